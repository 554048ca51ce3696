"""Attention of every query to all keys, without storing the weights of one to the other.

    s[i, j] = cap(SCALE sum_d q[i, d] k[j, d]) + mask[i, j],   cap(s) = CAP tanh(s / CAP) or s
    y[i, e] = STEPS(sum_j exp(s[i, j] - m[i]) v[j, e] / sum_j exp(s[i, j] - m[i]))
    m[i] = max_j s[i, j]

Keys are read block by block. The sums so far are scaled by exp(m before - m after) whenever the
maximum grows (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). All
exponents are of 2: m is kept times log2(e). A query that sees no key gets 0.

The first WHOLE keys are blocks of BLOCK_N that every query sees; the others are a block of
BLOCK_LAST, which asks which keys there are: 197 are three blocks of 64 and one of 16. Where WHOLE
is 0 all blocks are of BLOCK_LAST.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import evaluate

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention(
    q, k, v, mask, y,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DEPTH: tl.constexpr, VALUES: tl.constexpr,
    HEADS: tl.constexpr, SHARING: tl.constexpr,
    Q_STRIDES: tl.constexpr, K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr,
    MASK_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, CHOOSES: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, EPILOGUE: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_LAST: tl.constexpr,
    scalars=None,
):  # fmt: skip
    """Grid: (blocks of queries, batch x heads).

    Strides are those of batch, head, row and column. SHARING heads of q read one of k and v. A mask
    is added, or with CHOOSES lets through where it is not 0. With CAUSAL query i sees keys 0 to i.
    With either WHOLE is 0.
    """
    batch = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    q += batch * Q_STRIDES[0] + head * Q_STRIDES[1]
    k += batch * K_STRIDES[0] + head // SHARING * K_STRIDES[1]
    v += batch * V_STRIDES[0] + head // SHARING * V_STRIDES[1]
    y += batch * Y_STRIDES[0] + head * Y_STRIDES[1]
    some = (i < QUERIES)[:, None]
    query_place = i[:, None] * Q_STRIDES[2] + d[None, :] * Q_STRIDES[3]
    query = tl.load(q + query_place, mask=some & (d < DEPTH)[None, :], other=0.0)

    # The largest score is the one with the largest sum: the sums alone are compared.
    PLAIN: tl.constexpr = CAP == 0.0 and SCALE > 0.0 and mask is None
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    # What does not change with the block of keys is computed once.
    j = tl.arange(0, BLOCK_LAST)
    keys = k + d[:, None] * K_STRIDES[3] + (WHOLE + j)[None, :] * K_STRIDES[2]
    values = v + (WHOLE + j)[:, None] * V_STRIDES[2] + e[None, :] * V_STRIDES[3]
    if WHOLE > 0:
        if KEYS > WHOLE:  # the last block is on its way while the others are computed
            left = WHOLE + j < KEYS
            key = tl.load(keys, mask=(d < DEPTH)[:, None] & left[None, :], other=0.0)
            value = tl.load(values, mask=left[:, None] & (e < VALUES)[None, :], other=0.0)
        most, total, sums = _whole_blocks(
            query, k, v, d, e, most, total, sums, WHOLE, DEPTH, VALUES, K_STRIDES, V_STRIDES,
            SCALE, CAP, PLAIN, PRECISION, BLOCK_N,
        )  # fmt: skip
        if KEYS > WHOLE:
            s = _scores(query, key, SCALE, CAP, PLAIN, PRECISION)
            s = tl.where(left[None, :], s, float("-inf"))
            most, total, sums = _add_block(
                s, value, most, total, sums, SCALE, PLAIN, False, PRECISION
            )
    else:
        if mask is not None:
            mask += batch * MASK_STRIDES[0] + head * MASK_STRIDES[1]
            mask += i[:, None] * MASK_STRIDES[2] + j[None, :] * MASK_STRIDES[3]
        end = KEYS
        if CAUSAL:
            end = tl.minimum(KEYS, (tl.program_id(0) + 1) * BLOCK_M)
        for start in range(0, end, BLOCK_LAST):
            here = start + j < KEYS
            key = tl.load(
                keys + start * K_STRIDES[2], mask=(d < DEPTH)[:, None] & here[None, :], other=0.0
            )
            value = tl.load(
                values + start * V_STRIDES[2], mask=here[:, None] & (e < VALUES)[None, :], other=0.0
            )
            s = _scores(query, key, SCALE, CAP, PLAIN, PRECISION)
            seen = here[None, :]
            if CAUSAL:
                seen = seen & ((start + j)[None, :] <= i[:, None])
            if mask is not None:
                given = tl.load(mask + start * MASK_STRIDES[3], mask=some & here[None, :], other=0)
                if CHOOSES:
                    seen = seen & (given != 0)
                else:
                    s += given.to(tl.float32) * LOG2_E
            s = tl.where(seen, s, float("-inf"))
            most, total, sums = _add_block(
                s, value, most, total, sums, SCALE, PLAIN, CAUSAL or mask is not None, PRECISION
            )

    result = sums * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    result = evaluate((result,), EPILOGUE, scalars)
    place = i[:, None] * Y_STRIDES[2] + e[None, :] * Y_STRIDES[3]
    tl.store(y + place, result.to(y.dtype.element_ty), mask=some & (e < VALUES)[None, :])


@triton.jit
def _whole_blocks(
    query, k, v, d, e, most, total, sums, WHOLE: tl.constexpr,
    DEPTH: tl.constexpr, VALUES: tl.constexpr, K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, PLAIN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the maximum, the total weight and the sums with the first WHOLE keys."""
    j = tl.arange(0, BLOCK_N)
    k += d[:, None] * K_STRIDES[3] + j[None, :] * K_STRIDES[2]
    v += j[:, None] * V_STRIDES[2] + e[None, :] * V_STRIDES[3]
    for start in range(0, WHOLE, BLOCK_N):
        key = tl.load(k + start * K_STRIDES[2], mask=(d < DEPTH)[:, None], other=0.0)
        value = tl.load(v + start * V_STRIDES[2], mask=(e < VALUES)[None, :], other=0.0)
        s = _scores(query, key, SCALE, CAP, PLAIN, PRECISION)
        most, total, sums = _add_block(s, value, most, total, sums, SCALE, PLAIN, False, PRECISION)
    return most, total, sums


