"""Which nodes run as one kernel: TensorRT's fusions, as far as its documents and logs show them.

A convolution or product takes the normalisation, activation, sum and other pointwise work behind it
along; pointwise work alone forms chains; tensors are joined where their parts are written, so that
only parts that are themselves cut out of another tensor are copied. The DLA fuses alike: its output
stage scales, sums and rectifies, and joins and cuts are addresses.
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
class Kernel:
    """Nodes that run as one; `head` does the work and carries the cost.

    `reads` and `writes` are the activations that pass in from and out to other kernels (of a join:
    the parts that it must copy), `constants` the weights. A kernel of kind "free" only renames,
    cuts or joins addresses.
    """

    kind: Kind
    head: NodeView
    nodes: tuple[NodeView, ...]
    reads: tuple[TensorView, ...]
    writes: tuple[TensorView, ...]

    @property
    def constants(self) -> tuple[TensorView, ...]:
        """The weights and other constants of all its nodes."""
        return tuple(tensor for view in self.nodes for tensor in view.constants)


class _Group:
    """Nodes gathered so far; the last one's output is what a follower may join behind."""

    def __init__(self, view: NodeView, order: int, made_by: dict[str, "_Group"]) -> None:
        self.copied = _copied(view, made_by)
        self.kind = _kind(view, copies=bool(self.copied))
        self.order = order
        self.views = [view]


def fuse(views: Sequence[NodeView]) -> tuple[Kernel, ...]:
    """Return the kernels of a graph in running order; every node is in exactly one."""
    groups: list[_Group] = []
    made_by: dict[str, _Group] = {}
    for view in views:
        group = _joined(view, made_by)
        if group is None:
            group = _Group(view, len(groups), made_by)
            groups.append(group)
        else:
            group.views.append(view)
        for tensor in view.outputs:
            made_by[tensor.name] = group
    readers: dict[str, set[int]] = {}
    for group in groups:
        for view in group.views:
            for name in view.reads:
                readers.setdefault(name, set()).add(group.order)
    return tuple(_kernel(group, readers) for group in groups)


def alone(view: NodeView) -> Kernel:
    """Return the kernel of one node without its neighbours."""
    return _kernel(_Group(view, 0, {}), {})


def _joined(view: NodeView, made_by: dict[str, _Group]) -> _Group | None:
    """Return the group behind which a pointwise node can run in the same kernel.

    It is the latest that the node reads: a kernel that took the node earlier would wait for one
    that may read its own results (the gate of a squeeze-and-excitation block).
    """
    if view.op not in POINTWISE or not view.outputs:
        return None
    read = [(made_by[t.name], t.elements) for t in view.activations if t.name in made_by]
    if not read:
        return None
    latest = max((group for group, _ in read), key=lambda group: group.order)
    whole = any(g is latest and size == view.outputs[0].elements for g, size in read)
    return latest if whole and latest.kind in ("matrix", "pointwise") else None


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


def _copied(view: NodeView, made_by: dict[str, _Group]) -> tuple[TensorView, ...]:
    """Return the parts of a join that no kernel can write straight into the joined tensor."""
    if view.op != "Concat":
        return ()
    return tuple(
        tensor
        for tensor in view.activations
        if (group := made_by.get(tensor.name)) is None or group.views[0].op in CUTS
    )


def _kernel(group: _Group, readers: dict[str, set[int]]) -> Kernel:
    inside = {tensor.name for view in group.views for tensor in view.outputs}
    reads: dict[str, TensorView] = {}
    writes: list[TensorView] = []
    for view in group.views:
        reads |= {t.name: t for t in view.activations if t.name not in inside}
        for tensor in view.outputs:
            used = readers.get(tensor.name, set())
            if not used or used - {group.order}:
                writes.append(tensor)
    return Kernel(
        kind=group.kind,
        head=group.views[0],
        nodes=tuple(group.views),
        reads=group.copied or tuple(reads.values()),
        writes=tuple(writes),
    )
