"""Lower TopK."""

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.layout import slice_view
from toolkit.gpu.emit.strided_rows import plan_strided_rows
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.dtypes import is_float
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.shapes.sizes import ceil_div, opt, power_of_two

MAX_COLUMNS = 65536  # of a row: each element is compared with each, 4e9 times at most
_BLOCK_I, _BLOCK_J = 32, 256  # elements of a row that are ranked, and compared with, at a time


def emit_top_k(ctx: LoweringContext, group: Group) -> None:
    """Lower TopK; the results are sorted even where ONNX does not require it."""
    op = group.root_operation
    x = ctx.read(op.inputs[0])
    x = ctx.read_float(op.inputs[0]) if x.scale is not None or is_float(x.dtype) else x
    axis = op.integer("axis", -1) % len(x.shape)
    if x.shape[axis] > MAX_COLUMNS:
        raise NotCoveredError(
            f"node {op.name!r} (TopK) selects from {x.shape[axis]} elements; kernels take "
            f"{MAX_COLUMNS}"
        )
    values, indices = (ctx.output_view(name) for name in op.outputs)
    # The three tensors have the same rows, but not the same columns.
    first_columns = [slice_view(view, axis, 0, 1) for view in (x, values, indices)]
    layout = plan_strided_rows(first_columns, [axis])
    block = min(_BLOCK_I, power_of_two(x.shape[axis]))
    launch = ctx.make_launch(
        "top_k",
        (ceil_div(x.shape[axis], block), layout.rows, 1),
        {"x": x, "values": values, "indices": indices},
        {
            "COLUMNS": x.shape[axis],
            "COUNT": values.shape[axis],
            "OUTER": (0, *layout.outer[1:]),
            "X_ROW_STRIDES": layout.strides[0][0],
            "VALUES_ROW_STRIDES": layout.strides[1][0],
            "INDICES_ROW_STRIDES": layout.strides[2][0],
            "X_STRIDE": x.strides[axis],
            "VALUES_STRIDE": values.strides[axis],
            "INDICES_STRIDE": indices.strides[axis],
            "LARGEST": op.integer("largest", 1) == 1,
            "BLOCK_I": block,
            "BLOCK_J": min(_BLOCK_J, power_of_two(opt(x.shape[axis]))),
        },
        writes=(values, indices),
    )
    ctx.add_op(group.nodes, (launch,))
