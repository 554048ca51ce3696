"""Tiles of a product with weights of 4 bits: those of FP16, with steps that stay in one group."""

from dataclasses import replace

from toolkit.gpu.ir.gemm import GemmShape
from toolkit.gpu.schedule.tiles import Tile, estimate_cycles, gemm_tiles
from toolkit.gpu.shapes.sizes import ceil_div, fixed, opt
from toolkit.gpu.target import WARP, GpuTarget

SPAN = 64  # of the depth: the least step, of 16 words with four numbers
MAX_STEP = 128
MAX_VECTOR_ROWS = 8
_MAX_ACCUMULATORS = 64  # of a thread, whose registers hold weights, too
_MAX_TACTICS = 4
_MAX_VECTOR_TACTICS = 2
_VECTOR_DEPTHS = (512, 1024, 2048, 4096)  # of a step; the last is 32 numbers of each thread
_VECTOR_COLUMNS = (2, 4, 8, 16)
_VECTOR_WARPS = 4
_MAX_VECTOR_STEPS = 32  # which are unrolled
_MAX_VECTOR_WORDS = 64  # of a thread

# Estimated, not fitted: instructions of a thread, of which an SM starts 128 a cycle.
_DEQUANTIZE_INSTRUCTIONS = 2.0  # of a number
_VECTOR_INSTRUCTIONS = 2.5  # of a number, and one more for each row
_ROW_INSTRUCTIONS = 3.5  # of a number of a row of a, which a warp reads for all its columns
_SM_INSTRUCTIONS = 128
_VECTOR_LATENCY_CYCLES = 2400


def step_depth(group: int) -> int:
    """Return the depth of a step: a group, a part of one, or SPAN with several groups."""
    return min(max(group, SPAN), MAX_STEP)


def int4_tiles(shape: GemmShape, group: int, gpu: GpuTarget, *, split_k: bool) -> tuple[Tile, ...]:
    """Return the best tiles by estimate, the best first; those of one row are of few rows."""
    tiles = [
        replace(tile, depth=step_depth(group))
        for tile in gemm_tiles(shape, replace(gpu, exhaustive=True), split_k=split_k)
        if tile.rows * tile.columns <= _MAX_ACCUMULATORS * tile.warps * WARP
    ]
    tiles.sort(key=lambda tile: _cycles(shape, tile, gpu))
    vectors = sorted(_vector_tiles(shape), key=lambda tile: _vector_cycles(shape, tile, gpu))
    if not gpu.exhaustive:
        tiles, vectors = tiles[:_MAX_TACTICS], vectors[:_MAX_VECTOR_TACTICS]
    first = bool(vectors) and _vector_cycles(shape, vectors[0], gpu) < _cycles(shape, tiles[0], gpu)
    return (*vectors, *tiles) if first else (*tiles, *vectors)


def _vector_tiles(shape: GemmShape) -> list[Tile]:
    if not fixed(shape.rows) or shape.rows > MAX_VECTOR_ROWS or shape.batch != 1:
        return []
    return [
        Tile(1, columns, depth, _VECTOR_WARPS, 1)
        for depth in _VECTOR_DEPTHS
        for columns in _VECTOR_COLUMNS
        if shape.depth <= _MAX_VECTOR_STEPS * depth
        and columns * depth // 4 <= _MAX_VECTOR_WORDS * _VECTOR_WARPS * WARP
    ]


def _cycles(shape: GemmShape, tile: Tile, gpu: GpuTarget) -> float:
    blocks = ceil_div(opt(shape.rows), tile.rows) * ceil_div(opt(shape.columns), tile.columns)
    weights = tile.columns * shape.depth * blocks * opt(shape.batch)
    dequantize = weights * _DEQUANTIZE_INSTRUCTIONS / (_SM_INSTRUCTIONS * gpu.sm_count)
    return estimate_cycles(shape, tile, gpu) + dequantize


def _vector_cycles(shape: GemmShape, tile: Tile, gpu: GpuTarget) -> float:
    blocks_of_sm = ceil_div(ceil_div(shape.columns, tile.columns), gpu.sm_count)
    steps = ceil_div(shape.depth, tile.depth)
    weights = tile.columns * steps * tile.depth
    warps = min(tile.columns, max(1, 8 * WARP * tile.warps * 4 // tile.depth))  # side by side
    instructions = weights * (_VECTOR_INSTRUCTIONS + shape.rows)
    instructions += warps * steps * tile.depth * shape.rows * _ROW_INSTRUCTIONS
    compute = blocks_of_sm * instructions / _SM_INSTRUCTIONS
    memory = blocks_of_sm * weights / 2 / gpu.memory_bytes
    return _VECTOR_LATENCY_CYCLES + max(compute, memory)
