"""Chains of Reshape and Transpose -> one Reshape, one Transpose and one Reshape.

Exporters join dimensions and split them again: (rows, batch, heads x depth) becomes (rows, batch x
heads, depth), is transposed, and becomes (batch, heads, rows, depth). Where the batch does not lie
next to the heads in memory, joining them is a copy, though the end of the chain is none.

A chain is followed on atoms, the parts that no step of it divides. Each dimension is a row of
atoms; a transposition exchanges dimensions, and a reshaping deals the same atoms out anew,
dividing some. The chain is then: split the source into its atoms, put them in order, join them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

from toolkit.gpu.ir.builder import NetworkBuilder
from toolkit.gpu.ir.network import RESHAPES, Network, Operation, Shape
from toolkit.gpu.shapes.sizes import Size

_MOVES = RESHAPES | {"Transpose"}


def merge_layout_chains(network: Network) -> Network:
    """Return the network with the chains rewritten that split what they joined before."""
    counts = Counter(name for op in network.operations for name in op.inputs)
    counts.update(network.outputs)
    producers = {op.outputs[0]: op for op in network.operations}
    inside = {
        op.inputs[0]
        for op in network.operations
        if op.kind in _MOVES and counts[op.inputs[0]] == 1 and _is_move(producers, op.inputs[0])
    }
    builder = NetworkBuilder(network)
    merged: set[str] = set()
    for op in network.operations:
        builder.operations.append(op)
        if op.kind not in _MOVES or op.outputs[0] in inside:
            continue
        chain = [op]
        while chain[0].inputs[0] in inside:
            chain.insert(0, producers[chain[0].inputs[0]])
        joined = _follow(chain, network.shapes)
        if joined is not None:
            builder.operations.pop()
            _write(builder, chain, joined)
            merged |= {inner.outputs[0] for inner in chain[:-1]}
    builder.operations = [op for op in builder.operations if op.outputs[0] not in merged]
    return builder.network()


_Joined = tuple[Shape, tuple[int, ...]]
"""Sizes that the source is split into, and the order in which they are joined."""


def _is_move(producers: Mapping[str, Operation], name: str) -> bool:
    return name in producers and producers[name].kind in _MOVES


def _follow(chain: Sequence[Operation], shapes: Mapping[str, Shape]) -> _Joined | None:
    """Return what a chain comes to; None where it splits nothing that it joined."""
    source = shapes.get(chain[0].inputs[0])
    every = [source, *(shapes[op.outputs[0]] for op in chain)]
    if source is None or any(isinstance(n, Size) or n < 1 for s in every for n in s or ()):
        return None
    sizes = [n for n in source if n != 1]  # of each atom
    atoms = list(range(len(sizes)))  # in the order of the source
    dims = [[] if n == 1 else [sum(m != 1 for m in source[:at])] for at, n in enumerate(source)]
    undone = False
    for op in chain:
        if op.kind == "Transpose":
            order = op.integers("perm", tuple(reversed(range(len(dims)))))
            dims = [dims[at] for at in order]
            continue
        joined = [dim for dim in dims if len(dim) > 1]
        dealt = _deal(dims, shapes[op.outputs[0]], sizes, atoms)
        if dealt is None:
            return None
        undone |= _spreads(joined, dealt)
        dims = dealt
    if not undone:
        return None
    return _merged(source, sizes, atoms, [atom for dim in dims for atom in dim])


def _deal(
    dims: Sequence[list[int]], shape: Shape, sizes: list[int], atoms: list[int]
) -> list[list[int]] | None:
    """Deal atoms out to the dimensions of `shape`, in order; divides atoms that are too large.

    None where a dimension would end inside an atom that its size does not divide.
    """
    rest = [atom for dim in dims for atom in dim]
    dealt: list[list[int]] = []
    for size in shape:
        taken: list[int] = []
        quotient = size
        while quotient != 1:
            atom = rest[0]
            if quotient % sizes[atom]:
                if sizes[atom] % quotient:
                    return None
                _divide(atom, quotient, sizes, (atoms, rest, *dims))
            quotient //= sizes[atom]
            taken.append(rest.pop(0))
        dealt.append(taken)
    return dealt


def _divide(atom: int, outer: int, sizes: list[int], rows: Sequence[list[int]]) -> None:
    """Divide an atom into `outer` and what is left, in all lists that hold it."""
    inner = len(sizes)
    sizes.append(sizes[atom] // outer)
    sizes[atom] = outer
    for row in rows:
        if atom in row:
            row.insert(row.index(atom) + 1, inner)


def _spreads(joined: Sequence[Sequence[int]], dealt: Sequence[Sequence[int]]) -> bool:
    """Whether a dimension that was joined of several atoms is spread over several dimensions."""
    dim_of = {atom: at for at, dim in enumerate(dealt) for atom in dim}
    return any(len({dim_of[atom] for atom in dim}) > 1 for dim in joined)


def _merged(
    source: Shape, sizes: Sequence[int], atoms: Sequence[int], result: Sequence[int]
) -> _Joined:
    """Merge atoms of one dimension of the source that follow one another in the result, too."""
    follows = dict(pairwise(atoms))
    for last in _ends(source, sizes, atoms):
        follows.pop(last, None)
    runs: list[list[int]] = []
    for atom in result:
        if runs and follows.get(runs[-1][-1]) == atom:
            runs[-1].append(atom)
        else:
            runs.append([atom])
    in_source = sorted(runs, key=lambda run: atoms.index(run[0]))
    joined = tuple(prod(sizes[atom] for atom in run) for run in in_source)
    return joined, tuple(in_source.index(run) for run in runs)


def _ends(source: Shape, sizes: Sequence[int], atoms: Sequence[int]) -> list[int]:
    """The last atom of each dimension of the source."""
    ends: list[int] = []
    rest = iter(atoms)
    for size in source:
        atom, rest_of_size = -1, size
        while rest_of_size != 1:
            atom = next(rest)
            rest_of_size //= sizes[atom]
        ends.append(atom)
    return ends


def _write(builder: NetworkBuilder, chain: Sequence[Operation], joined: _Joined) -> None:
    """Add the Reshape, the Transpose and the Reshape of a chain, those that do anything."""
    last = chain[-1]
    name, output = chain[0].inputs[0], last.outputs[0]
    sizes, order = joined
    dtype, scale = builder.dtypes[output], builder.scales.get(output)
    if builder.shapes[name] != sizes:
        name = builder.add_new(last, "Reshape", (name,), sizes, dtype, scale=scale)
    if order != tuple(sorted(order)):
        shape = tuple(sizes[at] for at in order)
        perm = {"perm": order}
        name = builder.add_new(
            last, "Transpose", (name,), shape, dtype, attributes=perm, scale=scale
        )
    builder.add(last, "Reshape", (name,), output)
    others = tuple(node for op in chain[:-1] for node in op.nodes) + last.others
    builder.operations[-1] = replace(builder.operations[-1], others=others)
