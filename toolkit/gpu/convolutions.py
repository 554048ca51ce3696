"""Convolutions and products of matrices -> calls."""

from dataclasses import dataclass

import numpy as np

from toolkit.gpu.call import Constant
from toolkit.gpu.draft import Draft
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.expressions import Step, expression_of
from toolkit.gpu.fusion import Group
from toolkit.gpu.network import Array, Operation
from toolkit.gpu.tiles import Tile, product_tile, row_tile
from toolkit.gpu.view import View, channels_last
from toolkit.gpu.windows import Window, read_window


@dataclass(frozen=True, slots=True)
class _Ending:
    """What a kernel does with its sums: bias and residual (or None), and steps."""

    bias: View | None
    residual: str | None
    steps: tuple[Step, ...]


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
    ending: _Ending
    nodes: tuple[str, ...]


def emit_convolution(draft: Draft, group: Group) -> None:
    """Add a convolution with bias, residual and activation: one call."""
    op = _root(group)
    weights = _weights(draft, op, 1)
    ending = _ending(draft, group, op.input(2))
    shape, result = draft.network.shapes[op.inputs[0]], draft.network.shapes[group.result]
    window = read_window(op, weights.shape[2:], shape, result)
    x, x_pitch = draft.pixels(op.inputs[0])
    residual, r_pitch = (None, 0) if ending.residual is None else draft.pixels(ending.residual)
    y = draft.make(group.result, channels_last(result))
    y_pitch = y.pixel_pitch()
    assert y_pitch is not None  # homes and fresh tensors are channels-last
    picture = _Picture(
        x=x,
        x_pitch=x_pitch,
        weights=weights,
        groups=op.integer("group", 1),
        window=window,
        y=y,
        y_pitch=y_pitch,
        residual=residual,
        r_pitch=r_pitch,
        ending=ending,
        nodes=group.nodes,
    )
    filters, channels = weights.shape[:2]
    if channels == 1 and picture.groups == filters == shape[1]:
        _depthwise(draft, picture)
    elif window.is_point and picture.groups == 1:
        _pointwise(draft, picture)
    else:
        _implicit(draft, picture)


def _implicit(draft: Draft, p: _Picture) -> None:
    filters, channels = p.weights.shape[0] // p.groups, p.weights.shape[1]
    taps = p.window.taps[0] * p.window.taps[1]
    pixels = p.y.shape[0] * p.y.shape[2] * p.y.shape[3]
    tile = product_tile(pixels, filters, taps * channels, draft.item_bytes, draft.gpu)
    # (group, filter, channel, row, column) -> (group, row, column, channel, filter)
    packed = p.weights.reshape(p.groups, filters, channels, *p.window.taps).transpose(0, 3, 4, 2, 1)
    draft.call(
        "convolution",
        (_blocks(pixels, tile.rows) * _blocks(filters, tile.columns), p.groups, 1),
        {
            "x": p.x,
            "weights": draft.constant(packed, draft.dtype),
            "bias": p.ending.bias,
            "residual": p.residual,
            "y": p.y,
            "batch": p.x.shape[0],
        },
        {
            **_sizes(p),
            "CHANNELS": channels,
            "FILTERS": filters,
            **p.window.constants(),
            "STEPS": p.ending.steps,
            **_product_constants(draft, tile),
        },
        writes=p.y,
        nodes=p.nodes,
        warps=tile.warps,
        stages=tile.stages,
    )


def _depthwise(draft: Draft, p: _Picture) -> None:
    channels = p.weights.shape[0]
    pixels = p.y.shape[0] * p.y.shape[2] * p.y.shape[3]
    tile = row_tile(pixels, channels)
    draft.call(
        "depthwise",
        (_blocks(pixels, tile.rows), _blocks(channels, tile.columns), 1),
        {
            "x": p.x,
            "weights": draft.constant(p.weights[:, 0].transpose(1, 2, 0), draft.dtype),
            "bias": p.ending.bias,
            "residual": p.residual,
            "y": p.y,
            "batch": p.x.shape[0],
        },
        {
            **_sizes(p),
            "CHANNELS": channels,
            **p.window.constants(),
            "STEPS": p.ending.steps,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
        },
        writes=p.y,
        nodes=p.nodes,
        warps=tile.warps,
        stages=tile.stages,
    )


