"""Lower TopK: blocks reduce long rows to candidates, chunk by chunk, which are then ranked."""

from dataclasses import dataclass

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.emit.layout import slice_view
from toolkit.gpu.emit.strided_rows import StridedRows, plan_strided_rows
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.view import Shape, View, row_major
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.reasons import Reason, reason
from toolkit.gpu.shapes.sizes import ceil_div, fixed, opt, power_of_two, upper_bound

MAX_RANKED = 65536  # columns of a row: each element is compared with each, 4e9 times at most
MAX_SELECTED = 8192  # elements that are selected from more columns
_BLOCK_I, _BLOCK_J = 32, 256  # elements of a row that are ranked, and compared with, at a time
_MIN_COLUMNS = 4096  # that candidates are selected from; fewer are ranked at once
_MIN_CHUNK = 8192  # columns of a chunk; at least twice the elements that are selected
_COLUMNS_PER_WARP = 512


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows to select from; `sources`: the places of their elements in the rows of the operand."""

    view: View
    sources: View | None
    row_strides: Shape
    stride: int
    columns: int


def too_many_columns(columns: int, count: int) -> Reason | None:
    """Return why no kernel selects `count` of `columns` elements, None where one does."""
    if upper_bound(columns) <= MAX_RANKED or _selects(columns, count):
        return None
    return reason("gpu.top-k", count, columns, MAX_RANKED, MAX_SELECTED)


def emit_top_k(ctx: LoweringContext, group: Group) -> None:
    """Lower TopK; the results are sorted even where ONNX does not require it."""
    op = group.root_operation
    x = ctx.read(op.inputs[0], "float or integer")
    axis = op.integer("axis", -1) % len(x.shape)
    values, indices = (ctx.output_view(name) for name in op.outputs)
    columns, count = x.shape[axis], values.shape[axis]
    # The three tensors have the same rows, but not the same columns.
    layout = plan_strided_rows([slice_view(v, axis, 0, 1) for v in (x, values, indices)], [axis])
    largest = op.integer("largest", 1) == 1
    rows = _Rows(x, None, layout.strides[0][0], x.strides[axis], columns)
    launches: list[KernelLaunch] = []
    while _selects(rows.columns, count):
        launch, rows = _select(ctx, op.name, layout, rows, count, largest=largest)
        launches.append(launch)
    launches.append(_rank(layout, rows, (values, indices), axis, largest=largest))
    ctx.add_op(group.nodes, tuple(launches))


def _selects(columns: int, count: int) -> bool:
    """Whether candidates are selected first, so that fewer elements are ranked."""
    return (
        fixed(columns)
        and fixed(count)
        and columns > _MIN_COLUMNS
        and count <= min(MAX_SELECTED, columns // 2)
    )


def _chunk(count: int) -> int:
    return max(_MIN_CHUNK, power_of_two(2 * count))


def _select(
    ctx: LoweringContext, name: str, layout: StridedRows, rows: _Rows, count: int, *, largest: bool
) -> tuple[KernelLaunch, _Rows]:
    """Return the launch that selects the first `count` of each chunk, and the selected rows."""
    chunk = _chunk(count)
    chunks = ceil_div(rows.columns, chunk)
    selected = (chunks - 1) * count + min(count, rows.columns - (chunks - 1) * chunk)
    shape = (layout.rows, selected)
    values = ctx.allocate(f"{name} candidates", rows.view.dtype, shape, row_major(shape))
    indices = ctx.allocate(f"{name} places", "int32", shape, row_major(shape))
    launch = make_launch(
        "select_top",
        (chunks, layout.rows, 1),
        {"x": rows.view, "sources": rows.sources, "values": values, "indices": indices},
        {
            "COLUMNS": rows.columns,
            "COUNT": count,
            "SELECTED": selected,
            "OUTER": (0, *layout.outer[1:]),
            "X_ROW_STRIDES": rows.row_strides,
            "X_STRIDE": rows.stride,
            "LARGEST": largest,
            "BLOCK": chunk,
        },
        writes=(values, indices),
        warps=chunk // _COLUMNS_PER_WARP,
    )
    return launch, _Rows(values, indices, _dense_rows(layout, selected), 1, selected)


def _dense_rows(layout: StridedRows, columns: int) -> Shape:
    """Return the strides of dense rows over the dimensions of the layout."""
    return tuple(stride * columns for stride in row_major(layout.outer))


def _rank(
    layout: StridedRows,
    rows: _Rows,
    results: tuple[View, View],
    axis: int,
    *,
    largest: bool,
) -> KernelLaunch:
    """Return the launch that writes the first elements of each row in order."""
    values, indices = results
    block = min(_BLOCK_I, power_of_two(rows.columns))
    return make_launch(
        "top_k",
        (ceil_div(rows.columns, block), layout.rows, 1),
        {"x": rows.view, "sources": rows.sources, "values": values, "indices": indices},
        {
            "COLUMNS": rows.columns,
            "COUNT": values.shape[axis],
            "OUTER": (0, *layout.outer[1:]),
            "X_ROW_STRIDES": rows.row_strides,
            "VALUES_ROW_STRIDES": layout.strides[1][0],
            "INDICES_ROW_STRIDES": layout.strides[2][0],
            "X_STRIDE": rows.stride,
            "VALUES_STRIDE": values.strides[axis],
            "INDICES_STRIDE": indices.strides[axis],
            "LARGEST": largest,
            "BLOCK_I": block,
            "BLOCK_J": min(_BLOCK_J, power_of_two(opt(rows.columns))),
        },
        writes=(values, indices),
    )
