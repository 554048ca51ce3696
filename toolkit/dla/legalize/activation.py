"""Activations in terms of those that the DLA has: clipped ReLU, ReLU, Sigmoid, Tanh, Mul and Add.

clip(x, l, u) = l + min(max(x - l, 0), u - l); hard sigmoid(x) = clip(a x + b, 0, 1)
"""

import math

import numpy as np
import onnx_ir as ir

from toolkit.dla.legalize.graph_rewriter import GraphRewriter
from toolkit.dla.legalize.rewrite import Outcome, Site
from toolkit.graph.node_view import NodeView

# Bounds of the clipped ReLU, rule clip.upper.
MIN_UPPER, MAX_UPPER = 1.0, 127.0


def hard_sigmoid(site: Site) -> Outcome:
    """Write HardSigmoid as Mul, Add and Clip."""
    return site.replaced_by(emit_hard_sigmoid(site.rewriter, site.data, site.view))


def hard_swish(site: Site) -> Outcome:
    """Write HardSwish as x times a HardSigmoid of slope 1/6."""
    return site.replaced_by(emit_hard_swish(site.rewriter, site.data))


def emit_hard_sigmoid(rewriter: GraphRewriter, data: ir.Value, view: NodeView) -> ir.Value:
    """Add the nodes of HardSigmoid."""
    slope, shift = view.attribute("alpha"), view.attribute("beta")
    return _ramp(
        rewriter,
        data,
        slope if isinstance(slope, float) else 0.2,
        shift if isinstance(shift, float) else 0.5,
    )


def emit_hard_swish(rewriter: GraphRewriter, data: ir.Value) -> ir.Value:
    """Add the nodes of HardSwish."""
    return rewriter.add("Mul", [data, _ramp(rewriter, data, 1 / 6, 0.5)])


def _ramp(rewriter: GraphRewriter, data: ir.Value, slope: float, shift: float) -> ir.Value:
    scaled = rewriter.add("Mul", [data, rewriter.scalar(slope, data)])
    shifted = rewriter.add("Add", [scaled, rewriter.scalar(shift, data)])
    bounds = [rewriter.constant(np.array(bound), data) for bound in (0.0, 1.0)]
    return rewriter.add("Clip", [shifted, *bounds])


def clip(site: Site) -> Outcome:
    """Move (and stretch) the bounds of a Clip into those of a clipped ReLU."""
    low, high = _bounds(site)
    rewriter, data = site.rewriter, site.data
    if math.isnan(low) or math.isnan(high):
        return "its bounds are not constant"
    if not low < high or (math.isinf(low) and math.isinf(high)):
        return f"bounds {low:g} and {high:g} leave nothing to clip"
    if math.isinf(low):  # u - relu(u - x)
        data = _shifted(rewriter, _scaled(rewriter, data, -1.0), high)
        data = _shifted(rewriter, _scaled(rewriter, rewriter.add("Relu", [data]), -1.0), high)
    elif math.isinf(high):
        data = _shifted(rewriter, rewriter.add("Relu", [_shifted(rewriter, data, -low)]), low)
    else:
        stretch = _stretch(high - low)
        data = _scaled(rewriter, _shifted(rewriter, data, -low), stretch)
        bounds = [rewriter.constant(np.array(b), data) for b in (0.0, (high - low) * stretch)]
        data = _scaled(rewriter, rewriter.add("Clip", [data, *bounds]), 1 / stretch)
        data = _shifted(rewriter, data, low)
    return site.replaced_by(data)


def _bounds(site: Site) -> tuple[float, float]:
    """The bounds of a Clip; infinite where left out, NaN where not constant."""
    bounds = []
    for index, name, none in ((1, "min", -math.inf), (2, "max", math.inf)):
        attribute, array = site.view.attribute(name), site.array(index)
        if array is not None:
            bounds.append(float(array.reshape(-1)[0]))
        elif site.value(index) is not None:
            bounds.append(math.nan)
        else:
            bounds.append(float(attribute) if isinstance(attribute, (int, float)) else none)
    # The largest number of the type stands for infinity.
    half = site.data.dtype == ir.DataType.FLOAT16
    largest = float(np.finfo(np.float16 if half else np.float32).max)
    low, high = bounds
    return -math.inf if low <= -largest else low, math.inf if high >= largest else high


def _stretch(span: float) -> float:
    """The power of two that brings a span into the bounds of the clipped ReLU; it is exact."""
    if MIN_UPPER <= span <= MAX_UPPER:
        return 1.0
    return float(2.0 ** -math.floor(math.log2(span)))


def _scaled(rewriter: GraphRewriter, data: ir.Value, factor: float) -> ir.Value:
    return data if factor == 1.0 else rewriter.add("Mul", [data, rewriter.scalar(factor, data)])


def _shifted(rewriter: GraphRewriter, data: ir.Value, shift: float) -> ir.Value:
    return data if shift == 0.0 else rewriter.add("Add", [data, rewriter.scalar(shift, data)])


def swish(site: Site) -> Outcome:
    """Write Swish as x times a Sigmoid."""
    alpha = site.view.attribute("alpha")
    data = _scaled(site.rewriter, site.data, float(alpha) if isinstance(alpha, float) else 1.0)
    gate = site.rewriter.add("Sigmoid", [data])
    return site.replaced_by(site.rewriter.add("Mul", [site.data, gate]))


def gelu(site: Site) -> Outcome:
    """Write the tanh form of Gelu as Mul, Add and Tanh."""
    if site.view.attribute("approximate") != "tanh":
        return "it is the form by erf, which the DLA has not; the tanh form differs by up to 5e-4"
    rewriter, data = site.rewriter, site.data
    cube = rewriter.add("Mul", [rewriter.add("Mul", [data, data]), data])
    inner = rewriter.add("Add", [data, _scaled(rewriter, cube, 0.044715)])
    gate = rewriter.add("Tanh", [_scaled(rewriter, inner, math.sqrt(2 / math.pi))])
    whole = rewriter.add("Mul", [data, _shifted(rewriter, gate, 1.0)])
    return site.replaced_by(_scaled(rewriter, whole, 0.5))


def softsign(site: Site) -> Outcome:
    """Write Softsign as a division."""
    below = _shifted(site.rewriter, site.rewriter.add("Abs", [site.data]), 1.0)
    return site.replaced_by(site.rewriter.add("Div", [site.data, below]))


def absolute(site: Site) -> Outcome:
    """Write Abs as a maximum."""
    negative = _scaled(site.rewriter, site.data, -1.0)
    return site.replaced_by(site.rewriter.add("Max", [site.data, negative]))


def slope_rank(site: Site) -> Outcome:
    """Give the slope of PRelu the rank of its input."""
    slope, shape = site.array(1), site.view.outputs[0].shape
    if slope is None or shape is None or slope.ndim >= len(shape):
        return "the slope is not constant or has the rank of the input"
    wide = slope.reshape((1,) * (len(shape) - slope.ndim) + slope.shape)
    constant = site.rewriter.constant(wide, site.data)
    return site.replaced_by(site.rewriter.add("PRelu", [site.data, constant]))
