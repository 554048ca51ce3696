"""Persistent, weight-stationary INT8 convolutions: weights stay in shared memory."""

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.emit.schedule import Schedule
from toolkit.gpu.emit.windows import window_constants
from toolkit.gpu.ir.gemm import GemmProblem, Im2colLoader
from toolkit.gpu.ir.launch import KernelLaunch, Tactic
from toolkit.gpu.ir.network import Array
from toolkit.gpu.ir.view import View
from toolkit.gpu.shapes.sizes import ceil_div, fixed
from toolkit.gpu.target import GpuTarget, sm_limits

_ROWS = 64  # pixels of a block: what four warps multiply at once
_WARPS = 4
_PIECE = 64  # of k: what the threads of a row load at once
# Pieces of a product. 64 channels at batch 256: 70 us, of 4 pieces 78, of 8 96; 16 channels: of one
# piece 3 to 5 % faster than of two.
_PIECES_PER_RUN = 2
_PIECES_PER_RUN_FEW = 1
_FEW_CHANNELS = 16  # channels
_CHANNEL_ALIGNMENT = 16  # channels that one thread loads, and the least block of columns
_WIDTHS = (64, 32, 16)  # of blocks of columns
_MAX_TAPS = 31  # a bit each
_MAX_FILTERS = 128  # their sums take half the registers
# ResNet-50 and a detector at batch 32 to 256 on one H200: up to here 1.1 to 2.6 times as fast as
# copies of both operands; half the filters of twice as many weights are slower.
_MAX_WEIGHT_BYTES = 72 * 1024
# Programs of an SM, by filters at most: as many as its registers hold comes first, and they are
# known when the kernel is compiled. Measured as above.
_PROGRAMS = {16: (7, 6, 14), 32: (5, 4, 6), _MAX_FILTERS: (4, 3, 2)}


def _refusal(problem: GemmProblem, gpu: GpuTarget) -> str | None:
    left, weights = problem.left, problem.filters
    if not isinstance(left, Im2colLoader) or weights is None or left.groups > 1:
        return "it is no 2-D convolution of one group"
    int8 = problem.shape.item_bytes == 1 and problem.y.item_bytes == 1
    if not gpu.has_wgmma or not int8 or problem.epilogue.scale is None:
        return "the operands are not INT8, or the GPU has no wgmma"
    filters, channels = weights.shape[:2]
    if any(n % _CHANNEL_ALIGNMENT for n in (filters, channels, left.pitch)):
        return "channels are not loaded 16 at a time"
    taps = left.window.kernel[0] * left.window.kernel[1]
    depth = ceil_div(channels * taps, _PIECE) * _PIECE
    few = taps <= _MAX_TAPS and filters <= _MAX_FILTERS
    return None if few and filters * depth <= _MAX_WEIGHT_BYTES else "the weights are too many"


def persistent_conv_tactics(ctx: LoweringContext, problem: GemmProblem) -> tuple[Tactic, ...]:
    """Return a tactic for each number of programs, the best first; they share a kernel."""
    left, filters = problem.left, problem.filters
    if not isinstance(left, Im2colLoader) or filters is None:
        return ()
    packed = operand_order(filters)
    limits = sm_limits(ctx.gpu.sm)
    room = limits.shared_bytes // (packed.size + limits.reserved_bytes)
    pixels = problem.shape.rows
    blocks = ceil_div(pixels, _ROWS)
    programs = next(n for limit, n in _PROGRAMS.items() if filters.shape[0] <= limit)
    counts = [ctx.gpu.sm_count * n for n in programs if n <= room]
    if not counts:
        return ()
    if fixed(pixels):
        counts = [min(n, blocks) for n in counts]
    weights = ctx.weights.pack(packed, "int8")
    return tuple((_launch(problem, left, weights, count),) for count in dict.fromkeys(counts))


PERSISTENT_CONV = Schedule("persistent convolution", _refusal, persistent_conv_tactics)


def _launch(problem: GemmProblem, left: Im2colLoader, weights: View, count: int) -> KernelLaunch:
    filters, pitch = weights.shape
    return make_launch(
        "persistent_conv",
        (count, 1, 1),
        {
            "x": left.view,
            **problem.epilogue_operands(),
            "y": problem.y,
            "batch": left.batch,
            "weights": weights,
        },
        {
            **left.size_constants(),
            **window_constants(left.window),
            "Y_PITCH": problem.y_strides.row,
            "R_PITCH": problem.residual_strides.row,
            "EPILOGUE": problem.epilogue.ops,
            "CHANNELS": left.channels,
            "W_PITCH": pitch,
            "RUNS": _runs(pitch // _PIECE, left.channels),
            "WIDTHS": _widths(filters),
            "BLOCK_M": _ROWS,
            "WARPS": _WARPS,
        },
        writes=(problem.y,),
        warps=_WARPS,
    )


def operand_order(weights: Array) -> Array:
    """Pack int8 weights (filter, channel, row, column) for `persistent_conv`: (filter, k).

    k is counted by tap row, tap column and channel, filled up to whole pieces, and of each piece
    number 16 q + 8 s + 4 h + b is at position 32 s + 16 h + 4 q + b.
    """
    filters = weights.shape[0]
    flat = weights.transpose(0, 2, 3, 1).reshape(filters, -1)
    filled = np.pad(flat, ((0, 0), (0, -flat.shape[1] % _PIECE)))
    pieces: Array = filled.reshape(filters, -1, 4, 2, 2, 4).transpose(0, 1, 3, 4, 2, 5)
    return pieces.reshape(filters, -1)


def _runs(pieces: int, channels: int) -> tuple[tuple[int, int], ...]:
    """Return (first, count) of runs of pieces; the last may be shorter."""
    each = _PIECES_PER_RUN if channels > _FEW_CHANNELS else _PIECES_PER_RUN_FEW
    return tuple((at, min(each, pieces - at)) for at in range(0, pieces, each))


def _widths(columns: int) -> tuple[int, ...]:
    """Return blocks of columns, the widest first, that make up a multiple of 16."""
    widths: list[int] = []
    for width in _WIDTHS:
        widths += [width] * ((columns - sum(widths)) // width)
    return tuple(widths)
