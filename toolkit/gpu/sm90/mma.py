"""Which tiles store INT8 results in the MMA layout (`toolkit.gpu.sm90.kernels.mma_layout`)."""

from toolkit.gpu.ir.gemm import GemmProblem
from toolkit.gpu.schedule.tiles import Tile
from toolkit.gpu.target import GpuTarget


def mma_warps(problem: GemmProblem, tile: Tile, gpu: GpuTarget) -> int:
    """Return the warps of a tile whose INT8 results need not go through shared memory, else 0."""
    int8 = problem.shape.item_bytes == 1 and problem.y.item_bytes == 1
    rows = problem.layout == "rows"  # NCHW results have no neighbouring columns
    whole = tile.columns in (64, 128) and tile.rows % (16 * tile.warps) == 0
    return tile.warps if gpu.has_wgmma and int8 and rows and whole else 0
