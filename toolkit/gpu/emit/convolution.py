"""Convolutions -> calls."""

from dataclasses import dataclass, replace
from math import prod

from toolkit.gpu.emit.context import Draft
from toolkit.gpu.emit.conv1x1_nchw import emit_planes
from toolkit.gpu.emit.conv3d import emit_volume_convolution
from toolkit.gpu.emit.depthwise_int8 import word_calls
from toolkit.gpu.emit.epilogue import (
    Ending,
    constant_weights,
    ending_of,
    lanes_of,
    operand_strides,
    product_constants,
    result_strides,
    weight_matrix,
)
from toolkit.gpu.emit.int8_gemm import integer_weights
from toolkit.gpu.emit.persistent_conv import resident_calls
from toolkit.gpu.emit.row_panel import kept_products, product_tactics
from toolkit.gpu.emit.space_to_depth import CHANNELS as STEM_CHANNELS
from toolkit.gpu.emit.space_to_depth import is_stem, make_stem
from toolkit.gpu.emit.split_k import PLAIN_STEPS, adding_call, sums_in_parts
from toolkit.gpu.emit.windows import Window, read_window
from toolkit.gpu.ir.launch import Call, Tactic
from toolkit.gpu.ir.network import Array
from toolkit.gpu.ir.view import View, channels_last
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.tiles import Product, Tile, product_tiles, row_tile
from toolkit.gpu.shapes.sizes import ceil_div, fixed, opt
from toolkit.gpu.target import GpuTarget
from toolkit.plugins import Constant

# Rows that a block of a depthwise convolution makes at a time; of equally good ones the first.
_STRIPS = (4, 7, 2, 1)


@dataclass(frozen=True, slots=True)
class _Picture:
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
    ending: Ending
    nodes: tuple[str, ...]


def emit_convolution(draft: Draft, group: Group) -> None:
    """Add a convolution with bias, residual and activation: one call."""
    op = group.root_operation
    made = op.inputs[1] not in draft.network.constants
    if made or len(draft.network.shapes[group.result]) != 4:
        emit_volume_convolution(draft, group)
        return
    home = draft.homes.get(group.result)
    if home is not None and home.pixel_pitch() is None:
        emit_planes(draft, group, draft.make(group.result))
        return
    weights = constant_weights(draft, op, 1)
    integer = integer_weights(draft, op, 0, weights.shape[0], prod(weights.shape[1:]))
    ending = ending_of(draft, group, op.input(2), integer)
    shape, result = draft.network.shapes[op.inputs[0]], draft.network.shapes[group.result]
    window = read_window(op, weights.shape[2:], shape, result)
    values = integer.values if integer else weights
    filters, channels = weights.shape[:2]
    depthwise = channels == 1 and op.integer("group", 1) == filters == shape[1]
    stored = integer is not None or draft.read(op.inputs[0]).scale is None
    if stored and not depthwise and is_stem(weights, op.integer("group", 1), window, shape):
        stem = make_stem(draft, op.inputs[0], values, window, result)
        values, window, x, x_pitch = stem.weights, stem.window, stem.x, STEM_CHANNELS
    else:
        x, x_pitch = (draft.stored_pixels if integer else draft.pixels)(op.inputs[0])
    residual, r_pitch = None, 0
    if ending.residual is not None:
        residual, r_pitch = draft.stored_pixels(ending.residual)
    y = draft.make(group.result, channels_last(result))
    y_pitch = y.pixel_pitch()
    assert y_pitch is not None  # other homes and fresh tensors are channels-last
    picture = _Picture(
        x=x,
        x_pitch=x_pitch,
        weights=values,
        groups=op.integer("group", 1),
        window=window,
        y=y,
        y_pitch=y_pitch,
        residual=residual,
        r_pitch=r_pitch,
        ending=ending,
        nodes=group.nodes,
    )
    if depthwise:
        _depthwise(draft, picture)
    else:
        _implicit(draft, picture)


