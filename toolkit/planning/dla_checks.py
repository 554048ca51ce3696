"""The checks behind the DLA rules: each reads a node and returns what breaks the limit, or None.

A check whose facts are unknown returns None: rule G5 refuses every node of unknown shape.
"""

import math
from collections.abc import Callable

from toolkit.planning.node_view import NodeView, TensorView
from toolkit.planning.windows import Shape

Check = Callable[[NodeView], str | None]

COMPARISONS = ("Equal", "Greater", "Less")


def operator(view: NodeView) -> str | None:
    """Refuse the operator as such."""
    return f"operator {view.op}"


def custom(view: NodeView) -> str | None:
    """Refuse operators of other domains and operators with subgraphs."""
    if view.domain not in ("", "ai.onnx"):
        return f"operator {view.op} of domain {view.domain}"
    return f"operator {view.op} with a subgraph" if view.has_subgraph else None


def plain_float(view: NodeView) -> str | None:
    """Refuse tensors that are neither FP32 nor FP16; comparisons may make booleans."""
    tensors = view.activations if view.op in COMPARISONS else view.flowing
    wrong = (t for t in tensors if t.dtype not in ("float32", "float16"))
    return next((f"'{t.name}' of type {t.dtype}" for t in wrong), None)


def split_batch(shape: Shape) -> tuple[Shape, Shape]:
    """Split a shape into the dimensions that count as batch (all but C, H and W) and the rest."""
    at = len(shape) - 3 if len(shape) >= 4 else 1
    return shape[:at], shape[at:]


def batch_of(tensor: TensorView) -> int | None:
    """Return the batch of a tensor as the DLA counts it, None where it is unknown."""
    sizes = split_batch(tensor.shape or (None,))[0]
    known = [size for size in sizes if isinstance(size, int)]
    return math.prod(known) if len(known) == len(sizes) else None


def batch_within(most: int) -> Check:
    """Refuse batches above `most`."""

    def check(view: NodeView) -> str | None:
        batch = max((batch_of(tensor) or 0 for tensor in view.flowing), default=0)
        return f"batch {batch}" if batch > most else None

    return check


def dimensions(view: NodeView) -> str | None:
    """Refuse non-batch dimensions outside [1, 8192]."""
    for tensor in view.flowing:
        for size in split_batch(tensor.shape or ())[1]:
            if isinstance(size, int) and not 1 <= size <= 8192:
                return f"dimension {size} of '{tensor.name}'"
    return None


def static_shape(view: NodeView) -> str | None:
    """Refuse unknown shapes and dynamic dimensions."""
    for tensor in view.flowing:
        if tensor.shape is None:
            return f"unknown shape of '{tensor.name}'"
        for size in tensor.shape:
            if not isinstance(size, int):
                return f"{'dynamic' if size else 'unknown'} dimension of '{tensor.name}'"
    return None


def volume(view: NodeView) -> str | None:
    """Refuse tensors of 2^31 elements or more."""
    large = (t for t in view.flowing if (t.elements or 0) >= 2**31)
    return next((f"{t.elements} elements in '{t.name}'" for t in large), None)


def four_dims(view: NodeView) -> str | None:
    """Refuse activations and results that are not N, C, H, W."""
    wrong = (t for t in view.flowing if t.shape is not None and len(t.shape) != 4)
    return next((f"rank {len(t.shape or ())} of '{t.name}'" for t in wrong), None)


def static_weights(view: NodeView) -> str | None:
    """Refuse weights that are computed."""
    wrong = (t for t in view.inputs[1:] if t is not None and not t.constant)
    return next((f"computed weights '{t.name}'" for t in wrong), None)


def matrix_form(view: NodeView) -> str | None:
    """Refuse products that are not rows times a constant matrix."""
    if view.integer("transA", 0) == 1:
        return "transposed first input"
    shapes = [t.shape for t in view.inputs[:2] if t is not None and t.shape is not None]
    wrong = [len(shape) for shape in shapes if len(shape) != 2]
    return f"input of rank {wrong[0]}" if wrong else None


def window(part: str, low: int, high: int) -> Check:
    """Refuse windows whose `part` (kernel, strides, dilations, pads) leaves [low, high]."""

    def check(view: NodeView) -> str | None:
        values: tuple[int, ...] = getattr(view.window, part, None) or ()
        wrong = any(not low <= value <= high for value in values)
        return f"{part} {'x'.join(map(str, values))}" if wrong else None

    return check


