"""Convolutions -> calls."""

from dataclasses import dataclass, replace
from math import prod

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.conv1x1_nchw import emit_conv1x1_nchw
from toolkit.gpu.emit.conv3d import emit_conv3d
from toolkit.gpu.emit.depthwise_int8 import int8x4_launches
from toolkit.gpu.emit.epilogue import (
    Epilogue,
    constant_weights,
    epilogue_of,
    gemm_constants,
    mma_warps_of,
    operand_strides,
    result_strides,
    weight_matrix,
)
from toolkit.gpu.emit.int8_gemm import int8_weights
from toolkit.gpu.emit.persistent_conv import persistent_conv_launches
from toolkit.gpu.emit.row_panel import gemm_tactics, persistent_gemm_tactics
from toolkit.gpu.emit.space_to_depth import CHANNELS as STEM_CHANNELS
from toolkit.gpu.emit.space_to_depth import is_stem, make_stem
from toolkit.gpu.emit.split_k import IDENTITY_EPILOGUE, split_k_partials, split_k_reduce_launch
from toolkit.gpu.emit.windows import read_window_2d, window_constants
from toolkit.gpu.ir.launch import KernelLaunch, Tactic
from toolkit.gpu.ir.network import Array
from toolkit.gpu.ir.view import View, channels_last
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.tiles import GemmShape, Tile, gemm_tiles, row_tile
from toolkit.gpu.shapes.sizes import ceil_div, fixed, opt
from toolkit.gpu.target import GpuTarget
from toolkit.graph.window import Window
from toolkit.plugins import Constant

# Rows that a block of a depthwise convolution makes at a time; of equally good ones the first.
_STRIPS = (4, 7, 2, 1)


@dataclass(frozen=True, slots=True)
class _Conv2d:
    """A convolution whose operands have their places; weights (F, C / groups, rows, columns)."""

    x: View
    x_pitch: int
    weights: Array
    groups: int
    window: Window
    y: View
    y_pitch: int
    residual: View | None
    r_pitch: int
    epilogue: Epilogue
    nodes: tuple[str, ...]


def emit_convolution(ctx: LoweringContext, group: Group) -> None:
    """Add a convolution with bias, residual and activation: one call."""
    op = group.root_operation
    made = op.inputs[1] not in ctx.network.constants
    if made or len(ctx.network.shapes[group.result]) != 4:
        emit_conv3d(ctx, group)
        return
    home = ctx.concat_slices.get(group.result)
    if home is not None and home.pixel_pitch() is None:
        emit_conv1x1_nchw(ctx, group, ctx.output_view(group.result))
        return
    weights = constant_weights(ctx, op, 1)
    integer = int8_weights(ctx, op, 0, weights.shape[0], prod(weights.shape[1:]))
    epilogue = epilogue_of(ctx, group, op.input(2), integer)
    shape, result = ctx.network.shapes[op.inputs[0]], ctx.network.shapes[group.result]
    window = read_window_2d(op, weights.shape[2:], shape, result)
    values = integer.values if integer else weights
    filters, channels = weights.shape[:2]
    depthwise = channels == 1 and op.integer("group", 1) == filters == shape[1]
    stored = integer is not None or ctx.read(op.inputs[0]).scale is None
    if stored and not depthwise and is_stem(weights, op.integer("group", 1), window, shape):
        stem = make_stem(ctx, op.inputs[0], values, window, result)
        values, window, x, x_pitch = stem.weights, stem.window, stem.x, STEM_CHANNELS
    else:
        x, x_pitch = ctx.read_nhwc(op.inputs[0], keep_int8=bool(integer))
    residual, r_pitch = None, 0
    if epilogue.residual is not None:
        residual, r_pitch = ctx.read_nhwc(epilogue.residual, keep_int8=True)
    y = ctx.output_view(group.result, channels_last(result))
    y_pitch = y.pixel_pitch()
    assert y_pitch is not None  # other homes and fresh tensors are channels-last
    picture = _Conv2d(
        x=x,
        x_pitch=x_pitch,
        weights=values,
        groups=op.integer("group", 1),
        window=window,
        y=y,
        y_pitch=y_pitch,
        residual=residual,
        r_pitch=r_pitch,
        epilogue=epilogue,
        nodes=group.nodes,
    )
    if depthwise:
        _depthwise(ctx, picture)
    else:
        _implicit(ctx, picture)


