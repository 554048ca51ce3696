"""Facts of a node for the general rules and for those of layers with weights.

Each reader returns the values that its rule judges, with their text. It returns none if there is
nothing to judge or the value is unknown: rule G5 refuses every node of unknown shape.
"""

import math
from collections.abc import Callable

import numpy as np

from toolkit.dla.rules.rule import Fact
from toolkit.graph.node_view import NodeView, TensorView
from toolkit.graph.window import Shape

Reader = Callable[[NodeView], tuple[Fact, ...]]

COMPARISONS = ("Equal", "Greater", "Less")


def operator(view: NodeView) -> tuple[Fact, ...]:
    """The operator."""
    return (Fact(view.op, f"operator {view.op}"),)


def stated(text: str) -> Reader:
    """Return a reader with a fixed `text`; "{}" in it is replaced by the operator."""
    return lambda view: (Fact(view.op, text.format(view.op)),)


def plain(view: NodeView) -> tuple[Fact, ...]:
    """True for an ONNX operator without subgraphs."""
    if view.domain not in ("", "ai.onnx"):
        return (Fact(False, f"operator {view.op} of domain {view.domain}"),)
    if view.has_subgraph:
        return (Fact(False, f"operator {view.op} with a subgraph"),)
    return (Fact(True, f"operator {view.op} of ONNX"),)


def types(view: NodeView) -> tuple[Fact, ...]:
    """The types of activations and results; comparisons may return booleans to a Cast."""
    tensors = view.activations if view.op in COMPARISONS else view.flowing
    tensors = view.outputs if view.op == "Cast" else tensors
    return tuple(Fact(t.dtype, f"'{t.name}' of type {t.dtype}") for t in tensors)


def split_batch(shape: Shape) -> tuple[Shape, Shape]:
    """Split a shape into batch dimensions (all but C, H and W) and the rest."""
    spatial = len(shape) - 3 if len(shape) >= 4 else 1
    return shape[:spatial], shape[spatial:]


def batch_of(tensor: TensorView) -> int | None:
    """Return the batch of a tensor as the DLA counts it, None if unknown."""
    sizes = split_batch(tensor.shape or (None,))[0]
    known = [size for size in sizes if isinstance(size, int)]
    return math.prod(known) if len(known) == len(sizes) else None


def batch(view: NodeView) -> tuple[Fact, ...]:
    """The largest batch of the tensors."""
    batches = [count for tensor in view.flowing if (count := batch_of(tensor)) is not None]
    return (Fact(max(batches), f"batch {max(batches)}"),) if batches else ()


def dimensions(view: NodeView) -> tuple[Fact, ...]:
    """The dimensions other than the batch."""
    return tuple(
        Fact(size, f"dimension {size} of '{tensor.name}'")
        for tensor in view.flowing
        for size in split_batch(tensor.shape or ())[1]
        if isinstance(size, int)
    )


def fixed_shapes(view: NodeView) -> tuple[Fact, ...]:
    """Whether each shape is known and fixed."""
    return tuple(_fixed(tensor) for tensor in view.flowing)


def _fixed(tensor: TensorView) -> Fact:
    if tensor.shape is None:
        return Fact(False, f"unknown shape of '{tensor.name}'")
    for size in tensor.shape:
        if not isinstance(size, int):
            return Fact(False, f"{'dynamic' if size else 'unknown'} dimension of '{tensor.name}'")
    return Fact(True, f"'{tensor.name}' of shape {text_of(tensor.shape)}")


def volumes(view: NodeView) -> tuple[Fact, ...]:
    """The elements of each tensor."""
    return tuple(
        Fact(t.elements, f"{t.elements} elements in '{t.name}'")
        for t in view.flowing
        if t.elements is not None
    )


def ranks(view: NodeView) -> tuple[Fact, ...]:
    """The ranks of activations and results."""
    return tuple(
        Fact(len(t.shape), f"rank {len(t.shape)} of '{t.name}'")
        for t in view.flowing
        if t.shape is not None
    )


def weights(view: NodeView) -> tuple[Fact, ...]:
    """Whether each weight is constant."""
    return tuple(
        Fact(t.constant, f"{'constant' if t.constant else 'computed'} weights '{t.name}'")
        for t in view.inputs[1:]
        if t is not None
    )


def magnitudes(view: NodeView) -> tuple[Fact, ...]:
    """The largest finite magnitude of each small constant of floating point."""
    tensors = [t for t in view.constants if t.values and t.dtype == "float32"]
    arrays = [np.abs(np.array(t.values, np.float64)) for t in tensors]
    largest = [float(array[np.isfinite(array)].max(initial=0.0)) for array in arrays]
    return tuple(
        Fact(value, f"{value:g} in '{t.name}'") for t, value in zip(tensors, largest, strict=True)
    )


def matrix_form(view: NodeView) -> tuple[Fact, ...]:
    """True for a GEMM of two matrices, the first not transposed."""
    if view.integer("transA", 0) == 1:
        return (Fact(False, "transposed first input"),)
    shapes = [t.shape for t in view.inputs[:2] if t is not None and t.shape is not None]
    return tuple(Fact(len(shape) == 2, f"input of rank {len(shape)}") for shape in shapes)


def window(part: str) -> Reader:
    """Return the reader of one part of the window: kernel, strides, dilations or pads."""

    def read(view: NodeView) -> tuple[Fact, ...]:
        values: tuple[int, ...] = getattr(view.window, part, None) or ()
        return (Fact(values, f"{part} {text_of(values)}"),) if values else ()

    return read


