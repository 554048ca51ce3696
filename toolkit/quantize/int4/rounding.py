"""Round a weight to 4 bits: every number by itself, or so that later ones make up for its error.

    w[k, n] ~ (q - zero) scale,    q in 0 ... 15, a scale and a zero point for each block of k

GPTQ (Frantar et al., 2023) goes along the depth k, with U upper triangular:

    H = 2 x^T x / rows + damping,    H^-1 = U^T U,    e[k, n] = (w[k, n] - restored) / U[k, k]
    w[j, n] -= U[k, j] e[k, n]  for all j > k

Columns do not depend on each other, so a strip of them at a time is in memory. A block's scale and
zero point are those of the weights as they are when the block is reached.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.graph.block_weights import BlockWeight

MAX_DEPTH = 6144  # of GPTQ: U took 20 s of two CPUs and 0.84 GB
DAMPING = 0.01  # of the mean of the diagonal
_STRIP = 1024  # columns
_SMALL = 256  # of a triangular matrix, which is inverted as a general one
_LAST = 15  # of the integers from 0 on

Array = NDArray[np.float32]


def round_to_nearest(weight: Array, block: int) -> BlockWeight:
    """Round a weight (depth, columns), each block between its least and largest number and 0."""
    depth, columns = weight.shape
    blocks = -(-depth // block)
    padded = np.zeros((blocks * block, columns), np.float32)
    padded[:depth] = weight
    cut = padded.reshape(blocks, block, columns)
    low, high = np.minimum(cut.min(1), 0), np.maximum(cut.max(1), 0)
    scales, zeros = _scales(low, high)
    integers = np.clip(np.rint(cut / scales[:, None]) + zeros[:, None], 0, _LAST)
    flat = integers.reshape(-1, columns)[:depth].astype(np.uint8)
    return BlockWeight(flat, scales, zeros.astype(np.uint8), block)


def _scales(low: Array, high: Array) -> tuple[Array, Array]:
    """Return scales and zero points of blocks between `low` <= 0 and `high` >= 0."""
    scales = ((high - low) / _LAST).astype(np.float32)
    scales = np.where(scales > 0, scales, np.float32(1))
    return scales, np.rint(-low / scales)


def feedback_factor(x: Array) -> NDArray[np.float64] | None:
    """Return U of operands x (rows, depth); None: they are zero or not finite, or too deep."""
    depth = x.shape[1]
    if depth > MAX_DEPTH or not np.isfinite(x).all() or not x.any():
        return None
    hessian = np.zeros((depth, depth))
    for start in range(0, len(x), _STRIP):
        rows = x[start : start + _STRIP, ::-1].astype(np.float64)
        hessian += rows.T @ rows
    hessian[np.diag_indices(depth)] += DAMPING * hessian.diagonal().mean()
    # H = R R^T with R upper triangular, by the Cholesky factor of H in reverse order: U = R^-1.
    factor: NDArray[Any] = np.linalg.cholesky(hessian)
    del hessian  # The factor is a matrix of its own.
    _invert_lower(factor)
    return factor[::-1, ::-1]


def _invert_lower(matrix: NDArray[np.float64]) -> None:
    """Invert a lower triangular matrix in its place: a sixth of the work for a general one.

    [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]]
    """
    size = len(matrix)
    if size <= _SMALL:
        matrix[:] = np.tril(np.linalg.inv(matrix))
        return
    half = size // 2
    first, last = matrix[:half, :half], matrix[half:, half:]
    _invert_lower(first)
    _invert_lower(last)
    matrix[half:, :half] = last @ (matrix[half:, :half] @ -first)


def round_with_feedback(weight: Array, upper: NDArray[np.float64], block: int) -> BlockWeight:
    """Round a weight (depth, columns) by GPTQ; `upper` is U, (depth, depth)."""
    depth, columns = weight.shape
    blocks = -(-depth // block)
    integers = np.empty((depth, columns), np.uint8)
    scales = np.empty((blocks, columns), np.float32)
    zeros = np.empty((blocks, columns), np.uint8)
    for first in range(0, columns, _STRIP):
        strip = slice(first, first + _STRIP)
        rest = weight[:, strip].astype(np.float64)
        for number, start in enumerate(range(0, depth, block)):
            part = rest[start : start + block]
            low = np.minimum(part.min(0), 0).astype(np.float32)
            scale, zero = _scales(low, np.maximum(part.max(0), 0).astype(np.float32))
            within = upper[start : start + block, start : start + block]
            errors = np.empty_like(part)
            for k in range(len(part)):
                rounded = np.clip(np.rint(part[k] / scale) + zero, 0, _LAST)
                integers[start + k, strip] = rounded
                errors[k] = (part[k] - (rounded - zero) * scale) / within[k, k]
                part[k + 1 :] -= np.outer(within[k, k + 1 :], errors[k])
            scales[number, strip], zeros[number, strip] = scale, zero
            rest[start + block :] -= upper[start : start + block, start + block :].T @ errors
    return BlockWeight(integers, scales, zeros, block)
