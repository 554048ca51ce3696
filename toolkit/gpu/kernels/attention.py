"""Fused attention with an online softmax: scores and weights are never stored.

    s[i, j] = cap(SCALE sum_d q[i, d] k[j, d]) + mask[i, j]
    cap(s)  = SOFTCAP tanh(s / SOFTCAP), or s where SOFTCAP is 0
    y[i, e] = EPILOGUE(sum_j exp(s[i, j] - m[i]) v[j, e] / sum_j exp(s[i, j] - m[i]))
    m[i] = max_j s[i, j]

Keys are read block by block. The accumulators are scaled by exp(m before - m after) whenever the
maximum grows (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). All
exponents are of 2: m is stored times log2(e). A query that sees no key gets 0.

The first FULL_KEYS keys are read in blocks of BLOCK_N without a mask, the others in one masked
block of BLOCK_TAIL: 197 keys are three blocks of 64 and one of 16. Where FULL_KEYS is 0, all blocks
are masked blocks of BLOCK_TAIL.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import evaluate

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention(
    q, k, v, mask, y,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DEPTH: tl.constexpr, VALUE_DEPTH: tl.constexpr,
    HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    Q_STRIDES: tl.constexpr, K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr,
    MASK_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BOOL_MASK: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, EPILOGUE: tl.constexpr, FULL_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    scalars=None,
):  # fmt: skip
    """Grid: (blocks of queries, batch x heads).

    Strides are those of batch, head, row and column. GROUP_SIZE heads of q share one of k and v.
    The mask is added; with BOOL_MASK it selects the keys where it is not 0. With CAUSAL query i
    sees keys 0 to i. With a mask or CAUSAL, FULL_KEYS is 0.
    """
    batch = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    q += batch * Q_STRIDES[0] + head * Q_STRIDES[1]
    k += batch * K_STRIDES[0] + head // GROUP_SIZE * K_STRIDES[1]
    v += batch * V_STRIDES[0] + head // GROUP_SIZE * V_STRIDES[1]
    y += batch * Y_STRIDES[0] + head * Y_STRIDES[1]
    query_inside = (i < QUERIES)[:, None]
    query_offset = i[:, None] * Q_STRIDES[2] + d[None, :] * Q_STRIDES[3]
    query = tl.load(q + query_offset, mask=query_inside & (d < DEPTH)[None, :], other=0.0)

    # A positive scale keeps the order of scores, so the maximum is taken before scaling.
    LATE_SCALE: tl.constexpr = SOFTCAP == 0.0 and SCALE > 0.0 and mask is None
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    # What does not change with the block of keys is computed once.
    j = tl.arange(0, BLOCK_TAIL)
    keys = k + d[:, None] * K_STRIDES[3] + (FULL_KEYS + j)[None, :] * K_STRIDES[2]
    values = v + (FULL_KEYS + j)[:, None] * V_STRIDES[2] + e[None, :] * V_STRIDES[3]
    if FULL_KEYS > 0:
        row_max, total, acc = _full_blocks_and_tail(
            query, k, v, keys, values, j, d, e, row_max, total, acc,
            FULL_KEYS, KEYS, DEPTH, VALUE_DEPTH, K_STRIDES, V_STRIDES,
            SCALE, SOFTCAP, LATE_SCALE, PRECISION, BLOCK_N,
        )  # fmt: skip
    else:
        if mask is not None:
            mask += batch * MASK_STRIDES[0] + head * MASK_STRIDES[1]
        row_max, total, acc = _masked_blocks(
            query, keys, values, mask, i, j, d, e, query_inside, row_max, total, acc,
            KEYS, DEPTH, VALUE_DEPTH, K_STRIDES, V_STRIDES, MASK_STRIDES,
            SCALE, SOFTCAP, LATE_SCALE, BOOL_MASK, CAUSAL, PRECISION, BLOCK_M, BLOCK_TAIL,
        )  # fmt: skip

    result = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    result = evaluate((result,), EPILOGUE, scalars)
    offset = i[:, None] * Y_STRIDES[2] + e[None, :] * Y_STRIDES[3]
    inside = query_inside & (e < VALUE_DEPTH)[None, :]
    tl.store(y + offset, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _full_blocks_and_tail(
    query, k, v, tail_keys, tail_values, tail_j, d, e, row_max, total, acc,
    FULL_KEYS: tl.constexpr, KEYS: tl.constexpr, DEPTH: tl.constexpr, VALUE_DEPTH: tl.constexpr,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, LATE_SCALE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the maximum, the total weight and the accumulators with all keys, without a mask."""
    if KEYS > FULL_KEYS:  # the last block is on its way while the others are computed
        tail = FULL_KEYS + tail_j < KEYS
        key = tl.load(tail_keys, mask=(d < DEPTH)[:, None] & tail[None, :], other=0.0)
        value = tl.load(tail_values, mask=tail[:, None] & (e < VALUE_DEPTH)[None, :], other=0.0)
    row_max, total, acc = _full_blocks(
        query, k, v, d, e, row_max, total, acc, FULL_KEYS, DEPTH, VALUE_DEPTH,
        K_STRIDES, V_STRIDES, SCALE, SOFTCAP, LATE_SCALE, PRECISION, BLOCK_N,
    )  # fmt: skip
    if KEYS > FULL_KEYS:
        s = _scores(query, key, SCALE, SOFTCAP, LATE_SCALE, PRECISION)
        s = tl.where(tail[None, :], s, float("-inf"))
        row_max, total, acc = _add_block(
            s, value, row_max, total, acc, SCALE, LATE_SCALE, False, PRECISION
        )
    return row_max, total, acc


