"""Lower softmax and normalizations."""

from collections.abc import Sequence
from dataclasses import replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.elementwise import broadcast, epilogue_ops
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.emit.strided_rows import (
    add_row_kernel,
    plan_strided_rows,
    split_in_three,
    tile_rows,
)
from toolkit.gpu.ir.view import View
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.shapes.sizes import ceil_div

_SOFTMAX = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "Hardmax": "hardmax"}
# ONNX, MeanVarianceNormalization: added to the deviation; here, squared, to the variance.
_DEVIATION_EPSILON = 1e-9


def emit_softmax(ctx: LoweringContext, group: Group) -> None:
    """Lower Softmax, LogSoftmax and Hardmax."""
    op = group.root_operation
    x = ctx.read(op.inputs[0], "float")
    axis = op.integer("axis", -1) % len(x.shape)
    y = ctx.output_like(group.result, x)
    epilogue, scalars = epilogue_ops(ctx, group)
    layout = plan_strided_rows([x, y], [axis])
    add_row_kernel(
        ctx,
        group.nodes,
        "softmax",
        {"x": x},
        {"MODE": _SOFTMAX[op.kind], "EPILOGUE": epilogue},
        y=y,
        layout=layout,
        unstrided={"scalars": scalars},
    )


def emit_layer_normalization(ctx: LoweringContext, group: Group) -> None:
    """Lower LayerNormalization and RMSNormalization."""
    op = group.root_operation
    x = ctx.read(op.inputs[0], "float")
    first = op.integer("axis", -1) % len(x.shape)
    along = op.integers("axes", tuple(range(first, len(x.shape))))  # "axes": of a pattern
    gain, bias = (
        broadcast(ctx.read(name, "float"), x.shape) if name else None
        for name in (op.input(1), op.input(2))
    )
    _normalize(
        ctx,
        group,
        (x, ctx.output_view(group.result)),
        along=along,
        mode="square" if op.kind == "RMSNormalization" else "variance",
        epsilon=op.number("epsilon", 1e-5),
        factors=(gain, bias),
    )


def emit_group_normalization(ctx: LoweringContext, group: Group) -> None:
    """Lower InstanceNormalization and GroupNormalization.

    Gain and bias are per channel; up to opset 20, those of a GroupNormalization may be per group.
    """
    op = group.root_operation
    x = ctx.read(op.inputs[0], "float")
    y = ctx.output_like(group.result, x)
    channels = x.shape[1]
    groups = op.integer("num_groups", 1) if op.kind == "GroupNormalization" else channels
    split = _split_channels(x, groups)
    gain, bias = (_channel_factor(ctx.read(name, "float"), split) for name in op.inputs[1:3])
    _normalize(
        ctx,
        group,
        (split, _split_channels(y, groups)),
        along=range(2, len(split.shape)),
        mode="variance",
        epsilon=op.number("epsilon", 1e-5),
        factors=(gain, bias),
    )


def emit_plain_normalization(ctx: LoweringContext, group: Group) -> None:
    """Lower MeanVarianceNormalization and LpNormalization."""
    op = group.root_operation
    x = ctx.read(op.inputs[0], "float")
    y = ctx.output_like(group.result, x)
    axes: Sequence[int] = (op.integer("axis", -1),)
    mode, epsilon = f"l{op.integer('p', 2)}", 0.0
    if op.kind == "MeanVarianceNormalization":
        axes, mode, epsilon = op.integers("axes", (0, 2, 3)), "variance", _DEVIATION_EPSILON**2
    along = [axis % len(x.shape) for axis in axes]
    _normalize(ctx, group, (x, y), along=along, mode=mode, epsilon=epsilon)


def emit_local_normalization(ctx: LoweringContext, group: Group) -> None:
    """Lower LRN (local response normalization)."""
    op = group.root_operation
    x = ctx.read(op.inputs[0], "float")
    y = ctx.output_like(group.result, x)
    layout = plan_strided_rows([x, y], [1])
    tile = tile_rows(layout)
    launch = make_launch(
        "local_response_norm",
        (tile.grid(layout)[0], ceil_div(layout.columns, tile.columns), 1),
        {"x": x, "y": y, "rows": layout.rows},
        {
            **layout.constants("X", "Y"),
            "SIZE": op.integer("size", 1),
            "ALPHA": op.number("alpha", 1e-4),
            "BETA": op.number("beta", 0.75),
            "BIAS": op.number("bias", 1.0),
            "EPILOGUE": ctx.expression(op.outputs[0], group.after).ops,
            **tile.constants(),
        },
        writes=(y,),
        warps=tile.warps,
    )
    ctx.add_op(group.nodes, (launch,))


def _normalize(
    ctx: LoweringContext,
    group: Group,
    views: tuple[View, View],
    *,
    along: Sequence[int],
    mode: str,
    epsilon: float,
    factors: tuple[View | None, View | None] = (None, None),
) -> None:
    """Add the kernel from x to y, whose rows run along the dimensions `along` of x.

    `factors`: gain and bias in the shape of x.
    """
    (x, y), (gain, bias) = views, factors
    # The strides of absent factors are not used.
    layout = plan_strided_rows([x, gain or x, bias or x, y], along)
    epilogue, scalars = epilogue_ops(ctx, group)
    add_row_kernel(
        ctx,
        group.nodes,
        "normalize",
        {"x": x, "gain": gain, "bias": bias},
        {"MODE": mode, "EPSILON": epsilon, "EPILOGUE": epilogue},
        y=y,
        layout=layout,
        tile=split_in_three(tile_rows(layout), layout),
        unstrided={"scalars": scalars},
    )


def _channel_factor(view: View, split: View) -> View:
    """Broadcast factors per channel, or per group, to (N, groups, channels per group, ...)."""
    groups, channels = split.shape[1:3]
    stride, spatial = view.strides[0], (0,) * (len(split.shape) - 3)
    per_group = view.shape == (groups,)
    channel_strides = (stride, 0) if per_group else (stride * channels, stride)
    return replace(view, shape=split.shape, strides=(0, *channel_strides, *spatial))


def _split_channels(view: View, groups: int) -> View:
    """Return (N, C, ...) as (N, groups, C / groups, ...)."""
    channels, stride = view.shape[1] // groups, view.strides[1]
    return replace(
        view,
        shape=(view.shape[0], groups, channels, *view.shape[2:]),
        strides=(view.strides[0], stride * channels, stride, *view.strides[2:]),
    )
