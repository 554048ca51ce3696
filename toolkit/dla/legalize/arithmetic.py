"""Element-wise operators as Mul, Add and Max, with operands in shapes that the DLA takes."""

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from toolkit.dla.legalize.graph_rewriter import GraphRewriter
from toolkit.dla.legalize.rewrite import Outcome, Site, constant_of, image, sizes

Image = tuple[int, int, int, int]
MAX_EXPANDED = 1 << 20  # elements: a constant may be written out up to this, 4 MiB in float32
MAX_RESIZE = 32  # nearest scales of the DLA, rule resize.nearest


def divide_by_constant(site: Site) -> Outcome:
    """x / c = x * (1 / c)."""
    divisor = site.array(1)
    if divisor is None:
        return "the divisor is computed, and the DLA has no other division"
    with np.errstate(all="ignore"):
        inverse = 1.0 / divisor.astype(np.float64)
        stored = inverse.astype(divisor.dtype)
    if not np.all(np.isfinite(stored)) or not np.all(np.abs(stored) >= _tiny(stored)):
        return "the reciprocal of the divisor is no ordinary number of its type"
    factor = site.rewriter.constant(inverse, site.data)
    return site.replaced_by(site.rewriter.add("Mul", [site.data, factor]))


def subtract(site: Site) -> Outcome:
    """a - b = a + (-1) b."""
    rewriter, (minuend, subtrahend) = site.rewriter, site.node.inputs
    assert minuend is not None
    assert subtrahend is not None
    constant = constant_of(subtrahend)
    negative = (
        _negated(rewriter, subtrahend)
        if constant is None
        else rewriter.constant(-constant, subtrahend)
    )
    return site.replaced_by(rewriter.add("Add", [negative, minuend]))


def negate(site: Site) -> Outcome:
    """-x = (-1) x."""
    return site.replaced_by(_negated(site.rewriter, site.data))


def power(site: Site) -> Outcome:
    """x^n = x x .. x for n of 2, 3 and 4."""
    exponent = site.array(1)
    count = None if exponent is None or exponent.size != 1 else float(exponent.reshape(-1)[0])
    if count not in (2.0, 3.0, 4.0):
        return "the exponent is not 2, 3 or 4"
    rewriter, square = site.rewriter, site.rewriter.add("Mul", [site.data, site.data])
    if count != 2.0:
        square = rewriter.add("Mul", [square, site.data if count == 3.0 else square])
    return site.replaced_by(square)


def mean_of_inputs(site: Site) -> Outcome:
    """mean(a, b, ..) = (a + b + ..) / n."""
    total = site.data
    for operand in site.node.inputs[1:]:
        total = site.rewriter.add("Add", [total, operand])
    count = len(site.node.inputs)
    share = site.rewriter.add("Mul", [total, site.rewriter.scalar(1 / count, site.data)])
    return site.replaced_by(share)


def identity(site: Site) -> Outcome:
    """x = 1 (x - 0) / sqrt(1 + 0) + 0."""
    shape = image(site.data)
    if shape is None or site.data.is_initializer():
        return "it needs a computed 4-D tensor of known size"
    parts = [site.rewriter.constant(np.full(shape[1], v), site.data) for v in (1.0, 0.0, 0.0, 1.0)]
    result = site.rewriter.add("BatchNormalization", [site.data, *parts], {"epsilon": 0.0})
    return site.replaced_by(result)


def broadcast_constant(site: Site) -> Outcome:
    """Write out constant operands that are neither whole, nor per channel, nor one number."""
    return _with_operands(site, _written_out, "constant")


def broadcast_computed(site: Site) -> Outcome:
    """Widen computed operands: over channels by a convolution of ones, over a map by Resize."""
    return _with_operands(site, _widened, "computed 4-D")


def _with_operands(
    site: Site, broadcast: Callable[[Site, ir.Value, Image], ir.Value | str], kind: str
) -> Outcome:
    """Put what `broadcast` gives in the place of operands; it returns others as they are."""
    shape = image(site.output)
    if shape is None:
        return "it needs a 4-D result of known size"
    operands: list[ir.Value | None] = []
    for value in site.node.inputs:
        operand = None if value is None else broadcast(site, value, shape)
        if isinstance(operand, str):
            return operand
        operands.append(operand)
    if operands == list(site.node.inputs):
        return f"no {kind} operand is broadcast in another way"
    return _same_operator(site, operands)


