"""Products of FP16 and weights of 4 bits, which share a scale and a zero point in groups of k.

    y[i, m, n] = EPILOGUE((sum_k a[i, m, k] (q[k, n] - zero[k // GROUP, n]) s[k // GROUP, n]
                           + bias[n]) scale[n], residual[i, m, n])

A column of weights is a row of 16-bit words with four numbers each. Word j holds, from the low bits
on, the numbers of

    k = 64 (j // 16) + j % 16 + (0, 16, 32, 48)

so that a tile of words becomes four tiles of weights, each multiplied with a tile of a whose k lie
in runs of 16. Numbers become floats without conversions: 0x6400 + q is 1024 + q in FP16, and
0x4B000000 + q is 2**23 + q in FP32. Words and groups are padded with zeros.
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
    R_STRIDES: tl.constexpr, EPILOGUE: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows x blocks of columns, products, SPLIT_K); strides as in `gemm`.

    The transposed product is computed: tensor cores take their left operand, the weights, from
    registers, and few rows of a are few columns of theirs. BLOCK_K: of one group, or 64.
    """
    COLUMN_BLOCKS: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    STEPS: tl.constexpr = ((DEPTH + BLOCK_K - 1) // BLOCK_K + SPLIT_K - 1) // SPLIT_K
    tile = tl.program_id(0)
    group = tl.program_id(1) // INNER
    inner = tl.program_id(1) % INNER
    part = tl.program_id(2)
    m = tile // COLUMN_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile % COLUMN_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.arange(0, BLOCK_K // 4)
    k = word // 16 * 64 + word % 16
    a += group * A_STRIDES[0] + inner * A_STRIDES[1]
    a = a + m[None, :] * A_STRIDES[2] + k[:, None] * A_STRIDES[3]
    b = b + n[:, None] * B_PITCH + word[None, :]
    if residual is not None:
        residual += group * R_STRIDES[0] + inner * R_STRIDES[1]
    residual = load_residual(residual, m, n, rows, COLUMNS, R_STRIDES[2])
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    begin = part * STEPS * BLOCK_K
    end = tl.minimum(begin + STEPS * BLOCK_K, DEPTH) if SPLIT_K > 1 else DEPTH
    for start in range(begin, end, BLOCK_K):
        words = tl.load(b + start // 4, mask=(n < COLUMNS)[:, None], other=0)
        numbers = _numbers(words)
        for i in tl.static_range(4):
            if i * 16 % GROUP == 0:
                at = (start + i * 16) // GROUP * COLUMNS + n
                factor = tl.load(scales + at, mask=n < COLUMNS, other=0).to(tl.float16)
                if zeros is not None:
                    zero = tl.load(zeros + at, mask=n < COLUMNS, other=0).to(tl.float16)
                else:
                    zero = tl.full((BLOCK_N,), 8, tl.float16)
                zero += 1024
            weights = _scaled(numbers[i], zero[:, None], factor[:, None])
            inside = (m < rows)[None, :]
            if DEPTH % BLOCK_K != 0:
                inside = inside & (start + i * 16 + k < DEPTH)[:, None]
            a_tile = tl.load(a + (start + i * 16) * A_STRIDES[3], mask=inside, other=0)
            total = tl.dot(weights, a_tile, total)
    y += group * Y_STRIDES[0] + inner * Y_STRIDES[1]
    if SPLIT_K > 1:
        y += part * rows * Y_STRIDES[2]
    store_with_epilogue(
        tl.trans(total), bias, scale, residual, y, m, n, rows, COLUMNS, Y_STRIDES[2], EPILOGUE,
        scalars,
    )  # fmt: skip


@triton.jit
def _numbers(words):
    """Return 1024 + q of the four numbers of each word, FP16; two words at once."""
    if INTERPRETED:
        result = ()
        for i in tl.static_range(4):
            result = result + (((words >> (4 * i)) & 0xF).to(tl.float16) + 1024,)
    else:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA;
            shr.b32 t, $4, 4;
            lop3.b32 $1, t, 0x000F000F, 0x64006400, 0xEA;
            shr.b32 t, $4, 8;
            lop3.b32 $2, t, 0x000F000F, 0x64006400, 0xEA;
            shr.b32 t, $4, 12;
            lop3.b32 $3, t, 0x000F000F, 0x64006400, 0xEA;
            }""",
            "=r,=r,=r,=r,r", [words], (tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    return result


@triton.jit
def _scaled(numbers, zero, factor):
    """Return (numbers - zero) factor, the difference exact; two at once."""
    if INTERPRETED:
        result = (numbers - zero) * factor
    else:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            sub.rn.f16x2 t, $1, $2;
            mul.rn.f16x2 $0, t, $3;
            }""",
            "=r,r,r,r", [numbers, zero, factor], tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return result


@triton.jit
def _number_in_place(words, MASK: tl.constexpr):
    """Return the bits of MASK as FP32, without a shift."""
    if INTERPRETED:
        bits = (words & MASK) | 0x4B000000
    else:
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [words, MASK, 0x4B000000], tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    return bits.to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def int4_matrix_vector(
    a, b, scales, zeros, bias, scale, scalars, residual, y,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    A_PITCH: tl.constexpr, B_PITCH: tl.constexpr, Y_PITCH: tl.constexpr, R_PITCH: tl.constexpr,
    EPILOGUE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The product of a few rows: threads multiply in FP32, and b is read once.

    Grid: (blocks of columns). A number is left where it lies in its word, which makes it 16, 256 or
    4096 times as large; a is divided by that. Sums of 8 words, which are in one group, are scaled;
    the zero point is multiplied with the sum of a.
    """
    SHARED: tl.constexpr = 4 if GROUP >= 64 else GROUP // 16  # numbers of a word in one group
    SUMS: tl.constexpr = BLOCK_K // 32  # of 8 words each
    WHOLE: tl.constexpr = B_PITCH * 4 % BLOCK_K == 0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.arange(0, BLOCK_K // 4)
    k = word // 16 * 64 + word % 16
    span = tl.arange(0, SUMS) // 2 * 64
    b = b + n[:, None] * B_PITCH + word[None, :]
    totals = ()
    for _ in tl.static_range(ROWS):
        totals = totals + (tl.zeros((BLOCK_N, SUMS), tl.float32),)
    for start in tl.static_range(0, DEPTH, BLOCK_K):
        exists = (n < COLUMNS)[:, None]
        has_scale = (n < COLUMNS)[:, None]
        if not WHOLE:
            exists = exists & (start // 4 + word < B_PITCH)[None, :]
            has_scale = has_scale & (start + span < B_PITCH * 4)[None, :]
        words = tl.load(b + start // 4, mask=exists, other=0).to(tl.int32)
        for first in tl.static_range(0, 4, SHARED):
            at = (start + first * 16 + span)[None, :] // GROUP * COLUMNS + n[:, None]
            factor = tl.load(scales + at, mask=has_scale, other=0)
            zero = 8.0
            if zeros is not None:
                zero = tl.load(zeros + at, mask=has_scale, other=0)
            for m in tl.static_range(ROWS):
                product = tl.zeros((BLOCK_N, BLOCK_K // 4), tl.float32)
                x_sum = tl.zeros((BLOCK_K // 4,), tl.float32)
                for i in tl.static_range(first, first + SHARED):
                    at_k = start + i * 16 + k
                    x = tl.load(a + m * A_PITCH + at_k, mask=at_k < DEPTH, other=0).to(tl.float32)
                    x_sum += x
                    number = _number_in_place(words, 0xF << (4 * i))
                    product += number * (x * (1.0 / (1 << (4 * i))))[None, :]
                product = tl.sum(tl.reshape(product, (BLOCK_N, SUMS, 8)), 2)
                x_sum = tl.sum(tl.reshape(x_sum, (SUMS, 8)), 1)
                product = (product - zero * x_sum[None, :]) * factor
                totals = _with(totals, m, totals[m] + product, ROWS)
    for m in tl.static_range(ROWS):
        row = m + tl.arange(0, 1)
        tile = load_residual(residual, row, n, ROWS, COLUMNS, R_PITCH)
        store_with_epilogue(
            tl.sum(totals[m], 1)[None, :], bias, scale, tile, y, row, n, ROWS, COLUMNS, Y_PITCH,
            EPILOGUE, scalars,
        )  # fmt: skip


@triton.jit
def _with(values, INDEX: tl.constexpr, value, COUNT: tl.constexpr):
    """Return a tuple with another value at INDEX."""
    result = ()
    for i in tl.static_range(COUNT):
        result = result + ((value,) if i == INDEX else (values[i],))
    return result
