"""Where the elements of a tensor lie: an allocation, an offset and strides.

Layout is nothing but strides. A convolution stores channels last, a border wants rows first, and a
transposition is a view that moves no byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from toolkit.gpu.ir.dtypes import ELEMENT_TYPES

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """Elements of one type inside an allocation; `offset` and `strides` count elements.

    `scale`: an INT8 tensor holds q for the real numbers q * scale; None for all others.
    """

    base: str
    dtype: str
    shape: Shape
    strides: Shape
    offset: int = 0
    scale: float | None = None

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_TYPES[self.dtype].bytes

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * self.item_bytes

    def permuted(self, order: Sequence[int]) -> "View":
        """Return the view transposed: dimension i is dimension order[i] of this one."""
        return replace(
            self,
            shape=tuple(self.shape[at] for at in order),
            strides=tuple(self.strides[at] for at in order),
        )

    def reshaped(self, shape: Shape) -> "View | None":
        """Return the view under another shape; None where that needs a copy.

        Dimensions can always be split, and merged where they are contiguous.
        """
        old = [(n, s) for n, s in zip(self.shape, self.strides, strict=True) if n != 1]
        strides: list[int] = []
        at, last = 0, 1
        while len(strides) < len(shape):
            group = [shape[len(strides)]]  # new dimensions, of the elements of old[start:at]
            start, at = at, at + (group[0] != 1)
            elements = prod(n for n, _ in old[start:at])
            while prod(group) != elements:
                if prod(group) < elements and len(strides) + len(group) < len(shape):
                    group.append(shape[len(strides) + len(group)])
                elif at < len(old):
                    elements *= old[at][0]
                    at += 1
                else:
                    return None  # sizes that are equal at some points of a range only
            pairs = zip(old[start:at], old[start + 1 : at], strict=False)
            if any(s != n * inner for (_, s), (n, inner) in pairs):
                return None
            last = old[at - 1][1] if at > start else last
            strides += [last * stride for stride in row_major(tuple(group))]
        return replace(self, shape=shape, strides=tuple(strides))

    def is_same_as(self, view: "View") -> bool:
        """Whether both are the same elements in memory; dimensions of size 1 have any stride."""
        same = replace(self, strides=view.strides) == view
        return same and _same_strides(self.shape, self.strides, view.strides)

    def is_row_major(self) -> bool:
        """Whether the elements are row-major and dense."""
        return _same_strides(self.shape, self.strides, row_major(self.shape))

    def pixel_pitch(self) -> int | None:
        """Return the elements from one pixel to the next of a channels-last (N, C, ...) tensor.

        None for tensors stored otherwise.
        """
        if len(self.shape) < 3:
            return None
        # The innermost of these with more than one element has the stride of a pixel.
        dims = (*reversed(range(2, len(self.shape))), 0)
        pitch = next((self.strides[at] for at in dims if self.shape[at] != 1), self.shape[1])
        expected = channels_last(self.shape, pitch)
        fits = pitch >= self.shape[1] and _same_strides(self.shape, self.strides, expected)
        return pitch if fits else None


def row_major(shape: Shape) -> Shape:
    """Return the strides of (d0, d1, ...) with the last index fastest."""
    return tuple(prod(shape[at + 1 :]) for at in range(len(shape)))


def channels_last(shape: Shape, pitch: int | None = None) -> Shape:
    """Return the strides of (N, C, ...) with channels fastest; `pitch` defaults to C."""
    pitch = shape[1] if pitch is None else pitch
    image, *pixels = row_major((shape[0], *shape[2:]))
    return (image * pitch, 1, *(pixel * pitch for pixel in pixels))


def like(strides: Shape, shape: Shape) -> Shape:
    """Return dense strides of `shape` with its dimensions in the memory order of `strides`."""
    order = sorted(range(len(shape)), key=lambda at: (-strides[at], at))
    dense = row_major(tuple(shape[at] for at in order))
    by_dim = dict(zip(order, dense, strict=True))
    return tuple(by_dim[at] for at in range(len(shape)))


def _same_strides(shape: Shape, first: Shape, second: Shape) -> bool:
    """Whether two strides address the same elements; dimensions of size 1 do not count."""
    return all(n == 1 or a == b for n, a, b in zip(shape, first, second, strict=True))
