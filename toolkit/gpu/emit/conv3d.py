"""Convolutions over one or three dimensions, and transposed ones over one to three -> calls."""

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.epilogue import (
    Epilogue,
    constant_weights,
    epilogue_of,
    gemm_constants,
    weight_matrix,
)
from toolkit.gpu.emit.windows import Three, read_transposed_window, read_window, three
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.network import Array, Operation
from toolkit.gpu.ir.view import Shape, View, like, row_major
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.tiles import GemmShape, Tile, gemm_tiles
from toolkit.gpu.shapes.sizes import ceil_div


@dataclass(frozen=True, slots=True)
class _Conv3d:
    """A convolution along three dimensions; missing ones are single, before the others.

    `weights`: (phases, groups, taps x channels, filters).
    """

    x: View
    y: View
    residual: View | None
    weights: View
    taps: Three
    strides: Three
    dilations: Three
    pads: Three
    transposed: bool
    epilogue: Epilogue


def emit_conv3d(ctx: LoweringContext, group: Group) -> None:
    """Add a Conv over one or three dimensions."""
    op = group.root_operation
    shape, result = ctx.network.shapes[op.inputs[0]], ctx.network.shapes[group.result]
    check_spatial_rank(op, shape)
    weights = _filters(ctx, op)
    window = read_window(op, op.integers("kernel_shape", weights.taps), shape, result)
    _emit(
        ctx,
        group,
        _Conv3d(
            *_operands(ctx, group),
            weights=weights.packed,
            taps=three(weights.taps, 1),
            strides=three(window.strides, 1),
            dilations=three(window.dilations, 1),
            pads=three(window.before, 0),
            transposed=False,
            epilogue=epilogue_of(ctx, group, op.input(2)),
        ),
    )


