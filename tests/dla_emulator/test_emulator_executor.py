"""The `emulated` executor runs Q/DQ segments layer by layer as the DLA would.

With powers of two for scales 16-bit multipliers are exact, so that onnxruntime's numbers, rounded
half away from zero, are what each single layer must give.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from emulator_segments import SegmentBuilder, emulate
from engine_fixtures import split_network, write_network

from device.dla_emulator.options import Emulation
from device.engine.file import open_engine
from device.errors import SessionError
from device.runtime.executors.emulated import EmulatedExecutor
from device.runtime.session import open_session

EXACT, FAST = Emulation("exact", "hardware"), Emulation("fast", "hardware")
EMULATIONS = (EXACT, FAST, Emulation("exact", "ideal"))
IDS = ("exact", "fast", "ideal")
S = 2.0**-4
Layer = Callable[[SegmentBuilder, np.random.Generator], str]


def conv(
    b: SegmentBuilder,
    rng: np.random.Generator,
    shape: tuple[int, ...] = (6, 4, 3, 3),
    op: str = "Conv",
    **attributes: object,
) -> str:
    """A convolution with scales and biases per channel, ended by nothing yet."""
    x = b.input((2, 4, 9, 8), S)
    groups = int(str(attributes.get("group", 1)))
    outputs, axis = (shape[0], 0) if op == "Conv" else (shape[1] * groups, 1)
    scale = 2.0 ** -rng.integers(5, 9, shape[axis]).astype(np.float32)
    weight = b.weight(rng.integers(-127, 128, shape).astype(np.int8), scale, axis)
    of_bias = np.tile(scale, outputs // len(scale)) * np.float32(S)
    bias = b.weight(rng.integers(-9000, 9000, outputs).astype(np.int32), of_bias)
    return b.op(op, x, weight, bias, **attributes)


def gemm(b: SegmentBuilder, rng: np.random.Generator, turned: int) -> str:
    x = b.input((3, 10), S)
    shape = (7, 10) if turned else (10, 7)
    weight = b.weight(
        rng.integers(-127, 128, shape).astype(np.int8), np.full(7, 2.0**-6), 1 - turned
    )
    bias = b.weight(rng.integers(-900, 900, 7).astype(np.int32), np.full(7, S * 2.0**-6))
    return b.op("Gemm", x, weight, bias, transB=turned)


def matmul(b: SegmentBuilder, rng: np.random.Generator) -> str:
    x = b.input((2, 5, 10), S)
    return b.op("MatMul", x, b.weight(rng.integers(-127, 128, (10, 7)).astype(np.int8), 2.0**-6))


def two(b: SegmentBuilder, op: str, count: int = 2) -> str:
    return b.op(op, *(b.input((2, 3, 4, 5), S) for _ in range(count)))


def one(b: SegmentBuilder, op: str, *more: str, **attributes: object) -> str:
    return b.op(op, b.input((2, 4, 6, 8), S), *more, **attributes)


def silu(b: SegmentBuilder, rng: np.random.Generator) -> str:
    x = conv(b, rng)
    return b.op("Mul", x, b.op("Sigmoid", x))


def ints(b: SegmentBuilder, *values: int) -> str:
    return b.constant(values, np.int64)


def scaled(b: SegmentBuilder, op: str, values: object) -> str:
    return one(b, op, b.constant(values, np.float32))


# Layer by name, and the scale of its result.
LAYERS: dict[str, tuple[Layer, float]] = {
    "conv": (lambda b, r: conv(b, r, pads=[1, 1, 1, 1]), 0.25),
    "conv relu": (lambda b, r: b.op("Relu", conv(b, r)), 0.25),
    "conv clip": (
        lambda b, r: b.op("Clip", conv(b, r), b.constant(0, np.float32), b.constant(6, np.float32)),
        0.125,
    ),
    "conv stride dilation": (lambda b, r: conv(b, r, strides=[2, 1], dilations=[1, 2]), 0.5),
    "conv groups": (lambda b, r: conv(b, r, (6, 2, 3, 3), group=2), 0.5),
    "conv depthwise": (lambda b, r: conv(b, r, (4, 1, 3, 3), group=4, pads=[1, 0, 1, 2]), 0.125),
    "conv same": (lambda b, r: conv(b, r, auto_pad="SAME_LOWER", strides=[2, 2]), 0.25),
    "deconv": (lambda b, r: conv(b, r, (4, 6, 2, 2), op="ConvTranspose", strides=[2, 2]), 0.25),
    "deconv groups": (
        lambda b, r: conv(
            b, r, (4, 3, 3, 3), op="ConvTranspose", strides=[2, 1], group=2, output_padding=[1, 0]
        ),
        0.25,
    ),
    "gemm": (lambda b, r: gemm(b, r, 0), 0.25),
    "gemm transposed": (lambda b, r: gemm(b, r, 1), 0.25),
    "matmul": (matmul, 0.25),
    "add": (lambda b, _: two(b, "Add"), 0.125),
    "add relu": (lambda b, _: b.op("Relu", two(b, "Add")), 0.125),
    "sub": (lambda b, _: two(b, "Sub"), 0.125),
    "mul": (lambda b, _: two(b, "Mul"), 0.5),
    "sum of three": (lambda b, _: two(b, "Sum", 3), 0.25),
    "max": (lambda b, _: two(b, "Max"), S),
    "min": (lambda b, _: two(b, "Min"), S),
    "concat": (
        lambda b, _: b.op("Concat", b.input((2, 3, 4, 5), S), b.input((2, 1, 4, 5), S), axis=1),
        S,
    ),
    "max pool": (
        lambda b, _: one(b, "MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        S,
    ),
    "global max pool": (lambda b, _: one(b, "GlobalMaxPool"), S),
    "relu": (lambda b, _: one(b, "Relu"), S),
    "abs": (lambda b, _: one(b, "Abs"), S),
    "reshape": (lambda b, _: one(b, "Reshape", ints(b, 0, -1)), S),
    "flatten": (lambda b, _: one(b, "Flatten"), S),
    "transpose": (lambda b, _: one(b, "Transpose", perm=[0, 2, 3, 1]), S),
    "slice": (
        lambda b, _: one(b, "Slice", ints(b, 1, -1), ints(b, 3, -9), ints(b, 1, 3), ints(b, 1, -2)),
        S,
    ),
    "resize": (
        lambda b, _: one(
            b,
            "Resize",
            "",
            b.constant([1, 1, 2, 3], np.float32),
            mode="nearest",
            coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        ),
        S,
    ),
    "depth to space": (lambda b, _: one(b, "DepthToSpace", blocksize=2), S),
    "pad": (lambda b, _: one(b, "Pad", ints(b, 0, 0, 1, 0, 0, 0, 0, 2)), S),
    "mul constant": (lambda b, _: scaled(b, "Mul", [[[0.5]], [[1.5]], [[0.25]], [[3]]]), 0.125),
    "add constant": (lambda b, _: scaled(b, "Add", [[[0.5]], [[-1.25]], [[0.0]], [[2]]]), 0.125),
    "sub constant": (lambda b, _: scaled(b, "Sub", 1.5), 0.125),
    "requantize": (lambda b, _: one(b, "Identity"), 0.25),
}


@pytest.mark.parametrize("emulation", EMULATIONS, ids=IDS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gives_what_the_formula_gives(
    name: str, emulation: Emulation, tmp_path: Path
) -> None:
    rng = np.random.default_rng()
    b = SegmentBuilder()
    layer, scale = LAYERS[name]
    stored = b.output(layer(b, rng), scale)
    feeds = b.feeds(rng)
    actual = emulate(b.engine(tmp_path), feeds, emulation)[stored]
    expected = b.reference(feeds)[stored]
    assert actual.dtype == np.int8
    assert actual.tolist() == expected.tolist()


# Layers whose arithmetic is not the formula's: they may be a step off.
NEAR: dict[str, tuple[Layer, float]] = {
    "conv leaky": (lambda b, r: b.op("LeakyRelu", conv(b, r), alpha=0.1), 0.25),
    "conv prelu": (
        lambda b, r: b.op(
            "PRelu", conv(b, r), b.constant(r.uniform(0, 1, (1, 6, 1, 1)), np.float32)
        ),
        0.25,
    ),
    "clip of what has no scale": (
        lambda b, r: b.op("Clip", silu(b, r), "", b.constant(6, np.float32)),
        0.125,
    ),
    "leaky": (lambda b, _: one(b, "LeakyRelu", alpha=0.3), S),
    "prelu": (lambda b, _: scaled(b, "PRelu", [[[0.1]], [[0.2]], [[-0.5]], [[0.9]]]), S),
    "sigmoid": (lambda b, _: one(b, "Sigmoid"), 2.0**-7),
    "conv tanh": (lambda b, r: b.op("Tanh", conv(b, r)), 2.0**-7),
    "average pool": (lambda b, _: one(b, "AveragePool", kernel_shape=[2, 2], strides=[2, 2]), S),
    "average pool without padding": (
        lambda b, _: one(b, "AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        S,
    ),
    "average pool with padding": (
        lambda b, _: one(
            b, "AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1
        ),
        S,
    ),
    "global average pool": (lambda b, _: one(b, "GlobalAveragePool"), S),
    "softmax": (lambda b, _: one(b, "Softmax", axis=1), 2.0**-7),
    "resize linear": (
        lambda b, _: one(b, "Resize", "", b.constant([1, 1, 2, 2], np.float32), mode="linear"),
        S,
    ),
    "lrn": (lambda b, _: one(b, "LRN", size=3, alpha=0.1), S),
    "lrn of no such window": (lambda b, _: one(b, "LRN", size=11, alpha=0.1), S),
    "silu": (silu, 0.25),
    "max pool of what has no scale": (
        lambda b, r: b.op("MaxPool", silu(b, r), kernel_shape=[2, 2], pads=[0, 1, 1, 0]),
        0.25,
    ),
    "average pool of what has no scale": (
        lambda b, r: b.op("AveragePool", silu(b, r), kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        0.25,
    ),
    "divide": (lambda b, _: scaled(b, "Div", 3.0), S),
    "batch norm": (
        lambda b, r: one(
            b,
            "BatchNormalization",
            *(b.constant(r.uniform(0.5, 1.5, 4), np.float32) for _ in range(4)),
        ),
        S,
    ),
}


@pytest.mark.parametrize("emulation", EMULATIONS, ids=IDS)
@pytest.mark.parametrize("name", NEAR)
def test_a_layer_with_other_arithmetic_is_at_most_a_step_off(
    name: str, emulation: Emulation, tmp_path: Path
) -> None:
    rng = np.random.default_rng()
    b = SegmentBuilder()
    layer, scale = NEAR[name]
    stored = b.output(layer(b, rng), scale)
    feeds = b.feeds(rng)
    actual = emulate(b.engine(tmp_path), feeds, emulation)[stored]
    expected = b.reference(feeds)[stored]
    assert actual.shape == expected.shape
    assert np.abs(actual.astype(int) - expected).max() <= 1
    assert np.abs(expected).max() > 2


def test_an_average_of_two_by_two_shows_both_roundings(tmp_path: Path) -> None:
    b = SegmentBuilder()
    stored = b.output(one(b, "AveragePool", kernel_shape=[2, 2], strides=[2, 2]), S)
    feeds = {"x0": np.zeros((2, 4, 6, 8), np.int8)}
    feeds["x0"][0, 0, 0, :2] = [0, 1]  # 1 / 4: once 0, but 1/2 -> 1, then 1/2 -> 1
    actual = emulate(b.engine(tmp_path), feeds, EXACT)[stored]
    assert actual[0, 0, 0, 0] == 1
    assert b.reference(feeds)[stored][0, 0, 0, 0] == 0


def test_split_gives_its_parts(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    b = SegmentBuilder()
    x = b.input((1, 5, 2, 2), S)
    cut = onnx.helper.make_node("Split", [x, ints(b, 2, 3)], ["left", "right"], "cut", axis=1)
    b.nodes.append(cut)
    names = [b.output("left", S), b.output("right", S)]
    feeds = b.feeds(rng)
    outputs = emulate(b.engine(tmp_path), feeds, EXACT)
    assert outputs[names[0]].tolist() == feeds["x0"][:, :2].tolist()
    assert outputs[names[1]].tolist() == feeds["x0"][:, 2:].tolist()


def test_a_chain_is_rounded_at_every_q(tmp_path: Path) -> None:
    """Two convolutions with a rectifier between Q/DQ pairs: the rectifier joins the first."""
    rng = np.random.default_rng()
    b = SegmentBuilder()
    first = b.rounded(conv(b, rng, pads=[1, 1, 1, 1]), 0.5)
    rectified = b.rounded(b.op("Relu", first), 0.5)
    weight = rng.integers(-127, 128, (3, 6, 1, 1)).astype(np.int8)
    second = b.op("Conv", rectified, b.weight(weight, 2.0**-8))
    stored = b.output(second, 1.0)
    feeds = b.feeds(rng)
    path = b.engine(tmp_path)
    with open_engine(path) as engine:
        (segment,) = engine.manifest.segments
        executor = EmulatedExecutor(engine, segment, segment.implementations[0], EXACT, None)
        values = list(executor.trace(feeds))
    assert [(one.op, one.scale) for one in values] == [("Conv", 0.5), ("Conv", 1.0)]
    assert values[0].numbers.min() == 0
    acc = np.einsum("kc,nchw->nkhw", weight[:, :, 0, 0].astype(int), values[0].numbers.astype(int))
    expected = np.sign(acc) * ((2 * np.abs(acc) + 2**9) // 2**10)  # r = 0.5 2^-8
    assert values[1].numbers.tolist() == np.clip(expected, -128, 127).tolist()
    assert emulate(path, feeds, FAST)[stored].tolist() == values[1].numbers.tolist()


def test_what_has_no_scale_is_computed_as_fp16_and_named(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    b = SegmentBuilder()
    name = b.real_output(b.op("Sigmoid", conv(b, rng)))
    feeds = b.feeds(rng)
    path = b.engine(tmp_path)
    actual, expected = emulate(path, feeds, EXACT)[name], b.reference(feeds)[name]
    assert actual.dtype == np.float32
    assert (actual == actual.astype(np.float16)).all()
    assert np.abs(actual - expected).max() < 2.0**-9
    with open_engine(path) as engine:
        (segment,) = engine.manifest.segments
        executor = EmulatedExecutor(engine, segment, segment.implementations[0], EXACT, None)
    assert "2 nodes in floating point" in executor.description


REFUSED: dict[str, tuple[Layer, str]] = {
    "unknown": (lambda b, _: one(b, "Erf"), r"'Erf:t1' \(Erf\) .*no arithmetic for it"),
    "scales": (
        lambda b, _: b.op("Add", b.input((1, 2, 3, 3), S), b.input((1, 2, 3, 3), 0.5)),
        r"scales 0.0625 and 0.5, the DLA takes one",
    ),
    "two activations": (
        lambda b, _: b.op("MatMul", b.input((1, 1, 3, 3), S), b.input((1, 1, 3, 3), S)),
        r"\(MatMul\) .*needs constant weights",
    ),
    "no zero point": (
        lambda b, _: b.op("QuantizeLinear", one(b, "Relu"), b.constant(S, np.float32)),
        r"without a zero point it makes UINT8",
    ),
    "one dimension": (
        lambda b, _: b.op(
            "Conv", b.input((1, 2, 8), S), b.weight(np.ones((2, 2, 3), np.int8), 1.0)
        ),
        r"convolves in 2 dimensions, this one in 1",
    ),
    "zero point": (
        lambda b, _: b.op(
            "DequantizeLinear",
            b.op(
                "QuantizeLinear",
                one(b, "Relu"),
                b.constant(S, np.float32),
                b.constant(3, np.uint8),
            ),
            b.constant(S, np.float32),
            b.constant(3, np.uint8),
        ),
        r"zero point 3; the DLA quantizes symmetrically",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_node_without_arithmetic_is_refused_by_name(name: str, tmp_path: Path) -> None:
    layer, message = REFUSED[name]
    b = SegmentBuilder()
    b.output(layer(b, np.random.default_rng()), S)
    with pytest.raises(SessionError, match=message):
        emulate(b.engine(tmp_path), b.feeds(np.random.default_rng()), EXACT)


@pytest.mark.parametrize("size", [8, 9])
def test_an_average_of_more_than_8_positions_is_refused(size: int, tmp_path: Path) -> None:
    b = SegmentBuilder()
    x = b.input((1, 2, 9, 9), S)
    stored = b.output(b.op("AveragePool", x, kernel_shape=[size, size]), S)
    feeds = b.feeds(np.random.default_rng())
    if size == 8:
        assert emulate(b.engine(tmp_path), feeds, EXACT)[stored].shape == (1, 2, 2, 2)
        return
    with pytest.raises(SessionError, match=r"window of 9x9, the DLA's limit is 8"):
        emulate(b.engine(tmp_path), feeds, EXACT)


def test_a_session_emulates_the_dla_only_when_asked(tmp_path: Path) -> None:
    path = write_network(tmp_path / "split.engine", split_network())
    x = np.random.default_rng().normal(0, 1, (1, 3, 16, 16)).astype(np.float32)
    with open_session(path) as plain, open_session(path, dla="exact", scales="ideal") as ideal:
        assert {one.implementation for one in plain.reports} == {"portable"}
        assert [one.implementation for one in ideal.reports] == [
            "portable",
            "emulated",
            "portable",
            "emulated",
        ]
        assert "exact, ideal scales" in ideal.reports[1].reason
        assert "silicon may differ" in ideal.reports[1].reason
        a, b = plain.infer({"x": x})["y"], ideal.infer({"x": x})["y"]
    assert np.abs(a - b).max() < 0.02 * np.abs(a).max()
