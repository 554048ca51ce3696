"""What the general rules and those of layers with weights read of a node.

Each reader returns the values that its rule judges, with their text. It returns none where there is
nothing to judge or the facts are unknown: rule G5 refuses every node of unknown shape.
"""

import math
from collections.abc import Callable

from toolkit.dla.rules.rule import Seen
from toolkit.graph.node_view import NodeView, TensorView
from toolkit.graph.window import Shape

Reader = Callable[[NodeView], tuple[Seen, ...]]

COMPARISONS = ("Equal", "Greater", "Less")


def operator(view: NodeView) -> tuple[Seen, ...]:
    """The operator."""
    return (Seen(view.op, f"operator {view.op}"),)


def said(text: str) -> Reader:
    """Return a reader that says `text`, "{}" in it standing for the operator."""
    return lambda view: (Seen(view.op, text.format(view.op)),)


def plain(view: NodeView) -> tuple[Seen, ...]:
    """Whether the operator is one of ONNX and has no subgraphs."""
    if view.domain not in ("", "ai.onnx"):
        return (Seen(False, f"operator {view.op} of domain {view.domain}"),)
    if view.has_subgraph:
        return (Seen(False, f"operator {view.op} with a subgraph"),)
    return (Seen(True, f"operator {view.op} of ONNX"),)


def types(view: NodeView) -> tuple[Seen, ...]:
    """The types of activations and results; comparisons may make booleans."""
    tensors = view.activations if view.op in COMPARISONS else view.flowing
    return tuple(Seen(t.dtype, f"'{t.name}' of type {t.dtype}") for t in tensors)


def split_batch(shape: Shape) -> tuple[Shape, Shape]:
    """Split a shape into the dimensions that count as batch (all but C, H and W) and the rest."""
    at = len(shape) - 3 if len(shape) >= 4 else 1
    return shape[:at], shape[at:]


def batch_of(tensor: TensorView) -> int | None:
    """Return the batch of a tensor as the DLA counts it, None where it is unknown."""
    sizes = split_batch(tensor.shape or (None,))[0]
    known = [size for size in sizes if isinstance(size, int)]
    return math.prod(known) if len(known) == len(sizes) else None


def batch(view: NodeView) -> tuple[Seen, ...]:
    """The largest batch of the tensors."""
    found = [count for tensor in view.flowing if (count := batch_of(tensor)) is not None]
    return (Seen(max(found), f"batch {max(found)}"),) if found else ()


def dimensions(view: NodeView) -> tuple[Seen, ...]:
    """The dimensions other than the batch."""
    return tuple(
        Seen(size, f"dimension {size} of '{tensor.name}'")
        for tensor in view.flowing
        for size in split_batch(tensor.shape or ())[1]
        if isinstance(size, int)
    )


def fixed_shapes(view: NodeView) -> tuple[Seen, ...]:
    """Whether each shape is known and fixed."""
    return tuple(_fixed(tensor) for tensor in view.flowing)


def _fixed(tensor: TensorView) -> Seen:
    if tensor.shape is None:
        return Seen(False, f"unknown shape of '{tensor.name}'")
    for size in tensor.shape:
        if not isinstance(size, int):
            return Seen(False, f"{'dynamic' if size else 'unknown'} dimension of '{tensor.name}'")
    return Seen(True, f"'{tensor.name}' of shape {text_of(tensor.shape)}")


def volumes(view: NodeView) -> tuple[Seen, ...]:
    """The elements of each tensor."""
    return tuple(
        Seen(t.elements, f"{t.elements} elements in '{t.name}'")
        for t in view.flowing
        if t.elements is not None
    )


def ranks(view: NodeView) -> tuple[Seen, ...]:
    """The ranks of activations and results."""
    return tuple(
        Seen(len(t.shape), f"rank {len(t.shape)} of '{t.name}'")
        for t in view.flowing
        if t.shape is not None
    )


def weights(view: NodeView) -> tuple[Seen, ...]:
    """Whether each weight is constant."""
    return tuple(
        Seen(t.constant, f"{'constant' if t.constant else 'computed'} weights '{t.name}'")
        for t in view.inputs[1:]
        if t is not None
    )


def matrix_form(view: NodeView) -> tuple[Seen, ...]:
    """Whether a product is one of rows and a matrix."""
    if view.integer("transA", 0) == 1:
        return (Seen(False, "transposed first input"),)
    shapes = [t.shape for t in view.inputs[:2] if t is not None and t.shape is not None]
    return tuple(Seen(len(shape) == 2, f"input of rank {len(shape)}") for shape in shapes)


def window(part: str) -> Reader:
    """Return the reader of one part of the window: kernel, strides, dilations or pads."""

    def read(view: NodeView) -> tuple[Seen, ...]:
        values: tuple[int, ...] = getattr(view.window, part, None) or ()
        return (Seen(values, f"{part} {text_of(values)}"),) if values else ()

    return read


