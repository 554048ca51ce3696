"""Lower layout operations, and conversions between INT8 with a scale and ONNX integers with a zero
point: new views, and a copy where no view will do.
"""

from dataclasses import replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.elementwise import broadcast
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.elementwise_ops import ExprOp
from toolkit.gpu.ir.parameters import integers_of
from toolkit.gpu.ir.view import Shape, View, channels_last, like, row_major
from toolkit.gpu.passes.fusion import Group


def emit_same(ctx: LoweringContext, group: Group) -> None:
    """Lower Identity: the same view under another name."""
    op = group.root_operation
    ctx.views[op.outputs[0]] = ctx.read(op.inputs[0])


def emit_bit_cast(ctx: LoweringContext, group: Group) -> None:
    """Lower BitCast: the same bits as another type of the same width."""
    op = group.root_operation
    source, target = (ctx.network.dtypes[name] for name in (op.inputs[0], op.outputs[0]))
    view = ctx.read(op.inputs[0])
    cast = replace(view, dtype=target)
    same_width = cast.item_bytes == view.item_bytes
    if view.dtype != source or ctx.storage_dtype(target) != target or not same_width:
        raise NotCoveredError(
            f"node {op.name!r} (BitCast) takes {source} as {target}, of which kernels hold "
            f"{view.dtype} and {ctx.storage_dtype(target)}"
        )
    ctx.views[op.outputs[0]] = cast


def emit_reshape(ctx: LoweringContext, group: Group) -> None:
    """Lower Reshape, Flatten, Squeeze and Unsqueeze."""
    _reshape(ctx, group, ctx.read(group.root_operation.inputs[0]))


def emit_transpose(ctx: LoweringContext, group: Group) -> None:
    """Lower Transpose: permuted strides."""
    op = group.root_operation
    view = ctx.read(op.inputs[0])
    order = op.integers("perm", tuple(reversed(range(len(view.shape)))))
    ctx.views[op.outputs[0]] = view.permuted(order)


def emit_slice(ctx: LoweringContext, group: Group) -> None:
    """Lower Slice: an offset, and strides times the steps."""
    op = group.root_operation
    view = ctx.read(op.inputs[0])
    starts = integers_of(ctx.network, op, 1, "starts") or ()
    axes = integers_of(ctx.network, op, 3, "axes") or tuple(range(len(starts)))
    steps = integers_of(ctx.network, op, 4, "steps") or (1,) * len(starts)
    offset, strides = view.offset, list(view.strides)
    for axis, start, step in zip(axes, starts, steps, strict=True):
        size = view.shape[axis]
        first = start + size if start < 0 else start
        first = min(max(first, 0), size - 1)  # networks have no empty tensors
        offset += first * view.strides[axis]
        strides[axis] = view.strides[axis] * step
    shape = ctx.network.shapes[op.outputs[0]]
    ctx.views[op.outputs[0]] = replace(view, shape=shape, strides=tuple(strides), offset=offset)


def emit_split(ctx: LoweringContext, group: Group) -> None:
    """Lower Split: adjacent slices."""
    op = group.root_operation
    view = ctx.read(op.inputs[0])
    axis = op.integer("axis", 0) % len(view.shape)
    start = 0
    for name in op.outputs:
        size = ctx.network.shapes[name][axis]
        ctx.views[name] = slice_view(view, axis, start, size)
        start += size


def slice_view(view: View, axis: int, start: int, size: int) -> View:
    """Return the slice [start, start + size) of a dimension."""
    shape = (*view.shape[:axis], size, *view.shape[axis + 1 :])
    return replace(view, shape=shape, offset=view.offset + start * view.strides[axis])


def emit_expand(ctx: LoweringContext, group: Group) -> None:
    """Lower Expand: broadcast dimensions have stride 0."""
    op = group.root_operation
    shape = ctx.network.shapes[op.outputs[0]]
    ctx.views[op.outputs[0]] = broadcast(ctx.read(op.inputs[0]), shape)