def _written_out(site: Site, value: ir.Value, shape: Image) -> ir.Value | str:
    array = constant_of(value)
    if array is None or _fits(array.shape, shape):
        return value
    if int(np.prod(shape[1:])) > MAX_EXPANDED:
        return f"'{value.name}' written out has more than {MAX_EXPANDED} elements"
    whole = (array.shape[0] if array.ndim == 4 else 1, *shape[1:])
    return site.rewriter.constant(np.broadcast_to(array, whole), value)


def _widened(site: Site, value: ir.Value, shape: Image) -> ir.Value | str:
    operand_shape = image(value)
    if constant_of(value) is not None or operand_shape is None or _fits(operand_shape, shape):
        return value
    return widen(site.rewriter, value, shape)


def expand(site: Site) -> Outcome:
    """Repeat a tensor along axes of size 1, as Expand and Tile do."""
    input_shape, output_shape = image(site.data), image(site.output)
    if input_shape is None or output_shape is None:
        return "it needs 4-D tensors of known size"
    if site.data.is_initializer() or any(
        a not in (1, b) for a, b in zip(input_shape, output_shape, strict=True)
    ):
        return "it repeats an axis that is longer than 1"
    wide = widen(site.rewriter, site.data, output_shape)
    if isinstance(wide, str):
        return wide
    if wide is site.data:
        return "it repeats nothing"
    return site.replaced_by(wide)


def widen(rewriter: GraphRewriter, value: ir.Value, shape: Image) -> ir.Value | str:
    """Return `value` repeated to `shape`, or why the DLA cannot."""
    operand_shape = image(value)
    assert operand_shape is not None
    if operand_shape[0] != shape[0]:
        return "the batch would be repeated"
    scales = [shape[axis] // operand_shape[axis] for axis in (2, 3)]
    if max(scales) > MAX_RESIZE:
        return f"a scale of {max(scales)} is above {MAX_RESIZE}"
    if operand_shape[1] != shape[1]:
        ones = rewriter.constant(np.ones((shape[1], 1, 1, 1)), value)
        value = rewriter.add("Conv", [value, ones], {"kernel_shape": (1, 1)})
    if max(scales) > 1:
        factors = rewriter.constant(np.array([1, 1, *scales], np.float32))
        value = rewriter.add("Resize", [value, None, factors], NEAREST)
    return value


NEAREST = {
    "mode": "nearest",
    "coordinate_transformation_mode": "asymmetric",
    "nearest_mode": "floor",
}


def where_constant(site: Site) -> Outcome:
    """where(c, x, y) = c x + (1 - c) y, for a constant c of 0 and 1."""
    mask = site.array(0)
    if mask is None:
        return "the condition is computed, and booleans stay on the GPU"
    rewriter, (_, if_true, if_false) = site.rewriter, site.node.inputs
    assert if_true is not None
    assert if_false is not None
    for value in (if_true, if_false):
        if not finite(value):
            return f"'{value.name}' holds infinities, which 0 does not silence"
    shares = [rewriter.constant(part.astype(np.float64), if_true) for part in (mask, ~mask)]
    parts = [
        rewriter.add("Mul", [value, share])
        for value, share in zip((if_true, if_false), shares, strict=True)
    ]
    return site.replaced_by(rewriter.add("Add", parts))


def finite(value: ir.Value | None) -> bool:
    """Whether 0 times a value is 0, as far as a constant shows: infinities give no number."""
    array = constant_of(value)
    return array is None or bool(np.all(np.isfinite(array)))


def _same_operator(site: Site, operands: Sequence[ir.Value | None]) -> Outcome:
    attributes = {name: site.view.attribute(name) for name in site.node.attributes}
    plain = {k: v for k, v in attributes.items() if isinstance(v, (int, float, str))}
    return site.replaced_by(site.rewriter.add(site.node.op_type, operands, plain))


def _fits(operand: Sequence[int], result: Sequence[int]) -> bool:
    """Whether an operand is whole, per channel or one number (rule eltwise.broadcast)."""
    wide = (1,) * (4 - len(operand)) + tuple(operand)
    forms = (tuple(result[1:]), (result[1], 1, 1), (1, 1, 1))
    return wide[0] in (1, result[0]) and wide[1:] in forms


def _negated(rewriter: GraphRewriter, data: ir.Value) -> ir.Value:
    return rewriter.add("Mul", [data, _one(rewriter, data, -1.0)])


def _one(rewriter: GraphRewriter, data: ir.Value, value: float) -> ir.Value:
    """One number of the rank of `data`."""
    rank = len(sizes(data) or (1, 1, 1, 1))
    return rewriter.constant(np.full((1,) * rank, value), data)


def _tiny(array: np.ndarray) -> float:
    return float(np.finfo(array.dtype).tiny)