@triton.jit
def _full_blocks(
    query, k, v, d, e, row_max, total, acc, FULL_KEYS: tl.constexpr,
    DEPTH: tl.constexpr, VALUE_DEPTH: tl.constexpr,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, LATE_SCALE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the maximum, the total weight and the accumulators with the first FULL_KEYS keys."""
    j = tl.arange(0, BLOCK_N)
    k += d[:, None] * K_STRIDES[3] + j[None, :] * K_STRIDES[2]
    v += j[:, None] * V_STRIDES[2] + e[None, :] * V_STRIDES[3]
    for start in range(0, FULL_KEYS, BLOCK_N):
        key = tl.load(k + start * K_STRIDES[2], mask=(d < DEPTH)[:, None], other=0.0)
        value = tl.load(v + start * V_STRIDES[2], mask=(e < VALUE_DEPTH)[None, :], other=0.0)
        s = _scores(query, key, SCALE, SOFTCAP, LATE_SCALE, PRECISION)
        row_max, total, acc = _add_block(
            s, value, row_max, total, acc, SCALE, LATE_SCALE, False, PRECISION
        )
    return row_max, total, acc


@triton.jit
def _masked_blocks(
    query, keys, values, mask, i, j, d, e, query_inside, row_max, total, acc,
    KEYS: tl.constexpr, DEPTH: tl.constexpr, VALUE_DEPTH: tl.constexpr,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, MASK_STRIDES: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, LATE_SCALE: tl.constexpr,
    BOOL_MASK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """Return what `_full_blocks` returns, with all keys; a query sees those of its mask."""
    if mask is not None:
        mask += i[:, None] * MASK_STRIDES[2] + j[None, :] * MASK_STRIDES[3]
    end = KEYS
    if CAUSAL:
        end = tl.minimum(KEYS, (tl.program_id(0) + 1) * BLOCK_M)
    for start in range(0, end, BLOCK_TAIL):
        inside = start + j < KEYS
        key = tl.load(
            keys + start * K_STRIDES[2], mask=(d < DEPTH)[:, None] & inside[None, :], other=0.0
        )
        value = tl.load(
            values + start * V_STRIDES[2],
            mask=inside[:, None] & (e < VALUE_DEPTH)[None, :], other=0.0,
        )  # fmt: skip
        s = _scores(query, key, SCALE, SOFTCAP, LATE_SCALE, PRECISION)
        visible = inside[None, :]
        if CAUSAL:
            visible = visible & ((start + j)[None, :] <= i[:, None])
        if mask is not None:
            mask_tile = tl.load(
                mask + start * MASK_STRIDES[3], mask=query_inside & inside[None, :], other=0
            )
            if BOOL_MASK:
                visible = visible & (mask_tile != 0)
            else:
                s += mask_tile.to(tl.float32) * LOG2_E
        s = tl.where(visible, s, float("-inf"))
        row_max, total, acc = _add_block(
            s, value, row_max, total, acc, SCALE, LATE_SCALE, CAUSAL or mask is not None,
            PRECISION,
        )  # fmt: skip
    return row_max, total, acc


@triton.jit
def _scores(
    query, key, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, LATE_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return cap(SCALE query key) times log2(e); unscaled with LATE_SCALE."""
    s = tl.dot(query, key, input_precision=PRECISION)
    if SOFTCAP > 0.0:  # tanh(a) = 1 - 2 / (exp(2 a) + 1)
        power = tl.exp2(s * (2.0 * LOG2_E * SCALE / SOFTCAP))
        s = (SOFTCAP * LOG2_E) * (1.0 - 2.0 / (power + 1.0))
    elif not LATE_SCALE:
        s *= SCALE * LOG2_E
    return s


@triton.jit
def _add_block(
    s, value, row_max, total, acc, SCALE: tl.constexpr, LATE_SCALE: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the maximum, the total weight and the accumulators with one more block of keys.

    With MASKED a block may mask all of its keys for a query.
    """
    if LATE_SCALE:
        new_max = tl.maximum(row_max, tl.max(s, 1) * (SCALE * LOG2_E))
    else:
        new_max = tl.maximum(row_max, tl.max(s, 1))
    shift = new_max
    if MASKED:
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    if LATE_SCALE:
        weight = tl.exp2(tl.fma(s, SCALE * LOG2_E, -shift[:, None]))
    else:
        weight = tl.exp2(s - shift[:, None])
    correction = tl.exp2(row_max - shift)
    total = total * correction + tl.sum(weight, 1)
    acc *= correction[:, None]
    acc = tl.dot(weight.to(value.dtype), value, acc, input_precision=PRECISION)
    return new_max, total, acc
