"""Walks of kernels along rows: which dimensions count rows, which count along them.

A tensor of any layout is (rows, columns) to such a kernel, with the strides of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from toolkit.gpu.ir.view import Shape, View
from toolkit.gpu.shapes.sizes import ceil_div, fixed, opt, power_of_two
from toolkit.plugins import Constant

_HELD = 4096  # elements of a row that a block of 4 warps keeps in registers, 32 a thread
_LONGEST = 16384  # elements that a block of 16 warps keeps
_MIN_COLUMNS_FOR_THREE_BLOCKS = 64
_SHARED = 2048  # elements of a block that holds several rows


@dataclass(frozen=True, slots=True)
class StridedRows:
    """`outer` and `inner`: sizes of what is walked; `strides`: of each tensor along both."""

    outer: Shape
    inner: Shape
    strides: tuple[tuple[Shape, Shape], ...]

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return prod(self.outer)

    @property
    def columns(self) -> int:
        """Elements of one row."""
        return prod(self.inner)

    def constants(self, *names: str) -> dict[str, Constant]:
        """The walk as parameters of a kernel whose tensors have these names."""
        strides = {f"{n}_STRIDES": s for n, s in zip(names, self.strides, strict=True)}
        # The first size is that of the batch more often than not, and no kernel looks at it.
        return {
            "COLUMNS": self.columns,
            "OUTER": (0, *self.outer[1:]),
            "INNER": (0, *self.inner[1:]),
            **strides,
        }


@dataclass(frozen=True, slots=True)
class RowTile:
    """A block of `rows` rows, `columns` elements of each at a time."""

    rows: int
    columns: int
    warps: int

    def grid(self, walk: StridedRows) -> tuple[int, int, int]:
        """Blocks of rows."""
        return (ceil_div(walk.rows, self.rows), 1, 1)

    def constants(self) -> dict[str, Constant]:
        """The block as parameters of a kernel."""
        return {"ROWS": self.rows, "BLOCK": self.columns}


def plan_strided_rows(views: Sequence[View], along: Sequence[int]) -> StridedRows:
    """Walk views of one shape, along the dimensions `along`; these are in the order of indices."""
    rank = len(views[0].shape)
    across = sorted(
        (at for at in range(rank) if at not in along), key=lambda at: -views[0].strides[at]
    )
    outer, inner = _joined(views, across), _joined(views, sorted(along))
    strides = tuple(zip(outer[1], inner[1], strict=True))
    return StridedRows(outer[0], inner[0], strides)


def tile_rows(walk: StridedRows) -> RowTile:
    """Choose the block: neighbours in memory are read by neighbouring threads."""
    rows, columns = power_of_two(walk.rows), power_of_two(walk.columns)
    across, along = (opt(steps[-1]) for steps in walk.strides[0])
    if walk.rows != 1 and 0 < across < along:
        block = min(rows, 64)
        return RowTile(block, min(columns, _SHARED // block), 4)
    held = columns if columns <= _LONGEST else _HELD
    return RowTile(max(1, min(rows, _SHARED // held)), held, max(4, held // 1024))


def in_thirds(tile: RowTile, walk: StridedRows) -> RowTile:
    """Return the tile of a kernel that keeps a row in three blocks where a quarter is empty."""
    short = tile.columns < _MIN_COLUMNS_FOR_THREE_BLOCKS
    if short or not fixed(walk.columns) or 4 * walk.columns != 3 * tile.columns:
        return tile
    return replace(tile, columns=tile.columns // 4)


def _joined(views: Sequence[View], dims: Sequence[int]) -> tuple[Shape, list[Shape]]:
    """Join dimensions that all views step alike; single ones are left out."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for at in dims:
        size, steps = views[0].shape[at], tuple(view.strides[at] for view in views)
        if size == 1:
            continue
        if found and all(o == s * size for o, s in zip(found[-1][1], steps, strict=True)):
            found[-1] = (found[-1][0] * size, steps)
        else:
            found.append((size, steps))
    found = found or [(1, (0,) * len(views))]
    return tuple(n for n, _ in found), [tuple(s[at] for _, s in found) for at in range(len(views))]
