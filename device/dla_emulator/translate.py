"""Translates a Q/DQ segment into operations of the DLA, with one row of `ROWS` for each operator.

An operation reads INT8 and, if a Q follows (`epilogue.py`), writes INT8 through the output stages.
Pooling, bounds and moves have the scale of their input. All else computes in floating point
(`float_ops.py`). A node that no row fits is refused by name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from device.dla_emulator import float_ops
from device.dla_emulator.arithmetic import layers, normalization, pooling
from device.dla_emulator.arithmetic.convolution import Geometry
from device.dla_emulator.arithmetic.layers import Activation, Sums
from device.dla_emulator.arithmetic.rounding import Floats
from device.dla_emulator.arithmetic.scales import ScaleError
from device.dla_emulator.builder import EmulatedSegment, Function, OperationBuilder
from device.dla_emulator.epilogue import Epilogue, activation_of, find_epilogue
from device.dla_emulator.forms import QuantizedBuffer, QuantizedConstant
from device.dla_emulator.options import Emulation
from device.dla_emulator.products import product_of
from device.dla_emulator.segment_graph import Node, SegmentGraph
from device.padding import is_same

Array = NDArray[Any]


def translate(graph: SegmentGraph, where: str, emulation: Emulation) -> EmulatedSegment:
    """Return the operations of a segment's graph; `where` names the segment in errors.

    Raises SessionError naming the first node that has no arithmetic.
    """
    builder = OperationBuilder(graph, where, emulation)
    for node in graph.nodes:
        if builder.is_absorbed(node):
            continue
        try:
            ROWS.get(node.op, _other)(builder, node)
        except ScaleError as error:
            raise builder.refusal(node, str(error)) from error
    return builder.result()


def _quantize(builder: OperationBuilder, node: Node) -> None:
    """Q of a tensor that no epilogue rounded: an input of the segment, or another scale."""
    scale, source, name = builder.scale(node), builder.form(node.inputs[0]), node.outputs[0]
    if isinstance(source, QuantizedBuffer) and source.scale == scale:
        builder.note_quantized(node, name, source)
        return
    epilogue = Epilogue(Activation(), scale, f"{node.inputs[0]} at {name}", (name,), ())
    if isinstance(source, QuantizedBuffer):
        factor = Sums(np.asarray(source.scale / scale))
        path = builder.path(factor, epilogue, 128)
        builder.add_rounded(
            node, (source.buffer,), epilogue, lambda arrays: layers.finish(arrays[0], path)
        )
    else:
        real, path = builder.float_input(node, node.inputs[0]), layers.input_path(scale)
        builder.add_rounded(node, (real,), epilogue, lambda arrays: layers.finish(arrays[0], path))
    builder.note_quantized(node, name, QuantizedBuffer(epilogue.tensor, scale))


def _dequantize(builder: OperationBuilder, node: Node) -> None:
    """DQ: a constant stays in integers, a quantized tensor gets another name."""
    stored = builder.graph.constants.get(node.inputs[0])
    if stored is None:
        builder.note_dequantized(node, builder.scale(node))
        return
    scale = builder.graph.constants[node.inputs[1]].astype(np.float64)
    if any(np.any(builder.graph.constants[name]) for name in node.inputs[2:3] if name):
        raise builder.refusal(node, "the DLA's weights have zero point 0")
    axis = node.integer("axis", 1) % stored.ndim if scale.size > 1 else None
    builder.quantized_constants[node.outputs[0]] = QuantizedConstant(
        stored, scale.reshape(-1), axis
    )


def _product(builder: OperationBuilder, node: Node) -> None:
    """Conv, ConvTranspose, Gemm, MatMul with constant weights."""
    source = builder.form(node.inputs[0])
    product = product_of(node, builder.quantized_constants, builder.graph.constants, source)
    if isinstance(product, str):
        raise builder.refusal(node, product)
    epilogue = find_epilogue(node.outputs[0], builder.graph, functions=True)
    if product.step is None:
        builder.add_float(
            node, (builder.float_input(node, node.inputs[0]),), lambda x: product.real(x[0])
        )
    elif epilogue is None:
        builder.add_float(node, (source.buffer,), lambda arrays: product.real(arrays[0]))
    else:
        sums = Sums(product.step / epilogue.scale, product.bias)
        path = builder.path(sums, epilogue, product.kernel.bound)
        builder.add_rounded(
            node, (source.buffer,), epilogue, lambda arrays: product.finish(arrays[0], path)
        )


def _sum(builder: OperationBuilder, node: Node) -> None:
    """Add, Sub, Sum: INT8 of one scale added in 32 bits, then one conversion."""
    epilogue = find_epilogue(node.outputs[0], builder.graph, functions=True)
    operands = builder.quantized_inputs(node)
    if epilogue is None or operands is None:
        _affine(builder, node)
        return
    combine = np.subtract if node.op == "Sub" else np.add
    step, count = _one_scale(builder, node, operands), len(operands)
    low, high = (-255, 255) if node.op == "Sub" else (-128 * count, 127 * count)
    _by_table(builder, node, operands, epilogue, spec=(step, low, high), combine=combine)


def _multiply(builder: OperationBuilder, node: Node) -> None:
    """Mul: products of INT8 numbers, then one conversion."""
    epilogue = find_epilogue(node.outputs[0], builder.graph, functions=True)
    operands = builder.quantized_inputs(node)
    if epilogue is None or operands is None or len(operands) != 2:
        _affine(builder, node)
        return
    spec = (operands[0].scale * operands[1].scale, -127 * 128, 128 * 128)
    _by_table(builder, node, operands, epilogue, spec=spec, combine=np.multiply)


def _by_table(
    builder: OperationBuilder,
    node: Node,
    operands: Sequence[QuantizedBuffer],
    epilogue: Epilogue,
    *,
    spec: tuple[float, int, int],
    combine: np.ufunc = np.add,
) -> None:
    """Add an element-wise layer; its stages run once, on every sum (step, least, greatest)."""
    step, low, high = spec
    path = builder.path(Sums(np.asarray(step / epilogue.scale)), epilogue, max(-low, high))
    inputs = tuple(operand.buffer for operand in operands)

    def combined(arrays: Sequence[Array]) -> Array:
        result = arrays[0].astype(np.int16 if high < 1 << 15 else np.int32)
        for operand in arrays[1:]:
            result = combine(result, operand)
        return result

    slopes = epilogue.activation.slopes
    if slopes is not None and slopes.size > 1:
        builder.add_rounded(node, inputs, epilogue, lambda x: layers.finish(combined(x), path))
        return
    numbers = np.arange(low, high + 1).reshape(-1, 1, 1)
    results = layers.finish(numbers, path)
    single = layers.in_float32(path)
    if single is not None and (layers.finish(numbers, single) == results).all():
        builder.add_rounded(node, inputs, epilogue, lambda x: layers.finish(combined(x), single))
        return
    table = np.roll(results.reshape(-1), low)  # negative sums count from the end
    builder.add_rounded(
        node, inputs, epilogue, lambda arrays: np.take(table, combined(arrays), mode="wrap")
    )


def _one_scale(builder: OperationBuilder, node: Node, operands: Sequence[QuantizedBuffer]) -> float:
    scales = sorted({operand.scale for operand in operands})
    if len(scales) > 1:
        raise builder.refusal(
            node, f"its inputs have the scales {scales[0]:g} and {scales[-1]:g}, the DLA takes one"
        )
    return scales[0]


def _affine(builder: OperationBuilder, node: Node) -> None:
    """Add, Sub, Mul, Div with one constant, and BatchNormalization: scale and offset."""
    affine = _factor_and_offset(builder, node)
    form = None if affine is None else builder.form(affine[0])
    epilogue = find_epilogue(node.outputs[0], builder.graph, functions=False)
    if affine is None or epilogue is None or not isinstance(form, QuantizedBuffer):
        _other(builder, node)
        return
    factor = Sums(affine[1] * form.scale / epilogue.scale)
    path = layers.make_affine_path(
        factor, affine[2], epilogue.activation, epilogue.scale, builder.arithmetic
    )
    builder.add_rounded(
        node, (form.buffer,), epilogue, lambda arrays: layers.finish(arrays[0], path)
    )


def _factor_and_offset(builder: OperationBuilder, node: Node) -> tuple[str, Floats, Floats] | None:
    """Return input, factor and offset of y = x factor + offset; None for other nodes."""
    values = [builder.constant(name) for name in node.inputs]
    if node.op == "BatchNormalization":
        gamma, beta, mean, variance = (np.asarray(v, np.float64) for v in values[1:5])
        factor = gamma / np.sqrt(variance + node.number("epsilon", 1e-5))
        offset = beta - mean * factor
        return node.inputs[0], factor[:, None, None], offset[:, None, None]
    if len(values) != 2 or (values[0] is None) == (values[1] is None):
        return None
    first = values[0] is None
    constant = np.asarray(values[1] if first else values[0], np.float64)
    ones, zeros = np.ones_like(constant), np.zeros_like(constant)
    source = node.inputs[0] if first else node.inputs[1]
    if node.op in {"Add", "Sum"}:
        return source, ones, constant
    if node.op == "Sub":
        return (source, ones, -constant) if first else (source, -ones, constant)
    if node.op == "Mul":
        return source, constant, zeros
    return (source, 1.0 / constant, zeros) if node.op == "Div" and first else None


def _activation(builder: OperationBuilder, node: Node) -> None:
    """An activation that no epilogue absorbs: bounds clip INT8, others use a table of 256."""
    form, activation = builder.form(node.inputs[0]), activation_of(node, builder.graph.constants)
    if activation is None:
        raise builder.refusal(node, "the DLA needs constant slopes and bounds")
    bounds = activation.slopes is None and activation.function is None
    if not isinstance(form, QuantizedBuffer) and bounds:
        builder.add_float(
            node, (form.buffer,), lambda x: np.clip(x[0], activation.low, activation.high)
        )
        return
    if not isinstance(form, QuantizedBuffer):
        _other(builder, node)
        return
    if bounds:
        low, high = layers.bounds_of(activation, form.scale)
        bottom, top = np.int8(low), np.int8(high)
        builder.add_same_scale(
            node, (form.buffer,), form.scale, lambda x: np.clip(x[0], bottom, top)
        )
        return
    rounding_only = find_epilogue(node.outputs[0], builder.graph, functions=False)
    if rounding_only is None or rounding_only.activation != Activation():
        _other(builder, node)
        return
    epilogue = replace(rounding_only, activation=activation)
    _by_table(builder, node, [form], epilogue, spec=(form.scale, -128, 127))


def _extreme(builder: OperationBuilder, node: Node) -> None:
    """Max and Min of INT8 tensors of one scale: exact, at that scale."""
    operands = builder.quantized_inputs(node)
    if operands is None:
        _other(builder, node)
        return
    scale = _one_scale(builder, node, operands)
    combine = np.maximum if node.op == "Max" else np.minimum
    inputs = tuple(operand.buffer for operand in operands)
    builder.add_same_scale(
        node, inputs, scale, lambda x: np.asarray(combine.reduce(np.broadcast_arrays(*x)))
    )


def _absolute(builder: OperationBuilder, node: Node) -> None:
    form = builder.form(node.inputs[0])
    if isinstance(form, QuantizedBuffer):
        builder.add_same_scale(node, (form.buffer,), form.scale, _magnitude)
    else:
        _other(builder, node)


def _magnitude(arrays: Sequence[Array]) -> Array:
    return np.minimum(np.abs(arrays[0].astype(np.int16)), 127).astype(np.int8)


def _pool(builder: OperationBuilder, node: Node) -> None:
    """Pooling keeps the scale of its input."""
    form, window = builder.form(node.inputs[0]), _window_of(node)
    if isinstance(window, str):
        raise builder.refusal(node, window)
    which: Literal["max", "average"] = "average" if "Average" in node.op else "max"

    def extreme(arrays: Sequence[Array]) -> Array:
        return pooling.extreme(arrays[0], window.at(arrays[0].shape), "max")

    def average(arrays: Sequence[Array]) -> Array:
        fitted = window.at(arrays[0].shape)
        if max(fitted.size) > pooling.LARGEST_WINDOW:
            raise builder.refusal(
                node,
                f"a window of {fitted.size[0]}x{fitted.size[1]}, the DLA's limit is "
                f"{pooling.LARGEST_WINDOW} a side",
            )
        return pooling.average(arrays[0], fitted, count_padding=window.count_padding)

    def real(arrays: Sequence[Array]) -> Array:
        fitted = window.at(arrays[0].shape)
        return pooling.real(arrays[0], fitted, which, count_padding=window.count_padding)

    if not isinstance(form, QuantizedBuffer):
        builder.add_float(node, (form.buffer,), real)
    else:
        run = average if which == "average" else extreme
        builder.add_same_scale(node, (form.buffer,), form.scale, run)


@dataclass(frozen=True, slots=True)
class _PoolingNode:
    """A window that may depend on the input: with `size` None it covers all of it."""

    size: tuple[int, int] | None
    strides: tuple[int, int]
    pads: tuple[int, int, int, int]
    ceil_mode: bool
    auto_pad: str
    count_padding: bool

    def at(self, shape: tuple[int, ...]) -> pooling.Window:
        """Return the window on an input of the shape (batch, channels, height, width)."""
        size = self.size if self.size is not None else (shape[2], shape[3])
        pads = self.pads
        if is_same(self.auto_pad):
            pads = Geometry(size, self.strides).same(shape, self.auto_pad).pads
        return pooling.Window(size, self.strides, pads, self.ceil_mode)


def _window_of(node: Node) -> _PoolingNode | str:
    """Return a pooling node's window, or why the DLA has none such."""
    if node.op.startswith("Global"):
        return _PoolingNode(None, (1, 1), (0, 0, 0, 0), False, "NOTSET", True)
    size = node.integers("kernel_shape", ())
    if len(size) != 2:
        return f"the DLA pools in 2 dimensions, this one in {len(size)}"
    if any(dilation != 1 for dilation in node.integers("dilations", (1, 1))):
        return "the DLA has no pooling with dilation"
    if len(node.outputs) > 1 and node.outputs[1]:
        return "the DLA gives no indices of maxima"
    strides, pads = node.integers("strides", (1, 1)), node.integers("pads", (0, 0, 0, 0))
    return _PoolingNode(
        (size[0], size[1]),
        (strides[0], strides[1]),
        (pads[0], pads[1], pads[2], pads[3]),
        bool(node.integer("ceil_mode", 0)),
        node.text("auto_pad", "NOTSET"),
        not any(pads) or bool(node.integer("count_include_pad", 0)),
    )


