"""Lower Attention to the fused `attention` kernel."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.elementwise import broadcast, epilogue_ops
from toolkit.gpu.emit.epilogue import precision_of
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.view import Shape, View
from toolkit.gpu.passes.composites import DEEPEST_HEAD
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.tiles import Tile
from toolkit.gpu.shapes.sizes import ceil_div, fixed, opt, power_of_two
from toolkit.plugins import Constant

_MIN_BLOCK = 16  # the smallest side of a tile that tl.dot takes
# Tiles: queries, keys, warps, and the widest heads for which no register spills (Triton 3.9 for
# sm_87 and sm_90).
_TILES = ((128, 64, 8, 128), (64, 64, 4, 128), (128, 32, 4, 64), (64, 32, 4, 128))
# With sm_90's tensor cores, by times of ViT-S. The last is for 128 keys or more in few
# blocks, where a step by itself takes the longest.
_TILES_SM90 = ((128, 32, 4, 64), (64, 64, 4, 128), (64, 32, 4, 128), (128, 64, 8, 128))
_LONG_TILE = (64, 128, 4, 64)
_TILES_FP32 = ((64, 32, 8, 64), (32, 32, 4, 128))  # a product is three products of TF32 parts
_TILES_WITHOUT_MMA = ((32, 32, 4, 64), (16, 16, 4, 128))
_MAX_HEAD_IN_REGISTERS = 64  # columns of a head with which full and masked blocks do not spill
_MAX_STAGES = 3


@dataclass(frozen=True, slots=True)
class _Heads:
    """Operands as (batch, heads, rows, columns); the mask is broadcast to the scores' shape."""

    q: View
    k: View
    v: View
    y: View
    mask: View | None


def emit_attention(ctx: LoweringContext, group: Group) -> None:
    """Lower ONNX's Attention, or one that `toolkit.gpu.ir.patterns` matched.

    Operands of rank 3 are (batch, rows, heads x columns), or (batch, rows, columns) where no number
    of heads is given.
    """
    op = group.root_operation
    heads = _read_heads(ctx, group)
    depth = heads.q.shape[3]
    scale = op.number("scale", 1 / math.sqrt(depth))
    epilogue, scalars = epilogue_ops(ctx, group)
    constants: dict[str, Constant] = {
        "SCALE": scale,
        "SOFTCAP": op.number("softcap", 0.0),
        "CAUSAL": bool(op.integer("is_causal", 0)),
        "EPILOGUE": epilogue,
    }
    ctx.add_op(
        group.nodes,
        *((_launch(ctx, heads, tile, constants, scalars),) for tile in _tiles(heads, ctx)),
    )


def _read_heads(ctx: LoweringContext, group: Group) -> _Heads:
    op = group.root_operation
    queries = op.integer("q_num_heads", 1)
    counts = (queries, *(op.integer("kv_num_heads", queries),) * 2)
    floats = ctx.float_type(*op.inputs[:3])
    q, k, v = (
        _with_heads(ctx.read(name, "float", floats=floats), count)
        for name, count in zip(op.inputs[:3], counts, strict=True)
    )
    shape = ctx.network.shapes[group.result]
    strides = None
    if len(shape) == 4 and group.result not in ctx.network.outputs:
        strides = _rows_first(shape)
    y = _with_heads(ctx.output_view(group.result, strides), queries)
    mask = None
    if op.input(3):
        mask = broadcast(_read_mask(ctx, op), (*q.shape[:3], k.shape[2]))
    return _Heads(q, k, v, y, mask)


def _read_mask(ctx: LoweringContext, op: Operation) -> View:
    """Return the mask, dequantized if it is INT8.

    A mask of rank 3 is (heads, rows, columns), or (batch, rows, columns) where no number of heads
    is given.
    """
    mask = ctx.read(op.input(3), "real")
    per_batch = len(ctx.network.shapes[op.inputs[0]]) == 3 and "q_num_heads" not in op.attributes
    if not per_batch or len(mask.shape) != 3:
        return mask
    (batch, *shape), (batch_stride, *strides) = mask.shape, mask.strides
    return replace(mask, shape=(batch, 1, *shape), strides=(batch_stride, 0, *strides))


def _with_heads(view: View, count: int) -> View:
    """Return (batch, rows, heads x columns) as (batch, heads, rows, columns)."""
    if len(view.shape) == 4:
        return view
    (batch, rows, columns), (batch_stride, row, column) = view.shape, view.strides
    depth = columns // count
    return replace(
        view, shape=(batch, count, rows, depth), strides=(batch_stride, depth * column, row, column)
    )


def _rows_first(shape: Shape) -> Shape:
    """Strides of (batch, heads, rows, columns) with all heads of a row adjacent.

    The projection that follows then reads its rows without a copy.
    """
    _, heads, rows, columns = shape
    return (rows * heads * columns, columns, heads * columns, 1)


