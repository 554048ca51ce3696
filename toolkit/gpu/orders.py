"""The order in which an element-wise kernel goes over tensors: as few dimensions as it can be."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from toolkit.gpu.view import Shape


@dataclass(frozen=True, slots=True)
class Order:
    """Sizes of the dimensions from the slowest to the fastest, and the strides of each tensor.

    `places` says which of these dimensions a dimension that was kept apart has become.
    """

    shape: Shape
    strides: tuple[Shape, ...]
    places: dict[int, int]


def order_of(shape: Shape, strides: Sequence[Shape], apart: Collection[int] = ()) -> Order:
    """Order the dimensions as the first strides lie, and join those that all strides step alike.

    Dimensions of one index are left out. Those in `apart` are kept and not joined.
    """
    dims: list[tuple[int, tuple[int, ...]]] = []
    places: dict[int, int] = {}
    for at in sorted(range(len(shape)), key=lambda at: -strides[0][at]):
        size, steps = shape[at], tuple(one[at] for one in strides)
        if at in apart:
            places[at] = len(dims)
        elif size == 1:
            continue
        elif dims and len(dims) - 1 not in places.values() and _joins(dims[-1][1], steps, size):
            dims[-1] = (dims[-1][0] * size, steps)
            continue
        dims.append((size, steps))
    if not dims:
        dims = [(1, (0,) * len(strides))]
    return Order(
        tuple(size for size, _ in dims),
        tuple(tuple(steps[at] for _, steps in dims) for at in range(len(strides))),
        places,
    )


def _joins(outer: Sequence[int], inner: Sequence[int], size: int) -> bool:
    return all(o == i * size for o, i in zip(outer, inner, strict=True))