def _normalize(builder: OperationBuilder, node: Node) -> None:
    """LRN of an INT8 tensor to INT8; without scales, or of another window, as `_other`."""
    form = builder.form(node.inputs[0])
    epilogue = find_epilogue(node.outputs[0], builder.graph, functions=False)
    lrn = normalization.Lrn(
        node.integer("size", 1),
        node.number("alpha", 1e-4),
        node.number("beta", 0.75),
        node.number("bias", 1.0),
    )
    in_int8 = epilogue is not None and epilogue.activation == Activation()
    if (
        not in_int8
        or epilogue is None
        or not isinstance(form, QuantizedBuffer)
        or lrn.size not in normalization.WINDOWS
    ):
        _other(builder, node)
        return
    step_in, step_out = form.scale, epilogue.scale
    registers = normalization.lrn_registers(lrn, step_in, step_out)
    rounded = layers.input_path(step_out)

    def exact(arrays: Sequence[Array]) -> Array:
        return layers.finish(normalization.real(arrays[0], lrn, step_in), rounded)

    def looked_up(arrays: Sequence[Array]) -> Array:
        return normalization.normalize(arrays[0], registers)

    run = exact if builder.arithmetic == "ideal" else looked_up
    builder.add_rounded(node, (form.buffer,), epilogue, run)


