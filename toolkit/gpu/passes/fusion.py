"""Operations -> groups that become one kernel each: a root and the element-wise work after it.

A group's root is a convolution, a product, a pooling and the like, or an element-wise operation
itself. What follows joins it while only one tensor leaves the group and everything else that is
read was computed before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toolkit.gpu.ir.dtypes import is_float
from toolkit.gpu.ir.expressions import is_elementwise, tensors_read
from toolkit.gpu.ir.network import Network, Operation, Shape

MAX_OPERANDS = 4  # of an element-wise kernel
_WIDE_INTEGERS = frozenset({"uint16", "int32", "uint32", "int64", "uint64"})


@dataclass(frozen=True, slots=True)
class Group:
    """`root` (None: element-wise only), the element-wise operations after it, and the result."""

    root: Operation | None
    after: tuple[Operation, ...]
    result: str

    @property
    def root_operation(self) -> Operation:
        """The root of a group that has one."""
        assert self.root is not None
        return self.root

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the ONNX nodes in it, each once."""
        first = () if self.root is None else (self.root,)
        return tuple(dict.fromkeys(name for op in (*first, *self.after) for name in op.nodes))


def group_operations(network: Network, epilogues: Mapping[str, int]) -> tuple[Group, ...]:
    """Return all operations of a network in groups, in an order in which they can run.

    `epilogues`: roots whose kernel can end in an expression, with the tensors that it may read
    beside the result.
    """
    readers: dict[str, list[int]] = {}
    for at, op in enumerate(network.operations):
        for name in op.inputs:
            readers.setdefault(name, []).append(at)
    ready = set(network.inputs) | set(network.constants)
    taken: set[int] = set()
    groups: list[Group] = []
    for at, op in enumerate(network.operations):
        if at in taken:
            continue
        members = _grow(network, at, readers, ready, taken, epilogues=epilogues)
        taken |= set(members)
        operations = [network.operations[index] for index in members]
        result = operations[-1].outputs[0] if len(members) > 1 else op.outputs[0]
        root = None if is_elementwise(op) else op
        groups.append(Group(root, tuple(operations[root is not None :]), result))
        ready |= {name for index in operations for name in index.outputs}
    return tuple(groups)


def _grow(
    network: Network,
    start: int,
    readers: Mapping[str, Sequence[int]],
    ready: set[str],
    taken: set[int],
    *,
    epilogues: Mapping[str, int],
) -> list[int]:
    """Return the positions of the operations that form a group with the one at `start`."""
    root = network.operations[start]
    alone = is_elementwise(root)
    if not alone and root.kind not in epilogues:
        return [start]
    shape = network.shapes[root.outputs[0]]
    members, best = [start], [start]
    produced = {root.outputs[0]}
    outside = set(tensors_read(root, network.constants)) if alone else set()
    allowed = MAX_OPERANDS if alone else epilogues[root.kind]
    for at in range(start + 1, len(network.operations)):
        op = network.operations[at]
        if at in taken or not is_elementwise(op) or not produced & set(op.inputs):
            continue
        read = set(tensors_read(op, network.constants)) - produced
        fits = read <= ready and len(outside | read) <= allowed
        if not fits or not _same_shapes(network, op, shape, alone, read):
            continue
        members.append(at)
        produced.add(op.outputs[0])
        outside |= read
        alone_leaves = _escaping(network, members, readers) == {op.outputs[0]}
        if alone_leaves and not _widens(network, op):
            best = list(members)
    return best


def _widens(network: Network, op: Operation) -> bool:
    """True if an operation converts to float integers that FP16 may not represent, as INT8 sums.

    Such are stored as integers: their readers make the floats.
    """
    kinds = [network.dtypes.get(name, "") for name in (op.inputs[0], op.outputs[0])]
    return op.kind == "Cast" and kinds[0] in _WIDE_INTEGERS and is_float(kinds[1])


def _same_shapes(
    network: Network, op: Operation, shape: Shape, alone: bool, read: set[str]
) -> bool:
    """Whether the operation works on the root's shape; only element-wise kernels broadcast."""
    if network.shapes[op.outputs[0]] != shape:
        return False
    # Kernels hand what they read beside the result to an expression as FP32.
    return alone or all(
        network.shapes.get(name) == shape and is_float(network.dtypes[name]) for name in read
    )


def _escaping(
    network: Network, members: Sequence[int], readers: Mapping[str, Sequence[int]]
) -> set[str]:
    """Return the results of these operations that others read or that leave the segment."""
    inside = set(members)
    names = (name for at in members for name in network.operations[at].outputs)
    return {
        name
        for name in names
        if name in network.outputs or any(at not in inside for at in readers.get(name, ()))
    }
