"""The 4-D form of each operator that has one at rank 2 or 3: a row of FORMS each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from toolkit.dla.legalize.activation import emit_hard_sigmoid, emit_hard_swish
from toolkit.dla.legalize.graph_rewriter import GraphRewriter
from toolkit.dla.legalize.pooling import global_average
from toolkit.dla.legalize.rewrite import constant_of, image, sizes
from toolkit.graph.node_view import NodeView


@dataclass(frozen=True, slots=True)
class Lifted:
    """A node to write in 4-D; `images` holds the 4-D tensor of every operand that is computed.

    The elements of an image, in order, are those of the tensor that it stands for.
    """

    node: ir.Node
    view: NodeView
    rewriter: GraphRewriter
    images: Mapping[ir.Value, ir.Value]

    @property
    def data(self) -> ir.Value | str:
        """The image of the first operand, or what is wrong with it."""
        value = self.node.inputs[0]
        assert value is not None
        return self.images.get(value, "its first operand is constant")

    @property
    def rank(self) -> int:
        """The rank of the result."""
        return len(sizes(self.node.outputs[0]) or ())

    def attributes(self) -> dict[str, int | float | str | tuple[int, ...]]:
        """The plain attributes that are written at the node."""
        kinds = (int, float, str, tuple)
        items = self.node.attributes.items()
        return {name: a.value for name, a in items if isinstance(a.value, kinds)}


def elementwise(lifted: Lifted) -> ir.Value | str:
    """f(view(x)) = view(f(x))."""
    data = lifted.data
    if isinstance(data, str):
        return data
    operands = [data, *lifted.node.inputs[1:]]
    return lifted.rewriter.add(lifted.node.op_type, operands, lifted.attributes())


def hard_sigmoid(lifted: Lifted) -> ir.Value | str:
    """As elementwise, in the operators that the DLA has."""
    data = lifted.data
    return data if isinstance(data, str) else emit_hard_sigmoid(lifted.rewriter, data, lifted.view)


def hard_swish(lifted: Lifted) -> ir.Value | str:
    """As elementwise, in the operators that the DLA has."""
    data = lifted.data
    return data if isinstance(data, str) else emit_hard_swish(lifted.rewriter, data)


def binary(lifted: Lifted) -> ir.Value | str:
    """As elementwise; constants take the shape of the image."""
    images = [lifted.images[v] for v in lifted.node.inputs if v is not None and v in lifted.images]
    shape = sizes(lifted.node.outputs[0])
    size = image(images[0]) if images else None
    if size is None or shape is None or any(image(operand) != size for operand in images):
        return "its operands are not of one shape"
    if int(np.prod(size)) != int(np.prod(shape)):
        return "its operands are broadcast"
    operands = []
    for value in lifted.node.inputs:
        if value is None or value in lifted.images:
            operands.append(None if value is None else lifted.images[value])
            continue
        constant = _constant_image(lifted, value, shape, size)
        if constant is None:
            return f"'{value.name}' is broadcast in another way"
        operands.append(constant)
    return lifted.rewriter.add(lifted.node.op_type, operands)


def _constant_image(
    lifted: Lifted, value: ir.Value, shape: tuple[int, ...], size: tuple[int, ...]
) -> ir.Value | None:
    array = constant_of(value)
    if array is None:
        return None
    if array.size == 1:
        return lifted.rewriter.constant(array.reshape(1, 1, 1, 1), value)
    ranked = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
    if len(ranked) != 1:
        return None
    whole = np.broadcast_to(ranked, (1, *shape[1:])).reshape(1, *size[1:])
    first = whole[:, :, :1, :1]
    is_per_channel = size[1] == shape[1] and np.array_equal(
        whole, np.broadcast_to(first, whole.shape)
    )
    return lifted.rewriter.constant(first if is_per_channel else whole, value)


def product(lifted: Lifted) -> ir.Value | str:
    """A product with a constant matrix is a convolution whose window is the whole image."""
    data, matrix = lifted.data, constant_of(lifted.node.inputs[1])
    if isinstance(data, str) or matrix is None or matrix.ndim != 2 or lifted.rank != 2:
        return "it is no product of rank 2 with a constant matrix"
    size, view = image(data), lifted.view
    if size is None or view.integer("transA", 0):
        return "its first operand is transposed"
    rows = matrix if view.integer("transB", 0) else matrix.T
    alpha, beta = view.attribute("alpha"), view.attribute("beta")
    if isinstance(alpha, float) and alpha != 1.0:
        rows = rows * np.asarray(alpha, rows.dtype)
    weights = rows.reshape(rows.shape[0], *size[1:])
    operands = [data, lifted.rewriter.constant(weights, data)]
    if len(lifted.node.inputs) > 2 and lifted.node.inputs[2] is not None:
        bias = constant_of(lifted.node.inputs[2])
        if bias is None or bias.size not in (1, rows.shape[0]):
            return "its bias is not one constant per output"
        factor = beta if isinstance(beta, float) else 1.0
        whole = np.broadcast_to(bias.reshape(-1) * factor, (rows.shape[0],))
        operands.append(lifted.rewriter.constant(whole, data))
    return lifted.rewriter.add("Conv", operands, {"kernel_shape": size[2:]})


def windowed(lifted: Lifted) -> ir.Value | str:
    """A window along L is a window of height 1."""
    data, window = lifted.data, lifted.view.window
    size = None if isinstance(data, str) else image(data)
    if isinstance(data, str) or size is None or window is None or len(window.kernel) != 1:
        return "it has no window of one dimension"
    if size[2] != 1 or window.pads is None:
        return "its rows stand for a map of two dimensions"
    integers = {k: v for k, v in lifted.attributes().items() if isinstance(v, int)}
    attributes: dict[str, int | float | str | tuple[int, ...]] = {
        **integers,
        "kernel_shape": (1, *window.kernel),
        "strides": (1, *window.strides),
        "pads": (0, window.pads[0], 0, window.pads[1]),
    }
    if set(window.dilations) != {1}:
        attributes["dilations"] = (1, *window.dilations)
    extra = lifted.view.attribute("output_padding")
    if isinstance(extra, tuple) and any(extra):
        attributes["output_padding"] = (0, *(int(item) for item in extra))
    if lifted.view.attribute("output_shape"):
        return "its padding is made for an output_shape"
    operands: list[ir.Value | None] = [data]
    if len(lifted.node.inputs) > 1:
        weights = constant_of(lifted.node.inputs[1])
        if weights is None:
            return "its weights are computed"
        operands.append(lifted.rewriter.constant(weights[:, :, None, :], data))
        operands.extend(lifted.node.inputs[2:])
    return lifted.rewriter.add(lifted.node.op_type, operands, attributes)


def batch_norm(lifted: Lifted) -> ir.Value | str:
    """Per channel, so the image must have the channels of the tensor."""
    data, shape = lifted.data, sizes(lifted.node.outputs[0])
    size = None if isinstance(data, str) else image(data)
    if isinstance(data, str) or size is None or shape is None or size[1] != shape[1]:
        return "its channels stand for several dimensions"
    return lifted.rewriter.add(
        "BatchNormalization", [data, *lifted.node.inputs[1:]], lifted.attributes()
    )


def softmax(lifted: Lifted) -> ir.Value | str:
    """Over the channels, or over L where it is a row."""
    data, shape = lifted.data, sizes(lifted.node.outputs[0])
    size = None if isinstance(data, str) else image(data)
    if isinstance(data, str) or size is None or shape is None:
        return "its operand is constant"
    axis = lifted.view.integer("axis", -1) % len(shape)
    if axis == 1 and size[1] == shape[1]:
        return lifted.rewriter.add("Softmax", [data], {"axis": 1})
    if axis == 2 and size[2] == 1:
        return lifted.rewriter.add("Softmax", [data], {"axis": 3})
    return "its axis stands for several dimensions"


def concat(lifted: Lifted) -> ir.Value | str:
    """Over the channels; the rest of the images must agree."""
    images = [lifted.images.get(value) for value in lifted.node.inputs if value is not None]
    shapes = [image(value) for value in images]
    other_dims = {shape and (shape[0], *shape[2:]) for shape in shapes}
    if lifted.view.integer("axis", 0) % lifted.rank != 1 or None in shapes or len(other_dims) > 1:
        return "it does not concatenate the channels of computed tensors"
    return lifted.rewriter.add("Concat", images, {"axis": 1})


def global_pool(lifted: Lifted) -> ir.Value | str:
    """The mean over L, in steps."""
    data = lifted.data
    return data if isinstance(data, str) else global_average(lifted.rewriter, data)


@dataclass(frozen=True, slots=True)
class Form:
    """How an operator is written in 4-D, and the ranks at which it is."""

    write: Callable[[Lifted], ir.Value | str]
    ranks: frozenset[int] = frozenset({2, 3})


ROW, LINE = frozenset({2}), frozenset({3})

FORMS: dict[str, Form] = {
    "Abs": Form(elementwise),
    "Clip": Form(elementwise),
    "LeakyRelu": Form(elementwise),
    "Relu": Form(elementwise),
    "Sigmoid": Form(elementwise),
    "Tanh": Form(elementwise),
    "HardSigmoid": Form(hard_sigmoid),
    "HardSwish": Form(hard_swish),
    "Add": Form(binary),
    "Div": Form(binary),
    "Max": Form(binary),
    "Min": Form(binary),
    "Mul": Form(binary),
    "Sub": Form(binary),
    "Gemm": Form(product, ROW),
    "MatMul": Form(product, ROW),
    "Conv": Form(windowed, LINE),
    "ConvTranspose": Form(windowed, LINE),
    "MaxPool": Form(windowed, LINE),
    "AveragePool": Form(windowed, LINE),
    "BatchNormalization": Form(batch_norm),
    "Softmax": Form(softmax),
    "Concat": Form(concat),
    "GlobalAveragePool": Form(global_pool, LINE),
}