def _split(builder: OperationBuilder, node: Node) -> None:
    """Split: one move per output."""
    form, axis = builder.form(node.inputs[0]), node.integer("axis", 0)
    sizes = builder.constant(node.inputs[1]) if len(node.inputs) > 1 else None
    count = len(node.outputs)
    for i, name in enumerate(node.outputs):
        part = Node(node.op, node.name, (node.inputs[0],), (name,), node.attributes)
        scale = form.scale if isinstance(form, QuantizedBuffer) else None
        builder.add_same_scale(part, (form.buffer,), scale, _part(axis, i, count, sizes))


def _part(axis: int, index: int, count: int, sizes: Array | None) -> Function:
    def run(arrays: Sequence[Array]) -> Array:
        length = arrays[0].shape[axis]
        step = -(-length // count)
        cuts = np.arange(step, length, step) if sizes is None else np.cumsum(sizes)[:-1]
        return np.split(arrays[0], cuts, axis)[index]

    return run


def _move(builder: OperationBuilder, node: Node) -> None:
    """An operator that only moves numbers, at the scale of its inputs."""
    data = node.inputs if node.op == "Concat" else node.inputs[:1]
    parameters = [builder.constant(name) if name else None for name in node.inputs]
    run = float_ops.move_of(node, parameters)
    forms = [builder.form(name) for name in data if builder.constant(name) is None]
    operands = [form for form in forms if isinstance(form, QuantizedBuffer)]
    if run is None or len(forms) != len(data) or (operands and len(operands) != len(forms)):
        _other(builder, node)
        return
    scale = _one_scale(builder, node, operands) if operands else None
    builder.add_same_scale(node, tuple(form.buffer for form in forms), scale, run)


def _other(builder: OperationBuilder, node: Node) -> None:
    """Compute in floating point, or refuse the node."""
    linear = node.op == "Resize"
    if linear:
        parameters = [builder.constant(name) if name else None for name in node.inputs]
        function: Function | None = float_ops.resize_linear(node, parameters)
    elif node.op in float_ops.MOVES and node.op != "Concat":
        function = None
    else:
        function = float_ops.float_of(node)
    if function is None:
        raise builder.refusal(node, "the emulation has no arithmetic for it")
    names = node.inputs[:1] if linear else tuple(name for name in node.inputs if name)
    builder.add_float(node, tuple(builder.float_input(node, name) for name in names), function)


# All other operators compute in floating point or are refused.
ROWS: Mapping[str, Callable[[OperationBuilder, Node], None]] = {
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
    "LRN": _normalize,
    "Split": _split,
    **dict.fromkeys(float_ops.MOVES, _move),
}
