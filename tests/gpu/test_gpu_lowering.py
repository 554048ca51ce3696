"""What becomes one kernel, where tensors lie, and what is refused with which reason."""

import math

import numpy as np
import pytest
from gpu_graphs import ORIN, Case, node, normal

from device.profile import load_profile
from toolkit.gpu.errors import CompileError, NotCoveredError
from toolkit.gpu.ir.gemm import GemmShape
from toolkit.gpu.ir.network import MAX_ELEMENTS
from toolkit.gpu.ir.view import View, channels_last, row_major
from toolkit.gpu.schedule.tiles import gemm_tiles
from toolkit.gpu.target import GpuTarget


def kernels(case: Case, precision: str = "fp16") -> list[str]:
    return [call.spec.title for call in case.lower(precision).launches]


def test_a_residual_block_is_one_kernel_a_convolution(rng: np.random.Generator) -> None:
    nodes = [
        node("Conv", "x v", "a", pads=[1, 1, 1, 1]),
        node("Relu", "a", "b"),
        node("Conv", "b w", "c", pads=[1, 1, 1, 1]),
        node("Add", "c x", "d"),
        node("Relu", "d", "y"),
    ]
    weights = {"v": normal(rng, 8, 8, 3, 3), "w": normal(rng, 8, 8, 3, 3)}
    case = Case(nodes, {"x": (1, 8, 6, 6)}, weights)
    borders = "transpose_tiles"
    assert kernels(case) == [borders, "gemm im2col", "gemm im2col", borders]


def test_a_tensor_that_others_read_too_ends_its_kernel(rng: np.random.Generator) -> None:
    nodes = [
        node("Conv", "x w", "c"),
        node("Sigmoid", "c", "y"),
        node("Exp", "c", "z"),
    ]
    case = Case(nodes, {"x": (1, 8, 6, 6)}, {"w": normal(rng, 8, 8, 1, 1)}, ("y", "z"))
    assert kernels(case).count("gemm strided") == 1
    assert kernels(case).count("transpose_tiles") == 3  # the border, Sigmoid and Exp


def test_a_residual_that_is_not_made_yet_waits_for_its_own_kernel(
    rng: np.random.Generator,
) -> None:
    nodes = [  # the sum joins the later of the two convolutions
        node("Conv", "x v", "a"),
        node("Conv", "x w", "b"),
        node("Add", "a b", "y"),
    ]
    weights = {"v": normal(rng, 8, 8, 1, 1), "w": normal(rng, 8, 8, 1, 1)}
    program = Case(nodes, {"x": (1, 8, 6, 6)}, weights).lower("fp16")
    assert [op.nodes for op in program.ops if op.nodes] == [
        ("Conv:a",),
        ("Conv:b", "Add:y"),
    ]


def test_the_workspace_is_as_small_as_what_is_alive_at_once(rng: np.random.Generator) -> None:
    nodes = []
    weights = {}
    for at in range(6):
        weights[f"w{at}"] = normal(rng, 8, 8, 3, 3)
        name = "y" if at == 5 else f"t{at + 1}"
        source = "x" if at == 0 else f"t{at}"
        nodes.append(node("Conv", f"{source} w{at}", name, pads=[1, 1, 1, 1]))
    program = Case(nodes, {"x": (1, 8, 16, 16)}, weights).lower("fp32")
    assert program.workspace_bytes == program.largest_live_bytes == 2 * 8 * 16 * 16 * 4


def test_no_two_tensors_in_use_share_bytes(rng: np.random.Generator) -> None:
    nodes = [
        node("Conv", "x v", "a"),
        node("Conv", "x w", "b"),
        node("Concat", "a b", "c", axis=1),
        node("MaxPool", "c", "d", kernel_shape=[2, 2]),
        node("Conv", "d u", "y"),
    ]
    weights = {
        "v": normal(rng, 6, 4, 1, 1),
        "w": normal(rng, 10, 4, 3, 3),
        "u": normal(rng, 5, 16, 1, 1),
    }
    weights["w"] = weights["w"][:, :, 1:2, 1:2].copy()
    program = Case(nodes, {"x": (1, 4, 8, 8)}, weights).lower("fp16")
    for at, call in enumerate(program.launches):
        for base in call.reads:
            assert any(base in one.writes for one in program.launches[:at]) or base == "x"
        offsets = [program.offsets[base] for base in (*call.reads, *call.writes)]
        assert len(set(offsets)) == len(offsets)