def _pointwise(draft: Draft, p: _Picture) -> None:
    """A 1x1 convolution is a product: its rows are pixels, its columns filters."""
    filters, channels = p.weights.shape[:2]
    rows = p.y.shape[0] * p.y.shape[2] * p.y.shape[3]
    packed = draft.constant(p.weights.reshape(filters, channels).T, draft.dtype)
    tile = product_tile(rows, filters, channels, draft.item_bytes, draft.gpu)
    draft.call(
        "matmul",
        (_blocks(rows, tile.rows) * _blocks(filters, tile.columns), 1, 1),
        {
            "a": p.x,
            "b": packed,
            "bias": p.ending.bias,
            "residual": p.residual,
            "y": p.y,
            "rows": rows,
        },
        {
            "DEPTH": channels,
            "COLUMNS": filters,
            **_strides("A", 0, p.x_pitch, 1),
            **_strides("B", 0, filters, 1),
            "Y_BATCH": 0,
            "Y_PITCH": p.y_pitch,
            "R_PITCH": p.r_pitch,
            "STEPS": p.ending.steps,
            **_product_constants(draft, tile),
        },
        writes=p.y,
        nodes=p.nodes,
        warps=tile.warps,
        stages=tile.stages,
    )


def emit_gemm(draft: Draft, group: Group) -> None:
    """Add a Gemm: alpha and beta are in the weights already, B and C are constant."""
    op = _root(group)
    if op.number("alpha", 1.0) != 1.0 or (op.input(2) and op.number("beta", 1.0) != 1.0):
        raise NotCoveredError(f"node {op.name!r} (Gemm) has factors; kernels take 1.0")
    weights = _weights(draft, op, 1)
    right = draft.constant(weights.T if op.integer("transB", 0) else weights, draft.dtype)
    left = draft.read(op.inputs[0])
    if left.dtype != draft.dtype:
        left = draft.rows(op.inputs[0])
    left = left.permuted((1, 0)) if op.integer("transA", 0) else left
    _matmul(draft, group, left, right, _ending(draft, group, op.input(2)))


def emit_matmul(draft: Draft, group: Group) -> None:
    """Add a MatMul, of two tensors or of a tensor and a constant."""
    op = _root(group)
    left, right = (_stored(draft, name) for name in op.inputs)
    if len(left.shape) < 2 or len(right.shape) < 2:
        raise NotCoveredError(f"node {op.name!r} (MatMul) has a vector; kernels take matrices")
    if len(right.shape) == 2 and len(left.shape) > 2:
        left = _as_matrix(draft, left)
    elif len(left.shape) > 2:
        if left.shape[:-2] != right.shape[:-2]:
            raise NotCoveredError(
                f"node {op.name!r} (MatMul) repeats {list(right.shape)} along {list(left.shape)}; "
                "kernels take equal batches"
            )
        left, right = _as_batch(draft, left), _as_batch(draft, right)
    _matmul(draft, group, left, right, _ending(draft, group, ""))