def pads_known(view: NodeView) -> tuple[Seen, ...]:
    """Whether automatic padding could be resolved."""
    if view.window is None:
        return ()
    if view.window.pads is None:
        return (Seen(False, "unresolved padding"),)
    return (Seen(True, f"pads {text_of(view.window.pads)}"),)


def pads_below_kernel(view: NodeView) -> tuple[Seen, ...]:
    """Whether all padding is smaller than the kernel."""
    if view.window is None or view.window.pads is None:
        return ()
    kernel, pads = view.window.kernel, view.window.pads
    smaller = all(pad < size for pad, size in zip(pads, kernel + kernel, strict=True))
    return (Seen(smaller, f"pads {text_of(pads)} for kernel {text_of(kernel)}"),)


def channels(tensor: TensorView | None, op: str) -> int | None:
    """Return the channels of the input or output of a convolution or product."""
    if tensor is None or not tensor.shape or len(tensor.shape) < 2:
        return None
    size = tensor.shape[-1 if op in ("Gemm", "MatMul") else 1]
    return size if isinstance(size, int) else None


def input_channels(view: NodeView) -> tuple[Seen, ...]:
    """The input channels."""
    count = channels(view.input(0), view.op)
    return () if count is None else (Seen(count, f"{count} input channels"),)


def output_maps(view: NodeView) -> tuple[Seen, ...]:
    """The output maps."""
    count = _made(view)
    return () if count is None else (Seen(count, f"{count} output maps"),)


def _made(view: NodeView) -> int | None:
    return channels(view.outputs[0], view.op) if view.outputs else None


def groups(view: NodeView) -> tuple[Seen, ...]:
    """The number of groups."""
    count = view.integer("group", 1)
    return (Seen(count, f"{count} group{'' if count == 1 else 's'}"),)


def group_of_four(view: NodeView) -> tuple[Seen, ...]:
    """Whether groups have multiples of 4 channels, or one channel each (depthwise)."""
    count = view.integer("group", 1)
    came, made = channels(view.input(0), view.op), _made(view)
    if count == 1:
        return (Seen(True, "1 group"),)
    if came is None or made is None or count < 1:
        return ()
    if count == came == made:
        return (Seen(True, "depthwise"),)
    fit = (came // count) % 4 == 0 and (made // count) % 4 == 0
    return (Seen(fit, f"{came // count} input and {made // count} output channels per group"),)


def buffer_banks(element_bytes: int) -> Reader:
    """Return the reader of the banks of the convolution buffer, by the formula of the 8.5 guide.

    With C channels of width W, kernel rows k_h and columns k_w, dilation d of rows and b bytes an
    element: weight banks ceil(roundUp(C k_h k_w b, 128) / 32768), data banks
    ceil(ceil(ceil(C b / 32) W / 4) ((k_h - 1) d + 1) / 256). Grouped convolutions count all C.
    """

    def read(view: NodeView) -> tuple[Seen, ...]:
        count = channels(view.input(0), view.op)
        height, width, dilation, columns = _conv_geometry(view)
        if count is None or columns is None:
            return ()
        kernel_bytes = 128 * _ceil(count * height * width * element_bytes, 128)
        weight_banks = _ceil(kernel_bytes, 32768)
        entries = _ceil(_ceil(count * element_bytes, 32) * columns, 4)
        data_banks = _ceil(entries * ((height - 1) * dilation + 1), 256)
        text = f"{weight_banks} weight and {data_banks} data banks"
        return (Seen(weight_banks + data_banks, text),)

    return read


def _ceil(amount: int, unit: int) -> int:
    return -(-amount // unit)


def _conv_geometry(view: NodeView) -> tuple[int, int, int, int | None]:
    """Return kernel height and width, dilation height and input width; products are 1x1."""
    if view.op in ("Gemm", "MatMul"):
        return 1, 1, 1, 1
    data = view.input(0)
    if view.window is None or len(view.window.kernel) != 2 or data is None or not data.shape:
        return 1, 1, 1, None
    columns = data.shape[-1]
    height, width = view.window.kernel
    return height, width, view.window.dilations[0], columns if isinstance(columns, int) else None


def square_parts(view: NodeView) -> tuple[Seen, ...]:
    """Kernel and strides, which may be squares."""
    return window("kernel")(view) + window("strides")(view)


def transposed_padding(view: NodeView) -> tuple[Seen, ...]:
    """Whether a transposed convolution is without padding, at its input and at its output."""
    extra = view.attribute("output_padding")
    if isinstance(extra, tuple) and any(extra):
        return (Seen(False, f"output_padding {text_of(extra)}"),)
    asked = view.attribute("output_shape")
    if isinstance(asked, tuple) and asked:
        return (Seen(False, f"padding made for output_shape {text_of(asked)}"),)
    pads = () if view.window is None else view.window.pads or ()
    return (Seen(not any(pads), f"pads {text_of(pads)}"),) if pads else ()


def text_of(values: tuple[object, ...]) -> str:
    """Return numbers with an "x" between them."""
    return "x".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)