REFUSED = {
    "an operator without kernel": (
        Case([node("Det", "x", "y")], {"x": (2, 3, 3)}, {}),
        "'Det:y' (Det) has no kernel",
    ),
    "a size that depends on numbers": (
        Case([node("NonZero", "x", "y")], {"x": (2, 3)}, {}, dtypes={"y": "int64"}),
        "'NonZero:y' (NonZero) makes a tensor whose size depends on the numbers",
    ),
    "a weight beyond FP16": (
        Case([node("MatMul", "x w", "y")], {"x": (2, 3)}, {"w": np.full((3, 4), 1e5, np.float32)}),
        "does not fit float16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_covered_is_named(name: str) -> None:
    case, message = REFUSED[name]
    with pytest.raises(NotCoveredError) as refusal:
        case.lower("fp16")
    assert message in str(refusal.value)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(CompileError, match="sm_42"):
        _ = GpuTarget(42, 4).shared_bytes


@pytest.mark.parametrize("sm", [53, 62, 72, 75, 80, 86, 87, 89, 90, 100, 110, 120])
def test_tiles_keep_the_limits_of_every_gpu(sm: int, rng: np.random.Generator) -> None:
    gpu = GpuTarget(sm, 16)
    for _ in range(200):
        rows, columns, depth = (int(2 ** rng.uniform(0, 14)) for _ in range(3))
        item_bytes = int(rng.choice([1, 2, 4]))
        tiles = gemm_tiles(GemmShape(rows, columns, depth, depth, item_bytes, item_bytes), gpu)
        assert tiles
        for tile in tiles:
            for side in (tile.rows, tile.columns, tile.depth):
                assert side >= 16
                assert math.log2(side).is_integer()
            operands = (tile.rows + tile.columns) * tile.depth * item_bytes
            assert tile.stages * operands <= gpu.shared_bytes


# Microseconds on 14 SMs of an H200 with kernels for sm_80: products (rows, columns, depth, bytes of
# an operand) of ResNet-50 at batch 8, and tiles (rows, columns, depth, warps).
MMA_SYNC_US = {
    (25088, 128, 256, 2): {(128, 128, 32, 4): 51.1, (64, 128, 64, 4): 57.3, (128, 64, 32, 4): 63.2},
    (25088, 64, 576, 2): {(128, 64, 32, 4): 61.0, (256, 64, 32, 8): 76.7, (64, 64, 32, 4): 75.6},
    (6272, 128, 1152, 2): {(128, 128, 32, 4): 47.7, (64, 128, 64, 4): 50.5, (128, 64, 32, 4): 56.4},
    (6272, 256, 512, 2): {(128, 128, 32, 4): 42.3, (128, 256, 32, 8): 48.6, (64, 128, 64, 4): 49.9},
    (1568, 256, 2304, 2): {(128, 128, 32, 4): 45.2, (64, 128, 64, 4): 55.3, (128, 64, 32, 4): 63.2},
    (1568, 1024, 256, 2): {
        (128, 128, 32, 4): 28.7,
        (128, 256, 32, 8): 30.9,
        (128, 64, 32, 4): 34.0,
    },
    (1568, 56, 672, 2): {(128, 64, 32, 4): 7.6, (64, 64, 32, 4): 8.7, (128, 32, 32, 4): 9.4},
    (25088, 128, 256, 1): {
        (128, 128, 64, 4): 34.7,
        (64, 128, 128, 4): 37.2,
        (128, 64, 64, 4): 37.8,
    },
    (25088, 64, 576, 1): {(128, 64, 64, 4): 36.9, (128, 64, 128, 4): 37.1},
    (6272, 128, 1152, 1): {
        (64, 128, 128, 4): 28.8,
        (128, 128, 64, 4): 31.5,
        (64, 128, 64, 4): 32.9,
    },
    (6272, 256, 512, 1): {
        (64, 256, 128, 4): 26.8,
        (128, 128, 64, 4): 31.2,
        (64, 128, 128, 4): 30.6,
    },
    (1568, 256, 2304, 1): {
        (64, 256, 128, 4): 26.0,
        (128, 128, 64, 4): 28.9,
        (64, 128, 64, 4): 34.9,
    },
    (1568, 256, 1024, 1): {
        (64, 256, 128, 4): 14.1,
        (128, 128, 64, 4): 14.3,
        (64, 128, 64, 4): 15.8,
    },
}


@pytest.mark.parametrize("product", MMA_SYNC_US)
def test_warps_that_multiply_from_registers_get_the_fastest_tile(
    product: tuple[int, int, int, int],
) -> None:
    rows, columns, depth, item_bytes = product
    channels = depth // 9 if depth % 9 == 0 else depth
    times = MMA_SYNC_US[product]
    shape = GemmShape(rows, columns, depth, channels, item_bytes, item_bytes)
    tiles = gemm_tiles(shape, GpuTarget(87, 14))
    first = tiles[0]
    assert (first.rows, first.columns, first.depth, first.warps) == min(
        times, key=times.__getitem__
    )


@pytest.mark.parametrize(
    ("item_bytes", "has_residual", "accumulators"),
    [(1, False, 128), (1, True, 64), (2, False, 128), (2, True, 128)],
)
def test_a_residual_takes_registers_from_the_sums_of_int8_with_mma_sync(
    item_bytes: int, has_residual: bool, accumulators: int
) -> None:
    shape = GemmShape(6272, 256, 1152, 128, item_bytes, item_bytes * (1 + has_residual))
    tiles = gemm_tiles(shape, GpuTarget(87, 16))
    most = max(tile.rows * tile.columns // (tile.warps * 32) for tile in tiles)
    assert most == accumulators


def test_what_holds_registers_takes_them_from_the_sums_of_mma_sync() -> None:
    shape = GemmShape(6272, 256, 1152, 128, 2, 6, holds_registers=True)
    for sm, accumulators in ((87, 64), (90, 128)):
        tiles = gemm_tiles(shape, GpuTarget(sm, 16))
        assert max(t.rows * t.columns // (t.warps * 32) for t in tiles) == accumulators


@pytest.mark.parametrize(
    ("sm", "rows", "depth", "channels", "stages"),
    [
        (90, 64 * 43, 512, 512, 2),  # more than three blocks for each of 14 SMs, eight steps
        (90, 64 * 42, 512, 512, 3),
        (90, 64 * 43, 576, 576, 3),
        (90, 64 * 43, 576, 64, 3),  # 3x3: rows share pixels
        (87, 64 * 43, 512, 512, 3),  # mma.sync
    ],
)
def test_other_blocks_hide_copies_in_place_of_a_third_stage(
    sm: int, rows: int, depth: int, channels: int, stages: int
) -> None:
    shape = GemmShape(rows, 128, depth, channels, 2, 2)
    tiles = gemm_tiles(shape, GpuTarget(sm, 14, exhaustive=True))
    assert {t.stages for t in tiles if (t.rows, t.columns, t.split_k) == (64, 128, 1)} == {stages}


def test_wide_tiles_keep_no_weights_with_mma_sync() -> None:
    """Of 64 x 256 all take 1.4 times as long as 64 x 128: see `toolkit/gpu/schedule/tiles.py`."""
    for sm, columns in ((87, 128), (90, 256)):
        tiles = gemm_tiles(GemmShape(25088, 256, 64, 64, 2, 2), GpuTarget(sm, 14), resident=True)
        assert max(tile.columns for tile in tiles if tile.programs) == columns


def test_views_reach_the_elements_that_numpy_reaches(rng: np.random.Generator) -> None:
    data = np.arange(1000.0)
    for _ in range(50):
        shape = tuple(int(n) for n in rng.integers(1, 5, 4))
        strides = row_major(shape) if rng.random() < 0.5 else channels_last(shape)
        order = tuple(int(n) for n in rng.permutation(4))
        view = View("x", "float32", shape, strides).permuted(order)
        array = np.lib.stride_tricks.as_strided(data, shape, [8 * s for s in strides])
        moved = np.lib.stride_tricks.as_strided(data, view.shape, [8 * s for s in view.strides])
        assert np.array_equal(array.transpose(order), moved)
        pitch = view.pixel_pitch()
        if pitch is not None:
            again = channels_last(view.shape, pitch)
            same = np.lib.stride_tricks.as_strided(data, view.shape, [8 * s for s in again])
            assert np.array_equal(moved, same)


def test_channels_last_is_seen_for_images_of_one_pixel() -> None:
    view = View("x", "float16", (3, 8, 1, 1), (8, 1, 1, 1))
    assert view.pixel_pitch() == 8
    assert view.reshaped((3, 8)) is not None
    assert ORIN.fp32_precision == "tf32x3"


def test_offsets_of_the_largest_tensor_fit_32_bits() -> None:
    """The last block reaches over the end: what it counts there must not wrap around."""
    (call,) = Case([node("Relu", "x", "y")], {"x": (MAX_ELEMENTS,)}, {}).lower("fp16").launches
    assert call.grid[0] * int(dict(call.spec.constants)["BLOCK"]) <= 2**31
    with pytest.raises(NotCoveredError, match=f"{MAX_ELEMENTS + 1} elements"):
        Case([node("Relu", "x", "y")], {"x": (MAX_ELEMENTS + 1,)}, {}).lower("fp16")


@pytest.mark.parametrize(("name", "expected"), [("h200", 18.37), ("agx-orin-64gb", 9.84)])
def test_a_target_has_the_memory_of_its_profile(name: str, expected: float) -> None:
    profile = load_profile(name)
    assert profile.gpu is not None
    target = GpuTarget.of(profile.gpu, profile.memory)
    assert target.memory_bytes == pytest.approx(expected, rel=1e-3)
    assert name != "h200" or target == GpuTarget(90, 132)
