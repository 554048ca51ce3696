"""Selection of elements by size -> calls."""

from dataclasses import replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.strided_rows import plan_strided_rows
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.dtypes import is_float
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.shapes.sizes import ceil_div, opt, power_of_two

LONGEST = 65536  # elements of a row: each is compared to each, 4e9 times at most
_BLOCK_I, _BLOCK_J = 32, 256


def emit_top_k(ctx: LoweringContext, group: Group) -> None:
    """Add a TopK; its results are in order, whether or not ONNX asks for it."""
    op = group.root_operation
    x = ctx.read(op.inputs[0])
    x = ctx.read_float(op.inputs[0]) if x.scale is not None or is_float(x.dtype) else x
    axis = op.integer("axis", -1) % len(x.shape)
    if x.shape[axis] > LONGEST:
        raise NotCoveredError(
            f"node {op.name!r} (TopK) selects from {x.shape[axis]} elements; kernels take {LONGEST}"
        )
    values, places = (ctx.make(name) for name in op.outputs)
    count = values.shape[axis]
    # Three tensors of the same rows; their columns are counted apart.
    single = [
        replace(
            view,
            shape=(*view.shape[:axis], 1, *view.shape[axis + 1 :]),
        )
        for view in (x, values, places)
    ]
    walk = plan_strided_rows(single, [axis])
    block = min(_BLOCK_I, power_of_two(x.shape[axis]))
    call = ctx.make_launch(
        "top_k",
        (ceil_div(x.shape[axis], block), walk.rows, 1),
        {"x": x, "values": values, "places": places},
        {
            "COLUMNS": x.shape[axis],
            "COUNT": count,
            "OUTER": (0, *walk.outer[1:]),
            "X_ROW": walk.strides[0][0],
            "VALUES_ROW": walk.strides[1][0],
            "PLACES_ROW": walk.strides[2][0],
            "X_STEP": x.strides[axis],
            "VALUES_STEP": values.strides[axis],
            "PLACES_STEP": places.strides[axis],
            "LARGEST": op.integer("largest", 1) == 1,
            "BLOCK_I": block,
            "BLOCK_J": min(_BLOCK_J, power_of_two(opt(x.shape[axis]))),
        },
        writes=(values, places),
    )
    ctx.add(group.nodes, (call,))
