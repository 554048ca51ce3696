"""The special ways to convolve and to average, all tactics, and the choice of tiles."""

from dataclasses import replace

import gpu_interpreter
import numpy as np
import pytest
from gpu_graphs import Case, convolution, node, normal

from toolkit.gpu.ir.gemm import GemmShape
from toolkit.gpu.ir.launch import TunableOp
from toolkit.gpu.lower import KernelProgram
from toolkit.gpu.schedule.tiles import estimate_cycles, gemm_tiles
from toolkit.gpu.target import GpuTarget

pytest.importorskip("triton", reason="Triton is not installed")

EVERY = GpuTarget(sm=90, sm_count=8, exhaustive=True)
LIMIT = 1e-5  # FP32: the order of sums


def kernels(program: KernelProgram) -> list[str]:
    return [call.spec.title for call in program.launches]


def check(program: KernelProgram, case: Case, rng: np.random.Generator) -> None:
    feeds = case.feeds(rng)
    outputs = gpu_interpreter.run(program, feeds)
    for name, truth in case.truth(feeds).items():
        difference = np.linalg.norm(outputs[name].astype(np.float64) - truth)
        assert difference < LIMIT * np.linalg.norm(truth), name


FIRST_CONVOLUTIONS = {
    "as in a ResNet": ((1, 3, 20, 17), 8, (7, 7), {"strides": [2, 2], "pads": [3, 3, 3, 3]}),
    "as in a VGG": ((2, 3, 9, 8), 5, (3, 3), {"pads": [1, 1, 1, 1]}),
    "patches": ((1, 3, 16, 12), 6, (4, 4), {"strides": [4, 4]}),
    "grey": ((1, 1, 9, 10), 4, (3, 5), {"strides": [1, 2], "pads": [0, 2, 1, 1]}),
    "four channels, rows apart": ((1, 4, 12, 7), 4, (3, 2), {"dilations": [2, 1]}),
    "what the stride leaves out": ((1, 2, 11, 11), 4, (2, 2), {"strides": [3, 3]}),
}


@pytest.mark.parametrize("name", FIRST_CONVOLUTIONS)
def test_few_channels_are_read_from_a_padded_image(name: str, rng: np.random.Generator) -> None:
    shape, filters, taps, attributes = FIRST_CONVOLUTIONS[name]
    case = convolution(rng, shape, filters, taps, **attributes)
    program = case.lower()
    assert kernels(program)[:2] in (["pad", "gemm im2col"], ["space_to_depth", "gemm im2col"])
    check(program, case, rng)


def test_columns_of_taps_apart_are_read_one_by_one(rng: np.random.Generator) -> None:
    case = convolution(rng, (1, 3, 9, 9), 4, (3, 3), dilations=[1, 2])
    assert "pad" not in kernels(case.lower())


