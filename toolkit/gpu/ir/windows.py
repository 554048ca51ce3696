"""Windows of convolutions and poolings, from ONNX attributes."""

from collections.abc import Sequence

from device.padding import is_same
from toolkit.gpu.ir.gemm import Three
from toolkit.gpu.ir.network import Operation, Shape
from toolkit.graph.window import Window
from toolkit.plugins import Constant


def read_window(op: Operation, kernel: Shape, shape: Shape, result: Shape) -> Window:
    """Return the window of an operation on (N, C, ...) -> `result`, its padding resolved."""
    window, auto = _explicit_window(op, kernel), op.text("auto_pad", "NOTSET")
    if not is_same(auto):
        return window
    return window.with_same_padding(shape[2:], result[2:], upper=auto == "SAME_UPPER")


def read_transposed_window(op: Operation, kernel: Shape, shape: Shape, result: Shape) -> Window:
    """Return the window of a ConvTranspose; its padding is what the result is cropped by.

    `auto_pad` and `output_shape` leave the padding to the sizes.
    """
    window, auto = _explicit_window(op, kernel), op.text("auto_pad", "NOTSET")
    if not is_same(auto) and (auto == "VALID" or "output_shape" not in op.attributes):
        return window
    added = op.integers("output_padding", (0,) * len(kernel))
    sizes = [size - extra for size, extra in zip(result[2:], added, strict=True)]
    return window.with_same_padding(sizes, shape[2:], upper=auto == "SAME_UPPER")


def window_constants(window: Window) -> dict[str, Constant]:
    """Return a window as constants of a kernel."""
    return {
        "TAPS": window.kernel,
        "STRIDE": window.strides,
        "DILATION": window.dilations,
        "PAD": window.before,
    }


def three(values: Sequence[int], missing: int) -> Three:
    """Return one to three numbers as three, `missing` ones first."""
    depth, row, column = (*(missing,) * (3 - len(values)), *values)
    return depth, row, column


def _explicit_window(op: Operation, kernel: Shape) -> Window:
    """Return the window with the padding that its attributes give; none with auto_pad."""
    rank = len(kernel)
    pads = (0,) * 2 * rank
    return Window(
        kernel=kernel,
        strides=op.integers("strides", (1,) * rank),
        dilations=op.integers("dilations", (1,) * rank),
        pads=pads if op.text("auto_pad", "NOTSET") == "VALID" else op.integers("pads", pads),
    )
