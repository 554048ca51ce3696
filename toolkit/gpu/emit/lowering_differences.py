"""Compares lowerings of a segment at several points of its dynamic dimensions.

Lowering is plain Python on sizes that remember their formulas. Code that turns a size into a plain
number loses its formula, and code that compares sizes decides for one point. Both show as a
difference between the lowerings at different points (`toolkit.gpu.shapes.inference.traces_of`).
"""

from collections.abc import Sequence
from itertools import chain

from toolkit.gpu.ir.launch import KernelLaunch, TunableOp
from toolkit.gpu.shapes.sizes import Space


def find_difference(
    first: Sequence[TunableOp], second: Sequence[TunableOp]
) -> tuple[tuple[str, ...], str]:
    """Return the nodes of the first op that differs, formulas included, and what differs of it."""
    for at, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return _nodes(first, at), _what(a, b)
    if len(first) != len(second):
        longer = max(first, second, key=len)
        return _nodes(longer, min(len(first), len(second))), "has other kernels"
    return (), "has other constants"


def point_text(space: Space) -> str:
    """Name a point, such as "batch=1, height=224"."""
    pairs = zip(space.dims, space.point, strict=True)
    return ", ".join(f"{dim.name}={size}" for dim, size in pairs)


def _nodes(ops: Sequence[TunableOp], at: int) -> tuple[str, ...]:
    """Return the nodes of an op; those of a copy are the nodes of the op after it."""
    return next((op.nodes for op in ops[at:] if op.nodes), ())


def _what(a: TunableOp, b: TunableOp) -> str:
    if a.nodes != b.nodes or [len(t) for t in a.tactics] != [len(t) for t in b.tactics]:
        return "has other kernels"
    for x, y in zip(chain(*a.tactics), chain(*b.tactics), strict=True):
        if x != y:
            return _difference(x, y)
    return "has other kernels"


def _difference(a: KernelLaunch, b: KernelLaunch) -> str:
    if a.spec.title != b.spec.title:
        return f"is kernel {a.spec.title} and {b.spec.title}"
    constants = dict(b.spec.constants)
    for name, value in a.spec.constants:
        if name not in constants or constants[name] != value:
            return f"has {name} {value!r} and {constants.get(name)!r}"
    if a.grid != b.grid:
        return f"has the grid {a.grid} and {b.grid}"
    if len(a.arguments) == len(b.arguments):
        for (name, _), x, y in zip(a.spec.signature, a.arguments, b.arguments, strict=True):
            if x != y:
                return f"has {name} {x!r} and {y!r}"
    return "has other parameters"
