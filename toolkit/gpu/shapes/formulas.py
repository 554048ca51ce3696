"""Formulas over the dynamic dimensions of an engine, in canonical form.

A formula is a polynomial with integer coefficients over dimensions (d0, d1, ...) and over floors of
quotients of formulas. Equal formulas are equal values: floor((c q + r) / c) is written
q + floor(r / c) with every coefficient of r from 0 to c - 1, common factors are cancelled, and
floors of floors are joined.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import Union

_CACHE_ENTRIES = 1 << 16  # of each cache of results: networks repeat their sizes

Atom = Union[int, "Quotient"]  # the index of a dimension, or a floor
Monomial = tuple[Atom, ...]  # a sorted product


@dataclass(frozen=True, slots=True)
class Formula:
    """A sum of coefficients times monomials, sorted by degree and atoms, without zeros."""

    terms: tuple[tuple[Monomial, int], ...]

    @property
    def constant(self) -> int | None:
        """The value of a constant formula, None where it depends on a dimension."""
        if not self.terms:
            return 0
        monomial, coefficient = self.terms[0]
        return coefficient if len(self.terms) == 1 and not monomial else None


@dataclass(frozen=True, slots=True)
class Quotient:
    """floor(dividend / divisor)."""

    dividend: Formula
    divisor: Formula


def number(value: int) -> Formula:
    """Return a constant formula."""
    return Formula((((), value),) if value else ())


def dimension(index: int) -> Formula:
    """Return the dimension number `index`."""
    return Formula((((index,), 1),))


@lru_cache(_CACHE_ENTRIES)
def add(a: Formula, b: Formula) -> Formula:
    """Return a + b."""
    return _sum((*a.terms, *b.terms))


@lru_cache(_CACHE_ENTRIES)
def multiply(a: Formula, b: Formula) -> Formula:
    """Return a * b."""
    return _sum(
        (tuple(sorted((*m, *n), key=_atom_order)), x * y) for m, x in a.terms for n, y in b.terms
    )


@lru_cache(_CACHE_ENTRIES)
def floor_divide(a: Formula, b: Formula) -> Formula:
    """Return floor(a / b), as Python's // rounds. Raises ZeroDivisionError where b is 0."""
    divisor = b.constant
    if divisor is not None:
        if divisor < 0:
            return floor_divide(multiply(a, number(-1)), number(-divisor))
        whole = _sum((m, c // divisor) for m, c in a.terms)
        return add(whole, _floor(_sum((m, c % divisor) for m, c in a.terms), divisor))
    exact = _exact_quotient(a, b)
    return exact if exact is not None else Formula((((Quotient(a, b),), 1),))


def modulo(a: Formula, b: Formula) -> Formula:
    """Return a - floor(a / b) b, as Python's % does."""
    return add(a, multiply(number(-1), multiply(floor_divide(a, b), b)))


@lru_cache(_CACHE_ENTRIES)
def at(formula: Formula, point: Sequence[int]) -> int:
    """Return the value at a point: dimension i is point[i]."""
    return sum(c * prod(_atom_at(atom, point) for atom in m) for m, c in formula.terms)


@lru_cache(_CACHE_ENTRIES)
def bounds(formula: Formula, ranges: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Return a lower and an upper bound for dimensions i in ranges[i].

    Terms are bounded separately (interval arithmetic), so the bounds may not be tight.
    Raises ZeroDivisionError where a divisor can be 0 or less.
    """
    low = high = 0
    for monomial, coefficient in formula.terms:
        term_low, term_high = coefficient, coefficient
        for atom in monomial:
            ends = _atom_bounds(atom, ranges)
            corners = [x * y for x in (term_low, term_high) for y in ends]
            term_low, term_high = min(corners), max(corners)
        low, high = low + term_low, high + term_high
    return low, high


@lru_cache(_CACHE_ENTRIES)
def text(formula: Formula) -> str:
    """Write the formula as device.engine.cuda_sizes reads it, such as "4*d0*((d1+1)//2)+8"."""
    parts = [_term_text(m, c) for m, c in reversed(formula.terms)]
    joined = "".join(parts)
    return f"0{joined}" if joined.startswith("-") or not joined else joined[1:]


def _floor(dividend: Formula, divisor: int) -> Formula:
    """Return floor(rest / divisor), where the coefficients are 0 to divisor - 1."""
    if dividend.constant is not None:
        return number(dividend.constant // divisor)
    common = gcd(divisor, *(c for m, c in dividend.terms if m))
    if common > 1:  # floor((g q + r) / (g c)) = floor((q + floor(r / g)) / c)
        dividend = _sum((m, c // common) for m, c in dividend.terms)
        return floor_divide(dividend, number(divisor // common))
    variable = [(m, c) for m, c in dividend.terms if m]
    (first, *_), coefficient = variable[0]
    if len(variable) == 1 and coefficient == 1 and isinstance(first, Quotient):
        inner = first.divisor.constant
        if len(variable[0][0]) == 1 and inner is not None:
            # floor((floor(p / b) + k) / c) = floor((p + k b) / (b c))
            offset = dict(dividend.terms).get((), 0) * inner
            return floor_divide(add(first.dividend, number(offset)), number(inner * divisor))
    return Formula((((Quotient(dividend, number(divisor)),), 1),))


def _exact_quotient(a: Formula, b: Formula) -> Formula | None:
    """Return a / b where that is a polynomial: long division by the leading term."""
    lead, factor = b.terms[-1]
    quotient: list[tuple[Monomial, int]] = []
    while a.terms:
        monomial, coefficient = a.terms[-1]
        powers = Counter(monomial)
        powers.subtract(Counter(lead))
        if coefficient % factor or any(count < 0 for count in powers.values()):
            return None
        term = (tuple(sorted(powers.elements(), key=_atom_order)), coefficient // factor)
        quotient.append(term)
        a = add(a, multiply(Formula(((term[0], -term[1]),)), b))
    return _sum(quotient)


def _sum(terms: Iterable[tuple[Monomial, int]]) -> Formula:
    total: dict[Monomial, int] = {}
    for monomial, coefficient in terms:
        total[monomial] = total.get(monomial, 0) + coefficient
    terms = ((m, c) for m, c in total.items() if c)
    # By degree, then by atoms: products preserve this order, which the long division needs.
    return Formula(tuple(sorted(terms, key=lambda term: _monomial_order(term[0]))))


def _monomial_order(monomial: Monomial) -> tuple[int, list[tuple[int, str]]]:
    return len(monomial), [_atom_order(atom) for atom in monomial]


def _atom_order(atom: Atom) -> tuple[int, str]:
    return (atom, "") if isinstance(atom, int) else (1 << 30, _atom_text(atom))


def _atom_at(atom: Atom, point: Sequence[int]) -> int:
    if isinstance(atom, int):
        return point[atom]
    return at(atom.dividend, point) // at(atom.divisor, point)


def _atom_bounds(atom: Atom, ranges: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    if isinstance(atom, int):
        return ranges[atom]
    low, high = bounds(atom.dividend, ranges)
    divisor_low, divisor_high = bounds(atom.divisor, ranges)
    if divisor_low < 1:
        raise ZeroDivisionError(f"{_atom_text(atom)} divides by a size that can be {divisor_low}")
    corners = [x // y for x in (low, high) for y in (divisor_low, divisor_high)]
    return min(corners), max(corners)


def _atom_text(atom: Atom) -> str:
    if isinstance(atom, int):
        return f"d{atom}"
    return f"({_operand(atom.dividend)}//{_operand(atom.divisor)})"


def _operand(formula: Formula) -> str:
    inner = text(formula)
    return inner if inner.isalnum() else f"({inner})"


def _term_text(monomial: Monomial, coefficient: int) -> str:
    sign = "-" if coefficient < 0 else "+"
    size = abs(coefficient)
    factors = [str(size)] if size != 1 or not monomial else []
    return sign + "*".join([*factors, *(_atom_text(atom) for atom in monomial)])