def _tiles(heads: _Heads, ctx: LoweringContext) -> tuple[Tile, ...]:
    """Return the tiles, rows of queries and columns of keys, the best by estimate first.

    That is one that fills the GPU, or else the last.
    """
    gpu, rows = ctx.gpu, opt(heads.q.shape[2])
    batch_heads = opt(heads.q.shape[0] * heads.q.shape[1])
    depth, value_depth = _padded(heads.q.shape[3]), _padded(heads.v.shape[3])
    fitting = [
        row
        for row in _tile_table(heads, ctx)
        if row[0] <= _padded(rows) and max(depth, value_depth) <= row[3]
    ]
    max_stages = _MAX_STAGES if gpu.copies_while_computing else 1
    tiles = []
    for queries, keys, warps, _ in fitting or [(_MIN_BLOCK, _MIN_BLOCK, 4, DEEPEST_HEAD)]:
        stage_bytes = (depth + value_depth) * (keys + queries) * heads.q.item_bytes
        stages = max(1, min(max_stages, gpu.shared_bytes // stage_bytes))
        tiles.append(Tile(queries, keys, depth, warps, stages))
    filling = [t for t in tiles if ceil_div(rows, t.rows) * batch_heads >= gpu.sm_count]
    best = filling[0] if filling else tiles[-1]
    return (best, *(tile for tile in tiles if tile != best))


def _tile_table(heads: _Heads, ctx: LoweringContext) -> tuple[tuple[int, int, int, int], ...]:
    if not ctx.gpu.has_matrix_units:
        return _TILES_WITHOUT_MMA
    if heads.q.item_bytes != 2:
        return _TILES_FP32
    if not ctx.gpu.has_wgmma:
        return _TILES
    many_keys = opt(heads.k.shape[2]) >= _LONG_TILE[1]
    return (*_TILES_SM90, _LONG_TILE) if many_keys else _TILES_SM90


def _launch(
    ctx: LoweringContext,
    heads: _Heads,
    tile: Tile,
    constants: Mapping[str, Constant],
    scalars: View | None,
) -> KernelLaunch:
    q, k, v, y, mask = heads.q, heads.k, heads.v, heads.y, heads.mask
    batch, count, queries, depth = q.shape
    full_keys, tail = 0, tile.columns
    if mask is None and not constants["CAUSAL"] and _uses_full_blocks(ctx, heads):
        full_keys, tail = _key_blocks(k.shape[2], tile.columns)
    return make_launch(
        "attention",
        (ceil_div(queries, tile.rows), batch * count, 1),
        {"q": q, "k": k, "v": v, "mask": mask, "y": y, "scalars": scalars},
        {
            "QUERIES": queries,
            "KEYS": k.shape[2],
            "DEPTH": depth,
            "VALUE_DEPTH": v.shape[3],
            "HEADS": count,
            "GROUP_SIZE": count // k.shape[1],
            "Q_STRIDES": q.strides,
            "K_STRIDES": k.strides,
            "V_STRIDES": v.strides,
            "MASK_STRIDES": mask.strides if mask else (0, 0, 0, 0),
            "Y_STRIDES": y.strides,
            "BOOL_MASK": mask is not None and mask.dtype == "bool",
            "FULL_KEYS": full_keys,
            "PRECISION": precision_of(ctx.gpu, q.dtype),
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
            "BLOCK_D": _padded(depth),
            "BLOCK_E": _padded(v.shape[3]),
            "BLOCK_TAIL": tail,
            **constants,
        },
        writes=(y,),
        warps=tile.warps,
        stages=tile.stages,
    )


def _uses_full_blocks(ctx: LoweringContext, heads: _Heads) -> bool:
    """True if the number of keys is fixed, and full and masked blocks together do not spill.

    They spilled up to 1 KB a thread in FP32, 184 bytes without tensor cores and 64 for heads of 128
    on sm_87 (Triton 3.9); the tensor cores of sm_90 read operands from shared memory.
    """
    widest = max(_padded(heads.q.shape[3]), _padded(heads.v.shape[3]))
    fits = ctx.gpu.has_matrix_units and widest <= _MAX_HEAD_IN_REGISTERS
    fits = fits or ctx.gpu.has_wgmma
    return fixed(heads.k.shape[2]) and heads.q.item_bytes == 2 and fits


def _key_blocks(keys: int, block: int) -> tuple[int, int]:
    """Return the number of keys in full blocks, and the size of the tail's block."""
    tail = keys % block
    return keys - tail, min(block, _padded(tail))


def _padded(size: int) -> int:
    return max(_MIN_BLOCK, power_of_two(size))
