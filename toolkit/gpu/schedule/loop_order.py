"""The order in which an element-wise kernel goes over tensors: as few dimensions as possible."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from toolkit.gpu.ir.view import Shape
from toolkit.gpu.shapes.sizes import Size
from toolkit.plugins import Constant


@dataclass(frozen=True, slots=True)
class LoopOrder:
    """Sizes of the dimensions from the slowest to the fastest, and the strides of each tensor.

    `positions`: the position here of each dimension that stays separate.
    """

    shape: Shape
    strides: tuple[Shape, ...]
    positions: dict[int, int]

    def constants(self, *names: str) -> dict[str, Constant]:
        """Return the constants of a kernel; `names`: of the strides of each tensor."""
        # Kernels do not use the first size: often it is the batch, which may be dynamic.
        shape = (0, *self.shape[1:])
        return {"SHAPE": shape, **dict(zip(names, self.strides, strict=True))}


def order_of(shape: Shape, strides: Sequence[Shape], separate: Collection[int] = ()) -> LoopOrder:
    """Sort the dimensions by the first strides, and join those that are contiguous in all tensors.

    Dimensions of size 1 are dropped, except those in `separate`, which are never joined.
    """
    dims: list[tuple[int, tuple[int, ...]]] = []
    positions: dict[int, int] = {}
    for at in sorted(range(len(shape)), key=lambda at: -strides[0][at]):
        size, steps = shape[at], tuple(tensor_strides[at] for tensor_strides in strides)
        if at in separate:
            positions[at] = len(dims)
        elif size == 1:
            continue
        elif dims and len(dims) - 1 not in positions.values() and _joins(dims[-1][1], steps, size):
            dims[-1] = (dims[-1][0] * size, steps)
            continue
        dims.append((size, steps))
    if not dims:
        dims = [(1, (0,) * len(strides))]
    return LoopOrder(
        tuple(size for size, _ in dims),
        tuple(tuple(steps[at] for _, steps in dims) for at in range(len(strides))),
        positions,
    )


@dataclass(frozen=True, slots=True)
class Tiles:
    """An order whose tensors are fastest in two dimensions: `rows` of one, `columns` of the other.

    The first tensor is fastest along the columns. `shape`: the other dimensions; `strides`,
    `row_strides` and `column_strides` of each tensor along these three.
    """

    shape: Shape
    rows: int
    columns: int
    strides: tuple[Shape, ...]
    row_strides: Shape
    column_strides: Shape


def tiles_of(order: LoopOrder) -> Tiles | None:
    """Return the order in tiles where a tensor is read along another dimension than it is written.

    None where all tensors are read as the first one lies, and for dynamic sizes of a tile.
    """
    last = len(order.shape) - 1
    for strides in order.strides[1:]:
        if strides[last] in (0, 1) or 1 not in strides:
            continue
        row = strides.index(1)
        sizes = order.shape[row], order.shape[last]
        if any(isinstance(size, Size) for size in sizes):
            continue
        outer = [at for at in range(last) if at != row]
        return Tiles(
            tuple(order.shape[at] for at in outer) or (1,),
            *sizes,
            strides=tuple(tuple(s[at] for at in outer) or (0,) for s in order.strides),
            row_strides=tuple(s[row] for s in order.strides),
            column_strides=tuple(s[last] for s in order.strides),
        )
    return None


def join_contiguous(dims: Iterable[tuple[int, Shape]]) -> list[tuple[int, Shape]]:
    """Join adjacent dimensions that are contiguous in all tensors; drop those of size 1.

    `dims`: the size of each, and its stride in every tensor.
    """
    joined: list[tuple[int, Shape]] = []
    for size, strides in dims:
        if size == 1:
            continue
        if joined and _joins(joined[-1][1], strides, size):
            joined[-1] = (joined[-1][0] * size, strides)
        else:
            joined.append((size, strides))
    return joined


def _joins(outer: Sequence[int], inner: Sequence[int], size: int) -> bool:
    return all(o == i * size for o, i in zip(outer, inner, strict=True))