@triton.jit
def _scores(
    query, key, SCALE: tl.constexpr, CAP: tl.constexpr, PLAIN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return cap(SCALE query key) times log2(e); if PLAIN the products alone."""
    s = tl.dot(query, key, input_precision=PRECISION)
    if CAP > 0.0:  # tanh(a) = 1 - 2 / (exp(2 a) + 1)
        power = tl.exp2(s * (2.0 * LOG2_E * SCALE / CAP))
        s = (CAP * LOG2_E) * (1.0 - 2.0 / (power + 1.0))
    elif not PLAIN:
        s *= SCALE * LOG2_E
    return s


@triton.jit
def _add_block(
    s, value, most, total, sums, SCALE: tl.constexpr, PLAIN: tl.constexpr, HIDES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the maximum, the total weight and the sums with one more block of keys.

    With HIDES a block may show a query none of its keys.
    """
    if PLAIN:
        grown = tl.maximum(most, tl.max(s, 1) * (SCALE * LOG2_E))
    else:
        grown = tl.maximum(most, tl.max(s, 1))
    shift = grown
    if HIDES:
        shift = tl.where(grown == float("-inf"), 0.0, grown)
    if PLAIN:
        weight = tl.exp2(tl.fma(s, SCALE * LOG2_E, -shift[:, None]))
    else:
        weight = tl.exp2(s - shift[:, None])
    before = tl.exp2(most - shift)
    total = total * before + tl.sum(weight, 1)
    sums = tl.dot(weight.to(value.dtype), value, sums * before[:, None], input_precision=PRECISION)
    return grown, total, sums