def _implicit(ctx: LoweringContext, p: _Conv2d) -> None:
    """Add a convolution as the product of matrices that it is, by each of its tiles."""
    # (filter, channel, row, column) -> (filter, row, column, channel)
    packed = p.weights.transpose(0, 2, 3, 1).reshape(p.weights.shape[0], -1)
    weights = weight_matrix(ctx, packed.T, p.x.dtype)
    product = _product(p, packed.shape[1], p.weights.shape[1])
    # Where a first convolution has one row of taps, its bordered picture has more pixels than y.
    if p.window.is_pointwise and p.groups == 1 and p.x.shape[2:] == p.y.shape[2:]:
        ctx.add_op(p.nodes, *gemm_tactics(ctx, product, *_as_product(p, weights, product)))
        return
    tactics: list[Tactic] = [(call,) for call in _resident(ctx, p)]
    tiles = gemm_tiles(product, ctx.gpu, split_k=True)
    tactics += [_tactic(ctx, p, weights, product, tile) for tile in tiles]
    if p.window.is_strided_pointwise and p.groups == 1:
        tactics += [(call,) for call in _strided(ctx, p, weights, product)]
    ctx.add_op(p.nodes, *tactics)


def _strided(
    ctx: LoweringContext, p: _Conv2d, weights: View, product: GemmShape
) -> tuple[KernelLaunch, ...]:
    """Return calls that compute a 1x1 convolution whose pixels lie apart."""
    operands, constants = _as_product(p, weights, product)
    height, width = p.x.shape[2:]
    picture = (
        p.y.shape[3],
        p.y.shape[2] * p.y.shape[3],
        p.window.strides[0] * width * p.x_pitch,
        height * width * p.x_pitch,
    )
    if not all(map(fixed, picture)):
        return ()
    apart: dict[str, Constant] = {**constants, "A_ROW": p.window.strides[1] * p.x_pitch}
    return persistent_gemm_tactics(ctx, product, operands, apart, picture)


def _resident(ctx: LoweringContext, p: _Conv2d) -> tuple[KernelLaunch, ...]:
    if p.groups > 1:
        return ()
    operands = {"x": p.x, **_epilogue_operands(p), "y": p.y, "batch": p.x.shape[0]}
    constants: dict[str, Constant] = {**_sizes(p), "EPILOGUE": p.epilogue.steps}
    return persistent_conv_launches(
        ctx, p.weights, p.window, operands=operands, constants=constants
    )


def _tactic(
    ctx: LoweringContext, p: _Conv2d, weights: View, product: GemmShape, tile: Tile
) -> Tactic:
    if tile.parts == 1:
        return (_convolution(ctx, p, weights, product, tile),)
    filters = p.weights.shape[0]
    sums = split_k_partials(ctx, p.y, p.x, (tile.parts, product.rows, filters))
    first = replace(sums, shape=p.y.shape, strides=channels_last(p.y.shape))
    plain = Epilogue(bias=None, scale=None, scalars=None, residual=None, steps=IDENTITY_EPILOGUE)
    partial = replace(p, y=first, y_pitch=filters, residual=None, r_pitch=0, epilogue=plain)
    constants: dict[str, Constant] = {
        "Y_PITCH": p.y_pitch,
        "R_PITCH": p.r_pitch,
        "EPILOGUE": p.epilogue.steps,
    }
    operands = {**_epilogue_operands(p), "y": p.y}
    return (
        _convolution(ctx, partial, weights, product, tile),
        split_k_reduce_launch(ctx, sums, product, operands, constants),
    )


def _convolution(
    ctx: LoweringContext, p: _Conv2d, weights: View, product: GemmShape, tile: Tile
) -> KernelLaunch:
    filters = p.weights.shape[0] // p.groups
    blocks = ceil_div(product.rows, tile.rows) * ceil_div(filters, tile.columns)
    return ctx.make_launch(
        "convolution",
        (blocks, p.groups, tile.parts),
        {
            "x": p.x,
            "weights": weights,
            **_epilogue_operands(p),
            "y": p.y,
            "batch": p.x.shape[0],
        },
        {
            **_sizes(p),
            "CHANNELS": p.weights.shape[1],
            "FILTERS": filters,
            "W_PITCH": weights.strides[1],
            **window_constants(p.window),
            "EPILOGUE": p.epilogue.steps,
            "SPLIT_K": tile.parts,
            "MMA_WARPS": mma_warps_of(ctx, p.x, p.y, tile),
            **gemm_constants(ctx, tile, p.x.dtype),
        },
        writes=(p.y,),
        warps=tile.warps,
        stages=tile.stages,
    )


