"""Attention -> calls."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.elementwise import broadcast, steps_after
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.view import Shape, View
from toolkit.gpu.passes.composites import DEEPEST_HEAD
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.shapes.sizes import ceil_div, fixed, opt, power_of_two
from toolkit.plugins import Constant

_LEAST = 16  # the smallest block side that a product of matrices takes
# Blocks of queries x keys, the warps that compute one, and the widest heads for which nothing
# spills (Triton 3.9 for sm_87 and sm_90). Large ones read keys less often.
_TILES = ((128, 64, 8, 128), (64, 64, 4, 128), (128, 32, 4, 64), (64, 32, 4, 128))
# With sm_90's tensor cores, by times of ViT-S on an H200: at batch 128 the first took 45.8 us, the
# fourth 72.9. The last is for 128 keys or more in few blocks, where a step by itself takes the
# longest: 4.6 us at batch 1, 6.1 with 64 keys and 8.6 with 32.
_TILES_SM90 = ((128, 32, 4, 64), (64, 64, 4, 128), (64, 32, 4, 128), (128, 64, 8, 128))
_LONG_TILE = (64, 128, 4, 64)
_TILES_FP32 = ((64, 32, 8, 64), (32, 32, 4, 128))  # each product is three, with parts of operands
_WIDEST_IN_REGISTERS = 64
_SMALL_TILES = ((32, 32, 4, 64), (16, 16, 4, 128))  # where a thread multiplies numbers itself


@dataclass(frozen=True, slots=True)
class _Heads:
    """Operands as (batch, heads, rows, columns); the mask repeated to the weights' shape."""

    q: View
    k: View
    v: View
    y: View
    mask: View | None


def emit_attention(ctx: LoweringContext, group: Group) -> None:
    """Add ONNX's Attention, or one that `toolkit.gpu.ir.patterns` found.

    Operands of rank 3 are (batch, rows, heads x columns), or (batch, rows, columns) where no number
    of heads is given.
    """
    op = group.root_operation
    heads = _read_heads(ctx, group)
    depth = heads.q.shape[3]
    scale = op.number("scale", 1 / math.sqrt(depth))
    steps, numbers = steps_after(ctx, group)
    constants: dict[str, Constant] = {
        "SCALE": scale,
        "CAP": op.number("softcap", 0.0),
        "CAUSAL": bool(op.integer("is_causal", 0)),
        "EPILOGUE": steps,
    }
    ctx.add(
        group.nodes,
        *((_call(ctx, heads, tile, constants, numbers),) for tile in _tiles(heads, ctx)),
    )


def _read_heads(ctx: LoweringContext, group: Group) -> _Heads:
    op = group.root_operation
    queries = op.integer("q_num_heads", 1)
    counts = (queries, *(op.integer("kv_num_heads", queries),) * 2)
    q, k, v = (
        _with_heads(ctx.read_float(name), count)
        for name, count in zip(op.inputs[:3], counts, strict=True)
    )
    shape = ctx.network.shapes[group.result]
    strides = None
    if len(shape) == 4 and group.result not in ctx.network.outputs:
        strides = _rows_first(shape)
    y = _with_heads(ctx.make(group.result, strides), queries)
    mask = None
    if op.input(3):
        mask = broadcast(_read_mask(ctx, op), (*q.shape[:3], k.shape[2]))
    return _Heads(q, k, v, y, mask)


def _read_mask(ctx: LoweringContext, op: Operation) -> View:
    """Return the mask, the real numbers of one that lies as INT8.

    One of rank 3 is (heads, rows, columns), but (batch, rows, columns) where no heads are given.
    """
    name = op.input(3)
    mask = ctx.read(name)
    if mask.scale is not None:
        mask = ctx.read_float(name)
    plain = len(ctx.network.shapes[op.inputs[0]]) == 3 and "q_num_heads" not in op.attributes
    if not plain or len(mask.shape) != 3:
        return mask
    (batch, *sizes), (over, *steps) = mask.shape, mask.strides
    return replace(mask, shape=(batch, 1, *sizes), strides=(over, 0, *steps))


def _with_heads(view: View, count: int) -> View:
    """Return (batch, rows, heads x columns) as (batch, heads, rows, columns)."""
    if len(view.shape) == 4:
        return view
    (batch, rows, columns), (over, row, column) = view.shape, view.strides
    each = columns // count
    return replace(
        view, shape=(batch, count, rows, each), strides=(over, each * column, row, column)
    )


def _rows_first(shape: Shape) -> Shape:
    """Strides of (batch, heads, rows, columns) with all heads of a row side by side.

    So the projection that follows reads its rows without a copy.
    """
    _, heads, rows, columns = shape
    return (rows * heads * columns, columns, heads * columns, 1)


