"""Pooling, resizing, element-wise work and softmax -> calls."""

from dataclasses import replace

import numpy as np

from toolkit.gpu.draft import Draft
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.expressions import expression_of
from toolkit.gpu.fusion import Group
from toolkit.gpu.network import Operation
from toolkit.gpu.tiles import row_tile
from toolkit.gpu.view import Shape, View, channels_last, like
from toolkit.gpu.windows import read_window

# Coordinates and rounding with which pixel i of the result comes from floor(i / factor).
_WHOLE_PIXELS = {("asymmetric", "floor"), ("half_pixel", "round")}
_LONGEST_ROW = 16384  # elements that one block of softmax holds


def emit_pool(draft: Draft, group: Group) -> None:
    """Add a MaxPool or AveragePool."""
    op = _root(group)
    if len(op.outputs) > 1:
        raise NotCoveredError(f"node {op.name!r} ({op.kind}) returns indices; kernels do not")
    shape, result = draft.network.shapes[op.inputs[0]], draft.network.shapes[group.result]
    window = read_window(op, op.integers("kernel_shape", ()), shape, result)
    x, x_pitch = draft.pixels(op.inputs[0])
    y = draft.make(group.result, channels_last(result))
    pixels = result[0] * result[2] * result[3]
    tile = row_tile(pixels, shape[1])
    draft.call(
        "pool",
        (_blocks(pixels, tile.rows), _blocks(shape[1], tile.columns), 1),
        {"x": x, "y": y, "batch": shape[0]},
        {
            "HEIGHT": shape[2],
            "WIDTH": shape[3],
            "CHANNELS": shape[1],
            "X_PITCH": x_pitch,
            "OUT_HEIGHT": result[2],
            "OUT_WIDTH": result[3],
            "Y_PITCH": y.pixel_pitch(),
            **window.constants(),
            "PAD_BOTTOM": window.pads[2],
            "PAD_RIGHT": window.pads[3],
            "MODE": "max" if op.kind == "MaxPool" else "average",
            "COUNT_PADS": bool(op.integer("count_include_pad", 0)),
            "STEPS": expression_of(op.outputs[0], group.after, draft.network.constants).steps,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
        },
        writes=y,
        nodes=group.nodes,
    )


def emit_global_average(draft: Draft, group: Group) -> None:
    """Add a GlobalAveragePool."""
    op = _root(group)
    x, x_pitch = draft.pixels(op.inputs[0])
    batch, channels, height, width = x.shape
    y = draft.make(group.result, channels_last(draft.network.shapes[group.result]))
    tile = row_tile(height * width, channels)
    draft.call(
        "global_average",
        (batch, _blocks(channels, tile.columns), 1),
        {"x": x, "y": y, "batch": batch},
        {
            "PIXELS": height * width,
            "CHANNELS": channels,
            "X_PITCH": x_pitch,
            "Y_PITCH": y.pixel_pitch(),
            "STEPS": expression_of(op.outputs[0], group.after, draft.network.constants).steps,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
        },
        writes=y,
        nodes=group.nodes,
    )


def emit_elementwise(draft: Draft, group: Group) -> None:
    """Add an expression; the result lies as its first operand of the same shape does."""
    shape = draft.network.shapes[group.result]
    expression = expression_of(None, group.after, draft.network.constants)
    if not expression.operands:
        raise NotCoveredError(f"node {group.nodes[0]!r} reads constants only; fold it")
    operands = [broadcast(draft.read(name), shape) for name in expression.operands]
    whole = next((v for v in operands if 0 not in _wide(v)), None)
    strides = None
    if whole is not None and group.result not in draft.network.outputs:
        strides = like(whole.strides, shape)
    y = draft.make(group.result, strides)
    draft.elementwise(y, operands, expression.steps, group.nodes)


def emit_resize(draft: Draft, group: Group) -> None:
    """Add a nearest-neighbour upscaling by whole factors: a copy that repeats pixels."""
    op = _root(group)
    shape, result = draft.network.shapes[op.inputs[0]], draft.network.shapes[group.result]
    factors = [(r // s) for r, s in zip(result[2:], shape[2:], strict=True)]
    how = op.text("coordinate_transformation_mode", "half_pixel")
    rounding = op.text("nearest_mode", "round_prefer_floor")
    fits = op.text("mode", "nearest") == "nearest" and len(shape) == 4 and result[:2] == shape[:2]
    fits = fits and all(f * s == r for f, s, r in zip(factors, shape[2:], result[2:], strict=True))
    if not (fits and (how, rounding.split("_")[0]) in _WHOLE_PIXELS):
        raise NotCoveredError(
            f"node {op.name!r} (Resize) is not an upscaling by whole factors to the nearest pixel"
        )
    x, _ = draft.pixels(op.inputs[0])
    y = draft.make(group.result, channels_last(result))
    draft.elementwise(_split(y, factors, False), [_split(x, factors, True)], (), group.nodes)


def _split(view: View, factors: list[int], repeat: bool) -> View:
    """Return (N, C, H, f, W, g): with `repeat` each pixel f x g times, else their own places."""
    (f, g), (sn, sc, sh, sw) = factors, view.strides
    n, c, h, w = view.shape
    if repeat:
        return replace(view, shape=(n, c, h, f, w, g), strides=(sn, sc, sh, 0, sw, 0))
    return replace(
        view, shape=(n, c, h // f, f, w // g, g), strides=(sn, sc, sh * f, sh, sw * g, sw)
    )


def emit_softmax(draft: Draft, group: Group) -> None:
    """Add a Softmax along the last dimension."""
    op = _root(group)
    shape = draft.network.shapes[group.result]
    axis = op.integer("axis", -1) % len(shape)
    if any(size > 1 for size in shape[axis + 1 :]):
        raise NotCoveredError(
            f"node {op.name!r} (Softmax) runs along dimension {axis} of {list(shape)}; kernels "
            "take the last"
        )
    columns = shape[axis]
    if columns > _LONGEST_ROW:
        raise NotCoveredError(
            f"node {op.name!r} (Softmax) has rows of {columns}; kernels take {_LONGEST_ROW}"
        )
    x = draft.rows(op.inputs[0])
    y = draft.make(group.result)
    block = 1 << (columns - 1).bit_length()
    draft.call(
        "softmax",
        (int(np.prod(shape)) // columns, 1, 1),
        {"x": x, "y": y},
        {"COLUMNS": columns, "BLOCK": block},
        writes=y,
        nodes=group.nodes,
        warps=4 if block <= 4096 else 8,
    )


def broadcast(view: View, shape: Shape) -> View:
    """Return the view repeated to a shape, as numpy broadcasts."""
    lead = len(shape) - len(view.shape)
    sizes, strides = (1,) * lead + view.shape, (0,) * lead + view.strides
    strides = tuple(
        stride if size == wanted else 0
        for size, stride, wanted in zip(sizes, strides, shape, strict=True)
    )
    return replace(view, shape=shape, strides=strides)


def _wide(view: View) -> tuple[int, ...]:
    """Strides of the dimensions that are no single ones."""
    return tuple(s for s, n in zip(view.strides, view.shape, strict=True) if n > 1)


def _root(group: Group) -> Operation:
    assert group.root is not None
    return group.root


def _blocks(size: int, block: int) -> int:
    return -(-size // block)