def _implicit(draft: Draft, p: _Picture) -> None:
    """Add a convolution as the product of matrices that it is, by each of its tiles."""
    # (filter, channel, row, column) -> (filter, row, column, channel)
    packed = p.weights.transpose(0, 2, 3, 1).reshape(p.weights.shape[0], -1)
    weights = weight_matrix(draft, packed.T, p.x.dtype)
    product = _product(p, packed.shape[1], p.weights.shape[1])
    # Where a first convolution has one row of taps, its bordered picture has more pixels than y.
    if p.window.is_point and p.groups == 1 and p.x.shape[2:] == p.y.shape[2:]:
        draft.add(p.nodes, *product_tactics(draft, product, *_as_product(p, weights, product)))
        return
    tactics: list[Tactic] = [(call,) for call in _resident(draft, p)]
    tiles = product_tiles(product, draft.gpu, in_parts=True)
    tactics += [_tactic(draft, p, weights, product, tile) for tile in tiles]
    if p.window.steps_over_points and p.groups == 1:
        tactics += [(call,) for call in _strided(draft, p, weights, product)]
    draft.add(p.nodes, *tactics)


def _strided(draft: Draft, p: _Picture, weights: View, product: Product) -> tuple[Call, ...]:
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
    return kept_products(draft, product, operands, apart, picture)


def _resident(draft: Draft, p: _Picture) -> tuple[Call, ...]:
    if p.groups > 1:
        return ()
    operands = {"x": p.x, **_ending_operands(p), "y": p.y, "batch": p.x.shape[0]}
    constants: dict[str, Constant] = {**_sizes(p), "STEPS": p.ending.steps}
    return resident_calls(draft, p.weights, p.window, operands=operands, constants=constants)


def _tactic(draft: Draft, p: _Picture, weights: View, product: Product, tile: Tile) -> Tactic:
    if tile.parts == 1:
        return (_convolution(draft, p, weights, product, tile),)
    filters = p.weights.shape[0]
    sums = sums_in_parts(draft, p.y, p.x, (tile.parts, product.rows, filters))
    first = replace(sums, shape=p.y.shape, strides=channels_last(p.y.shape))
    plain = Ending(bias=None, scale=None, numbers=None, residual=None, steps=PLAIN_STEPS)
    partial = replace(p, y=first, y_pitch=filters, residual=None, r_pitch=0, ending=plain)
    constants: dict[str, Constant] = {
        "Y_PITCH": p.y_pitch,
        "R_PITCH": p.r_pitch,
        "STEPS": p.ending.steps,
    }
    operands = {**_ending_operands(p), "y": p.y}
    return (
        _convolution(draft, partial, weights, product, tile),
        adding_call(draft, sums, product, operands, constants),
    )


def _convolution(draft: Draft, p: _Picture, weights: View, product: Product, tile: Tile) -> Call:
    filters = p.weights.shape[0] // p.groups
    blocks = ceil_div(product.rows, tile.rows) * ceil_div(filters, tile.columns)
    return draft.make_call(
        "convolution",
        (blocks, p.groups, tile.parts),
        {
            "x": p.x,
            "weights": weights,
            **_ending_operands(p),
            "y": p.y,
            "batch": p.x.shape[0],
        },
        {
            **_sizes(p),
            "CHANNELS": p.weights.shape[1],
            "FILTERS": filters,
            "W_PITCH": weights.strides[1],
            **p.window.constants(),
            "STEPS": p.ending.steps,
            "PARTS": tile.parts,
            "LANES": lanes_of(draft, p.x, p.y, tile),
            **product_constants(draft, tile, p.x.dtype),
        },
        writes=(p.y,),
        warps=tile.warps,
        stages=tile.stages,
    )


