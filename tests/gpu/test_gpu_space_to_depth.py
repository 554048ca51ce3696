"""Space-to-depth first convolutions, alone and fused with max pooling, interpreted."""

from dataclasses import replace

import gpu_interpreter
import int8_reference
import numpy as np
import pytest
from gpu_graphs import Case, convolution, node
from int8_graphs import Graph

from device.engine.manifest import DimRange
from toolkit.gpu.lower import KernelProgram, lower_segment
from toolkit.gpu.shapes.inference import traces_of
from toolkit.gpu.target import GpuTarget

pytest.importorskip("triton", reason="Triton is not installed")

HOPPER = GpuTarget(sm=90, sm_count=2, exhaustive=True)
XAVIER = GpuTarget(sm=72, sm_count=8)
LIMITS = {"fp32": 1e-5, "fp16": 2e-3}
POOL = {"kernel_shape": [3, 3], "strides": [2, 2]}


def kernels(program: KernelProgram) -> list[str]:
    return [call.spec.title for call in program.launches]


def check(program: KernelProgram, case: Case, limit: float, rng: np.random.Generator) -> None:
    feeds = case.feeds(rng)
    outputs = gpu_interpreter.run(program, feeds)
    for name, truth in case.truth(feeds).items():
        difference = np.linalg.norm(outputs[name].astype(np.float64) - truth)
        assert difference < limit * np.linalg.norm(truth), name


FIRST_CONVOLUTIONS = {
    "7x7": ((1, 3, 20, 17), 8, (7, 7), {"pads": [3, 3, 3, 3]}),
    "3x3": ((2, 3, 9, 8), 5, (3, 3), {"pads": [1, 1, 1, 1]}),
    "grey, even taps": ((1, 1, 9, 10), 4, (2, 4), {"pads": [0, 2, 1, 1]}),
    "four channels, no border": ((1, 4, 11, 7), 4, (5, 3), {}),
    "as TensorFlow pads": ((1, 3, 10, 9), 4, (3, 3), {"auto_pad": "SAME_UPPER"}),
    "padded before": ((1, 3, 10, 9), 4, (3, 4), {"auto_pad": "SAME_LOWER"}),
}


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("strides", [[1, 1], [1, 2], [2, 1]])
@pytest.mark.parametrize("columns", [2, 3])
def test_one_row_of_taps_is_no_single_point(
    columns: int, strides: list[int], precision: str, rng: np.random.Generator
) -> None:
    case = convolution(rng, (2, 3, 5, 9), 8, (1, columns), strides=strides, pads=[1, 0, 0, 1])
    for gpu in (HOPPER, XAVIER):
        check(case.lower(precision, gpu), case, LIMITS[precision], rng)


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("name", FIRST_CONVOLUTIONS)
def test_stride_2_reads_blocks_of_pixels(
    name: str, precision: str, rng: np.random.Generator
) -> None:
    shape, filters, taps, attributes = FIRST_CONVOLUTIONS[name]
    case = convolution(rng, shape, filters, taps, strides=[2, 2], **attributes)
    program = case.lower(precision)
    assert kernels(program)[:2] == ["space_to_depth", "gemm im2col"]
    check(program, case, LIMITS[precision], rng)


