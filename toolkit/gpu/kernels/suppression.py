"""Boxes that overlap no better one (ONNX, operator NonMaxSuppression), padded to a fixed number.

    candidates   boxes with a score above THRESHOLD; with any that is a number if it is None
    order        by score, the larger first; equal scores by the place of the box
    kept         a candidate unless IoU(it, one kept before it) > IOU, in this order, at most MOST
    IoU(a, b)  = area(a and b) / (area(a) + area(b) - area(a and b)); 0 where an area is 0

A row is a class of an image. Its candidates are counted and packed in segments, so that their order
costs as many comparisons as there are pairs of candidates, however many boxes there are.
"""

import triton
import triton.language as tl


@triton.jit
def box_candidates(
    scores, values, places, counts,
    BOXES: tl.constexpr, CLASSES: tl.constexpr, STRIDES: tl.constexpr, THRESHOLD: tl.constexpr,
    SEGMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (segments of BLOCK boxes, rows). Pack the scores and places of a segment's candidates.

    `values` and `places` are (rows, SEGMENTS, BLOCK), `counts` (rows, SEGMENTS).
    """
    segment, row = tl.program_id(0), tl.program_id(1)
    box = segment * BLOCK + tl.arange(0, BLOCK)
    first = scores + row // CLASSES * STRIDES[0] + row % CLASSES * STRIDES[1]
    score = tl.load(first + box * STRIDES[2], mask=box < BOXES, other=0.0).to(tl.float32)
    chosen = box < BOXES
    if THRESHOLD is None:
        chosen = chosen & (score == score)  # NaN has no place in an order
    else:
        chosen = chosen & (score > THRESHOLD)
    count = chosen.to(tl.int32)
    target = (row * SEGMENTS + segment) * BLOCK + tl.cumsum(count, 0) - 1
    tl.store(values + target, score, mask=chosen)
    tl.store(places + target, box, mask=chosen)
    tl.store(counts + row * SEGMENTS + segment, tl.sum(count, 0))


@triton.jit
def box_order(
    values, places, counts, order,
    SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of packed candidates, rows). `order`: (rows, SEGMENTS * SEGMENT) places."""
    row = tl.program_id(1)
    slot = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    segment = tl.program_id(0) * BLOCK_I // SEGMENT
    count = tl.load(counts + row * SEGMENTS + segment)
    mine = slot - segment * SEGMENT < count
    values += row * SEGMENTS * SEGMENT
    value = tl.load(values + slot, mask=mine, other=0.0)[:, None]
    rank = tl.zeros((BLOCK_I,), tl.int32)
    is_empty = tl.program_id(0) * BLOCK_I - segment * SEGMENT >= count
    for peer_segment in range(tl.where(is_empty, 0, SEGMENTS)):
        others = tl.load(counts + row * SEGMENTS + peer_segment)
        for start in range(0, others, BLOCK_J):
            inside = start + tl.arange(0, BLOCK_J)
            peer_slot = peer_segment * SEGMENT + inside
            peer = tl.load(values + peer_slot, mask=inside < others, other=0.0)[None, :]
            precedes = (peer > value) | ((peer == value) & (peer_slot[None, :] < slot[:, None]))
            rank += tl.sum((precedes & (inside < others)[None, :]).to(tl.int32), 1)
    place = tl.load(places + row * SEGMENTS * SEGMENT + slot, mask=mine, other=0)
    tl.store(order + row * SEGMENTS * SEGMENT + rank, place, mask=mine)


@triton.jit
def _overlap(left, top, right, bottom, left2, top2, right2, bottom2, IOU: tl.constexpr):
    """Return which pairs overlap by more than IOU."""
    width = tl.minimum(right, right2) - tl.maximum(left, left2)
    height = tl.minimum(bottom, bottom2) - tl.maximum(top, top2)
    common = width * height
    area = (right - left) * (bottom - top)
    area2 = (right2 - left2) * (bottom2 - top2)
    both = area + area2 - common
    apart = (width <= 0.0) | (height <= 0.0) | (area <= 0.0) | (area2 <= 0.0) | (both <= 0.0)
    return (apart == 0) & (tl.div_rn(common, tl.where(both <= 0.0, 1.0, both)) > IOU)


@triton.jit
def _corners(box, STRIDE: tl.constexpr, CENTERED: tl.constexpr):
    """Return left, top, right and bottom of boxes of two corners, or of centre and size."""
    a = tl.load(box).to(tl.float32)
    b = tl.load(box + STRIDE).to(tl.float32)
    c = tl.load(box + 2 * STRIDE).to(tl.float32)
    d = tl.load(box + 3 * STRIDE).to(tl.float32)
    if CENTERED:
        left, right = a - c / 2, a + c / 2
        top, bottom = b - d / 2, b + d / 2
    else:
        left, right = tl.minimum(b, d), tl.maximum(b, d)
        top, bottom = tl.minimum(a, c), tl.maximum(a, c)
    return left, top, right, bottom


@triton.jit
def _greedy(alive, overlap, rounds):
    """Return which candidates stay (INT32): alive, and overlapping none that stays before.

    A step that takes the last one's result for those before is repeated until nothing changes;
    none for `rounds` 0.
    """
    stays = alive.to(tl.int32)
    changed = rounds
    while changed > 0:
        hit = tl.max(overlap * stays[None, :], 1)
        now = (alive & (hit == 0)).to(tl.int32)
        changed = tl.sum((now != stays).to(tl.int32), 0)
        stays = now
    return stays


@triton.jit
def suppress(
    boxes, counts, order, kept, chosen, chosen_counts,
    CLASSES: tl.constexpr, STRIDES: tl.constexpr, CENTERED: tl.constexpr, IOU: tl.constexpr,
    MOST: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENTS_BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr, BLOCK: tl.constexpr, KEPT_BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows). Keep candidates in their order, BLOCK at a time.

    `kept`: corners (rows, 4, MOST) of what is kept; `chosen`: their places (rows, MOST), as many as
    `chosen_counts` says.
    """
    row = tl.program_id(0)
    segment = tl.arange(0, SEGMENTS_BLOCK)
    packed = tl.load(counts + row * SEGMENTS + segment, mask=segment < SEGMENTS, other=0)
    total = tl.sum(packed, 0)
    boxes += row // CLASSES * STRIDES[0]
    kept += row * 4 * MOST
    number = total * 0
    start = total * 0
    while (start < total) & (number < MOST):
        slot = start + tl.arange(0, BLOCK)
        place = tl.load(order + row * SEGMENTS * SEGMENT + slot, mask=slot < total, other=0)
        box = boxes + place * STRIDES[1]
        left, top, right, bottom = _corners(box, STRIDES[2], CENTERED)
        x1, y1, x2, y2 = left[:, None], top[:, None], right[:, None], bottom[:, None]

        alive = slot < total
        for first in range(0, number, KEPT_BLOCK):
            at = first + tl.arange(0, KEPT_BLOCK)
            before = at < number
            overlap = _overlap(
                x1, y1, x2, y2,
                tl.load(kept + at, mask=before, other=0.0)[None, :],
                tl.load(kept + MOST + at, mask=before, other=0.0)[None, :],
                tl.load(kept + 2 * MOST + at, mask=before, other=0.0)[None, :],
                tl.load(kept + 3 * MOST + at, mask=before, other=0.0)[None, :],
                IOU,
            )  # fmt: skip
            alive = alive & (tl.max(overlap.to(tl.int32), 1) == 0)
        overlap = _overlap(
            x1, y1, x2, y2,
            left[None, :], top[None, :], right[None, :], bottom[None, :],
            IOU,
        )  # fmt: skip
        overlap = (overlap & (slot[None, :] < slot[:, None])).to(tl.int32)
        stays = _greedy(alive, overlap, total)

        target = number + tl.cumsum(stays, 0) - 1
        written = (stays != 0) & (target < MOST)
        tl.store(kept + target, left, mask=written)
        tl.store(kept + MOST + target, top, mask=written)
        tl.store(kept + 2 * MOST + target, right, mask=written)
        tl.store(kept + 3 * MOST + target, bottom, mask=written)
        tl.store(chosen + row * MOST + target, place, mask=written)
        number = tl.minimum(number + tl.sum(stays, 0), MOST)
        start += BLOCK
        tl.debug_barrier()  # what is kept is read by other threads in the next round
    tl.store(chosen_counts + row, number)


@triton.jit
def box_rows(
    chosen, chosen_counts, y, count,
    ROWS: tl.constexpr, ROWS_BLOCK: tl.constexpr, CLASSES: tl.constexpr, MOST: tl.constexpr,
    BOUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of results). y: (BOUND, 3) of image, class, box; the last one is repeated.

    Rows of zeros where nothing was kept. `count`: how many there are.
    """
    row = tl.arange(0, ROWS_BLOCK)
    counts = tl.load(chosen_counts + row, mask=row < ROWS, other=0)
    total = tl.sum(counts, 0)
    ends = tl.cumsum(counts, 0)
    result = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.maximum(tl.minimum(result, total - 1), 0)
    ended = (ends[None, :] <= at[:, None]) & (row < ROWS)[None, :]
    mine = tl.minimum(tl.sum(ended.to(tl.int32), 1), ROWS - 1)
    begin = tl.sum(tl.where(ended, counts[None, :], 0), 1)
    mask = result < BOUND
    some = mask & (at < total)
    place = tl.load(chosen + mine * MOST + at - begin, mask=some, other=0)
    mine = tl.where(some, mine, 0)
    tl.store(y + result * 3, (mine // CLASSES).to(tl.int64), mask=mask)
    tl.store(y + result * 3 + 1, (mine % CLASSES).to(tl.int64), mask=mask)
    tl.store(y + result * 3 + 2, place.to(tl.int64), mask=mask)
    if tl.program_id(0) == 0:
        tl.store(count, total.to(tl.int64))
