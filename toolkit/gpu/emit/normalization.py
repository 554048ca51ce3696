"""Softmax and normalizations: what runs along rows and keeps them -> calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.elementwise import broadcast, steps_after
from toolkit.gpu.emit.strided_rows import in_thirds, plan_strided_rows, tile_rows
from toolkit.gpu.ir.view import Shape, View, like
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.shapes.sizes import ceil_div

_SOFTMAX = {"Softmax": "softmax", "LogSoftmax": "log", "Hardmax": "first"}
# ONNX, MeanVarianceNormalization: added to the deviation; here, squared, to the variance.
_DEVIATION_EPSILON = 1e-9


def emit_softmax(ctx: LoweringContext, group: Group) -> None:
    """Add a Softmax, LogSoftmax or Hardmax along any dimension."""
    op = group.root_operation
    x = ctx.read_float(op.inputs[0])
    axis = op.integer("axis", -1) % len(x.shape)
    y = ctx.make(group.result, _strides_like(ctx, group, x))
    steps, numbers = steps_after(ctx, group)
    walk = plan_strided_rows([x, y], [axis])
    tile = tile_rows(walk)
    call = ctx.make_launch(
        "softmax",
        tile.grid(walk),
        {"x": x, "y": y, "rows": walk.rows, "scalars": numbers},
        {
            **walk.constants("X", "Y"),
            "MODE": _SOFTMAX[op.kind],
            "EPILOGUE": steps,
            **tile.constants(),
        },
        writes=(y,),
        warps=tile.warps,
    )
    ctx.add(group.nodes, (call,))


@dataclass(frozen=True, slots=True)
class _Normalization:
    """What the kernel is told: dimensions of a row, the mode, and factors of the input's shape."""

    x: View
    y: View
    along: Sequence[int]
    mode: str
    epsilon: float = 0.0
    gain: View | None = None
    bias: View | None = None


def emit_layer_normalization(ctx: LoweringContext, group: Group) -> None:
    """Add a LayerNormalization or RMSNormalization."""
    op = group.root_operation
    x = ctx.read_float(op.inputs[0])
    first = op.integer("axis", -1) % len(x.shape)
    along = op.integers("axes", tuple(range(first, len(x.shape))))  # "axes": of a pattern
    gain, bias = (
        broadcast(ctx.read_float(name), x.shape) if name else None
        for name in (op.input(1), op.input(2))
    )
    _normalize(
        ctx,
        group,
        _Normalization(
            x=x,
            y=ctx.make(group.result),
            along=along,
            mode="square" if op.kind == "RMSNormalization" else "variance",
            epsilon=op.number("epsilon", 1e-5),
            gain=gain,
            bias=bias,
        ),
    )


def emit_group_normalization(ctx: LoweringContext, group: Group) -> None:
    """Add an InstanceNormalization or GroupNormalization, with factors for each channel.

    Up to opset 20 a GroupNormalization may have factors for each group instead.
    """
    op = group.root_operation
    x = ctx.read_float(op.inputs[0])
    y = ctx.make(group.result, _strides_like(ctx, group, x))
    channels = x.shape[1]
    groups = op.integer("num_groups", 1) if op.kind == "GroupNormalization" else channels
    split = _channels_split(x, groups)
    gain, bias = (_factor(ctx.read_float(name), split) for name in op.inputs[1:3])
    _normalize(
        ctx,
        group,
        _Normalization(
            x=split,
            y=_channels_split(y, groups),
            along=range(2, len(split.shape)),
            mode="variance",
            epsilon=op.number("epsilon", 1e-5),
            gain=gain,
            bias=bias,
        ),
    )


def emit_mean_variance(ctx: LoweringContext, group: Group) -> None:
    """Add a MeanVarianceNormalization."""
    op = group.root_operation
    x = ctx.read_float(op.inputs[0])
    y = ctx.make(group.result, _strides_like(ctx, group, x))
    along = [axis % len(x.shape) for axis in op.integers("axes", (0, 2, 3))]
    _normalize(ctx, group, _Normalization(x, y, along, "variance", _DEVIATION_EPSILON**2))


def emit_lp_normalization(ctx: LoweringContext, group: Group) -> None:
    """Add an LpNormalization."""
    op = group.root_operation
    x = ctx.read_float(op.inputs[0])
    y = ctx.make(group.result, _strides_like(ctx, group, x))
    along = [op.integer("axis", -1) % len(x.shape)]
    _normalize(ctx, group, _Normalization(x, y, along, f"l{op.integer('p', 2)}"))


def emit_local_normalization(ctx: LoweringContext, group: Group) -> None:
    """Add an LRN: normalization by the channels around each."""
    op = group.root_operation
    x = ctx.read_float(op.inputs[0])
    y = ctx.make(group.result, _strides_like(ctx, group, x))
    walk = plan_strided_rows([x, y], [1])
    tile = tile_rows(walk)
    call = ctx.make_launch(
        "normalize_locally",
        (tile.grid(walk)[0], ceil_div(walk.columns, tile.columns), 1),
        {"x": x, "y": y, "rows": walk.rows},
        {
            **walk.constants("X", "Y"),
            "SIZE": op.integer("size", 1),
            "ALPHA": op.number("alpha", 1e-4),
            "BETA": op.number("beta", 0.75),
            "BIAS": op.number("bias", 1.0),
            "EPILOGUE": ctx.expression(op.outputs[0], group.after).steps,
            **tile.constants(),
        },
        writes=(y,),
        warps=tile.warps,
    )
    ctx.add(group.nodes, (call,))


def _normalize(ctx: LoweringContext, group: Group, what: _Normalization) -> None:
    factors = [what.gain or what.x, what.bias or what.x]  # absent ones are not looked at
    walk = plan_strided_rows([what.x, *factors, what.y], what.along)
    tile = in_thirds(tile_rows(walk), walk)
    steps, numbers = steps_after(ctx, group)
    operands = {"x": what.x, "gain": what.gain, "bias": what.bias, "y": what.y}
    call = ctx.make_launch(
        "normalize",
        tile.grid(walk),
        {**operands, "rows": walk.rows, "scalars": numbers},
        {
            **walk.constants("X", "GAIN", "BIAS", "Y"),
            "MODE": what.mode,
            "EPSILON": what.epsilon,
            "EPILOGUE": steps,
            **tile.constants(),
        },
        writes=(what.y,),
        warps=tile.warps,
    )
    ctx.add(group.nodes, (call,))


def _strides_like(ctx: LoweringContext, group: Group, x: View) -> Shape | None:
    """Strides with which the result lies as `x`; as ONNX has it where it leaves the segment."""
    return None if group.result in ctx.network.outputs else like(x.strides, x.shape)


def _factor(view: View, split: View) -> View:
    """Return one number a channel, or a group, as (N, groups, channels of one, ...)."""
    groups, each = split.shape[1:3]
    step, rest = view.strides[0], (0,) * (len(split.shape) - 3)
    own = (step, 0) if view.shape == (groups,) else (step * each, step)
    return replace(view, shape=split.shape, strides=(0, *own, *rest))


def _channels_split(view: View, groups: int) -> View:
    """Return (N, C, ...) as (N, groups, C / groups, ...)."""
    channels, step = view.shape[1], view.strides[1]
    each = channels // groups
    return replace(
        view,
        shape=(view.shape[0], groups, each, *view.shape[2:]),
        strides=(view.strides[0], step * each, step, *view.strides[2:]),
    )
