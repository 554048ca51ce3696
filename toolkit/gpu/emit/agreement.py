"""Whether a segment drafted at several points of its dynamic dimensions is the same everywhere.

A draft is plain Python on sizes that remember their formulas. What turns a size into a plain number
loses its formula, and what compares sizes decides for one point. Both show as a difference between
drafts at different points: the ends, the optimum and between
(`toolkit.gpu.shapes.inference.traces_of`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.gpu.ir.launch import KernelLaunch, TunableOp
from toolkit.gpu.shapes.sizes import Space


@dataclass(frozen=True, slots=True)
class Difference:
    """`nodes`: the ONNX nodes whose work differs, none where that is not known; `what` differs."""

    nodes: tuple[str, ...]
    what: str


def find_difference(first: Sequence[TunableOp], other: Sequence[TunableOp]) -> Difference | None:
    """Return the first piece of work that is not the same, with all its formulas, or None."""
    for at, (one, two) in enumerate(zip(first, other, strict=False)):
        if one != two:
            return Difference(_nodes(first, at), _what(one, two))
    if len(first) != len(other):
        longer = max(first, other, key=len)
        return Difference(_nodes(longer, min(len(first), len(other))), "has other kernels")
    return None


def point_text(space: Space) -> str:
    """Name a point, such as "batch=1, height=224"."""
    pairs = zip(space.dims, space.point, strict=True)
    return ", ".join(f"{dim.name}={size}" for dim, size in pairs)


def _nodes(work: Sequence[TunableOp], at: int) -> tuple[str, ...]:
    """Return the nodes of a piece of work; a copy is made for what comes after it."""
    return next((one.nodes for one in work[at:] if one.nodes), ())


def _what(one: TunableOp, two: TunableOp) -> str:
    if one.nodes != two.nodes or len(one.tactics) != len(two.tactics):
        return "has other kernels"
    for left, right in zip(one.tactics, two.tactics, strict=True):
        if len(left) != len(right):
            return "has other kernels"
        for a, b in zip(left, right, strict=True):
            if a != b:
                return _difference(a, b)
    return "has other kernels"


def _difference(a: KernelLaunch, b: KernelLaunch) -> str:
    if a.spec.title != b.spec.title:
        return f"is kernel {a.spec.title} and {b.spec.title}"
    ours, theirs = dict(a.spec.constants), dict(b.spec.constants)
    for name, value in ours.items():
        if name not in theirs or theirs[name] != value:
            return f"has {name} {value!r} and {theirs.get(name)!r}"
    if a.grid != b.grid:
        return f"has the grid {a.grid} and {b.grid}"
    if len(a.arguments) == len(b.arguments):
        for (name, _), x, y in zip(a.spec.signature, a.arguments, b.arguments, strict=True):
            if x != y:
                return f"has {name} {x!r} and {y!r}"
    return "has other parameters"
