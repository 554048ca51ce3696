"""Tiles of a product with weights of 4 bits: those of FP16, with steps that stay in one group."""

from dataclasses import replace

from toolkit.gpu.ir.gemm import GemmShape
from toolkit.gpu.schedule.tiles import Tile, estimate_cycles, gemm_tiles
from toolkit.gpu.shapes.sizes import ceil_div, fixed, opt, power_of_two
from toolkit.gpu.target import WARP, GpuTarget

SPAN = 64  # of the depth: the least step, of 16 words with four numbers
_MAX_STEP = 128
_MAX_FEW_ROWS = 8
_MAX_ACCUMULATORS = 64  # of a thread, whose registers hold weights, too
_MAX_TACTICS = 4
# Of products of few rows. Two warps take `mma.sync` on every GPU: `wgmma` is slower here.
_PARTS = (1, 2, 4, 8)
_FEW_ROW_COLUMNS = (16, 32, 64)
_FEW_ROW_WARPS = 2
_FEW_ROW_STAGES = 3
_MMA_COLUMNS = 8
_MIN_LEFT_ROWS, _MAX_LEFT_ROWS = 64, 256  # parts of columns

# Estimated, not fitted: instructions of a thread, of which an SM starts 128 a cycle.
_DEQUANTIZE_INSTRUCTIONS = 2.0  # of a number
_SM_INSTRUCTIONS = 128
# From times of 4096 x 4096 on 14 and on 132 SMs of an H200.
_FEW_ROW_PROLOGUE_CYCLES = 1700
_FEW_ROW_STEP_CYCLES = 100  # beside its instructions
_FEW_ROW_BLOCK_CYCLES = 700  # beside the instructions of its steps


def step_depth(group: int) -> int:
    """Return the depth of a step: a group, a part of one, or SPAN with several groups."""
    return min(max(group, SPAN), _MAX_STEP)


def int4_tiles(shape: GemmShape, group: int, gpu: GpuTarget, *, split_k: bool) -> tuple[Tile, ...]:
    """Return the best tiles by estimate, the best first."""
    if fixed(shape.rows) and shape.rows <= _MAX_FEW_ROWS:
        tiles = _few_row_tiles(shape, step_depth(group))
        tiles.sort(key=lambda tile: _few_row_cycles(shape, tile, gpu))
    else:
        tiles = [
            replace(tile, depth=step_depth(group))
            for tile in gemm_tiles(shape, replace(gpu, exhaustive=True), split_k=split_k)
            if tile.rows * tile.columns <= _MAX_ACCUMULATORS * tile.warps * WARP
        ]
        tiles.sort(key=lambda tile: _cycles(shape, tile, gpu))
    return tuple(tiles if gpu.exhaustive else tiles[:_MAX_TACTICS])


def _few_row_tiles(shape: GemmShape, depth: int) -> list[Tile]:
    rows, steps = power_of_two(shape.rows), ceil_div(shape.depth, depth)
    return [
        Tile(
            max(rows, _MMA_COLUMNS // parts), columns, depth, _FEW_ROW_WARPS, _FEW_ROW_STAGES,
            parts=parts,
        )
        for parts in _PARTS
        for columns in _FEW_ROW_COLUMNS
        if _MIN_LEFT_ROWS <= parts * columns <= _MAX_LEFT_ROWS
        and parts * rows <= 2 * _MMA_COLUMNS
        and (parts == 1 or steps >= 2 * parts)
    ]  # fmt: skip


def _cycles(shape: GemmShape, tile: Tile, gpu: GpuTarget) -> float:
    blocks = ceil_div(opt(shape.rows), tile.rows) * ceil_div(opt(shape.columns), tile.columns)
    weights = tile.columns * shape.depth * blocks * opt(shape.batch)
    dequantize = weights * _DEQUANTIZE_INSTRUCTIONS / (_SM_INSTRUCTIONS * gpu.sm_count)
    return estimate_cycles(shape, tile, gpu) + dequantize


def _few_row_cycles(shape: GemmShape, tile: Tile, gpu: GpuTarget) -> float:
    """Estimate the time: the longer of what a lone block and all blocks of an SM take, and half
    the other.
    """
    steps = ceil_div(shape.depth, tile.depth * tile.parts)
    weights = tile.columns * tile.parts * steps * tile.depth
    instructions = weights * _DEQUANTIZE_INSTRUCTIONS
    blocks = ceil_div(ceil_div(shape.columns, tile.columns) * opt(shape.batch), gpu.sm_count)
    memory = weights / 2 / gpu.memory_bytes
    block = max(instructions / _SM_INSTRUCTIONS, memory) + _FEW_ROW_BLOCK_CYCLES
    alone = instructions / (tile.warps * WARP)
    alone += _FEW_ROW_PROLOGUE_CYCLES + steps * _FEW_ROW_STEP_CYCLES
    return max(blocks * block, alone) + min(blocks * block, alone) / 2
