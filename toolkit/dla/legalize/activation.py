"""Activations in terms of those that the DLA has: clipped ReLU, ReLU, Sigmoid, Tanh, Mul and Add.

clip(x, l, u) = l + min(max(x - l, 0), u - l); hard sigmoid(x) = clip(a x + b, 0, 1)
"""

import math

import numpy as np
import onnx_ir as ir

from toolkit.dla.legalize.draft import Draft
from toolkit.dla.legalize.rewrite import Site
from toolkit.graph.node_view import NodeView

# Bounds of the clipped ReLU, rule clip.upper.
LEAST_UPPER, MOST_UPPER = 1.0, 127.0


def hard_sigmoid(site: Site) -> str | None:
    """Write HardSigmoid as Mul, Add and Clip."""
    site.draft.finish(site.made, emit_hard_sigmoid(site.draft, site.data, site.view))
    return None


def hard_swish(site: Site) -> str | None:
    """Write HardSwish as x times a HardSigmoid of slope 1/6."""
    site.draft.finish(site.made, emit_hard_swish(site.draft, site.data))
    return None


def emit_hard_sigmoid(draft: Draft, data: ir.Value, view: NodeView) -> ir.Value:
    """Add the nodes of HardSigmoid."""
    slope, shift = view.attribute("alpha"), view.attribute("beta")
    return _ramp(
        draft,
        data,
        slope if isinstance(slope, float) else 0.2,
        shift if isinstance(shift, float) else 0.5,
    )


def emit_hard_swish(draft: Draft, data: ir.Value) -> ir.Value:
    """Add the nodes of HardSwish."""
    return draft.add("Mul", [data, _ramp(draft, data, 1 / 6, 0.5)])


def _ramp(draft: Draft, data: ir.Value, slope: float, shift: float) -> ir.Value:
    scaled = draft.add("Mul", [data, draft.number(slope, data)])
    shifted = draft.add("Add", [scaled, draft.number(shift, data)])
    bounds = [draft.constant(np.array(bound), data) for bound in (0.0, 1.0)]
    return draft.add("Clip", [shifted, *bounds])


def clip(site: Site) -> str | None:
    """Move (and stretch) the bounds of a Clip into those of a clipped ReLU."""
    low, high = _bounds(site)
    draft, data = site.draft, site.data
    if math.isnan(low) or math.isnan(high):
        return "its bounds are not constant"
    if not low < high or (math.isinf(low) and math.isinf(high)):
        return f"bounds {low:g} and {high:g} leave nothing to clip"
    if math.isinf(low):  # u - relu(u - x)
        data = _shifted(draft, _scaled(draft, data, -1.0), high)
        data = _shifted(draft, _scaled(draft, draft.add("Relu", [data]), -1.0), high)
    elif math.isinf(high):
        data = _shifted(draft, draft.add("Relu", [_shifted(draft, data, -low)]), low)
    else:
        stretch = _stretch(high - low)
        data = _scaled(draft, _shifted(draft, data, -low), stretch)
        bounds = [draft.constant(np.array(b), data) for b in (0.0, (high - low) * stretch)]
        data = _scaled(draft, draft.add("Clip", [data, *bounds]), 1 / stretch)
        data = _shifted(draft, data, low)
    site.draft.finish(site.made, data)
    return None


def _bounds(site: Site) -> tuple[float, float]:
    """The bounds of a Clip; infinite where left out, NaN where not constant."""
    found = []
    for index, name, none in ((1, "min", -math.inf), (2, "max", math.inf)):
        given, array = site.view.attribute(name), site.array(index)
        if array is not None:
            found.append(float(array.reshape(-1)[0]))
        elif site.value(index) is not None:
            found.append(math.nan)
        else:
            found.append(float(given) if isinstance(given, (int, float)) else none)
    # The largest number of the type stands for infinity.
    half = site.data.dtype == ir.DataType.FLOAT16
    largest = float(np.finfo(np.float16 if half else np.float32).max)
    low, high = found
    return -math.inf if low <= -largest else low, math.inf if high >= largest else high


def _stretch(span: float) -> float:
    """The power of two that brings a span into the bounds of the clipped ReLU; it is exact."""
    if LEAST_UPPER <= span <= MOST_UPPER:
        return 1.0
    return float(2.0 ** -math.floor(math.log2(span)))


def _scaled(draft: Draft, data: ir.Value, factor: float) -> ir.Value:
    return data if factor == 1.0 else draft.add("Mul", [data, draft.number(factor, data)])


def _shifted(draft: Draft, data: ir.Value, shift: float) -> ir.Value:
    return data if shift == 0.0 else draft.add("Add", [data, draft.number(shift, data)])


def swish(site: Site) -> str | None:
    """Write Swish as x times a Sigmoid."""
    alpha = site.view.attribute("alpha")
    data = _scaled(site.draft, site.data, float(alpha) if isinstance(alpha, float) else 1.0)
    gate = site.draft.add("Sigmoid", [data])
    site.draft.finish(site.made, site.draft.add("Mul", [site.data, gate]))
    return None


def gelu(site: Site) -> str | None:
    """Write the tanh form of Gelu as Mul, Add and Tanh."""
    if site.view.attribute("approximate") != "tanh":
        return "it is the form by erf, which the DLA has not; the tanh form differs by up to 5e-4"
    draft, data = site.draft, site.data
    cube = draft.add("Mul", [draft.add("Mul", [data, data]), data])
    inner = draft.add("Add", [data, _scaled(draft, cube, 0.044715)])
    gate = draft.add("Tanh", [_scaled(draft, inner, math.sqrt(2 / math.pi))])
    whole = draft.add("Mul", [data, _shifted(draft, gate, 1.0)])
    draft.finish(site.made, _scaled(draft, whole, 0.5))
    return None


def softsign(site: Site) -> str | None:
    """Write Softsign as a division."""
    below = _shifted(site.draft, site.draft.add("Abs", [site.data]), 1.0)
    site.draft.finish(site.made, site.draft.add("Div", [site.data, below]))
    return None


def absolute(site: Site) -> str | None:
    """Write Abs as a maximum."""
    negative = _scaled(site.draft, site.data, -1.0)
    site.draft.finish(site.made, site.draft.add("Max", [site.data, negative]))
    return None


def slope_rank(site: Site) -> str | None:
    """Give the slope of PRelu the rank of its input."""
    slope, shape = site.array(1), site.view.outputs[0].shape
    if slope is None or shape is None or slope.ndim >= len(shape):
        return "the slope is not constant or has the rank of the input"
    wide = slope.reshape((1,) * (len(shape) - slope.ndim) + slope.shape)
    constant = site.draft.constant(wide, site.data)
    site.draft.finish(site.made, site.draft.add("PRelu", [site.data, constant]))
    return None
