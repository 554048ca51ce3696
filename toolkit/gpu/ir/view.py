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
        """How many elements it has."""
        return prod(self.shape)

    def permuted(self, order: Sequence[int]) -> "View":
        """The same elements with dimension i taken from order[i]."""
        return replace(
            self,
            shape=tuple(self.shape[at] for at in order),
            strides=tuple(self.strides[at] for at in order),
        )

    def reshaped(self, shape: Shape) -> "View | None":
        """The same elements in order under another shape; None where that needs a copy.

        Dimensions are split at will, and joined where they lie like one.
        """
        old = [(n, s) for n, s in zip(self.shape, self.strides, strict=True) if n != 1]
        found: list[int] = []
        at, last = 0, 1
        while len(found) < len(shape):
            group = [shape[len(found)]]  # new dimensions that hold the same elements as old ones
            start, at = at, at + (group[0] != 1)
            joined = prod(n for n, _ in old[start:at])
            while prod(group) != joined:
                if prod(group) < joined and len(found) + len(group) < len(shape):
                    group.append(shape[len(found) + len(group)])
                elif at < len(old):
                    joined *= old[at][0]
                    at += 1
                else:
                    return None  # sizes that are equal at some points of a range only
            pairs = zip(old[start:at], old[start + 1 : at], strict=False)
            if any(s != n * inner for (_, s), (n, inner) in pairs):
                return None
            last = old[at - 1][1] if at > start else last
            found += [last * stride for stride in row_major(tuple(group))]
        return replace(self, shape=shape, strides=tuple(found))

    def lies_as(self, other: "View") -> bool:
        """Whether it is the same elements at the same places: single sizes have any stride."""
        alike = replace(self, strides=other.strides) == other
        return alike and _same(self.shape, self.strides, other.strides)

    def is_row_major(self) -> bool:
        """Whether the elements lie in the order of the indices, without gaps."""
        return _same(self.shape, self.strides, row_major(self.shape))

    def pixel_pitch(self) -> int | None:
        """Elements from one pixel to the next, where (N, C, H, W) is stored channels-last."""
        if len(self.shape) != 4:
            return None
        batch, channels, height, width = self.shape
        # The first of these that is no single one steps over exactly one pixel.
        steps = ((width, self.strides[3]), (height, self.strides[2]), (batch, self.strides[0]))
        pitch = next((stride for size, stride in steps if size != 1), channels)
        wanted = channels_last(self.shape, pitch)
        fits = pitch >= channels and _same(self.shape, self.strides, wanted)
        return pitch if fits else None


def row_major(shape: Shape) -> Shape:
    """Return the strides of (d0, d1, ...) with the last index fastest."""
    return tuple(prod(shape[at + 1 :]) for at in range(len(shape)))


def channels_last(shape: Shape, pitch: int | None = None) -> Shape:
    """Return the strides of (N, C, H, W) with channels fastest; `pitch` defaults to C."""
    _, channels, height, width = shape
    pitch = channels if pitch is None else pitch
    return (height * width * pitch, 1, width * pitch, pitch)


def like(strides: Shape, shape: Shape) -> Shape:
    """Return dense strides of `shape` whose dimensions lie in the order of `strides`."""
    order = sorted(range(len(shape)), key=lambda at: (-strides[at], at))
    dense = row_major(tuple(shape[at] for at in order))
    placed = dict(zip(order, dense, strict=True))
    return tuple(placed[at] for at in range(len(shape)))


def _same(shape: Shape, left: Shape, right: Shape) -> bool:
    """Whether two strides reach the same elements: those of single sizes do not count."""
    return all(n == 1 or a == b for n, a, b in zip(shape, left, right, strict=True))
