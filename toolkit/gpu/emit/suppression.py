"""Lower NonMaxSuppression whose result is padded to its bound."""

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.network import Network, Operation
from toolkit.gpu.ir.view import View, row_major
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.shapes.sizes import power_of_two

MAX_BOXES = 1 << 17  # of a class: candidates are compared with each other
MAX_CLASSES = 1024  # of all images: one block finds the place of each in the result
_SEGMENT = 4096  # boxes whose candidates are packed together
_BLOCK_I, _BLOCK_J = 32, 256  # candidates that are ordered, and compared with, at a time
_BLOCK, _KEPT_BLOCK = 64, 64  # candidates at a time, and kept boxes that they are compared with
_RESULTS = 128  # of a block


def emit_suppression(ctx: LoweringContext, group: Group) -> None:
    """Lower the operator that `toolkit.gpu.data_dependent_shapes.suppression` writes."""
    op = group.root_operation
    boxes, scores = (ctx.read(name, "real") for name in op.inputs[:2])
    y, count = (ctx.output_view(name) for name in op.outputs)
    counts, order, sort = _sort(ctx, op, scores)
    suppress = _suppress(ctx, op, (boxes, counts, order), scores.shape[1], (y, count))
    ctx.add_op(group.nodes, (*sort, *suppress))


def _scratch(ctx: LoweringContext, op: Operation, name: str, dtype: str, *shape: int) -> View:
    return ctx.allocate(f"{op.name} {name}", dtype, shape, row_major(shape))


def _sort(
    ctx: LoweringContext, op: Operation, scores: View
) -> tuple[View, View, tuple[KernelLaunch, ...]]:
    """Return the launches that order candidates by score, after how many there are and their order.

    Counts are (rows, segments), the order (rows, segments * segment); a row is a class of an image.
    """
    images, classes, number = scores.shape
    rows = images * classes
    segment = min(_SEGMENT, max(power_of_two(number), _BLOCK_I))
    segments = -(-number // segment)
    values = _scratch(ctx, op, "scores", "float32", rows, segments, segment)
    places = _scratch(ctx, op, "places", "int32", rows, segments, segment)
    counts = _scratch(ctx, op, "counts", "int32", rows, segments)
    order = _scratch(ctx, op, "order", "int32", rows, segments * segment)
    candidates = make_launch(
        "box_candidates",
        (segments, rows, 1),
        {"scores": scores, "values": values, "places": places, "counts": counts},
        {
            "BOXES": number,
            "CLASSES": classes,
            "STRIDES": scores.strides,
            "THRESHOLD": _number(ctx.network, op, 4),
            "SEGMENTS": segments,
            "BLOCK": segment,
        },
        writes=(values, places, counts),
        warps=8,
    )
    ordered = make_launch(
        "box_order",
        (segments * segment // _BLOCK_I, rows, 1),
        {"values": values, "places": places, "counts": counts, "order": order},
        {"SEGMENTS": segments, "SEGMENT": segment, "BLOCK_I": _BLOCK_I, "BLOCK_J": _BLOCK_J},
        writes=(order,),
    )
    return counts, order, (candidates, ordered)


def _suppress(
    ctx: LoweringContext,
    op: Operation,
    candidates: tuple[View, View, View],
    classes: int,
    results: tuple[View, View],
) -> tuple[KernelLaunch, ...]:
    """Return the launches that choose of candidates (boxes, counts, order) and write results."""
    boxes, counts, order = candidates
    y, count = results
    rows, segments = counts.shape
    bound = y.shape[0]
    most = bound // rows
    kept_boxes = _scratch(ctx, op, "kept", "float32", rows, 4, most)
    chosen = _scratch(ctx, op, "chosen", "int32", rows, most)
    chosen_counts = _scratch(ctx, op, "chosen counts", "int32", rows)
    iou = _number(ctx.network, op, 3)
    suppress = make_launch(
        "suppress",
        (rows, 1, 1),
        {
            "boxes": boxes,
            "counts": counts,
            "order": order,
            "kept": kept_boxes,
            "chosen": chosen,
            "chosen_counts": chosen_counts,
        },
        {
            "SEGMENTS": segments,
            "SEGMENT": order.shape[1] // segments,
            "CLASSES": classes,
            "STRIDES": boxes.strides,
            "CENTERED": op.integer("center_point_box", 0) == 1,
            "IOU": 0.0 if iou is None else iou,
            "MOST": most,
            "SEGMENTS_BLOCK": power_of_two(segments),
            "BLOCK": _BLOCK,
            "KEPT_BLOCK": _KEPT_BLOCK,
        },
        writes=(kept_boxes, chosen, chosen_counts),
        warps=8,
    )
    written = make_launch(
        "box_rows",
        (-(-bound // _RESULTS), 1, 1),
        {"chosen": chosen, "chosen_counts": chosen_counts, "y": y, "count": count},
        {
            "ROWS": rows,
            "ROWS_BLOCK": power_of_two(rows),
            "CLASSES": classes,
            "MOST": most,
            "BOUND": bound,
            "BLOCK": _RESULTS,
        },
        writes=(y, count),
    )
    return suppress, written


def _number(network: Network, op: Operation, at: int) -> float | None:
    values = network.constants.get(op.input(at))
    return None if values is None or not values.size else float(values.reshape(-1)[0])
