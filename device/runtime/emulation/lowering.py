"""A Q/DQ segment as steps of the DLA: which layer each node becomes, row by row (`ROWS`).

A layer reads INT8 and, if a Q ends it (`forms.py`), gives INT8 through the output stages.
Pooling, bounds and moves keep the grid of their input. What is left computes in floating point
(`float_ops.py`). A node that none of this fits is refused by name.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from device.runtime.dla import layers, pooling, rounding
from device.runtime.dla.layers import Activation, Arithmetic, Sums
from device.runtime.dla.rounding import Floats
from device.runtime.dla.scales import ScaleError
from device.runtime.emulation import float_ops
from device.runtime.emulation.forms import Ending, Grid, Integers, activation_of, find_ending
from device.runtime.emulation.options import Mode
from device.runtime.emulation.pooling import window_of
from device.runtime.emulation.products import product_of
from device.runtime.emulation.segment_graph import Graph, Node
from device.runtime.emulation.steps import Function, Lowered, Lowering

Array = NDArray[Any]


def lower(graph: Graph, where: str, mode: Mode, arithmetic: Arithmetic) -> Lowered:
    """Return a segment's graph as steps; `where` names the segment in refusals.

    Raises SessionError naming the first node that has no arithmetic.
    """
    to = Lowering(graph, where, mode, arithmetic)
    for node in graph.nodes:
        if to.taken_in(node):
            continue
        try:
            ROWS.get(node.op, _other)(to, node)
        except ScaleError as error:
            raise to.refusal(node, str(error)) from error
    return to.lowered()


def _quantize(to: Lowering, node: Node) -> None:
    """Q of numbers that no layer rounded: an input of the segment, or another scale."""
    scale, source, name = to.scale(node), to.form(node.inputs[0]), node.outputs[0]
    if isinstance(source, Grid) and source.scale == scale:
        to.stored_as(node, name, source)
        return
    ending = Ending(Activation(), scale, f"{node.inputs[0]} at {name}", (name,), ())
    if isinstance(source, Grid):
        factor = Sums(np.asarray(source.scale / scale))
        path = to.path(factor, ending, 128)
        to.end(node, (source.buffer,), ending, lambda arrays: layers.finish(arrays[0], path))
    else:
        real = to.real_input(node, node.inputs[0])
        to.end(node, (real,), ending, lambda arrays: _rounded(arrays[0], scale))
    to.stored_as(node, name, Grid(ending.tensor, scale))


def _rounded(x: Array, scale: float) -> Array:
    steps = rounding.half_away(x.astype(np.float64) / scale)
    return np.clip(steps, -128, 127).astype(np.int8)


def _dequantize(to: Lowering, node: Node) -> None:
    """DQ: of a constant it keeps the integers, of a stored tensor it is another name."""
    stored = to.graph.constants.get(node.inputs[0])
    if stored is None:
        to.restored(node, to.scale(node))
        return
    scale = to.graph.constants[node.inputs[1]].astype(np.float64)
    if any(np.any(to.graph.constants[name]) for name in node.inputs[2:3] if name):
        raise to.refusal(node, "the DLA's weights have zero point 0")
    axis = node.integer("axis", 1) % stored.ndim if scale.size > 1 else None
    to.integers[node.outputs[0]] = Integers(stored, scale.reshape(-1), axis)


def _product(to: Lowering, node: Node) -> None:
    """Conv, ConvTranspose, Gemm, MatMul with constant weights."""
    source = to.form(node.inputs[0])
    product = product_of(node, to.integers, to.graph.constants, source)
    if isinstance(product, str):
        raise to.refusal(node, product)
    ending = find_ending(node.outputs[0], to.graph, functions=True)
    if product.step is None:
        to.real(node, (to.real_input(node, node.inputs[0]),), lambda x: product.real(x[0]))
    elif ending is None:
        to.real(node, (source.buffer,), lambda arrays: product.real(arrays[0]))
    else:
        sums = Sums(product.step / ending.scale, product.bias)
        path = to.path(sums, ending, product.kernel.bound)
        to.end(node, (source.buffer,), ending, lambda arrays: product.finish(arrays[0], path))


def _sum(to: Lowering, node: Node) -> None:
    """Add, Sub, Sum: INT8 of one scale added in 32 bits, then one conversion."""
    ending = find_ending(node.outputs[0], to.graph, functions=True)
    grids = to.grids(node)
    if ending is None or grids is None:
        _affine(to, node)
        return
    count, sign = len(grids), -1 if node.op == "Sub" else 1

    def total(arrays: Sequence[Array]) -> Array:
        result = arrays[0].astype(np.int32)
        for other in arrays[1:]:
            result = result + sign * other.astype(np.int32)
        return result

    step = _one_scale(to, node, grids)
    low, high = (-128 * count, 127 * count) if sign > 0 else (-255, 255)
    _by_table(to, node, grids, ending, spec=(step, low, high), combine=total)


def _multiply(to: Lowering, node: Node) -> None:
    """Mul: products of INT8 numbers, then one conversion."""
    ending = find_ending(node.outputs[0], to.graph, functions=True)
    grids = to.grids(node)
    if ending is None or grids is None or len(grids) != 2:
        _affine(to, node)
        return
    spec = (grids[0].scale * grids[1].scale, -127 * 128, 128 * 128)
    _by_table(to, node, grids, ending, spec=spec, combine=lambda x: x[0].astype(np.int32) * x[1])


def _by_table(
    to: Lowering,
    node: Node,
    grids: Sequence[Grid],
    ending: Ending,
    *,
    spec: tuple[float, int, int],
    combine: Function,
) -> None:
    """Add an element-wise layer; its stages run once, on every sum (step, least, greatest)."""
    step, low, high = spec
    path = to.path(Sums(np.asarray(step / ending.scale)), ending, max(-low, high))
    inputs = tuple(grid.buffer for grid in grids)
    slopes = ending.activation.slopes
    if slopes is not None and slopes.size > 1:
        to.end(node, inputs, ending, lambda arrays: layers.finish(combine(arrays), path))
        return
    table = layers.finish(np.arange(low, high + 1).reshape(-1, 1, 1), path).reshape(-1)
    to.end(node, inputs, ending, lambda arrays: table[combine(arrays) - low])


def _one_scale(to: Lowering, node: Node, grids: Sequence[Grid]) -> float:
    found = sorted({grid.scale for grid in grids})
    if len(found) > 1:
        raise to.refusal(
            node, f"its inputs have the scales {found[0]:g} and {found[-1]:g}, the DLA takes one"
        )
    return found[0]


def _affine(to: Lowering, node: Node) -> None:
    """Add, Sub, Mul, Div with one constant, and BatchNormalization: scale and offset."""
    found = _factor_and_offset(to, node)
    form = None if found is None else to.form(found[0])
    ending = find_ending(node.outputs[0], to.graph, functions=False)
    if found is None or ending is None or not isinstance(form, Grid):
        _other(to, node)
        return
    factor = Sums(found[1] * form.scale / ending.scale)
    path = layers.make_affine_path(factor, found[2], ending.activation, ending.scale, to.arithmetic)
    to.end(node, (form.buffer,), ending, lambda arrays: layers.finish(arrays[0], path))


def _factor_and_offset(to: Lowering, node: Node) -> tuple[str, Floats, Floats] | None:
    """Return input, factor and offset of y = x factor + offset; None for other nodes."""
    values = [to.constant(name) for name in node.inputs]
    if node.op == "BatchNormalization":
        gamma, beta, mean, variance = (np.asarray(v, np.float64) for v in values[1:5])
        factor = gamma / np.sqrt(variance + node.number("epsilon", 1e-5))
        offset = beta - mean * factor
        return node.inputs[0], factor[:, None, None], offset[:, None, None]
    if len(values) != 2 or (values[0] is None) == (values[1] is None):
        return None
    first = values[0] is None
    constant = np.asarray(values[1] if first else values[0], np.float64)
    one, none = np.ones_like(constant), np.zeros_like(constant)
    source = node.inputs[0] if first else node.inputs[1]
    if node.op in {"Add", "Sum"}:
        return source, one, constant
    if node.op == "Sub":
        return (source, one, -constant) if first else (source, -one, constant)
    if node.op == "Mul":
        return source, constant, none
    return (source, 1.0 / constant, none) if node.op == "Div" and first else None


def _activation(to: Lowering, node: Node) -> None:
    """An activation of its own: bounds stay on the grid, the others go by a table of 256."""
    form, found = to.form(node.inputs[0]), activation_of(node, to.graph.constants)
    if found is None:
        raise to.refusal(node, "the DLA needs constant slopes and bounds")
    bounds = found.slopes is None and found.function is None
    if not isinstance(form, Grid) and bounds:
        to.real(node, (form.buffer,), lambda x: np.clip(x[0], found.low, found.high))
        return
    if not isinstance(form, Grid):
        _other(to, node)
        return
    if bounds:
        low, high = layers.bounds_of(found, form.scale)
        bottom, top = np.int8(low), np.int8(high)
        to.keep(node, (form.buffer,), form.scale, lambda x: np.clip(x[0], bottom, top))
        return
    behind = find_ending(node.outputs[0], to.graph, functions=False)
    if behind is None or behind.activation != Activation():
        _other(to, node)
        return
    ending = Ending(found, behind.scale, behind.tensor, behind.stored, behind.absorbed)
    _by_table(
        to,
        node,
        [form],
        ending,
        spec=(form.scale, -128, 127),
        combine=lambda x: x[0].astype(np.int32),
    )


def _extreme(to: Lowering, node: Node) -> None:
    """Max and Min of INT8 tensors of one scale: exact, on their grid."""
    grids = to.grids(node)
    if grids is None:
        _other(to, node)
        return
    scale = _one_scale(to, node, grids)
    combine = np.maximum if node.op == "Max" else np.minimum
    inputs = tuple(grid.buffer for grid in grids)
    to.keep(node, inputs, scale, lambda x: np.asarray(combine.reduce(np.broadcast_arrays(*x))))


def _absolute(to: Lowering, node: Node) -> None:
    form = to.form(node.inputs[0])
    if isinstance(form, Grid):
        to.keep(node, (form.buffer,), form.scale, _magnitude)
    else:
        _other(to, node)


def _magnitude(arrays: Sequence[Array]) -> Array:
    return np.minimum(np.abs(arrays[0].astype(np.int16)), 127).astype(np.int8)


def _pool(to: Lowering, node: Node) -> None:
    """Pooling keeps the scale of its input."""
    form, window = to.form(node.inputs[0]), window_of(node)
    if isinstance(window, str):
        raise to.refusal(node, window)
    which: Literal["max", "average"] = "average" if "Average" in node.op else "max"

    def extreme(arrays: Sequence[Array]) -> Array:
        return pooling.extreme(arrays[0], window.at(arrays[0].shape), "max")

    def average(arrays: Sequence[Array]) -> Array:
        found = window.at(arrays[0].shape)
        if max(found.size) > pooling.LARGEST_WINDOW:
            raise to.refusal(
                node,
                f"a window of {found.size[0]}x{found.size[1]}, the DLA's limit is "
                f"{pooling.LARGEST_WINDOW} a side",
            )
        return pooling.average(arrays[0], found, count_padding=window.count_padding)

    def real(arrays: Sequence[Array]) -> Array:
        found = window.at(arrays[0].shape)
        return pooling.real(arrays[0], found, which, count_padding=window.count_padding)

    if not isinstance(form, Grid):
        to.real(node, (form.buffer,), real)
    else:
        run = average if which == "average" else extreme
        to.keep(node, (form.buffer,), form.scale, run)


def _split(to: Lowering, node: Node) -> None:
    """Split: one move per output."""
    form, axis = to.form(node.inputs[0]), node.integer("axis", 0)
    sizes = to.constant(node.inputs[1]) if len(node.inputs) > 1 else None
    count = len(node.outputs)
    for i, name in enumerate(node.outputs):
        part = Node(node.op, node.name, (node.inputs[0],), (name,), node.attributes)
        scale = form.scale if isinstance(form, Grid) else None
        to.keep(part, (form.buffer,), scale, _part(axis, i, count, sizes))


def _part(axis: int, index: int, count: int, sizes: Array | None) -> Function:
    def run(arrays: Sequence[Array]) -> Array:
        length = arrays[0].shape[axis]
        step = -(-length // count)
        cuts = np.arange(step, length, step) if sizes is None else np.cumsum(sizes)[:-1]
        return np.split(arrays[0], cuts, axis)[index]

    return run


def _move(to: Lowering, node: Node) -> None:
    """What only moves numbers, on the grid of its inputs."""
    data = node.inputs if node.op == "Concat" else node.inputs[:1]
    parameters = [to.constant(name) if name else None for name in node.inputs]
    run = float_ops.move_of(node, parameters)
    forms = [to.form(name) for name in data if to.constant(name) is None]
    grids = [form for form in forms if isinstance(form, Grid)]
    if run is None or len(forms) != len(data) or (grids and len(grids) != len(forms)):
        _other(to, node)
        return
    scale = _one_scale(to, node, grids) if grids else None
    to.keep(node, tuple(form.buffer for form in forms), scale, run)


def _other(to: Lowering, node: Node) -> None:
    """Floating point, or a refusal."""
    linear = node.op == "Resize"
    if linear:
        parameters = [to.constant(name) if name else None for name in node.inputs]
        function: Function | None = float_ops.resize_linear(node, parameters)
    elif node.op in float_ops.MOVES and node.op != "Concat":
        function = None
    else:
        function = float_ops.float_of(node)
    if function is None:
        raise to.refusal(node, "the emulation has no arithmetic for it")
    names = node.inputs[:1] if linear else tuple(name for name in node.inputs if name)
    to.real(node, tuple(to.real_input(node, name) for name in names), function)


# Which layer each operator becomes; all others compute in floating point or are refused.
ROWS: Mapping[str, Callable[[Lowering, Node], None]] = {
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "Conv": _product,
    "ConvTranspose": _product,
    "Gemm": _product,
    "MatMul": _product,
    "Add": _sum,
    "Sub": _sum,
    "Sum": _sum,
    "Mul": _multiply,
    "Div": _affine,
    "BatchNormalization": _affine,
    "Max": _extreme,
    "Min": _extreme,
    "Relu": _activation,
    "Clip": _activation,
    "LeakyRelu": _activation,
    "PRelu": _activation,
    "Sigmoid": _activation,
    "Tanh": _activation,
    "Abs": _absolute,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "GlobalAveragePool": _pool,
    "GlobalMaxPool": _pool,
    "Split": _split,
    **dict.fromkeys(float_ops.MOVES, _move),
}
