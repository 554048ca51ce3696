"""Pooling -> calls."""

from toolkit.gpu import reductions
from toolkit.gpu.draft import Draft
from toolkit.gpu.fusion import Group
from toolkit.gpu.sizes import ceil_div
from toolkit.gpu.tiles import row_tile
from toolkit.gpu.view import channels_last
from toolkit.gpu.volume_poolings import emit_volume_pool
from toolkit.gpu.windows import read_window


def emit_pool(draft: Draft, group: Group) -> None:
    """Add a MaxPool or AveragePool."""
    op = group.root_operation
    if len(op.outputs) > 1 or len(draft.network.shapes[op.inputs[0]]) != 4:
        emit_volume_pool(draft, group)
        return
    shape, result = draft.network.shapes[op.inputs[0]], draft.network.shapes[group.result]
    window = read_window(op, op.integers("kernel_shape", ()), shape, result)
    x, x_pitch = draft.stored_pixels(op.inputs[0])
    y = draft.make(group.result, channels_last(result))
    pixels = result[0] * result[2] * result[3]
    tile = row_tile(pixels, shape[1])
    call = draft.make_call(
        "pool",
        (ceil_div(pixels, tile.rows), ceil_div(shape[1], tile.columns), 1),
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
            "STEPS": draft.expression(op.outputs[0], group.after, x.scale).steps,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
        },
        writes=(y,),
    )
    draft.add(group.nodes, (call,))


def emit_global_average(draft: Draft, group: Group) -> None:
    """Add a GlobalAveragePool."""
    op = group.root_operation
    if len(draft.network.shapes[op.inputs[0]]) != 4:
        reductions.emit_global_pool(draft, group)
        return
    x, x_pitch = draft.stored_pixels(op.inputs[0])
    batch, channels, height, width = x.shape
    y = draft.make(group.result, channels_last(draft.network.shapes[group.result]))
    tile = row_tile(height * width, channels)
    call = draft.make_call(
        "global_average",
        (batch, ceil_div(channels, tile.columns), 1),
        {"x": x, "y": y, "batch": batch},
        {
            "PIXELS": height * width,
            "CHANNELS": channels,
            "X_PITCH": x_pitch,
            "Y_PITCH": y.pixel_pitch(),
            "STEPS": draft.expression(op.outputs[0], group.after, x.scale).steps,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
        },
        writes=(y,),
    )
    draft.add(group.nodes, (call,))
