"""Persistent weight-stationary INT8 convolution (implicit GEMM) with few channels.

    y[p, f] = EPILOGUE((sum_k a[p, k] w[f, k] + bias[f]) scale[f], residual[p, f])

k runs over (tap row, tap column, channel), and a[p, k] is the input under that tap, 0 outside the
image. With few filters tensor cores read shared memory as fast as they multiply, and copies into it
take as long again. So a program keeps the weights of its filters in shared memory and loads blocks
of pixels straight into registers, in the A operand layout of sm_90. There thread l of a warp has,
of each 32 of k, four at 4 (l % 4) and four 16 behind them, but it loads 16 adjacent bytes. Both
agree if k is permuted:

    position 32 s + 16 h + 4 q + b of each 64 of k holds number 16 q + 8 s + 4 h + b

`kernels.mma_layout` permutes rows and columns likewise. Results on other GPUs are the same.

Weights are [filter, k] with k in that order, padded with zeros to a multiple of 64.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import first_sums
from toolkit.gpu.sm90.kernels.mma_layout import (
    in_operand_order,
    in_registers,
    load_mma_residual,
    mma_columns,
    store_mma,
)


@triton.jit
def persistent_conv(
    x, weights, bias, scale, scalars, residual, y, batch,
    SIZE: tl.constexpr, OUT: tl.constexpr, CHANNELS: tl.constexpr, X_PITCH: tl.constexpr,
    W_PITCH: tl.constexpr, Y_PITCH: tl.constexpr, R_PITCH: tl.constexpr,
    TAPS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr,
    EPILOGUE: tl.constexpr, RUNS: tl.constexpr, WIDTHS: tl.constexpr,
    BLOCK_M: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Grid: (programs). CHANNELS is a multiple of 16, TAPS[0] * TAPS[1] less than 32.

    Filters are multiplied in blocks of WIDTHS columns. Each of RUNS is (first, count) of one or
    two pieces, 64 of k each; the next run is loaded while the product of one is computed.
    """
    weight_blocks = ()
    sums = ()
    for i in tl.static_range(len(WIDTHS)):
        f = _before(WIDTHS, i) + mma_columns(WIDTHS[i])
        for run in tl.static_range(len(RUNS)):
            k = RUNS[run][0] * 64 + tl.arange(0, RUNS[run][1] * 64)
            weight_blocks = weight_blocks + (tl.load(weights + f[None, :] * W_PITCH + k[:, None]),)
        sums = sums + (first_sums(bias, f, None, BLOCK_M, WIDTHS[i]),)

    pixels = batch * OUT[0] * OUT[1]
    blocks = (pixels + BLOCK_M - 1) // BLOCK_M
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        p = block * BLOCK_M + tl.arange(0, BLOCK_M)
        image = p // (OUT[0] * OUT[1])
        top = p // OUT[1] % OUT[0] * STRIDE[0] - PAD[0]
        left = p % OUT[1] * STRIDE[1] - PAD[1]
        corner = ((image * SIZE[0] + top) * SIZE[1] + left) * X_PITCH
        top = tl.where(p < pixels, top, -(2**24))  # rows past the last pixel read nothing
        tap_mask = tl.zeros((BLOCK_M,), tl.int32)  # a bit for each tap inside the image
        for i in tl.static_range(TAPS[0] * TAPS[1]):
            h = top + i // TAPS[1] * DILATION[0]
            w = left + i % TAPS[1] * DILATION[1]
            tap_mask |= ((h >= 0) & (h < SIZE[0]) & (w >= 0) & (w < SIZE[1])).to(tl.int32) << i
        residuals = ()
        if residual is not None:
            for i in tl.static_range(len(WIDTHS)):
                column = _before(WIDTHS, i)
                residuals += (
                    load_mma_residual(residual, p, column, pixels, None, R_PITCH, WIDTHS[i]),
                )

        totals = sums
        for run in tl.static_range(len(RUNS)):
            pieces = ()
            for i in tl.static_range(RUNS[run][1]):
                piece = _piece(
                    x, corner, tap_mask, (RUNS[run][0] + i) * 64, CHANNELS, X_PITCH, SIZE[1],
                    TAPS[1], DILATION[0], DILATION[1],
                )  # fmt: skip
                pieces = pieces + (in_operand_order(in_registers(piece), BLOCK_M, WARPS),)
            a_tile = _beside(pieces, BLOCK_M)
            partial_sums = ()
            for i in tl.static_range(len(WIDTHS)):
                b_tile = weight_blocks[i * len(RUNS) + run]
                partial_sums = partial_sums + (
                    tl.dot(a_tile, b_tile, totals[i], out_dtype=tl.int32),
                )
            totals = partial_sums
        for i in tl.static_range(len(WIDTHS)):
            residual_tile = None
            if residual is not None:
                residual_tile = residuals[i]
            store_mma(
                totals[i], scale, residual_tile, y, p, _before(WIDTHS, i), pixels, None, Y_PITCH,
                EPILOGUE, scalars, BLOCK_M, WIDTHS[i], WARPS,
            )  # fmt: skip


@triton.jit
def _piece(
    x, corner, tap_mask, first: tl.constexpr, CHANNELS: tl.constexpr, X_PITCH: tl.constexpr, WIDTH,
    TAP_COLUMNS: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
):  # fmt: skip
    """Return a[p, first..first + 63]; 16 side by side lie under one tap."""
    k = first + tl.arange(0, 64)
    tap = first // CHANNELS if CHANNELS % 64 == 0 else tl.max_constancy(k // CHANNELS, [16])
    inside = (tap_mask[:, None] >> (tap if CHANNELS % 64 == 0 else tap[None, :]) & 1) != 0
    row, column = tap // TAP_COLUMNS * DILATION_H, tap % TAP_COLUMNS * DILATION_W
    at = (row * WIDTH + column) * X_PITCH + k % CHANNELS
    at = tl.max_contiguous(tl.multiple_of(at, [16]), [16])
    return tl.load(x + corner[:, None] + at[None, :], mask=inside, other=0)


@triton.jit
def _beside(pieces, BLOCK_M: tl.constexpr):
    """Return one piece, or two as one block."""
    if len(pieces) == 1:
        block = pieces[0]
    else:
        block = tl.join(pieces[0], pieces[1]).permute(0, 2, 1).reshape(BLOCK_M, 128)
    return block


@triton.constexpr_function
def _before(widths, at):
    """How many columns the first `at` blocks have."""
    return sum(widths[:at])