CONVOLUTIONS = {
    "3x3": ((1, 24, 4, 5), 40, (3, 3), {"pads": [1, 1, 1, 1]}),
    "pointwise": ((2, 24, 9, 8), 40, (1, 1), {}),
    "narrow groups": ((2, 40, 5, 6), 40, (3, 3), {"group": 10, "pads": [1, 1, 1, 1]}),
    "few narrow groups, strided": ((2, 24, 15, 17), 24, (3, 2), {"group": 6, "strides": [2, 2]}),
    "narrow groups, pointwise": ((2, 80, 9, 8), 80, (1, 1), {"group": 20}),
    "depthwise": ((2, 12, 13, 6), 12, (3, 3), {"group": 12, "pads": [1, 1, 1, 1]}),
    "depthwise, strided": ((1, 9, 15, 14), 9, (5, 5), {"group": 9, "strides": [2, 2]}),
    "depthwise, rows apart": ((1, 9, 15, 9), 9, (3, 3), {"group": 9, "dilations": [3, 2]}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_every_tactic_gives_the_result(name: str, rng: np.random.Generator) -> None:
    shape, filters, taps, attributes = CONVOLUTIONS[name]
    case = convolution(rng, shape, filters, taps, **attributes)
    program = case.lower(gpu=EVERY)
    (at,) = [at for at, op in enumerate(program.ops) if len(op.tactics) > 1]
    for tactic in program.ops[at].tactics:
        ops = [*program.ops]
        ops[at] = TunableOp(ops[at].nodes, (tactic,))
        check(replace(program, ops=tuple(ops)), case, rng)


@pytest.mark.parametrize("taps", [(1, 30), (1, 31), (4, 8), (3, 11), (7, 7)])
@pytest.mark.parametrize("channels", [5, 32])
def test_any_number_of_taps_is_masked(
    taps: tuple[int, int], channels: int, rng: np.random.Generator
) -> None:
    pads = [taps[0] // 2, taps[1] // 2, taps[0] - 1, taps[1] // 2]
    case = convolution(rng, (1, channels, 7, 13), 6, taps, pads=pads)
    check(case.lower(), case, rng)


SHALLOW = {
    "whole steps": ((2, 64, 9, 7), 80),
    "a part of a step": ((1, 40, 11, 13), 40),
    "fewer rows than programs": ((1, 48, 6, 6), 40),
}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", SHALLOW)
def test_programs_that_keep_the_weights_reach_every_row(
    name: str, precision: str, rng: np.random.Generator
) -> None:
    shape, filters = SHALLOW[name]
    nodes = [node("Add", "c r", "a"), node("Relu", "a", "y")]
    plain = convolution(rng, shape, filters, (1, 1), *nodes)
    case = replace(plain, inputs={**plain.inputs, "r": (shape[0], filters, *shape[2:])})
    program = case.lower(precision, GpuTarget(sm=90, sm_count=2, exhaustive=True))
    (at,) = [at for at, op in enumerate(program.ops) if len(op.tactics) > 1]
    resident = [t for t in program.ops[at].tactics if t[0].spec.kernel == "resident_gemm"]
    assert {dict(tactic[0].spec.constants)["BLOCK_N"] for tactic in resident} >= {64}
    feeds = case.feeds(rng)
    truth = case.truth(feeds)["y"]
    for tactic in resident:
        ops = [*program.ops]
        ops[at] = TunableOp(ops[at].nodes, (tactic,))
        actual = gpu_interpreter.run(replace(program, ops=tuple(ops)), feeds)["y"]
        difference = np.linalg.norm(actual.astype(np.float64) - truth)
        assert difference < {"fp32": LIMIT, "fp16": 2e-3}[precision] * np.linalg.norm(truth)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(("depth", "columns"), [(72, 24), (640, 33), (24, 96)])
def test_a_product_of_one_row_needs_no_matrix_units(
    depth: int, columns: int, precision: str, rng: np.random.Generator
) -> None:
    nodes = [node("Add", "c r", "a"), node("HardSwish", "a", "y")]
    plain = convolution(rng, (1, depth, 1, 1), columns, (1, 1), *nodes)
    case = replace(plain, inputs={**plain.inputs, "r": (1, columns, 1, 1)})
    program = case.lower(precision, GpuTarget(sm=87, sm_count=2, exhaustive=True))
    check_tactics(program, "matrix_vector", case, rng)


def check_tactics(
    program: KernelProgram, kernel: str, case: Case, rng: np.random.Generator
) -> None:
    """Every tactic of the only operation with this kernel gives what onnxruntime gives."""
    feeds = case.feeds(rng)
    truth = case.truth(feeds)["y"]
    at, tactics = next(
        (at, chosen)
        for at, op in enumerate(program.ops)
        if (chosen := [t for t in op.tactics if t[0].spec.kernel == kernel])
    )
    for tactic in tactics:
        ops = [*program.ops]
        ops[at] = TunableOp(ops[at].nodes, (tactic,))
        actual = gpu_interpreter.run(replace(program, ops=tuple(ops)), feeds)["y"]
        difference = np.linalg.norm(actual.astype(np.float64) - truth)
        assert difference < 2e-3 * np.linalg.norm(truth)


def test_narrow_groups_share_a_tile(rng: np.random.Generator) -> None:
    case = convolution(rng, (1, 96, 6, 6), 96, (3, 3), group=24, pads=[1, 1, 1, 1])
    (launch,) = [c for c in case.lower("fp16").launches if c.spec.title == "gemm im2col"]
    constants = dict(launch.spec.constants)
    assert (constants["CHANNELS"], constants["DIAGONAL"], launch.grid[1]) == (32, 96, 1)


DEEP = {
    "3x3": ((1, 32, 5, 6), 24, (3, 3), {"pads": [1, 1, 1, 1]}),
    "pointwise": ((2, 160, 3, 5), 20, (1, 1), {}),
    "in groups": ((1, 64, 4, 4), 32, (3, 3), {"group": 2, "pads": [1, 1, 1, 1]}),
    "strided, odd channels": ((1, 45, 7, 6), 18, (2, 3), {"strides": [2, 2]}),
}


@pytest.mark.parametrize("name", DEEP)
def test_sums_in_parts_are_the_convolution(name: str, rng: np.random.Generator) -> None:
    shape, filters, taps, attributes = DEEP[name]
    nodes = [node("Mul", "c s", "m"), node("Relu", "m", "y")]
    plain = convolution(rng, shape, filters, taps, *nodes, **attributes)
    case = replace(plain, weights={**plain.weights, "s": np.array(0.7, np.float32)})
    program = case.lower(gpu=EVERY)
    (at,) = [at for at, op in enumerate(program.ops) if len(op.tactics) > 1]
    split_k = [tactic for tactic in program.ops[at].tactics if len(tactic) == 2]
    counts = {dict(tactic[0].spec.constants)["SPLIT_K"] for tactic in split_k}
    assert len(counts) > 1
    product = "gemm strided" if name == "pointwise" else "gemm im2col"
    for tactic in split_k:
        assert [call.spec.title for call in tactic] == [product, "split_k_reduce"]
        assert tactic[0].grid[2] == dict(tactic[0].spec.constants)["SPLIT_K"]
        ops = [*program.ops]
        ops[at] = TunableOp(ops[at].nodes, (tactic,))
        check(replace(program, ops=tuple(ops)), case, rng)


@pytest.mark.parametrize("batch", [1, 3])
def test_an_average_over_many_pixels_is_made_in_parts(batch: int, rng: np.random.Generator) -> None:
    case = Case([node("GlobalAveragePool", "x", "y")], {"x": (batch, 33, 40, 37)}, {})
    program = case.lower()
    assert kernels(program).count("global_average_pool") == 2
    (at,) = [at for at, op in enumerate(program.ops) if len(op.tactics) > 1]
    for tactic in program.ops[at].tactics:  # at once, too
        ops = [*program.ops]
        ops[at] = TunableOp(ops[at].nodes, (tactic,))
        check(replace(program, ops=tuple(ops)), case, rng)


def test_many_images_are_averaged_at_once(rng: np.random.Generator) -> None:
    case = Case([node("GlobalAveragePool", "x", "y")], {"x": (65, 8, 20, 20)}, {})
    program = case.lower()
    assert kernels(program).count("global_average_pool") == 1
    check(program, case, rng)


def test_tiles_fit_the_gpu_and_the_first_is_the_fastest_by_estimate(
    rng: np.random.Generator,
) -> None:
    for sm, count in ((72, 8), (75, 40), (80, 108), (86, 20), (87, 16), (90, 132), (110, 20)):
        gpu = GpuTarget(sm, count, exhaustive=True)
        for _ in range(40):
            rows, columns, depth = (int(2 ** rng.uniform(0, top)) for top in (18, 11, 13))
            item = int(rng.choice([1, 2, 4]))
            product = GemmShape(rows, columns, depth, depth, item, 2 * item)
            tiles = gemm_tiles(product, gpu)
            assert tiles
            for tile in tiles:
                operands = (tile.rows + tile.columns) * tile.depth * item * tile.stages
                assert operands <= gpu.shared_bytes
                assert tile.rows * tile.columns <= 128 * 32 * tile.warps
            times = [estimate_cycles(product, tile, gpu) for tile in tiles]
            assert times == sorted(times)
            carried = gemm_tiles(product, GpuTarget(sm, count))
            assert carried == tiles[: len(carried)]


def test_parts_share_a_depth_where_blocks_are_few(rng: np.random.Generator) -> None:
    gpu = GpuTarget(sm=90, sm_count=132)
    deep, flat = GemmShape(49, 512, 4608, 512, 2, 2), GemmShape(50176, 64, 576, 64, 2, 2)
    assert gemm_tiles(deep, gpu, split_k=True)[0].split_k > 1
    assert all(tile.split_k == 1 for tile in gemm_tiles(flat, gpu, split_k=True))
    for _ in range(100):
        rows, columns, depth = (int(2 ** rng.uniform(0, top)) for top in (14, 11, 14))
        product = GemmShape(rows, columns, depth, depth, int(rng.choice([1, 2])), 2)
        tiles = gemm_tiles(product, gpu, split_k=True)
        assert any(tile.split_k == 1 for tile in tiles)
        for tile in tiles:
            steps = -(-depth // tile.depth)
            assert (tile.split_k - 1) * -(-steps // tile.split_k) < steps  # no part is empty
            blocks = -(-rows // tile.rows) * -(-columns // tile.columns)
            assert tile.split_k == 1 or blocks * tile.split_k <= 4 * gpu.sm_count


def test_rows_of_a_transposed_tensor_are_rows_of_one_product(rng: np.random.Generator) -> None:
    nodes = [
        node("Transpose", "x", "t", perm=[1, 0, 2]),
        node("MatMul", "t w", "p"),
        node("Add", "p t", "s"),
        node("Transpose", "s", "y", perm=[1, 0, 2]),
    ]
    case = Case(nodes, {"x": (3, 11, 24)}, {"w": normal(rng, 24, 24)})
    program = case.lower()
    (product,) = [call for call in program.launches if call.spec.title == "gemm strided"]
    assert product.grid[1] == 1
    check(program, case, rng)