def emit_transposed_convolution(ctx: LoweringContext, group: Group) -> None:
    """Add a ConvTranspose: a convolution for each phase of its strides."""
    op = group.root_operation
    weights = constant_weights(ctx, op, 1)
    shape, result = ctx.network.shapes[op.inputs[0]], ctx.network.shapes[group.result]
    check_spatial_rank(op, shape)
    window = read_transposed_window(op, weights.shape[2:], shape, result)
    pads = three(window.before, 0)
    strides = three(window.strides, 1)
    dilated = _dilated(weights, three(window.dilations, 1))
    packed = _phases(dilated, op.integer("group", 1), strides, pads)
    _emit(
        ctx,
        group,
        _Conv3d(
            *_operands(ctx, group),
            weights=weight_matrix(
                ctx, packed.reshape(*packed.shape[:2], -1, packed.shape[-1]), ctx.dtype
            ),
            taps=three(packed.shape[2:5], 1),
            strides=strides,
            dilations=(-1, -1, -1),
            pads=pads,
            transposed=True,
            epilogue=epilogue_of(ctx, group, op.input(2)),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Filters:
    """Weights as (1, groups, taps x channels, filters of a group), and the taps."""

    packed: View
    taps: Shape


def _filters(ctx: LoweringContext, op: Operation) -> _Filters:
    """Return the weights of a Conv, packed now or by a kernel if they are made while running."""
    groups, name = op.integer("group", 1), op.inputs[1]
    if name in ctx.network.constants:
        weights = ctx.network.constants[name]
        # (group, filter, channel, taps) -> (group, taps, channel, filter)
        each = weights.reshape(groups, weights.shape[0] // groups, weights.shape[1], -1)
        packed = each.transpose(0, 3, 2, 1).reshape(1, groups, -1, each.shape[1])
        return _Filters(weight_matrix(ctx, packed, ctx.dtype), weights.shape[2:])
    view = ctx.read_float(name)
    moved = view.permuted((0, *range(2, len(view.shape)), 1))
    if not moved.is_row_major():
        moved = ctx.copy_view(moved, row_major(moved.shape), ctx.dtype)
    filters, depth = view.shape[0] // groups, prod(view.shape[1:])
    packed_view = replace(
        moved, shape=(1, groups, depth, filters), strides=(0, filters * depth, 1, depth)
    )
    return _Filters(packed_view, view.shape[2:])


def check_spatial_rank(op: Operation, shape: Shape) -> None:
    """Raise NotCoveredError unless (N, C, ...) has one to three dimensions more."""
    if not 3 <= len(shape) <= 5:
        raise NotCoveredError(
            f"node {op.name!r} ({op.kind}) has {len(shape) - 2} spatial dimensions; kernels take "
            "1 to 3"
        )


def _operands(ctx: LoweringContext, group: Group) -> tuple[View, View, View | None]:
    """Return the input, the result and the residual, channels-last."""
    op = group.root_operation
    x = channels_last_3d(ctx, op.inputs[0])
    shape = ctx.network.shapes[group.result]
    y = ctx.output_view(group.result, channels_last_strides_3d(shape))
    name = ctx.expression(op.outputs[0], group.after).operands[1:]
    return x, y, channels_last_3d(ctx, name[0]) if name else None


def channels_last_3d(ctx: LoweringContext, name: str) -> View:
    """Return a tensor stored channels-last; copies if needed."""
    view = ctx.read_float(name)
    if _is_channels_last(view):
        return view
    return ctx.copy_view(view, channels_last_strides_3d(view.shape), view.dtype)


def _is_channels_last(view: View) -> bool:
    """Whether channels lie side by side, and places one after the other."""
    sizes, steps = (view.shape[0], *view.shape[2:]), (view.strides[0], *view.strides[2:])
    wanted = [pitch_3d(view) * prod(sizes[at + 1 :]) for at in range(len(sizes))]
    dense = all(n == 1 or s == w for n, s, w in zip(sizes, steps, wanted, strict=True))
    return dense and (view.shape[1] == 1 or view.strides[1] == 1)


def pitch_3d(view: View) -> int:
    """Return the elements from one place to the next."""
    for at in (*reversed(range(2, len(view.shape))), 0):
        if view.shape[at] != 1:
            return view.strides[at]
    return view.shape[1]


def channels_last_strides_3d(shape: Shape) -> Shape:
    """Return the strides of a dense (N, C, ...) with channels fastest."""
    rest = range(2, len(shape))
    return like((len(shape) + 1, 0, *(len(shape) - at for at in rest)), shape)


def _emit(ctx: LoweringContext, group: Group, p: _Conv3d) -> None:
    phases, groups, depth, filters = p.weights.shape
    out = three(p.y.shape[2:], 1)
    steps = p.strides if p.transposed else (1, 1, 1)
    places = p.y.shape[0] * prod(ceil_div(n, step) for n, step in zip(out, steps, strict=True))
    weights = p.weights
    read = 0 if p.residual is None else p.residual.item_bytes
    product = GemmShape(
        rows=places,
        columns=filters,
        depth=depth,
        run=depth // prod(p.taps),
        item_bytes=p.x.item_bytes,
        stored_bytes=p.y.item_bytes + read,
        products=phases * groups,
    )

    def call(tile: Tile) -> KernelLaunch:
        blocks = ceil_div(places, tile.rows) * ceil_div(filters, tile.columns)
        return ctx.make_launch(
            "conv3d",
            (blocks, groups, phases),
            {
                "x": p.x,
                "weights": weights,
                "bias": p.epilogue.bias,
                "residual": p.residual,
                "y": p.y,
                "batch": p.x.shape[0],
            },
            {
                "SIZE": three(p.x.shape[2:], 1),
                "OUT": out,
                "CHANNELS": product.run,
                "FILTERS": filters,
                "X_STRIDES": (p.x.strides[0], *three(p.x.strides[2:], 0)),
                "W_PHASE": weights.strides[0],
                "W_GROUP": weights.strides[1],
                "W_PITCH": weights.strides[3],
                "Y_PITCH": pitch_3d(p.y),
                "R_PITCH": 0 if p.residual is None else pitch_3d(p.residual),
                "TAPS": p.taps,
                "STRIDE": p.strides,
                "DILATION": p.dilations,
                "PAD": p.pads,
                "TRANSPOSED": p.transposed,
                "EPILOGUE": p.epilogue.steps,
                **gemm_constants(ctx, tile, p.x.dtype),
            },
            writes=(p.y,),
            warps=tile.warps,
            stages=tile.stages,
        )

    ctx.add_op(group.nodes, *((call(tile),) for tile in gemm_tiles(product, ctx.gpu)))


def _dilated(weights: Array, dilations: Three) -> Array:
    """Return (C, F, taps...) as (C, F, depth, rows, columns) with zeros between the taps."""
    taps = weights.reshape(*weights.shape[:2], *three(weights.shape[2:], 1))
    sizes = [(n - 1) * d + 1 for n, d in zip(taps.shape[2:], dilations, strict=True)]
    wide = np.zeros((*taps.shape[:2], *sizes), weights.dtype)
    wide[:, :, :: dilations[0], :: dilations[1], :: dilations[2]] = taps
    return wide


def _phases(weights: Array, groups: int, strides: Three, pads: Three) -> Array:
    """Return (C, F / groups, taps...) as (phase, group, taps of a phase..., channel, filter).

    The taps of a phase are those of its remainder, (phase + pad) % stride; missing ones are 0.
    """
    channels, filters, *taps = weights.shape
    counts = [ceil_div(n, step) for n, step in zip(taps, strides, strict=True)]
    lacking = [c * s - n for c, s, n in zip(counts, strides, taps, strict=True)]
    padded = np.pad(weights, [(0, 0), (0, 0), *((0, n) for n in lacking)])
    grouped = padded.reshape(groups, channels // groups, filters, *padded.shape[2:])
    parts = []
    for phase in np.ndindex(*strides):
        first = [(own + pad) % step for own, pad, step in zip(phase, pads, strides, strict=True)]
        d, h, w = (slice(at, None, step) for at, step in zip(first, strides, strict=True))
        parts.append(grouped[:, :, :, d, h, w].transpose(0, 3, 4, 5, 1, 2))
    return np.stack(parts)
