"""Arithmetic on the sizes of tensors: fixed ones (int), and those that dynamic dimensions decide.

A `Size` is an int that remembers its formula. Code that chooses kernels stays plain Python: it
adds, multiplies and divides sizes, and what comes out is a number with its formula.
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
    """The dynamic dimensions of an engine, and the point in them that a draft is made at."""

    dims: tuple[DimRange, ...]
    point: tuple[int, ...]

    @cached_property
    def opt(self) -> tuple[int, ...]:
        """The point that blocks are chosen for."""
        return tuple(dim.opt for dim in self.dims)

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The least and the most of each dimension."""
        return tuple((dim.min, dim.max) for dim in self.dims)

    def dim(self, place: int) -> int:
        """Return the size of dimension number `place`; a plain number where it has no choice."""
        low, high = self.ranges[place]
        if low == high:
            return low
        step = formulas.number(self.dims[place].step)
        steps = formulas.floor_divide(formulas.dimension(place), step)
        return self.size(formulas.multiply(steps, step))

    def size(self, formula: Formula) -> int:
        """Return the value of a formula at the point, as a `Size` where it depends on one."""
        if formula.constant is not None:
            return formula.constant
        return Size(formulas.at(formula, self.point), formula, self)


class Size(int):
    """A size at one point of the dynamic dimensions, with its formula.

    +, -, *, // and % between sizes and ints give sizes (plain ints where the formula is constant).
    Two are equal if they are equal everywhere, so none equals an int: what holds at one point only
    decides nothing. `<` and its like compare the values at the point.
    """

    formula: Formula
    space: Space

    def __new__(cls, value: int, formula: Formula, space: Space) -> "Size":
        """Make one; `value` is the formula's at the space's point."""
        made = super().__new__(cls, value)
        made.formula = formula
        made.space = space
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.formula == other.formula

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.formula)

    def __repr__(self) -> str:
        return f"{formulas.text(self.formula)} ({int(self)})"

    def __add__(self, other: int) -> int:
        return self._made(formulas.add, other)

    def __radd__(self, other: int) -> int:
        return self._made(formulas.add, other)

    def __sub__(self, other: int) -> int:
        return self._made(_subtract, other)

    def __rsub__(self, other: int) -> int:
        return self._made(_subtract, other, swapped=True)

    def __mul__(self, other: int) -> int:
        return self._made(formulas.multiply, other)

    def __rmul__(self, other: int) -> int:
        return self._made(formulas.multiply, other)

    def __floordiv__(self, other: int) -> int:
        return self._made(formulas.floor_divide, other)

    def __rfloordiv__(self, other: int) -> int:
        return self._made(formulas.floor_divide, other, swapped=True)

    def __mod__(self, other: int) -> int:
        return self._made(formulas.modulo, other)

    def __rmod__(self, other: int) -> int:
        return self._made(formulas.modulo, other, swapped=True)

    def __divmod__(self, other: int) -> tuple[int, int]:
        return self // other, self % other

    def __rdivmod__(self, other: int) -> tuple[int, int]:
        return other // self, other % self

    def __neg__(self) -> int:
        return 0 - self

    def __pos__(self) -> int:
        return self

    def _made(
        self, rule: Callable[[Formula, Formula], Formula], other: object, swapped: bool = False
    ) -> int:
        if isinstance(other, Size):
            right = other.formula
        elif hasattr(other, "__index__"):
            right = formulas.number(operator.index(other))
        else:
            return NotImplemented  # type: ignore[no-any-return]  # a float: no size any more
        pair = (right, self.formula) if swapped else (self.formula, right)
        return self.space.size(rule(*pair))


def ceil_div(size: int, block: int) -> int:
    """Return how many blocks hold `size` elements."""
    return (size + block - 1) // block


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size` where blocks are chosen."""
    return 1 << (opt(size) - 1).bit_length()


def opt(size: int) -> int:
    """Return the size that blocks are chosen for."""
    if isinstance(size, Size):
        return formulas.at(size.formula, size.space.opt)
    return int(size)


def most(size: int) -> int:
    """Return a number that the size never exceeds: what must hold all of it goes by this."""
    if isinstance(size, Size):
        return formulas.bounds(size.formula, size.space.ranges)[1]
    return int(size)


def fixed(size: int) -> bool:
    """Whether it is the same at every point."""
    return not isinstance(size, Size)


def amount(size: int) -> int | str:
    """Return the number, or the formula as an engine writes it.

    Raises NotCoveredError: a formula that is too long to be read.
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