def _as_product(
    p: _Picture, weights: View, product: Product
) -> tuple[dict[str, View | int | None], dict[str, Constant]]:
    """Return a 1x1 convolution as a product: its rows are pixels, its columns filters."""
    filters, channels = p.weights.shape[:2]
    operands = {"a": p.x, "b": weights, **_ending_operands(p), "y": p.y, "rows": product.rows}
    constants: dict[str, Constant] = {
        "DEPTH": channels,
        "COLUMNS": filters,
        "INNER": 1,
        **operand_strides("A", p.x_pitch, 1),
        **operand_strides("B", *weights.strides),
        **result_strides("Y", p.y_pitch),
        **result_strides("R", p.r_pitch),
        "STEPS": p.ending.steps,
    }
    return operands, constants


def _ending_operands(p: _Picture) -> dict[str, View | None]:
    return {
        "bias": p.ending.bias,
        "scale": p.ending.scale,
        "numbers": p.ending.numbers,
        "residual": p.residual,
    }


def _product(p: _Picture, depth: int, run: int) -> Product:
    """Return the products of matrices that a convolution is: rows are pixels, columns filters."""
    read = 0 if p.residual is None else p.residual.item_bytes
    return Product(
        rows=p.y.shape[0] * p.y.shape[2] * p.y.shape[3],
        columns=p.weights.shape[0] // p.groups,
        depth=depth,
        run=run,
        item_bytes=p.x.item_bytes,
        stored_bytes=p.y.item_bytes + read,
        products=p.groups,
    )


def _depthwise(draft: Draft, p: _Picture) -> None:
    operands = {"x": p.x, **_ending_operands(p), "y": p.y, "batch": p.x.shape[0]}
    constants: dict[str, Constant] = {**_sizes(p), "STEPS": p.ending.steps}
    calls = word_calls(draft, p.weights, p.window, operands=operands, constants=constants)
    if calls:
        draft.add(p.nodes, *((call,) for call in calls))
        return
    channels = p.weights.shape[0]
    weights = draft.constant(p.weights[:, 0].transpose(1, 2, 0), p.x.dtype)

    def call(rows: int) -> Call:
        tile = row_tile(_strips(p, rows), channels)
        return draft.make_call(
            "depthwise",
            (ceil_div(_strips(p, rows), tile.rows), ceil_div(channels, tile.columns), 1),
            {**operands, "weights": weights},
            {
                **constants,
                "CHANNELS": channels,
                **p.window.constants(),
                "ROWS": rows,
                "BLOCK_M": tile.rows,
                "BLOCK_N": tile.columns,
            },
            writes=(p.y,),
            warps=tile.warps,
            stages=tile.stages,
        )

    draft.add(p.nodes, *((call(rows),) for rows in _rows_at_once(p, draft.gpu)))


def _strips(p: _Picture, rows: int) -> int:
    """Return how many strips of `rows` pixels above each other the result has."""
    return p.y.shape[0] * ceil_div(p.y.shape[2], rows) * p.y.shape[3]


def _rows_at_once(p: _Picture, gpu: GpuTarget) -> tuple[int, ...]:
    """Return how many rows a block of a depthwise convolution makes, the best by estimate first.

    More rows read less, while there are blocks enough for the GPU and no row of a block is empty.
    """
    if p.window.taps[0] * p.window.taps[1] >= 50:
        return (1,)
    channels, height = p.weights.shape[0], opt(p.y.shape[2])

    def order(rows: int) -> tuple[bool, int, int]:
        strips = opt(_strips(p, rows))
        tile = row_tile(strips, channels)
        blocks = ceil_div(strips, tile.rows) * ceil_div(channels, tile.columns)
        return blocks < gpu.sm_count, -height % rows, _STRIPS.index(rows)

    return tuple(sorted(_STRIPS, key=order)[: len(_STRIPS) if gpu.exhaustive else 2])


def _sizes(p: _Picture) -> dict[str, Constant]:
    return {
        "HEIGHT": p.x.shape[2],
        "WIDTH": p.x.shape[3],
        "X_PITCH": p.x_pitch,
        "OUT_HEIGHT": p.y.shape[2],
        "OUT_WIDTH": p.y.shape[3],
        "Y_PITCH": p.y_pitch,
        "R_PITCH": p.r_pitch,
    }