def unresolved_pads(view: NodeView) -> str | None:
    """Refuse windows whose automatic padding could not be resolved."""
    return "unresolved padding" if view.window and view.window.pads is None else None


def padding_below_kernel(view: NodeView) -> str | None:
    """Refuse padding that is not smaller than the kernel."""
    if view.window is None or view.window.pads is None:
        return None
    kernel, pads = view.window.kernel, view.window.pads
    if all(pad < size for pad, size in zip(pads, kernel + kernel, strict=True)):
        return None
    return f"pads {'x'.join(map(str, pads))} for kernel {'x'.join(map(str, kernel))}"


def channels(tensor: TensorView | None, op: str) -> int | None:
    """Return the channels of the input or output of a convolution or product."""
    if tensor is None or not tensor.shape or len(tensor.shape) < 2:
        return None
    size = tensor.shape[-1 if op in ("Gemm", "MatMul") else 1]
    return size if isinstance(size, int) else None


def input_channels(view: NodeView) -> str | None:
    """Refuse more than 8192 input channels."""
    count = channels(view.input(0), view.op)
    return f"{count} input channels" if count is not None and not 1 <= count <= 8192 else None


def output_maps(view: NodeView) -> str | None:
    """Refuse more than 8192 output maps."""
    count = channels(view.outputs[0], view.op) if view.outputs else None
    return f"{count} output maps" if count is not None and not 1 <= count <= 8192 else None


def groups_within(most: int) -> Check:
    """Refuse more than `most` groups."""

    def check(view: NodeView) -> str | None:
        count = view.integer("group", 1)
        return f"{count} groups" if count > most else None

    return check


def group_of_four(view: NodeView) -> str | None:
    """Refuse grouped convolutions, depthwise ones excepted, with groups not of 4, 8, 12..."""
    count = view.integer("group", 1)
    came = channels(view.input(0), view.op)
    made = channels(view.outputs[0], view.op) if view.outputs else None
    if count == 1 or came is None or made is None or count == came:
        return None
    wrong = (came // count) % 4 or (made // count) % 4
    return f"{came // count} input and {made // count} output channels per group" if wrong else None


def convolution_buffer(element_bytes: int) -> Check:
    """Refuse convolutions whose kernel and data slice do not fit in 16 buffer banks."""

    def check(view: NodeView) -> str | None:
        count = channels(view.input(0), view.op)
        height, width, dilation, columns = _conv_geometry(view)
        if count is None or columns is None:
            return None
        kernel_bytes = 128 * _ceil(count * height * width * element_bytes, 128)
        weight_banks = _ceil(kernel_bytes, 32768)
        entries = _ceil(_ceil(count * element_bytes, 32) * columns, 4)
        data_banks = _ceil(entries * ((height - 1) * dilation + 1), 256)
        banks = weight_banks + data_banks
        return f"{weight_banks} weight and {data_banks} data banks" if banks > 16 else None

    return check


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


LONG = (64, 96, 128)


def long_window(part: str) -> Check:
    """Refuse sizes that are neither within 32x32 nor 1 by 64, 96 or 128."""

    def check(view: NodeView) -> str | None:
        values: tuple[int, ...] = getattr(view.window, part, None) or (1, 1)
        small = all(1 <= value <= 32 for value in values)
        long = min(values) == 1 and max(values) in LONG
        return None if small or long else f"{part} {'x'.join(map(str, values))}"

    return check


def square_window(view: NodeView) -> str | None:
    """Refuse square kernels or strides from 23 on, which TensorRT switches off."""
    for part in ("kernel", "strides"):
        values: tuple[int, ...] = getattr(view.window, part, None) or (1,)
        if len(set(values)) == 1 and 23 <= values[0] <= 32:
            return f"{part} {'x'.join(map(str, values))}"
    return None


def output_padding(view: NodeView) -> str | None:
    """Refuse padding of a transposed convolution, at its input or at its output."""
    extra = view.attribute("output_padding")
    if isinstance(extra, tuple) and any(extra):
        return f"output_padding {'x'.join(map(str, extra))}"
    asked = view.attribute("output_shape")
    if isinstance(asked, tuple) and asked:
        return f"padding made for output_shape {'x'.join(map(str, asked))}"
    return window("pads", 0, 0)(view)
