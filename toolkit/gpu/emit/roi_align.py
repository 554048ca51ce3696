"""Lower RoiAlign."""

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.loop_order import order_of
from toolkit.gpu.shapes.sizes import ceil_div

_BLOCK = 256  # elements of a block


def emit_roi_align(ctx: LoweringContext, group: Group) -> None:
    """Lower RoiAlign that averages a fixed number of samples in each bin."""
    op = group.root_operation
    x = ctx.read_float(op.inputs[0])
    rois, batches = ctx.read_dequantized(op.inputs[1]), ctx.read(op.inputs[2])
    y = ctx.output_view(op.outputs[0])
    shifted = op.text("coordinate_transformation_mode", "") == "half_pixel"
    order = order_of(
        y.shape,
        [
            y.strides,
            (0, x.strides[1], 0, 0),
            (rois.strides[0], 0, 0, 0),
            (batches.strides[0], 0, 0, 0),
            (0, 0, 1, 0),
            (0, 0, 0, 1),
        ],
    )
    names = ("Y_STRIDES", "X_STRIDES", "ROI_STRIDES", "BATCH_STRIDES")
    launch = ctx.make_launch(
        "roi_align",
        (ceil_div(y.elements, _BLOCK), 1, 1),
        {"x": x, "rois": rois, "batches": batches, "y": y, "elements": y.elements},
        {
            **order.constants(*names, "ROW_STRIDES", "COLUMN_STRIDES"),
            "COORDINATE_STRIDE": rois.strides[1],
            "IMAGES": x.shape[0],
            "IMAGE_STRIDE": x.strides[0],
            "SIZES": x.shape[2:],
            "SPATIAL_STRIDES": x.strides[2:],
            "BINS": y.shape[2:],
            "SCALE": op.number("spatial_scale", 1.0),
            "OFFSET": 0.5 if shifted else 0.0,
            "LEAST": None if shifted else 1.0,
            "SAMPLES": op.integer("sampling_ratio", 0),
            "BLOCK": _BLOCK,
        },
        writes=(y,),
    )
    ctx.add_op(group.nodes, (launch,))