def _matmul(draft: Draft, group: Group, left: View, right: View, ending: _Ending) -> None:
    """Add the product of two views of rank 2, or of two of rank 3."""
    products = left.shape[0] if len(left.shape) == 3 else 1
    if products > 1 and ending.residual is not None:
        raise NotCoveredError(
            f"node {group.nodes[0]!r} ends {products} products in a residual; kernels take 1"
        )
    (rows, depth), columns = left.shape[-2:], right.shape[-1]
    residual = None if ending.residual is None else draft.rows(ending.residual)
    y = draft.make(group.result)
    tile = product_tile(rows, columns, depth, draft.item_bytes, draft.gpu)
    draft.call(
        "matmul",
        (_blocks(rows, tile.rows) * _blocks(columns, tile.columns), products, 1),
        {
            "a": left,
            "b": right,
            "bias": ending.bias,
            "residual": residual,
            "y": y,
            "rows": rows,
        },
        {
            "DEPTH": depth,
            "COLUMNS": columns,
            **_strides("A", *_three(left)),
            **_strides("B", *_three(right)),
            "Y_BATCH": rows * columns,
            "Y_PITCH": columns,
            "R_PITCH": columns,
            "STEPS": ending.steps,
            **_product_constants(draft, tile),
        },
        writes=y,
        nodes=group.nodes,
        warps=tile.warps,
        stages=tile.stages,
    )


def _stored(draft: Draft, name: str) -> View:
    """Return a view in the type that products are made in."""
    view = draft.read(name)
    return view if view.dtype == draft.dtype else draft.rows(name)


def _as_matrix(draft: Draft, view: View) -> View:
    """Join all dimensions but the last; copies if they do not lie in a row."""
    shape = (int(np.prod(view.shape[:-1])), view.shape[-1])
    return _dense(draft, view).reshaped(shape) or view


def _as_batch(draft: Draft, view: View) -> View:
    """Join all dimensions but the last two; a single batch dimension keeps its strides."""
    if len(view.shape) == 3:
        return view
    shape = (int(np.prod(view.shape[:-2])), *view.shape[-2:])
    return _dense(draft, view).reshaped(shape) or view


def _dense(draft: Draft, view: View) -> View:
    if view.is_row_major():
        return view
    return draft.copy(view, tuple(np.cumprod((1, *view.shape[:0:-1]))[::-1].tolist()), view.dtype)


def _root(group: Group) -> Operation:
    assert group.root is not None
    return group.root


def _weights(draft: Draft, op: Operation, at: int) -> Array:
    name = op.input(at)
    if name not in draft.network.constants:
        raise NotCoveredError(
            f"node {op.name!r} ({op.kind}) has weights that are not constant ({name!r})"
        )
    return draft.network.constants[name]


def _ending(draft: Draft, group: Group, bias: str) -> _Ending:
    """Read what follows the product; a bias is constant and has a number for each column."""
    op = _root(group)
    packed = None
    if bias:
        values = _weights(draft, op, 2)
        columns = draft.network.shapes[op.outputs[0]][1]
        if values.size not in (1, columns) or (values.size > 1 and values.shape[-1] != columns):
            raise NotCoveredError(
                f"node {op.name!r} ({op.kind}) adds {list(values.shape)}; kernels take one number "
                f"for each of {columns} columns"
            )
        packed = draft.constant(np.broadcast_to(values.reshape(-1), (columns,)), "float32")
    expression = expression_of(op.outputs[0], group.after, draft.network.constants)
    residual = expression.operands[1] if len(expression.operands) > 1 else None
    return _Ending(packed, residual, expression.steps)


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


def _product_constants(draft: Draft, tile: Tile) -> dict[str, Constant]:
    half = draft.dtype == "float16"
    return {
        "PRECISION": "ieee" if half else draft.gpu.fp32_precision,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
    }


def _strides(operand: str, batch: int, row: int, column: int) -> dict[str, Constant]:
    return {f"{operand}_BATCH": batch, f"{operand}_ROW": row, f"{operand}_COLUMN": column}


def _three(view: View) -> tuple[int, int, int]:
    """Return the strides of products, rows and columns."""
    batch = view.strides[0] if len(view.shape) == 3 else 0
    return batch, view.strides[-2], view.strides[-1]


def _blocks(size: int, block: int) -> int:
    return -(-size // block)
