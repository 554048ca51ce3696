"""Fuse nodes into kernels as TensorRT does, as far as its documents and logs show.

A convolution or GEMM has normalisation, activation, Add and other pointwise nodes in its epilogue;
other pointwise nodes form chains. A Concat is in place: only inputs that are slices of another
tensor are copied. The DLA fuses likewise: its output stage scales, adds and rectifies, and Concat
and Slice are addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from toolkit.graph.node_view import NodeView, TensorView

Kind = Literal["matrix", "pointwise", "pool", "copy", "other", "free"]

MATRIX = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
POINTWISE = frozenset(
    {"Abs", "Add", "BatchNormalization", "Cast", "Ceil", "Clip", "Div", "Elu", "Equal", "Erf"}
    | {"Exp", "Floor", "Gelu", "Greater", "HardSigmoid", "HardSwish", "LeakyRelu", "Less", "Log"}
    | {"Max", "Mean", "Min", "Mish", "Mul", "Neg", "PRelu", "Pow", "Reciprocal", "Relu", "Selu"}
    | {"Sigmoid", "Softplus", "Sqrt", "Sub", "Sum", "Tanh", "Where", "QuantizeLinear"}
    | {"DequantizeLinear", "Sign", "Softsign", "Not", "And", "Or"}
)
POOLS = frozenset({"MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool"})
RENAMES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"})
CUTS = frozenset({"Split", "Slice"})
SHAPES = frozenset({"Shape", "Constant", "ConstantOfShape", "Size", "Range"})


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """Nodes that run as one kernel; `head` carries the cost.

    `reads` and `writes`: activations from and to other kernels (of a Concat: the inputs that it
    must copy); `constants`: the weights. A kernel of kind "free" is only a view. `launches`: more
    than 1 for copies of several tensors.
    """

    kind: Kind
    head: NodeView
    nodes: tuple[NodeView, ...]
    reads: tuple[TensorView, ...]
    writes: tuple[TensorView, ...]
    launches: int = 1

    @property
    def constants(self) -> tuple[TensorView, ...]:
        """The constants of all nodes."""
        return tuple(tensor for view in self.nodes for tensor in view.constants)


class _Group:
    """Nodes of a kernel so far; a pointwise node may be fused after the last one."""

    def __init__(self, view: NodeView, order: int, producer_of: dict[str, "_Group"]) -> None:
        self.copied = _copied(view, producer_of)
        self.kind = _kind(view, copies=bool(self.copied))
        self.order = order
        self.views = [view]
        self.launches = 1

    def copy(self, in_place: set[str]) -> None:
        """Copy inputs that are in place in an earlier Concat, each with a kernel of its own."""
        names = [tensor.name for tensor in self.views[0].activations]
        shared = tuple(
            tensor
            for tensor in self.views[0].activations
            if tensor.name in in_place and tensor not in self.copied
        )
        in_place.update(names)
        if shared:
            self.launches = len(shared) + bool(self.copied)
            self.copied += shared
            self.kind = "copy"


def fuse(views: Sequence[NodeView], *, copy_shared: bool = False) -> tuple[FusedKernel, ...]:
    """Return the kernels of a graph in execution order; every node is in exactly one.

    `copy_shared`: a tensor that several Concats read is in place in the first and copied by the
    others, as TensorRT does; the compiler of this project nests the Concats instead.
    """
    groups: list[_Group] = []
    producer_of: dict[str, _Group] = {}
    in_place: set[str] = set()
    for view in views:
        group = _fusable_group(view, producer_of)
        if group is None:
            group = _Group(view, len(groups), producer_of)
            if copy_shared and view.op == "Concat":
                group.copy(in_place)
            groups.append(group)
        else:
            group.views.append(view)
        for tensor in view.outputs:
            producer_of[tensor.name] = group
    readers: dict[str, set[int]] = {}
    for group in groups:
        for view in group.views:
            for name in view.reads:
                readers.setdefault(name, set()).add(group.order)
    return tuple(_kernel(group, readers) for group in groups)


def alone(view: NodeView) -> FusedKernel:
    """Return the kernel of one node without its neighbours."""
    return _kernel(_Group(view, 0, {}), {})


def _fusable_group(view: NodeView, producer_of: dict[str, _Group]) -> _Group | None:
    """Return the group that a pointwise node can be fused into.

    It is the latest group that the node reads: an earlier one would wait for a kernel that may read
    its results (the gate of a squeeze-and-excitation block).
    """
    if view.op not in POINTWISE or not view.outputs:
        return None
    read = [(producer_of[t.name], t.elements) for t in view.activations if t.name in producer_of]
    if not read:
        return None
    latest = max((group for group, _ in read), key=lambda group: group.order)
    same_size = any(g is latest and size == view.outputs[0].elements for g, size in read)
    return latest if same_size and latest.kind in ("matrix", "pointwise") else None


def _kind(view: NodeView, *, copies: bool) -> Kind:
    if view.op in MATRIX:
        return "matrix"
    if view.op in POINTWISE:
        return "pointwise" if view.activations else "free"
    if view.op in POOLS:
        return "pool"
    if view.op in RENAMES | CUTS | SHAPES or not view.activations:
        return "free"
    if view.op == "Concat":
        return "copy" if copies else "free"
    return "other"


def _copied(view: NodeView, producer_of: dict[str, _Group]) -> tuple[TensorView, ...]:
    """Return the inputs of a Concat that cannot be written in place."""
    if view.op != "Concat":
        return ()
    return tuple(
        tensor
        for tensor in view.activations
        if (group := producer_of.get(tensor.name)) is None or group.views[0].op in CUTS
    )


def _kernel(group: _Group, readers: dict[str, set[int]]) -> FusedKernel:
    inside = {tensor.name for view in group.views for tensor in view.outputs}
    reads: dict[str, TensorView] = {}
    writes: list[TensorView] = []
    for view in group.views:
        reads |= {t.name: t for t in view.activations if t.name not in inside}
        for tensor in view.outputs:
            reader_groups = readers.get(tensor.name, set())
            if not reader_groups or reader_groups - {group.order}:
                writes.append(tensor)
    return FusedKernel(
        kind=group.kind,
        head=group.views[0],
        nodes=tuple(group.views),
        reads=group.copied or tuple(reads.values()),
        writes=tuple(writes),
        launches=group.launches,
    )
