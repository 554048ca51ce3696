"""Concatenations that are taken apart again, and functions of what is joined.

A detector joins boxes and scores of each scale, then the scales, splits both again and takes the
sigmoid of the scores. Every join would be a pass over all numbers. But

    Slice(Concat(a, b))   = a, b or Concat of both                along the joined dimension
    Slice(Concat(a, b))   = Concat(Slice(a), Slice(b))            along another
    Slice(Reshape(a))     = Reshape(Slice(a))                     with the same dimensions up to it
    f(Concat(a, b))       = Concat(f(a), f(b))                    f of each number alone
    f(Reshape(a))         = Reshape(f(a))

The first three are used where no Slice is left of all slices of a tensor; the last two where every
f(part) ends the kernel that makes the part.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from toolkit.gpu.ir.builder import NetworkBuilder
from toolkit.gpu.ir.dtypes import is_float
from toolkit.gpu.ir.expressions import is_elementwise, tensors_read
from toolkit.gpu.ir.network import RESHAPES, Network, Operation, live
from toolkit.gpu.ir.parameters import UnitSlice, slice_of
from toolkit.gpu.shapes.sizes import fixed


def push_through_concat(network: Network, roots: Collection[str]) -> Network:
    """Return the network with slices and functions of joined tensors moved to their parts.

    `roots`: operators whose kernels can end in an expression.
    """
    return _functions_of_parts(_without_slices(network), roots)


@dataclass(frozen=True, slots=True)
class _Joined:
    """A tensor that is there already, or its `parts`: joined along `axis`, or reshaped."""

    name: str = ""
    parts: tuple["_Joined", ...] = ()
    axis: int | None = None
    shape: tuple[int, ...] = ()


def _without_slices(network: Network) -> Network:
    producers = {name: op for op in network.operations for name in op.outputs}
    readers: dict[str, list[Operation]] = {}
    for op in network.operations:
        for name in set(op.inputs):
            readers.setdefault(name, []).append(op)
    joined: dict[str, _Joined] = {}  # by the name of a slice
    for source, reading in readers.items():
        slices = [slice_of(network, op) for op in reading]
        if source in network.outputs or None in slices:
            continue
        trees = [_part(network, producers, part) for part in slices if part is not None]
        if all(trees):
            names = (op.outputs[0] for op in reading)
            joined |= {n: tree for n, tree in zip(names, trees, strict=True) if tree is not None}
    if not joined:
        return network
    builder = NetworkBuilder(network)
    same: dict[str, str] = {}
    for old in network.operations:
        op = replace(old, inputs=tuple(same.get(name, name) for name in old.inputs))
        tree = joined.get(op.outputs[0])
        if tree is None:
            builder.operations.append(op)
        elif tree.name and op.outputs[0] not in network.outputs:
            same[op.outputs[0]] = same.get(tree.name, tree.name)
        else:
            _write(builder, op, tree, op.outputs[0], same)
    return live(builder.network(), (*RESHAPES, "Concat"))


def _part(network: Network, producers: Mapping[str, Operation], piece: UnitSlice) -> _Joined | None:
    """Return a slice as it is joined from whole tensors; None where a Slice would be left."""
    shape = network.shapes.get(piece.source)
    if shape is None or not fixed(shape[piece.axis]):
        return None
    if piece.size == shape[piece.axis]:
        return _Joined(piece.source)
    op = producers.get(piece.source)
    if op is None or any(name not in network.shapes for name in op.inputs[:1]):
        return None
    scale = network.scales.get(piece.source)
    if op.kind in RESHAPES and network.scales.get(op.inputs[0]) == scale:
        same_prefix = network.shapes[op.inputs[0]][: piece.axis + 1] == shape[: piece.axis + 1]
        inner = (
            _part(network, producers, replace(piece, source=op.inputs[0])) if same_prefix else None
        )
        cut = (*shape[: piece.axis], piece.size, *shape[piece.axis + 1 :])
        return inner and _Joined(parts=(inner,), shape=cut)
    alike = op.kind == "Concat" and all(
        name in network.shapes and network.scales.get(name) == scale for name in op.inputs
    )
    return _joined_part(network, producers, piece, op) if alike else None


def _joined_part(
    network: Network, producers: Mapping[str, Operation], piece: UnitSlice, op: Operation
) -> _Joined | None:
    """Return a slice of the concatenation `op`."""
    axis = op.integer("axis", 0) % len(network.shapes[piece.source])
    parts: list[_Joined | None] = []
    begin = 0
    for name in op.inputs:
        size = network.shapes[name][piece.axis]
        if not fixed(size):
            return None
        first, last = piece.start, piece.start + piece.size
        if axis == piece.axis:
            first, last = max(first - begin, 0), min(last - begin, size)
            begin += size
        if first < last:
            parts.append(
                _part(network, producers, UnitSlice(name, piece.axis, first, last - first))
            )
    whole = tuple(part for part in parts if part is not None)
    if len(whole) < len(parts):
        return None
    return whole[0] if len(whole) == 1 else _Joined(parts=whole, axis=axis)


def _write(
    builder: NetworkBuilder, op: Operation, tree: _Joined, output: str, same: Mapping[str, str]
) -> None:
    """Add the operations that join what the slice `op` is, to `output`."""
    if tree.name:
        builder.add(op, "Identity", (same.get(tree.name, tree.name),), output)
        return
    names = []
    for part in tree.parts:
        name = same.get(part.name, part.name)
        if not name:
            shape = _shape(builder, part)
            name = builder.tensor(
                f"{output} (part)", shape, builder.dtypes[output], builder.scales.get(output)
            )
            _write(builder, op, part, name, same)
        names.append(name)
    if tree.axis is None:
        builder.add(op, "Reshape", names, output)
    else:
        builder.add(op, "Concat", names, output, {"axis": tree.axis})


def _shape(builder: NetworkBuilder, tree: _Joined) -> tuple[int, ...]:
    if tree.name:
        return builder.shapes[tree.name]
    if tree.axis is None:
        return tree.shape
    shapes = [_shape(builder, part) for part in tree.parts]
    size = sum(shape[tree.axis] for shape in shapes)
    return (*shapes[0][: tree.axis], size, *shapes[0][tree.axis + 1 :])


def _functions_of_parts(network: Network, roots: Collection[str]) -> Network:
    readers = Counter(name for op in network.operations for name in op.inputs)
    readers.update(network.outputs)
    builder = NetworkBuilder(network)
    producers: dict[str, Operation] = {}
    unread: set[str] = set()
    for op in network.operations:
        start = len(builder.operations)
        if _is_function(network, op) and _all_end(producers, readers, roots, op.inputs[0], False):
            unread |= _move(builder, producers, op, op.inputs[0], op.outputs[0])
        else:
            builder.operations.append(op)
        for added in builder.operations[start:]:
            producers |= dict.fromkeys(added.outputs, added)
            readers.update({name: 1 for name in added.outputs if name not in readers})
    builder.operations = [op for op in builder.operations if op.outputs[0] not in unread]
    return builder.network()


def _is_function(network: Network, op: Operation) -> bool:
    """Whether an operation makes a float of each float of its first operand, and reads no other."""
    if not is_elementwise(op) or tensors_read(op, network.constants) != op.inputs[:1]:
        return False
    source, result = op.inputs[0], op.outputs[0]
    alike = source in network.shapes and network.shapes[source] == network.shapes[result]
    return alike and all(is_float(network.dtypes[name]) for name in (source, result))


def _all_end(
    producers: Mapping[str, Operation],
    readers: Counter[str],
    roots: Collection[str],
    name: str,
    inner: bool,
) -> bool:
    """Whether a tensor is joined of parts each of which a kernel makes that can end in more."""
    op = producers.get(name)
    if op is None or readers[name] != 1:
        return False
    if op.kind in RESHAPES:
        return _all_end(producers, readers, roots, op.inputs[0], inner)
    if op.kind == "Concat":
        return all(_all_end(producers, readers, roots, part, True) for part in op.inputs)
    return inner and (op.kind in roots or is_elementwise(op))


def _move(
    builder: NetworkBuilder,
    producers: Mapping[str, Operation],
    op: Operation,
    name: str,
    output: str,
) -> set[str]:
    """Add `op` of each part of tensor `name`, join them to `output`; return tensors now unread."""
    producer = producers[name]
    if producer.kind not in (*RESHAPES, "Concat"):
        builder.operations.append(replace(op, inputs=(name, *op.inputs[1:]), outputs=(output,)))
        return set()
    unread = {name}
    count = len(producer.inputs) if producer.kind == "Concat" else 1
    parts = []
    for part in producer.inputs[:count]:
        dtype, scale = builder.dtypes[output], builder.scales.get(output)
        parts.append(builder.tensor(f"{part} ({op.kind})", builder.shapes[part], dtype, scale))
        unread |= _move(builder, producers, op, part, parts[-1])
    inputs = (*parts, *producer.inputs[count:])
    builder.operations.append(replace(producer, inputs=inputs, outputs=(output,)))
    return unread