OTHERS = {
    "five channels": ((1, 5, 9, 9), (3, 3), {"strides": [2, 2]}),
    "another stride": ((1, 3, 9, 9), (3, 3), {"strides": [2, 1]}),
    "rows apart": ((1, 3, 9, 9), (3, 3), {"strides": [2, 2], "dilations": [2, 1]}),
    "a column of taps": ((1, 3, 9, 9), (3, 1), {"strides": [2, 2]}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_read_pixels(name: str, rng: np.random.Generator) -> None:
    shape, taps, attributes = OTHERS[name]
    case = convolution(rng, shape, 4, taps, **attributes)
    program = case.lower()
    assert "space_to_depth" not in kernels(program)
    check(program, case, LIMITS["fp32"], rng)


POOLED = {
    # pictures, filters, taps of the convolution, its attributes, those of the pooling
    "ResNet": ((2, 3, 40, 66), 64, (7, 7), {"pads": [3] * 4}, {"pads": [1] * 4}),
    "a row of one segment": ((1, 3, 23, 21), 9, (7, 7), {"pads": [3] * 4}, {"pads": [1] * 4}),
    "SqueezeNet": ((1, 3, 39, 35), 70, (3, 3), {}, {"ceil_mode": 1}),
    "even, rounded up": ((3, 3, 30, 34), 8, (7, 7), {"pads": [3] * 4}, {"ceil_mode": 1}),
    "depth no power of two": ((1, 3, 25, 37), 5, (5, 5), {"pads": [2] * 4}, {"pads": [0, 1, 1, 0]}),
    "as TensorFlow pads": (
        (1, 3, 30, 28),
        6,
        (7, 7),
        {"auto_pad": "SAME_UPPER"},
        {"auto_pad": "SAME_UPPER"},
    ),
}


def pooled(name: str, rng: np.random.Generator, between: str = "Relu") -> Case:
    shape, filters, taps, attributes, window = POOLED[name]
    after = (node(between, "c", "r"), node("MaxPool", "r", "p", **POOL, **window))
    return convolution(
        rng, shape, filters, taps, *after, node("Abs", "p", "y"), strides=[2, 2], **attributes
    )


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        pytest.param(name, gpu, marks=[pytest.mark.slow] * (gpu is XAVIER and "even" not in name))
        for name in POOLED
        for gpu in (HOPPER, XAVIER)
        if "TensorFlow" not in name
    ],
)
def test_pooled_sums_of_int8_are_exact(name: str, gpu: GpuTarget, rng: np.random.Generator) -> None:
    shape, filters, taps, attributes, window = POOLED[name]
    graph = Graph(rng, {"x": shape})
    sums = graph.product(
        "Conv", graph.rounded("x"), (filters, shape[1], *taps), bias="int32", strides=[2, 2],
        **attributes,
    )  # fmt: skip
    inner = graph.rounded(graph.add("Relu", sums), np.float32(0.11))
    outer = graph.rounded(graph.add("MaxPool", inner, **POOL, **window), np.float32(0.13))
    case = graph.case(graph.product("Conv", outer, (4, filters, 1, 1)))
    program = case.lower("int8", gpu)
    assert kernels(program)[:3] == ["space_to_depth", "gemm im2col", "max_pool"]
    feeds = case.feeds(rng)
    outputs = gpu_interpreter.run(program, feeds)
    for output, truth in int8_reference.run(case.model(), feeds).items():
        assert len(np.unique(truth)) > 4
        np.testing.assert_array_equal(outputs[output], truth, strict=True)


def test_windows_of_any_offset_and_size_are_pooled(rng: np.random.Generator) -> None:
    for _ in range(5):
        taps = tuple(int(n) for n in rng.integers(2, 9, 2))
        pads = [int(rng.integers(0, n)) for n in (*taps, *taps)]
        height, width = (int(n) for n in rng.integers(12, 48, 2))
        window = {
            **POOL,
            "pads": [int(n) for n in rng.integers(0, 2, 4)],
            "ceil_mode": int(rng.integers(2)),
        }
        after = (node("Relu", "c", "r"), node("MaxPool", "r", "y", **window))
        shape, filters = (int(rng.integers(1, 4)), 3, height, width), int(rng.integers(1, 80))
        case = convolution(rng, shape, filters, taps, *after, strides=[2, 2], pads=pads)
        program = case.lower("fp16", HOPPER)
        check(program, case, LIMITS["fp16"], rng)


def test_nan_passes_the_pooling(rng: np.random.Generator) -> None:
    """Row 20 is under the taps of rows 8 to 11 of the convolution, column 30 of columns 13 to 16.

    The eighth tap has the weight 0, and 0 times NaN is NaN.
    """
    case = pooled("ResNet", rng)
    feeds = case.feeds(rng)
    feeds["x"][0, 1, 20, 30] = np.nan
    result = np.isnan(gpu_interpreter.run(case.lower("fp16", HOPPER), feeds)["y"])
    assert result[0, :, 4:7, 6:9].all()
    assert result.sum() == result[0, :, 4:7, 6:9].size


def test_a_dynamic_batch_is_pooled_too(rng: np.random.Generator) -> None:
    case = replace(pooled("ResNet", rng), inputs={"x": ("batch", 3, 22, 38)})
    batch = DimRange(name="batch", min=1, opt=2, max=5)
    piece = case.segment()
    program = lower_segment(piece.model, gpu=HOPPER, precision="fp16", traces=traces_of([batch]))
    for size in (1, 2, 5):
        feeds = {"x": rng.normal(size=(size, 3, 22, 38)).astype(np.float32)}
        outputs = gpu_interpreter.run(program, feeds, (size,))
        for name, truth in case.truth(feeds).items():
            difference = np.linalg.norm(outputs[name].astype(np.float64) - truth)
            assert difference < LIMITS["fp16"] * np.linalg.norm(truth), size