def emit_tile(ctx: LoweringContext, group: Group) -> None:
    """Lower Tile: each dimension as (repeats, size), reshaped."""
    op = group.root_operation
    view = ctx.read(op.inputs[0])
    shape = ctx.network.shapes[op.outputs[0]]
    pairs = [(whole // size, size) for whole, size in zip(shape, view.shape, strict=True)]
    tiled = replace(
        view,
        shape=tuple(size for pair in pairs for size in pair),
        strides=tuple(stride for inner in view.strides for stride in (0, inner)),
    )
    _reshape(ctx, group, tiled)


def emit_depth_to_space(ctx: LoweringContext, group: Group) -> None:
    """Lower DepthToSpace and SpaceToDepth: b x b channels of a pixel are b x b pixels, or back."""
    op = group.root_operation
    view = ctx.read(op.inputs[0])
    side, depth_first = op.integer("blocksize", 1), op.text("mode", "DCR") == "DCR"
    n, c, h, w = view.shape
    if op.kind == "SpaceToDepth":
        shape: Shape = (n, c, h // side, side, w // side, side)
        order = (0, 3, 5, 1, 2, 4) if depth_first else (0, 1, 3, 5, 2, 4)
    elif depth_first:
        shape, order = (n, side, side, c // (side * side), h, w), (0, 3, 4, 1, 5, 2)
    else:
        shape, order = (n, c // (side * side), side, side, h, w), (0, 1, 4, 2, 5, 3)
    split = view.reshaped(shape)
    assert split is not None  # splitting dimensions needs no copy
    _reshape(ctx, group, split.permuted(order))


def _reshape(ctx: LoweringContext, group: Group, view: View) -> None:
    """Set the result of a group to `view` reshaped; copies where no view can be."""
    name = group.root_operation.outputs[0]
    shape = ctx.network.shapes[name]
    reshaped = view.reshaped(shape)
    if reshaped is None:
        reshaped = _reshaped_copy(ctx, view, shape, name)
    ctx.views[name] = reshaped


def _reshaped_copy(ctx: LoweringContext, view: View, shape: Shape, name: str) -> View:
    """Copy a view so that it can be reshaped: NHWC where it is already, else row-major."""
    dtype = view.dtype if view.scale is not None else ctx.storage_dtype(view.dtype, name)
    strides = row_major(view.shape)
    if len(shape) == 4 and view.strides[-1] != 1 and name not in ctx.network.outputs:
        target = View("", dtype, shape, channels_last(shape)).reshaped(view.shape)
        strides = strides if target is None else target.strides
    reshaped = ctx.copy_view(view, strides, dtype).reshaped(shape)
    if reshaped is None:  # the sizes agree at this point of the dynamic dimensions only
        raise NotCoveredError(
            f"{list(view.shape)} becomes {list(shape)}, as large as that at some sizes only"
        )
    return reshaped


def emit_to_integers(ctx: LoweringContext, group: Group) -> None:
    """Lower ToIntegers: a view for INT8, else a copy with the zero point added."""
    op = group.root_operation
    view = ctx.read(op.inputs[0])
    name = op.outputs[0]
    if view.scale != op.number("scale", 1.0):
        raise NotCoveredError(f"tensor {op.inputs[0]!r} does not have the scale of {name!r}")
    stored = replace(view, scale=None)
    dtype = ctx.network.dtypes[name]
    ctx.views[name] = stored
    if dtype != "int8":
        ctx.views[name] = _add_zero_point(ctx, group, stored, dtype, op.integer("zero_point", 0))


def emit_from_integers(ctx: LoweringContext, group: Group) -> None:
    """Lower FromIntegers: a view for INT8, else a copy with the zero point subtracted."""
    op = group.root_operation
    view = ctx.read(op.inputs[0])
    if view.dtype != "int8":
        view = _add_zero_point(ctx, group, view, "int8", -op.integer("zero_point", 0))
    ctx.views[op.outputs[0]] = replace(view, scale=op.number("scale", 1.0))


def _add_zero_point(
    ctx: LoweringContext, group: Group, view: View, dtype: str, zero_point: int
) -> View:
    target = ctx.allocate(
        group.root_operation.outputs[0], dtype, view.shape, like(view.strides, view.shape)
    )
    ops: tuple[ExprOp, ...] = (("real", 0, 1.0), ("constant", float(zero_point)), ("add", 1, 2))
    ctx.add_elementwise(target, [view], ops, group.nodes)
    return target
