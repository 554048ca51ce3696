"""Strided rows: tensors of any layout as (rows, columns), for kernels that reduce along rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.ir.view import Shape, View
from toolkit.gpu.schedule.loop_order import join_contiguous
from toolkit.gpu.shapes.sizes import ceil_div, fixed, opt, power_of_two
from toolkit.plugins import Constant

_ELEMENTS_OF_4_WARPS = 4096  # that a block holds in registers, 32 a thread
_ELEMENTS_OF_16_WARPS = 16384
_MIN_COLUMNS_FOR_THREE_BLOCKS = 64
_MULTI_ROW_ELEMENTS = 2048  # of a block of several rows
_MAX_INTERLEAVED_ROWS = 64  # of a block whose rows are adjacent in memory


@dataclass(frozen=True, slots=True)
class StridedRows:
    """Rows over the dimensions `outer`, columns over `inner`; (outer, inner) strides per tensor."""

    outer: Shape
    inner: Shape
    strides: tuple[tuple[Shape, Shape], ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return prod(self.outer)

    @property
    def columns(self) -> int:
        """Elements of one row."""
        return prod(self.inner)

    def constants(self, *names: str) -> dict[str, Constant]:
        """Return the constants of a kernel whose tensors have these names."""
        strides = {f"{n}_STRIDES": s for n, s in zip(names, self.strides, strict=True)}
        # Kernels do not use the first sizes: often they are the batch, which may be dynamic.
        return {
            "COLUMNS": self.columns,
            "OUTER": (0, *self.outer[1:]),
            "INNER": (0, *self.inner[1:]),
            **strides,
        }


@dataclass(frozen=True, slots=True)
class RowTile:
    """The tile of a block: `rows` rows, `columns` columns at a time."""

    rows: int
    columns: int
    warps: int

    def grid(self, layout: StridedRows) -> tuple[int, int, int]:
        """Return the grid: blocks of rows."""
        return (ceil_div(layout.rows, self.rows), 1, 1)

    def constants(self) -> dict[str, Constant]:
        """Return the constants of a kernel."""
        return {"ROWS": self.rows, "BLOCK": self.columns}


def plan_strided_rows(views: Sequence[View], along: Sequence[int]) -> StridedRows:
    """Return views of one shape as rows along the dimensions `along`.

    Columns are in the order of the indices, rows in that of the memory of the first view.
    """
    rank = len(views[0].shape)
    across = sorted(
        (at for at in range(rank) if at not in along), key=lambda at: -views[0].strides[at]
    )
    outer, outer_strides = _collapse(views, across)
    inner, inner_strides = _collapse(views, sorted(along))
    return StridedRows(outer, inner, tuple(zip(outer_strides, inner_strides, strict=True)))


def tile_rows(layout: StridedRows) -> RowTile:
    """Choose the tile so that loads are coalesced."""
    rows, columns = power_of_two(layout.rows), power_of_two(layout.columns)
    row_stride, column_stride = (opt(strides[-1]) for strides in layout.strides[0])
    if layout.rows != 1 and 0 < row_stride < column_stride:
        block = min(rows, _MAX_INTERLEAVED_ROWS)
        return RowTile(block, min(columns, _MULTI_ROW_ELEMENTS // block), 4)
    block = columns if columns <= _ELEMENTS_OF_16_WARPS else _ELEMENTS_OF_4_WARPS
    return RowTile(max(1, min(rows, _MULTI_ROW_ELEMENTS // block)), block, max(4, block // 1024))


def add_row_kernel(
    ctx: LoweringContext,
    nodes: tuple[str, ...],
    kernel: str,
    operands: Mapping[str, View | None],
    constants: Mapping[str, Constant],
    *,
    y: View,
    layout: StridedRows,
    tile: RowTile | None = None,
    unstrided: Mapping[str, View | None] = MappingProxyType({}),
) -> None:
    """Launch a kernel over blocks of rows that writes `y`.

    `layout`: of the operands and y, in this order. `unstrided`: further tensors.
    """
    tile = tile_rows(layout) if tile is None else tile
    names = [name.upper() for name in (*operands, "y")]
    launch = make_launch(
        kernel,
        tile.grid(layout),
        {**operands, "y": y, "rows": layout.rows, **unstrided},
        {**layout.constants(*names), **constants, **tile.constants()},
        writes=(y,),
        warps=tile.warps,
    )
    ctx.add_op(nodes, (launch,))


def split_in_three(tile: RowTile, layout: StridedRows) -> RowTile:
    """Return the tile of three blocks a row where it fits exactly and one would be 3/4 full."""
    short = tile.columns < _MIN_COLUMNS_FOR_THREE_BLOCKS
    if short or not fixed(layout.columns) or 4 * layout.columns != 3 * tile.columns:
        return tile
    return replace(tile, columns=tile.columns // 4)


def _collapse(views: Sequence[View], dims: Sequence[int]) -> tuple[Shape, list[Shape]]:
    """Collapse dimensions that are contiguous in all views; drop those of size 1."""
    dims_of_views = ((views[0].shape[at], tuple(v.strides[at] for v in views)) for at in dims)
    collapsed = join_contiguous(dims_of_views) or [(1, (0,) * len(views))]
    shape = tuple(size for size, _ in collapsed)
    return shape, [tuple(strides[at] for _, strides in collapsed) for at in range(len(views))]
