"""Arithmetic on the sizes of tensors, fixed (int) or dynamic (`Size`).

A `Size` is an int that remembers its formula over the dynamic dimensions. Code that lowers
operations stays plain Python: it adds, multiplies and divides sizes.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from device.engine.cuda_sizes import MAX_CHARACTERS
from device.engine.manifest import DimRange
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.shapes import formulas
from toolkit.gpu.shapes.formulas import Formula


@dataclass(frozen=True)
class Space:
    """The dynamic dimensions of an engine, and the point at which a segment is lowered."""

    dims: tuple[DimRange, ...]
    point: tuple[int, ...]

    @cached_property
    def opt(self) -> tuple[int, ...]:
        """The point that tiles are chosen for."""
        return tuple(dim.opt for dim in self.dims)

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The minimum and maximum of each dimension."""
        return tuple((dim.min, dim.max) for dim in self.dims)

    def dim(self, index: int) -> int:
        """Return the size of dimension number `index`; an int where its range is one value."""
        low, high = self.ranges[index]
        if low == high:
            return low
        step = formulas.number(self.dims[index].step)
        steps = formulas.floor_divide(formulas.dimension(index), step)
        return self.size(formulas.multiply(steps, step))

    def size(self, formula: Formula) -> int:
        """Return the value of a formula at the point, a `Size` unless it is constant."""
        if formula.constant is not None:
            return formula.constant
        return Size(formulas.at(formula, self.point), formula, self)


class Size(int):
    """A size at one point of the dynamic dimensions, with its formula.

    +, -, *, // and % between sizes and ints give sizes (plain ints where the formula is constant).
    Two sizes are equal if their formulas are, so none equals an int. `<` and the like compare the
    values at the point.
    """

    formula: Formula
    space: Space

    def __new__(cls, value: int, formula: Formula, space: Space) -> "Size":
        """Create a size; `value` is that of the formula at the space's point."""
        size = super().__new__(cls, value)
        size.formula = formula
        size.space = space
        return size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.formula == other.formula

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.formula)

    def __repr__(self) -> str:
        return f"{formulas.text(self.formula)} ({int(self)})"

    def __add__(self, other: int) -> int:
        return self._apply(formulas.add, other)

    __radd__ = __add__

    def __sub__(self, other: int) -> int:
        return self._apply(_subtract, other)

    def __rsub__(self, other: int) -> int:
        return self._apply(_subtract, other, swapped=True)

    def __mul__(self, other: int) -> int:
        return self._apply(formulas.multiply, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> int:
        return self._apply(formulas.floor_divide, other)

    def __rfloordiv__(self, other: int) -> int:
        return self._apply(formulas.floor_divide, other, swapped=True)

    def __mod__(self, other: int) -> int:
        return self._apply(formulas.modulo, other)

    def __rmod__(self, other: int) -> int:
        return self._apply(formulas.modulo, other, swapped=True)

    def __divmod__(self, other: int) -> tuple[int, int]:
        return self // other, self % other

    def __rdivmod__(self, other: int) -> tuple[int, int]:
        return other // self, other % self

    def __neg__(self) -> int:
        return 0 - self

    def __pos__(self) -> int:
        return self

    def _apply(
        self, rule: Callable[[Formula, Formula], Formula], other: object, swapped: bool = False
    ) -> int:
        if isinstance(other, Size):
            right = other.formula
        elif hasattr(other, "__index__"):
            right = formulas.number(operator.index(other))
        else:
            return NotImplemented  # type: ignore[no-any-return]  # a float: not a size
        pair = (right, self.formula) if swapped else (self.formula, right)
        return self.space.size(rule(*pair))


def ceil_div(size: int, block: int) -> int:
    """Return the number of blocks that hold `size` elements."""
    return (size + block - 1) // block


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `opt(size)`."""
    return 1 << (opt(size) - 1).bit_length()


def opt(size: int) -> int:
    """Return the size at the opt point, for which tiles are chosen."""
    if isinstance(size, Size):
        return formulas.at(size.formula, size.space.opt)
    return int(size)


def upper_bound(size: int) -> int:
    """Return an upper bound of the size, for memory that must hold all of it."""
    if isinstance(size, Size):
        return formulas.bounds(size.formula, size.space.ranges)[1]
    return int(size)


def fixed(size: int) -> bool:
    """Whether the size is not dynamic."""
    return not isinstance(size, Size)


def amount(size: int) -> int | str:
    """Return the number, or the formula as engines write it.

    Raises NotCoveredError: the formula is longer than engines may hold.
    """
    if not isinstance(size, Size):
        return int(size)
    text = formulas.text(size.formula)
    if len(text) > MAX_CHARACTERS:
        raise NotCoveredError(
            f"a size of the segment is a formula of {len(text)} characters, the limit is "
            f"{MAX_CHARACTERS}; fix a dimension with --shape"
        )
    return text


def _subtract(a: Formula, b: Formula) -> Formula:
    return formulas.add(a, formulas.multiply(formulas.number(-1), b))