def _as_product(
    p: _Conv2d, weights: View, product: GemmShape
) -> tuple[dict[str, View | int | None], dict[str, Constant]]:
    """Return a 1x1 convolution as a product: its rows are pixels, its columns filters."""
    filters, channels = p.weights.shape[:2]
    operands = {"a": p.x, "b": weights, **_epilogue_operands(p), "y": p.y, "rows": product.rows}
    constants: dict[str, Constant] = {
        "DEPTH": channels,
        "COLUMNS": filters,
        "INNER": 1,
        **operand_strides("A", p.x_pitch, 1),
        **operand_strides("B", *weights.strides),
        **result_strides("Y", p.y_pitch),
        **result_strides("R", p.r_pitch),
        "EPILOGUE": p.epilogue.steps,
    }
    return operands, constants


def _epilogue_operands(p: _Conv2d) -> dict[str, View | None]:
    return {
        "bias": p.epilogue.bias,
        "scale": p.epilogue.scale,
        "scalars": p.epilogue.scalars,
        "residual": p.residual,
    }


def _product(p: _Conv2d, depth: int, run: int) -> GemmShape:
    """Return the products of matrices that a convolution is: rows are pixels, columns filters."""
    read = 0 if p.residual is None else p.residual.item_bytes
    return GemmShape(
        rows=p.y.shape[0] * p.y.shape[2] * p.y.shape[3],
        columns=p.weights.shape[0] // p.groups,
        depth=depth,
        run=run,
        item_bytes=p.x.item_bytes,
        stored_bytes=p.y.item_bytes + read,
        products=p.groups,
    )


def _depthwise(ctx: LoweringContext, p: _Conv2d) -> None:
    operands = {"x": p.x, **_epilogue_operands(p), "y": p.y, "batch": p.x.shape[0]}
    constants: dict[str, Constant] = {**_sizes(p), "EPILOGUE": p.epilogue.steps}
    calls = int8x4_launches(ctx, p.weights, p.window, operands=operands, constants=constants)
    if calls:
        ctx.add_op(p.nodes, *((call,) for call in calls))
        return
    channels = p.weights.shape[0]
    weights = ctx.pack_constant(p.weights[:, 0].transpose(1, 2, 0), p.x.dtype)

    def call(rows: int) -> KernelLaunch:
        tile = row_tile(_strips(p, rows), channels)
        return ctx.make_launch(
            "depthwise",
            (ceil_div(_strips(p, rows), tile.rows), ceil_div(channels, tile.columns), 1),
            {**operands, "weights": weights},
            {
                **constants,
                "CHANNELS": channels,
                **window_constants(p.window),
                "ROWS": rows,
                "BLOCK_M": tile.rows,
                "BLOCK_N": tile.columns,
            },
            writes=(p.y,),
            warps=tile.warps,
            stages=tile.stages,
        )

    ctx.add_op(p.nodes, *((call(rows),) for rows in _rows_at_once(p, ctx.gpu)))


def _strips(p: _Conv2d, rows: int) -> int:
    """Return how many strips of `rows` pixels above each other the result has."""
    return p.y.shape[0] * ceil_div(p.y.shape[2], rows) * p.y.shape[3]


def _rows_at_once(p: _Conv2d, gpu: GpuTarget) -> tuple[int, ...]:
    """Return how many rows a block of a depthwise convolution makes, the best by estimate first.

    More rows read less, while there are blocks enough for the GPU and no row of a block is empty.
    """
    if p.window.kernel[0] * p.window.kernel[1] >= 50:
        return (1,)
    channels, height = p.weights.shape[0], opt(p.y.shape[2])

    def order(rows: int) -> tuple[bool, int, int]:
        strips = opt(_strips(p, rows))
        tile = row_tile(strips, channels)
        blocks = ceil_div(strips, tile.rows) * ceil_div(channels, tile.columns)
        return blocks < gpu.sm_count, -height % rows, _STRIPS.index(rows)

    return tuple(sorted(_STRIPS, key=order)[: len(_STRIPS) if gpu.exhaustive else 2])


def _sizes(p: _Conv2d) -> dict[str, Constant]:
    return {
        "HEIGHT": p.x.shape[2],
        "WIDTH": p.x.shape[3],
        "X_PITCH": p.x_pitch,
        "OUT_HEIGHT": p.y.shape[2],
        "OUT_WIDTH": p.y.shape[3],
        "Y_PITCH": p.y_pitch,
        "R_PITCH": p.r_pitch,
    }
