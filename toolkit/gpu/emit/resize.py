"""Lower Resize and Upsample."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.elementwise import broadcast
from toolkit.gpu.emit.launches import element_launch
from toolkit.gpu.emit.resample_tables import Axis, Interpolation, Mode, table_of
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.network import Operation, SegmentTensors
from toolkit.gpu.ir.parameters import floats_of, integers_of, scales_input
from toolkit.gpu.ir.view import Shape, View, channels_last, like
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.reasons import Reason, reason
from toolkit.gpu.schedule.loop_order import order_of
from toolkit.gpu.shapes.sizes import Size, upper_bound
from toolkit.plugins import Constant

_BLOCK = 512  # elements of a block
_AXES_PER_LAUNCH = 2
# Coordinates and rounding with which pixel i of the result comes from floor(i / factor).
_WHOLE_PIXELS = {("asymmetric", "floor"), ("half_pixel", "round")}
_TABLES = ("index_a", "weight_a", "index_b", "weight_b")  # parameters of the kernel


def emit_resize(ctx: LoweringContext, group: Group) -> None:
    """Lower Resize: a broadcast or a copy of repeated pixels where it is one, else resampling."""
    op = group.root_operation
    shape, result = ctx.network.shapes[op.inputs[0]], ctx.network.shapes[op.outputs[0]]
    interpolation = _interpolation(op)
    if _is_broadcast(interpolation, shape, result):
        ctx.views[op.outputs[0]] = broadcast(_with_scale_of_result(ctx, op), result)
    elif _has_whole_factors(interpolation, shape, result) and _has_whole_scales(ctx, op):
        _repeat(ctx, group, result)
    else:
        _resample(ctx, group, interpolation, _axes(ctx, op, shape, result))


def resize_refusal(
    op: Operation, tensors: SegmentTensors, shape: Shape, result: Shape
) -> Reason | None:
    """Return why no kernel resizes; scales, sizes and region are not read where shapes tell all."""
    interpolation, at = _interpolation(op), scales_input(op)
    repeats = not op.input(at) and _has_whole_factors(interpolation, shape, result)
    if repeats or _is_broadcast(interpolation, shape, result):
        return None
    names = [name for name in op.inputs[1:4] if name]
    for name in names:
        if name in tensors.computed:
            return reason("gpu.constant", name)
    if not tensors.constants.keys() >= set(names):  # computed from sizes, which lowering knows
        return None
    factors = floats_of(tensors, op, at, "scales") or integers_of(tensors, op, 3, "sizes")
    if not factors or len(factors) != len(op.integers("axes", shape)):
        return reason("gpu.resize:scales" if factors else "gpu.resize:sizes")
    try:
        table_of(Axis(1, 1, 1.0), interpolation)
    except KeyError as error:
        return reason("gpu.resize:mode", error)
    return None


def _with_scale_of_result(ctx: LoweringContext, op: Operation) -> View:
    """Return the operand, requantized where the result is INT8 with another scale."""
    x, scale = ctx.read(op.inputs[0]), ctx.network.scales.get(op.outputs[0])
    if scale is None or x.scale == scale:
        return x
    requantized = ctx.allocate(op.inputs[0], "int8", x.shape, like(x.strides, x.shape))
    requantized = replace(requantized, scale=scale)
    ctx.add_elementwise(requantized, [x])
    return requantized


def _interpolation(op: Operation) -> Interpolation:
    old = op.kind == "Upsample"
    mode = op.text("mode", "nearest")
    return Interpolation(
        mode=cast(Mode, {"bilinear": "linear"}.get(mode, mode)),
        coordinates=op.text(
            "coordinate_transformation_mode", "asymmetric" if old else "half_pixel"
        ),
        nearest=op.text("nearest_mode", "floor" if old else "round_prefer_floor"),
        cubic_a=op.number("cubic_coeff_a", -0.75),
        exclude_outside=bool(op.integer("exclude_outside", 0)),
        antialias=bool(op.integer("antialias", 0)),
    )


def _is_broadcast(interpolation: Interpolation, shape: Shape, result: Shape) -> bool:
    """Whether only dimensions of size 1 change: every index reads the only element."""
    plain = not interpolation.antialias and not interpolation.exclude_outside
    plain = plain and interpolation.coordinates != "tf_crop_and_resize"
    return plain and all(s in (1, r) for s, r in zip(shape, result, strict=True))


def _has_whole_factors(interpolation: Interpolation, shape: Shape, result: Shape) -> bool:
    """Whether a result may repeat each pixel of (N, C, H, W) whole times; scales may deny it."""
    if interpolation.mode != "nearest" or len(shape) != 4 or result[:2] != shape[:2]:
        return False
    rounding = interpolation.nearest.split("_")[0]
    if (interpolation.coordinates, rounding) not in _WHOLE_PIXELS:
        return False
    return all(r // s * s == r and r >= s for r, s in zip(result[2:], shape[2:], strict=True))


def _has_whole_scales(ctx: LoweringContext, op: Operation) -> bool:
    """Whether scales, where an operation is given them and no sizes, are whole numbers.

    One of 2.4 makes 4 rows of 2, too, but three of the first and one of the second.
    """
    at = scales_input(op)
    if op.input(at) and op.input(at) not in ctx.network.constants:
        return False
    return all(scale == int(scale) for scale in floats_of(ctx.network, op, at, "scales") or ())


def _repeat(ctx: LoweringContext, group: Group, result: Shape) -> None:
    x = ctx.read(group.root_operation.inputs[0], "int8 or float", "channels last")
    y = ctx.output_view(group.root_operation.outputs[0], channels_last(result))
    factors = [r // s for r, s in zip(result[2:], x.shape[2:], strict=True)]
    ctx.add_elementwise(_split(y, factors, False), [_split(x, factors, True)], (), group.nodes)


def _split(view: View, factors: list[int], repeat: bool) -> View:
    """Return a view (N, C, H, f, W, g): repeated pixels (source), or all pixels (result)."""
    (f, g), (sn, sc, sh, sw) = factors, view.strides
    n, c, h, w = view.shape
    if repeat:
        return replace(view, shape=(n, c, h, f, w, g), strides=(sn, sc, sh, 0, sw, 0))
    return replace(
        view, shape=(n, c, h // f, f, w // g, g), strides=(sn, sc, sh * f, sh, sw * g, sw)
    )


def _axes(ctx: LoweringContext, op: Operation, shape: Shape, result: Shape) -> dict[int, Axis]:
    """Return the dimensions that change; the sizes of dynamic ones are their largest."""
    rank = len(shape)
    axes = [at % rank for at in op.integers("axes", tuple(range(rank)))]
    scales = floats_of(ctx.network, op, scales_input(op), "scales")
    if scales is None:
        scales = _from_sizes(ctx, op, shape, axes)
    _check_dynamic(op, shape, result)
    region = () if scales_input(op) == 1 else floats_of(ctx.network, op, 1, "roi") or ()
    crops = op.text("coordinate_transformation_mode", "") == "tf_crop_and_resize"
    changed: dict[int, Axis] = {}
    for at, (axis, scale) in enumerate(zip(axes, scales, strict=True)):
        part = (region[at], region[at + len(axes)]) if crops and region else (0.0, 1.0)
        if scale != 1 or result[axis] != shape[axis] or part != (0.0, 1.0):
            changed[axis] = Axis(upper_bound(shape[axis]), upper_bound(result[axis]), scale, part)
    return changed


def _check_dynamic(op: Operation, shape: Shape, result: Shape) -> None:
    """Reject dynamic sizes where the taps of an index depend on them."""
    interpolation = _interpolation(op)
    same = (
        interpolation.coordinates in ("half_pixel", "asymmetric")
        and not interpolation.exclude_outside
    )
    if any(isinstance(size, Size) for size in (*shape, *result)) and not same:
        raise NotCoveredError(
            f"node {op.name!r} ({op.kind}) resizes {list(shape)} to {list(result)} with "
            f"{interpolation.coordinates} coordinates; dynamic sizes are resized with half_pixel "
            "or asymmetric ones"
        )


def _scale(op: Operation, size: int, result: int) -> float:
    """Return result / size, which must be the same at all dynamic sizes."""
    if not isinstance(size, Size) and not isinstance(result, Size):
        return result / size
    for whole, part, power in ((result, size, 1), (size, result, -1)):
        factor = whole // part
        if not isinstance(factor, Size) and factor * part == whole:
            return float(factor**power)
    raise NotCoveredError(
        f"node {op.name!r} ({op.kind}) resizes {size} to {result}; dynamic sizes are resized by "
        "constant scales"
    )


def _from_sizes(
    ctx: LoweringContext, op: Operation, shape: Shape, axes: Sequence[int]
) -> tuple[float, ...]:
    sizes = integers_of(ctx.network, op, 3, "sizes")
    assert sizes is not None  # resize_refusal
    scales = [_scale(op, shape[axis], size) for size, axis in zip(sizes, axes, strict=True)]
    policy = op.text("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return tuple(scales)
    return (min(scales) if policy == "not_larger" else max(scales),) * len(scales)


def _resample(
    ctx: LoweringContext, group: Group, interpolation: Interpolation, axes: Mapping[int, Axis]
) -> None:
    """Resample, two dimensions in a launch."""
    op = group.root_operation
    name, source = op.outputs[0], op.inputs[0]
    x = _with_scale_of_result(ctx, op)
    if x.scale is not None and (
        interpolation.mode != "nearest" or x.scale != ctx.network.scales.get(name)
    ):
        x = ctx.read(source, "float")
    order = sorted(axes)
    pairs = [order[at : at + _AXES_PER_LAUNCH] for at in range(0, len(order), _AXES_PER_LAUNCH)]
    for at, pair in enumerate(pairs or [[]]):
        shape = tuple(axes[dim].result if dim in pair else size for dim, size in enumerate(x.shape))
        if at + 1 < len(pairs):
            y = ctx.allocate(
                f"{name} (part)", ctx.storage_dtype(x.dtype), shape, like(x.strides, shape)
            )
        else:
            y = ctx.output_like(name, x)
        _add_resample(ctx, group, x, y, {dim: axes[dim] for dim in pair})
        x = y


def _add_resample(
    ctx: LoweringContext, group: Group, x: View, y: View, axes: Mapping[int, Axis]
) -> None:
    if not axes:
        ctx.add_elementwise(y, [x], (), group.nodes)
        return
    op = group.root_operation
    interpolation = _interpolation(op)
    tables = [table_of(axis, interpolation) for axis in axes.values()]
    inner = tuple(0 if at in axes else stride for at, stride in enumerate(x.strides))
    order = order_of(y.shape, [y.strides, inner], separate=tuple(axes))
    packed: dict[str, View | None] = dict.fromkeys(_TABLES)
    for index, weight, (indices, weights) in zip(_TABLES[::2], _TABLES[1::2], tables, strict=False):
        packed[index] = ctx.weights.pack(indices, "int32")
        if weights is not None:
            packed[weight] = ctx.weights.pack(weights, "float32")
    dims, taps = list(axes), [indices.shape[1] for indices, _ in tables]
    crops = interpolation.coordinates == "tf_crop_and_resize"
    constants: dict[str, Constant] = {
        **order.constants("Y_STRIDES", "X_STRIDES"),
        "EXTRAPOLATION": op.number("extrapolation_value", 0.0) if crops else None,
    }
    for axis, dim, count in (("A", dims[0], taps[0]), ("B", dims[-1], (*taps, 1)[1])):
        size = x.shape[dim]
        constants |= {
            f"DIM_{axis}": order.positions[dim],
            f"STRIDE_{axis}": x.strides[dim],
            f"TAPS_{axis}": count,
            f"SIZE_{axis}": size if isinstance(size, Size) else None,
        }
    launch = element_launch("resample", y, {"x": x, **packed}, constants, block=_BLOCK)
    ctx.add_op(group.nodes, (launch,))
