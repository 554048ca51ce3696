"""Regions of a feature map, averaged over bins (ONNX, operator RoiAlign, mode "avg").

    y[k, c, p, q] = 1 / S^2  sum over s, t < S of  x[b_k, c](top + (p + (s + 1/2) / S) h,
                                                            left + (q + (t + 1/2) / S) w)

The region k = (left, top, right, bottom) SCALE - OFFSET has bins of h x w, at least LEAST times the
number of bins in all. x between its elements is bilinear; it is 0 beyond 1 outside of it. Numbers
of images are clamped to 0..IMAGES-1, so no address leaves x. Regions that are not chosen get
`rest`, or the number REST, and no element of x is read for them.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.strided_rows import offsets


@triton.jit
def _neighbours(c, SIZE: tl.constexpr):
    """Return the element before a coordinate, the one after, and the weight of that."""
    c = tl.minimum(tl.maximum(c, 0.0), SIZE - 1.0)
    low = tl.floor(c).to(tl.int32)
    high = tl.minimum(low + 1, SIZE - 1)
    return low, high, c - low.to(tl.float32)


@triton.jit
def _add_bilinear(total, x, row, column, inside, SIZES: tl.constexpr, STRIDES: tl.constexpr):
    """Return total + x at a position between its elements, which counts 0 if not inside."""
    above, below, down = _neighbours(tl.where(inside, row, 0.0), SIZES[0])
    before, after, along = _neighbours(tl.where(inside, column, 0.0), SIZES[1])
    upper = x + above * STRIDES[0]
    lower = x + below * STRIDES[0]
    before *= STRIDES[1]
    after *= STRIDES[1]
    a = tl.load(upper + before, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(upper + after, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(lower + before, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(lower + after, mask=inside, other=0.0).to(tl.float32)
    total += (1.0 - down) * ((1.0 - along) * a + along * b)
    return total + down * ((1.0 - along) * c + along * d)


@triton.jit
def roi_align(
    x, rois, batches, chosen, rest, y, elements,
    SHAPE: tl.constexpr, Y_STRIDES: tl.constexpr, X_STRIDES: tl.constexpr,
    ROI_STRIDES: tl.constexpr, BATCH_STRIDES: tl.constexpr, ROW_STRIDES: tl.constexpr,
    COLUMN_STRIDES: tl.constexpr,
    COORDINATE_STRIDE: tl.constexpr, IMAGES: tl.constexpr, IMAGE_STRIDE: tl.constexpr,
    SIZES: tl.constexpr, SPATIAL_STRIDES: tl.constexpr, BINS: tl.constexpr, SCALE: tl.constexpr,
    OFFSET: tl.constexpr, LEAST: tl.constexpr, SAMPLES: tl.constexpr,
    CHOSEN_STRIDES: tl.constexpr, REST_STRIDES: tl.constexpr, REST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of results). Strides of ROW and COLUMN make an element's bin of its number."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < elements
    active = mask
    if chosen is not None:
        choice = tl.load(chosen + offsets(i, SHAPE, CHOSEN_STRIDES), mask=mask, other=0)
        active = mask & (choice != 0)
    roi = rois + offsets(i, SHAPE, ROI_STRIDES)
    left = tl.load(roi, mask=mask, other=0.0).to(tl.float32) * SCALE - OFFSET
    top = tl.load(roi + COORDINATE_STRIDE, mask=mask, other=0.0).to(tl.float32) * SCALE - OFFSET
    right = tl.load(roi + 2 * COORDINATE_STRIDE, mask=mask, other=0.0).to(tl.float32) * SCALE
    bottom = tl.load(roi + 3 * COORDINATE_STRIDE, mask=mask, other=0.0).to(tl.float32) * SCALE
    width = right - OFFSET - left
    height = bottom - OFFSET - top
    if LEAST is not None:
        width = tl.maximum(width, LEAST)
        height = tl.maximum(height, LEAST)
    height = height / BINS[0]
    width = width / BINS[1]
    top += offsets(i, SHAPE, ROW_STRIDES).to(tl.float32) * height
    left += offsets(i, SHAPE, COLUMN_STRIDES).to(tl.float32) * width
    batch = tl.load(batches + offsets(i, SHAPE, BATCH_STRIDES), mask=mask, other=0)
    batch = tl.where(batch < 0, 0, tl.where(batch >= IMAGES, IMAGES - 1, batch))
    source = x + offsets(i, SHAPE, X_STRIDES) + batch.to(tl.int32) * IMAGE_STRIDE
    total = tl.zeros((BLOCK,), tl.float32)
    samples = SAMPLES * SAMPLES
    if chosen is not None:
        samples = tl.where(tl.max(active.to(tl.int32), 0) > 0, samples, 0)
    for sample in range(samples):
        row = top + (sample // SAMPLES + 0.5) * height / SAMPLES
        column = left + (sample % SAMPLES + 0.5) * width / SAMPLES
        inside = active & (row >= -1.0) & (row <= SIZES[0])
        inside = inside & (column >= -1.0) & (column <= SIZES[1])
        total = _add_bilinear(total, source, row, column, inside, SIZES, SPATIAL_STRIDES)
    total = total / (SAMPLES * SAMPLES)
    if rest is not None:
        offset = offsets(i, SHAPE, REST_STRIDES)
        unchosen = tl.load(rest + offset, mask=mask & (active == 0), other=0.0).to(tl.float32)
        total = tl.where(active, total, unchosen)
    elif chosen is not None:
        total = tl.where(active, total, REST)
    tl.store(y + offsets(i, SHAPE, Y_STRIDES), total.to(y.dtype.element_ty), mask=mask)
