"""Products of FP16 and weights of 4 bits, which share a scale and a zero point in groups of k.

    y[i, m, n] = EPILOGUE((sum_k a[i, m, k] (q[k, n] - zero[k // GROUP, n]) s[k // GROUP, n]
                           + bias[n]) scale[n], residual[i, m, n])

A column of weights is a row of 16-bit words with four numbers each. Word j holds, from the low bits
on, the numbers of

    k = 64 (j // 16) + j % 16 + (0, 16, 32, 48)

so that a tile of words becomes four tiles of weights, each multiplied with a tile of a whose k lie
in runs of 16. Numbers become floats without conversions: 0x6400 + q is 1024 + q in FP16. Words
and groups are padded with zeros.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import load_residual, store_with_epilogue
from toolkit.gpu.kernels.int8 import INTERPRETED


@triton.jit
def int4_gemm(
    a, b, scales, zeros, bias, scale, scalars, residual, y, rows,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
    A_STRIDES: tl.constexpr, B_PITCH: tl.constexpr, Y_STRIDES: tl.constexpr,
    R_STRIDES: tl.constexpr, EPILOGUE: tl.constexpr, SPLIT_K: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows x blocks of columns, products, SPLIT_K); strides as in `gemm`.

    The transposed product is computed: tensor cores take their left operand, the weights, from
    registers, and few rows of a are few columns of theirs. BLOCK_K: of one group, or 64.

    Products of few rows take PARTS of the depth side by side, so that warps share it: the left
    operand has a row for each part of each column, the right one a column for each part of each row
    of a, and the sums where both are of one part are added. Few sums are scaled in place of the
    weights, in FP32.
    """
    COLUMN_BLOCKS: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    STEPS: tl.constexpr = (DEPTH + BLOCK_K * PARTS * SPLIT_K - 1) // (BLOCK_K * PARTS * SPLIT_K)
    LENGTH: tl.constexpr = STEPS * BLOCK_K  # of a part
    WHOLE: tl.constexpr = LENGTH * PARTS == DEPTH or (PARTS == 1 and DEPTH % BLOCK_K == 0)
    SCALED_SUMS: tl.constexpr = BLOCK_M * PARTS <= 16
    tile = tl.program_id(0)
    group = tl.program_id(1) // INNER
    inner = tl.program_id(1) % INNER
    first = tl.program_id(2) * PARTS * LENGTH
    row = tl.arange(0, PARTS * BLOCK_N)
    right = tl.arange(0, BLOCK_M * PARTS)
    n = tile % COLUMN_BLOCKS * BLOCK_N + row % BLOCK_N
    m = tile // COLUMN_BLOCKS * BLOCK_M + right // PARTS
    left_first = first + row // BLOCK_N * LENGTH
    right_first = first + right % PARTS * LENGTH
    word = tl.arange(0, BLOCK_K // 4)
    k = word // 16 * 64 + word % 16
    a += group * A_STRIDES[0] + inner * A_STRIDES[1]
    a = a + m[None, :] * A_STRIDES[2] + (right_first[None, :] + k[:, None]) * A_STRIDES[3]
    b = b + n[:, None] * B_PITCH + (left_first // 4)[:, None] + word[None, :]
    total = tl.zeros((PARTS * BLOCK_N, BLOCK_M * PARTS), tl.float32)
    end = tl.minimum(LENGTH, DEPTH - first) if SPLIT_K > 1 else LENGTH
    for start in range(0, end, BLOCK_K):
        exists = n < COLUMNS
        if not WHOLE:
            exists = exists & (left_first + start < B_PITCH * 4)
        words = tl.load(b + start // 4, mask=exists[:, None], other=0)
        numbers = _numbers(words)
        sums = tl.zeros((PARTS * BLOCK_N, BLOCK_M * PARTS), tl.float32)
        factor = tl.zeros((PARTS * BLOCK_N,), tl.float32)
        for i in tl.static_range(4):
            if i * 16 % GROUP == 0:
                if SCALED_SUMS and i > 0:
                    total += sums * factor[:, None]
                    sums = tl.zeros((PARTS * BLOCK_N, BLOCK_M * PARTS), tl.float32)
                at = (left_first + start + i * 16) // GROUP * COLUMNS + n
                factor = tl.load(scales + at, mask=exists, other=0)
                if zeros is not None:
                    zero = tl.load(zeros + at, mask=exists, other=0).to(tl.float16)
                else:
                    zero = tl.full((PARTS * BLOCK_N,), 8, tl.float16)
            inside = (m < rows)[None, :]
            if not WHOLE:
                inside = inside & (right_first[None, :] + (start + i * 16) + k[:, None] < DEPTH)
            a_tile = tl.load(a + (start + i * 16) * A_STRIDES[3], mask=inside, other=0)
            weights = _without_zero(numbers[i], zero[:, None], 16 if i % 2 else 1)
            if SCALED_SUMS:
                sums = tl.dot(weights, a_tile, sums)
            else:
                weights = _scaled(weights, factor.to(tl.float16)[:, None])
                total = tl.dot(weights, a_tile, total)
        if SCALED_SUMS:
            total += sums * factor[:, None]
    n = tile % COLUMN_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile // COLUMN_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    if PARTS > 1:
        total = tl.where((row // BLOCK_N)[:, None] == (right % PARTS)[None, :], total, 0)
        total = tl.sum(tl.reshape(total, (PARTS * BLOCK_N, BLOCK_M, PARTS)), 2)
        total = tl.sum(tl.reshape(total, (PARTS, BLOCK_N, BLOCK_M)), 0)
    if residual is not None:
        residual += group * R_STRIDES[0] + inner * R_STRIDES[1]
    residual = load_residual(residual, m, n, rows, COLUMNS, R_STRIDES[2])
    y += group * Y_STRIDES[0] + inner * Y_STRIDES[1]
    if SPLIT_K > 1:
        y += tl.program_id(2) * rows * Y_STRIDES[2]
    store_with_epilogue(
        tl.trans(total), bias, scale, residual, y, m, n, rows, COLUMNS, Y_STRIDES[2], EPILOGUE,
        scalars,
    )  # fmt: skip


@triton.jit
def _numbers(words):
    """Return 1024 + q, 1024 + 16 q, 1024 + q, 1024 + 16 q of each word, FP16; two words at once."""
    if INTERPRETED:
        result = ()
        for i in tl.static_range(4):
            q = ((words >> (4 * i)) & 0xF).to(tl.float16)
            result = result + (q * (16 if i % 2 else 1) + 1024,)
    else:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            shr.b32 t, $4, 8;
            lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 $1, $4, 0x00F000F0, 0x64006400, 0xEA;
            lop3.b32 $2, t, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 $3, t, 0x00F000F0, 0x64006400, 0xEA;
            }""",
            "=&r,=&r,=&r,=&r,r", [words], (tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    return result


@triton.jit
def _without_zero(numbers, zero, TIMES: tl.constexpr):
    """Return q - zero of 1024 + TIMES q, FP16, exact; two at once."""
    FACTOR: tl.constexpr = 1 / TIMES
    offset = -1024 / TIMES - zero
    if INTERPRETED:
        result = numbers * FACTOR + offset
    else:
        factor = tl.full(numbers.shape, FACTOR, tl.float16)
        result = tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [numbers, factor, offset], tl.float16,
            is_pure=True, pack=2,
        )  # fmt: skip
    return result


@triton.jit
def _scaled(numbers, factor):
    """Return numbers factor of FP16, two at once."""
    if INTERPRETED:
        result = numbers * factor
    else:
        result = tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [numbers, factor], tl.float16, is_pure=True,
            pack=2,
        )  # fmt: skip
    return result