@dataclass(frozen=True, slots=True)
class _Tile:
    """A block of `queries` x `keys`."""

    queries: int
    keys: int
    warps: int
    stages: int


def _tiles(heads: _Heads, ctx: LoweringContext) -> tuple[_Tile, ...]:
    """Choose blocks: first those that fill the GPU, or where none does the last."""
    gpu, rows = ctx.gpu, opt(heads.q.shape[2])
    work = opt(heads.q.shape[0] * heads.q.shape[1])
    sizes: tuple[tuple[int, int, int, int], ...] = _TILES_FP32
    if ctx.item_bytes == 2:
        sizes = _TILES_SM90 if gpu.has_wgmma else _TILES
    if sizes is _TILES_SM90 and opt(heads.k.shape[2]) >= _LONG_TILE[1]:
        sizes = (*sizes, _LONG_TILE)
    sizes = sizes if gpu.has_matrix_units else _SMALL_TILES
    sides = max(_LEAST, power_of_two(rows))
    widths = _padded(heads.q.shape[3]), _padded(heads.v.shape[3])
    fitting = [one for one in sizes if one[0] <= sides and max(widths) <= one[3]]
    depth = sum(widths)
    found = []
    for queries, keys, warps, _ in fitting or [(_LEAST, _LEAST, 4, DEEPEST_HEAD)]:
        stages = gpu.shared_bytes // (depth * (keys + queries) * ctx.item_bytes)
        most = 3 if gpu.copies_while_computing else 1
        found.append(_Tile(queries, keys, warps, max(1, min(most, stages))))
    filling = [t for t in found if ceil_div(rows, t.queries) * work >= gpu.sm_count]
    best = filling[0] if filling else found[-1]
    return (best, *(tile for tile in found if tile != best))


def _call(
    ctx: LoweringContext,
    heads: _Heads,
    tile: _Tile,
    constants: Mapping[str, Constant],
    numbers: View | None,
) -> KernelLaunch:
    q, k, v, y, mask = heads.q, heads.k, heads.v, heads.y, heads.mask
    batch, count, queries, depth = q.shape
    whole, last = 0, tile.keys
    if mask is None and not constants["CAUSAL"] and _knows_whole_blocks(ctx, heads):
        whole, last = _key_blocks(k.shape[2], tile.keys)
    return ctx.make_launch(
        "attention",
        (ceil_div(queries, tile.queries), batch * count, 1),
        {"q": q, "k": k, "v": v, "mask": mask, "y": y, "scalars": numbers},
        {
            "QUERIES": queries,
            "KEYS": k.shape[2],
            "DEPTH": depth,
            "VALUES": v.shape[3],
            "HEADS": count,
            "SHARING": count // k.shape[1],
            "Q_STRIDES": q.strides,
            "K_STRIDES": k.strides,
            "V_STRIDES": v.strides,
            "MASK_STRIDES": mask.strides if mask else (0, 0, 0, 0),
            "Y_STRIDES": y.strides,
            "CHOOSES": mask is not None and mask.dtype == "bool",
            "WHOLE": whole,
            "PRECISION": "ieee" if ctx.dtype == "float16" else ctx.gpu.fp32_precision,
            "BLOCK_M": tile.queries,
            "BLOCK_N": tile.keys,
            "BLOCK_D": _padded(depth),
            "BLOCK_E": _padded(v.shape[3]),
            "BLOCK_LAST": last,
            **constants,
        },
        writes=(y,),
        warps=tile.warps,
        stages=tile.stages,
    )


def _knows_whole_blocks(ctx: LoweringContext, heads: _Heads) -> bool:
    """Whether keys are a fixed number, and two kinds of blocks leave enough registers.

    They took up to 1 KB of local memory a thread more in FP32, 184 bytes without tensor cores and
    64 for heads of 128 on sm_87 (Triton 3.9); those of sm_90 read operands from shared memory.
    """
    widest = max(_padded(heads.q.shape[3]), _padded(heads.v.shape[3]))
    fits = ctx.gpu.has_matrix_units and widest <= _WIDEST_IN_REGISTERS
    fits = fits or ctx.gpu.has_wgmma
    return fixed(heads.k.shape[2]) and ctx.item_bytes == 2 and fits


def _key_blocks(keys: int, block: int) -> tuple[int, int]:
    """Return how many keys are in blocks without an empty place, and the width of those after."""
    left = keys % block
    return keys - left, min(block, _padded(left))


def _padded(size: int) -> int:
    return max(_LEAST, power_of_two(size))
