"""Automatic padding against ONNX Runtime: one table for convolutions and transposed ones."""

from functools import cache
from itertools import product

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from device.dla_emulator.arithmetic.convolution import Geometry
from device.engine.manifest import DimRange
from device.padding import same_padding
from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.windows import read_transposed_window, read_window
from toolkit.gpu.shapes import formulas
from toolkit.gpu.shapes.sizes import Size, Space, ceil_div
from toolkit.graph.window import resolve_window

SIZES, KERNELS, STRIDES, DILATIONS = range(1, 10), (1, 2, 3, 4), (1, 2, 3), (1, 2, 3)
WINDOWS = list(product(KERNELS, STRIDES, DILATIONS))
OF_ONNXRUNTIME = [  # a quick fourth has each kernel, stride and dilation
    pytest.param(*window, marks=[pytest.mark.slow] * (at % 4 > 0))
    for at, window in enumerate(WINDOWS)
]
MODES = ("SAME_UPPER", "SAME_LOWER")


def taps(kernel: int, dilation: int) -> np.ndarray:
    """A dilated kernel, written as a longer one with zeros between its taps."""
    spread = np.zeros((kernel - 1) * dilation + 1, np.float32)
    spread[::dilation] = 2.0 ** np.arange(kernel)
    return spread


@cache
def session(op: str, mode: str, kernel: int, stride: int, dilation: int) -> ort.InferenceSession:
    weights = taps(kernel, dilation)
    node = helper.make_node(
        op, ["x", "w"], ["y"], kernel_shape=[len(weights)], strides=[stride], auto_pad=mode
    )
    graph = helper.make_graph(
        [node],
        "padding",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, "n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, "m"])],
        [helper.make_tensor("w", TensorProto.FLOAT, [1, 1, len(weights)], weights)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def signal(size: int) -> np.ndarray:
    return np.arange(1, size + 1, dtype=np.float32) ** 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kernel", "stride", "dilation"), OF_ONNXRUNTIME)
def test_a_convolution_is_padded_as_by_onnx_runtime(mode, kernel, stride, dilation):
    weights = taps(kernel, dilation)
    for size in SIZES:
        x = signal(size)
        count = -(-size // stride)
        pads = same_padding(
            size, count, stride=stride, span=len(weights), upper=mode == "SAME_UPPER"
        )
        padded = np.pad(x, pads)
        y = [padded[at * stride :][: len(weights)] @ weights for at in range(count)]
        oracle = session("Conv", mode, kernel, stride, dilation).run(None, {"x": x[None, None]})
        assert y == list(oracle[0][0, 0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kernel", "stride", "dilation"), OF_ONNXRUNTIME)
def test_a_transposed_convolution_is_cropped_as_by_onnx_runtime(mode, kernel, stride, dilation):
    weights = taps(kernel, dilation)
    for size in SIZES:
        x = signal(size)
        whole = np.zeros((size - 1) * stride + len(weights), np.float32)
        for at, value in enumerate(x):
            whole[at * stride :][: len(weights)] += value * weights
        before, after = same_padding(
            size * stride, size, stride=stride, span=len(weights), upper=mode == "SAME_UPPER"
        )
        run = session("ConvTranspose", mode, kernel, stride, dilation).run
        oracle = run(None, {"x": x[None, None]})[0][0, 0]
        assert list(whole[before : len(whole) - after]) == list(oracle)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kernel", "stride", "dilation"), WINDOWS)
def test_rules_kernels_and_the_emulator_pad_alike(mode, kernel, stride, dilation):
    upper, span = mode == "SAME_UPPER", (kernel - 1) * dilation + 1
    two = {"strides": (stride, 1), "dilations": (dilation, 1), "auto_pad": mode}
    op = Operation("Conv", "conv", ("x", "w"), ("y",), two)
    for size in SIZES:
        count = -(-size // stride)
        one = same_padding(size, count, stride=stride, span=span, upper=upper)
        pads = (one[0], 0, one[1], 0)
        shape, result = (1, 1, size, 5), (1, 1, count, 5)
        assert read_window(op, (kernel, 1), shape, result).pads == pads
        window = resolve_window("Conv", {**two, "kernel_shape": (kernel, 1)}, shape, None)
        assert window is not None
        assert window.pads == pads
        moves = Geometry((kernel, 1), (stride, 1), dilations=(dilation, 1))
        assert moves.same(shape, mode).pads == pads

        wide = (1, 1, size * stride, 5)
        one = same_padding(wide[2], size, stride=stride, span=span, upper=upper)
        assert read_transposed_window(op, (kernel, 1), shape, wide).before == (one[0], 0)
        window = resolve_window("ConvTranspose", {**two, "kernel_shape": (kernel, 1)}, shape, None)
        assert window is not None
        assert window.pads == (one[0], 0, one[1], 0)


@pytest.mark.parametrize("upper", [True, False])
def test_the_padding_of_a_dynamic_size_is_a_formula(upper):
    dims = (DimRange(name="n", min=1, opt=6, max=40),)
    size = Space(dims, (6,)).dim(0)
    pads = same_padding(size, ceil_div(size, 2), stride=2, span=4, upper=upper)
    for n in range(1, 41):
        results = [formulas.at(p.formula, (n,)) if isinstance(p, Size) else p for p in pads]
        assert tuple(results) == same_padding(n, -(-n // 2), stride=2, span=4, upper=upper)
