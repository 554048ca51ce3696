"""Sizes of the blocks that a kernel computes at a time."""

from dataclasses import dataclass

from toolkit.gpu.gpu import GpuTarget
from toolkit.gpu.sizes import ceil_div, power_of_two

_LEAST = 16  # the smallest block side that a product of matrices takes
_LEAST_INT8 = 32  # and the smallest depth of one of INT8
_DEEPEST = {1: 128, 2: 64, 4: 32}  # products at a time, by bytes of an operand
_RUNNING_MEAN = 1024  # elements that a memory-bound block holds at once


@dataclass(frozen=True, slots=True)
class Tile:
    """A block of `rows` x `columns` results, computed `depth` products at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def product_tile(rows: int, columns: int, depth: int, item_bytes: int, gpu: GpuTarget) -> Tile:
    """Choose the tile of a product of matrices: the largest that still fills the GPU.

    Large tiles read each operand less often; tiles fewer than the SMs leave some idle.
    """
    block_n = _side(columns, 128)
    sizes = [
        (128, block_n),
        (64, block_n),
        (64, min(block_n, 64)),
        (32, min(block_n, 64)),
        (32, min(block_n, 32)),
        (16, min(block_n, 32)),
    ]
    if not gpu.has_matrix_units:  # larger ones spill: a thread holds its sums and operands
        sizes = [(32, min(block_n, 32)), (16, min(block_n, 32))]
    wide = [(m, n) for m, n in sizes if m <= max(_LEAST, power_of_two(rows))]
    filling = [s for s in wide if ceil_div(rows, s[0]) * ceil_div(columns, s[1]) >= gpu.sm_count]
    block_m, block_n = filling[0] if filling else wide[-1]
    deepest = _DEEPEST[item_bytes] if gpu.has_matrix_units else _LEAST
    block_k = max(_side(depth, deepest), _LEAST_INT8 if item_bytes == 1 else _LEAST)
    warps = 8 if block_m * block_n >= 128 * 128 else 4
    return Tile(
        block_m, block_n, block_k, warps, _stages(block_m, block_n, block_k, item_bytes, gpu)
    )


def row_tile(rows: int, columns: int) -> Tile:
    """Choose the tile of a kernel that is bound by memory: whole rows of channels first."""
    block_n = min(max(power_of_two(columns), 8), 64)
    block_m = max(1, min(power_of_two(rows), _RUNNING_MEAN // block_n))
    return Tile(block_m, block_n, 0, 4, 1)


def _stages(block_m: int, block_n: int, block_k: int, item_bytes: int, gpu: GpuTarget) -> int:
    """Blocks of operands in flight: no more than shared memory holds."""
    most = 4 if gpu.copies_while_computing else 2
    fits = gpu.shared_bytes // ((block_m + block_n) * block_k * item_bytes)
    return max(1, min(most, fits))


def _side(size: int, most: int) -> int:
    return max(_LEAST, min(most, power_of_two(size)))