def pads_known(view: NodeView) -> tuple[Fact, ...]:
    """Whether automatic padding could be resolved."""
    if view.window is None:
        return ()
    if view.window.pads is None:
        return (Fact(False, "unresolved padding"),)
    return (Fact(True, f"pads {text_of(view.window.pads)}"),)


def pads_below_kernel(view: NodeView) -> tuple[Fact, ...]:
    """Whether all padding is smaller than the kernel."""
    if view.window is None or view.window.pads is None:
        return ()
    kernel, pads = view.window.kernel, view.window.pads
    # Pads of another number contradict the operator; then the rule does not hold either.
    fit = len(pads) == 2 * len(kernel)
    smaller = fit and all(pad < kernel[at % len(kernel)] for at, pad in enumerate(pads))
    return (Fact(smaller, f"pads {text_of(pads)} for kernel {text_of(kernel)}"),)


def channels(tensor: TensorView | None, op: str) -> int | None:
    """Return the channels of the input or output of a convolution or GEMM."""
    if tensor is None or not tensor.shape or len(tensor.shape) < 2:
        return None
    size = tensor.shape[-1 if op in ("Gemm", "MatMul") else 1]
    return size if isinstance(size, int) else None


def input_channels(view: NodeView) -> tuple[Fact, ...]:
    """The input channels."""
    count = channels(view.input(0), view.op)
    return () if count is None else (Fact(count, f"{count} input channels"),)


def output_maps(view: NodeView) -> tuple[Fact, ...]:
    """The output maps."""
    count = _output_channels(view)
    return () if count is None else (Fact(count, f"{count} output maps"),)


def _output_channels(view: NodeView) -> int | None:
    return channels(view.outputs[0], view.op) if view.outputs else None


def groups(view: NodeView) -> tuple[Fact, ...]:
    """The number of groups."""
    count = view.integer("group", 1)
    return (Fact(count, f"{count} group{'' if count == 1 else 's'}"),)


def group_of_four(view: NodeView) -> tuple[Fact, ...]:
    """Whether groups have multiples of 4 channels, or one channel each (depthwise)."""
    count = view.integer("group", 1)
    in_channels, out_channels = channels(view.input(0), view.op), _output_channels(view)
    if count == 1:
        return (Fact(True, "1 group"),)
    if in_channels is None or out_channels is None or count < 1:
        return ()
    if count == in_channels == out_channels:
        return (Fact(True, "depthwise"),)
    multiple_of_four = (in_channels // count) % 4 == 0 and (out_channels // count) % 4 == 0
    return (
        Fact(
            multiple_of_four,
            f"{in_channels // count} input and {out_channels // count} output channels per group",
        ),
    )


def buffer_banks(element_bytes: int) -> Reader:
    """Return the reader of the banks of the convolution buffer, by the formula of the 8.5 guide.

    With C channels of width W, kernel rows k_h and columns k_w, dilation d of rows and b bytes an
    element: weight banks ceil(roundUp(C k_h k_w b, 128) / 32768), data banks
    ceil(ceil(ceil(C b / 32) W / 4) ((k_h - 1) d + 1) / 256). Grouped convolutions count all C.
    """

    def read(view: NodeView) -> tuple[Fact, ...]:
        count = channels(view.input(0), view.op)
        height, width, dilation, columns = _conv_geometry(view)
        if count is None or columns is None:
            return ()
        kernel_bytes = 128 * _ceil(count * height * width * element_bytes, 128)
        weight_banks = _ceil(kernel_bytes, 32768)
        entries = _ceil(_ceil(count * element_bytes, 32) * columns, 4)
        data_banks = _ceil(entries * ((height - 1) * dilation + 1), 256)
        text = f"{weight_banks} weight and {data_banks} data banks"
        return (Fact(weight_banks + data_banks, text),)

    return read


def _ceil(amount: int, unit: int) -> int:
    return -(-amount // unit)


def _conv_geometry(view: NodeView) -> tuple[int, int, int, int | None]:
    """Return kernel height and width, dilation height and input width; a GEMM is 1x1."""
    if view.op in ("Gemm", "MatMul"):
        return 1, 1, 1, 1
    data = view.input(0)
    if view.window is None or len(view.window.kernel) != 2 or data is None or not data.shape:
        return 1, 1, 1, None
    columns = data.shape[-1]
    height, width = view.window.kernel
    return height, width, view.window.dilations[0], columns if isinstance(columns, int) else None


def square_parts(view: NodeView) -> tuple[Fact, ...]:
    """Kernel and strides."""
    return window("kernel")(view) + window("strides")(view)


def transposed_padding(view: NodeView) -> tuple[Fact, ...]:
    """True if a transposed convolution has no input or output padding."""
    output_padding = view.attribute("output_padding")
    if isinstance(output_padding, tuple) and any(output_padding):
        return (Fact(False, f"output_padding {text_of(output_padding)}"),)
    output_shape = view.attribute("output_shape")
    if isinstance(output_shape, tuple) and output_shape:
        return (Fact(False, f"padding made for output_shape {text_of(output_shape)}"),)
    pads = () if view.window is None else view.window.pads or ()
    return (Fact(not any(pads), f"pads {text_of(pads)}"),) if pads else ()


def text_of(values: tuple[object, ...]) -> str:
    """Return values joined by "x"."""
    return "x".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)
