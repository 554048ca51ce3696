"""Unify INT8 ranges for the DLA: tensors whose scales a layer requires to be equal.

Let a(t) be the amax of tensor t, and let each node of the DLA tie some of its tensors to one range
(the rows "tie" of `SCALE_RULES`). Ties are an equivalence; on each of its classes C

    a'(t) = max { a(u) : u in C, u has a range }      for every t in C

which is the smallest a' >= a that obeys every tie: no range shrinks. If no tensor of a class has a
range (imported tables), the rows "fill" copy one from a neighbour, first with the data flow, then
against it; of several neighbours the largest counts. They never change an existing range: that of a
ReLU may be smaller than that of its operand. Ties and fills repeat until nothing changes.

The result does not depend on the order of nodes, and applying the rules again changes nothing.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import onnx_ir as ir

from toolkit.errors import BuildError

Kind = Literal["tie", "fill"]
Which = Literal["data", "inputs", "inputs and outputs"]
Certainty = Literal["documented", "observed"]

HEADER = "NvInfer.h 10.3"
TRANSLATOR = "NVIDIA qdq-translator 0.2"


def _nearest(node: ir.Node) -> bool:
    return node.attributes.get_string("mode", "nearest") == "nearest"


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """One row: the tensors of a node that share a range.

    `which`: "data" the first input and all outputs (other inputs are shapes, axes, bounds),
    "inputs" all inputs, "inputs and outputs" both; constants and tensors that are not floating
    point never count. `kind` "tie": they must have one range; "fill": those without a range take
    that of the others. `when`: the nodes of `ops` that it holds for, None: all. `bound`: the amax
    of an output without a range, where the operator has one.
    """

    id: str
    ops: frozenset[str]
    kind: Kind
    which: Which
    source: str
    certainty: Certainty = "documented"
    when: Callable[[ir.Node], bool] | None = None
    bound: float | None = None


def _ops(names: str) -> frozenset[str]:
    return frozenset(names.split())


# fmt: off
SCALE_RULES: tuple[ScaleRule, ...] = (
    ScaleRule("concat", _ops("Concat"), "tie", "inputs and outputs",
              f"{HEADER}, IConcatenationLayer: all input ranges equal to the output's"),
    ScaleRule("pooling", _ops("MaxPool AveragePool GlobalAveragePool"), "tie", "data",
              f"{HEADER}, IPoolingLayer: input and output range equal"),
    ScaleRule("element-wise", _ops("Add Sum Sub Mul Max Min"), "tie", "inputs",
              f"{HEADER}, IElementWiseLayer: both ranges equal, the larger one"),
    # Data movement cannot rescale.
    ScaleRule("shape", _ops("Reshape Flatten Transpose Squeeze Unsqueeze Pad"), "tie", "data",
              f"{TRANSLATOR}: scales carried through", "observed"),
    ScaleRule("move", _ops("Slice Split Identity"), "tie", "data",
              "values are copied, as through the operators of rule shape", "observed"),
    ScaleRule("resize-nearest", _ops("Resize Upsample"), "tie", "data",
              "values are copied, as through the operators of rule shape", "observed",
              when=_nearest),
    ScaleRule("rectifier", _ops("Relu"), "fill", "data",
              f"{TRANSLATOR}: missing scales carried through", "observed"),
    ScaleRule("sigmoid", _ops("Sigmoid"), "fill", "data",
              f"{TRANSLATOR}: a missing output scale is 1 / 127", "observed", bound=1.0),
    # A convolution before an Add runs in INT8 only if its output has a range. The other operand
    # gives one (rule element-wise), or else the output of the Add.
    ScaleRule("conv-feeds-add", _ops("Add Sum"), "fill", "inputs and outputs",
              f"{TRANSLATOR}: --add_unary_ew_scales_for_dla", "observed",
              when=lambda node: any(_produced_by(value, "Conv") for value in node.inputs)),
)
# fmt: on


@dataclass(frozen=True, slots=True)
class ScaleChange:
    """A tensor's new range, and the rule and node that ask for it.

    `before` is None where there was no range; `from_tensor` is the tensor at that node from which
    the range came ("" where it is the bound of the operator).
    """

    tensor: str
    before: float | None
    after: float
    rule: str
    node: str
    from_tensor: str

    @property
    def factor(self) -> float:
        """after / before, the growth of the scale; 1 if there was no range."""
        return 1.0 if self.before is None else self.after / self.before


@dataclass(frozen=True, slots=True)
class MissingRange:
    """A tensor that a rule ties but for which no range could be found."""

    tensor: str
    rule: str
    node: str


@dataclass(frozen=True, slots=True)
class UnifiedRanges:
    """The ranges that obey the rules, what changed (sorted by tensor), and what is missing."""

    amax: Mapping[str, float]
    changes: tuple[ScaleChange, ...]
    missing: tuple[MissingRange, ...]

    @property
    def worst_factor(self) -> float:
        """The largest growth of a scale, at least 1; its log2 is the number of bits lost."""
        return max((change.factor for change in self.changes), default=1.0)


@dataclass(frozen=True, slots=True)
class _Bond:
    """A rule applied to a node: its tensors, in the order of the node.

    `outputs`: those that the node computes; it reads the others.
    """

    rule: ScaleRule
    node: str
    tensors: tuple[str, ...]
    outputs: frozenset[str]


def unify_scales(
    model: ir.Model,
    amax: Mapping[str, float],
    nodes: Collection[str],
    rules: Sequence[ScaleRule] = SCALE_RULES,
) -> UnifiedRanges:
    """Return ranges that obey `rules` at the named nodes: those that run on the DLA in INT8.

    `amax`: tensor -> range, in the tensor's unit; tensors may lack one. `nodes`: names; leave out
    those that stay in FP16, because filling ranges there would put them back to INT8.

    Raises BuildError: a range is not a positive number.
    """
    _check(amax)
    names = frozenset(nodes)
    bonds = _bonds(model.graph, names, rules)
    ranges = dict(amax)
    reasons: dict[str, tuple[_Bond, str]] = {}
    changed = True
    while changed:
        changed = _tie(bonds, ranges, reasons) or _fill(bonds, ranges, reasons)
    changes = [
        ScaleChange(name, amax.get(name), after, bond.rule.id, bond.node, origin)
        for name, after in sorted(ranges.items())
        if after != amax.get(name)
        for bond, origin in (reasons[name],)
    ]
    return UnifiedRanges(ranges, tuple(changes), _missing(bonds, ranges))


def _check(amax: Mapping[str, float]) -> None:
    for name, value in amax.items():
        if not (value > 0 and math.isfinite(value)):
            raise BuildError(
                f"Tensor {name!r} has the range {value}, but a range must be a positive number; "
                "calibrate again."
            )


def _bonds(graph: ir.Graph, names: frozenset[str], rules: Sequence[ScaleRule]) -> tuple[_Bond, ...]:
    bonds = []
    for node in graph:
        if str(node.name) not in names or node.domain != "":
            continue
        for rule in rules:
            if node.op_type in rule.ops and (rule.when is None or rule.when(node)):
                bonds.append(_bond(node, rule))
    # Sorted, so that reasons do not depend on the order of nodes.
    return tuple(sorted(bonds, key=lambda bond: (bond.rule.id, bond.node)))


def _bond(node: ir.Node, rule: ScaleRule) -> _Bond:
    inputs = node.inputs[:1] if rule.which == "data" else node.inputs
    results = () if rule.which == "inputs" else node.outputs
    outputs = frozenset(str(value.name) for value in results if _has_range(value))
    read = [str(value.name) for value in inputs if value is not None and _has_range(value)]
    return _Bond(rule, str(node.name), tuple(dict.fromkeys([*read, *sorted(outputs)])), outputs)


def _has_range(value: ir.Value) -> bool:
    """Whether a value is an activation in floating point (or of unknown type)."""
    if not value.name or ir.convenience.get_const_tensor(value) is not None:
        return False
    return value.dtype in {None, ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


def _produced_by(value: ir.Value | None, op: str) -> bool:
    producer = None if value is None else value.producer()
    return producer is not None and producer.op_type == op


def _tie(
    bonds: Sequence[_Bond], ranges: dict[str, float], reasons: dict[str, tuple[_Bond, str]]
) -> bool:
    """Set each class of tied tensors to its largest range, breadth first."""
    bonds_of: dict[str, list[_Bond]] = {}
    for bond in bonds:
        if bond.rule.kind == "tie":
            for name in bond.tensors:
                bonds_of.setdefault(name, []).append(bond)
    changed, seen = False, set[str]()
    # From the largest range down: a tensor belongs to the first range that reaches it.
    known = sorted(
        (name for name in bonds_of if name in ranges), key=lambda name: (-ranges[name], name)
    )
    for limit, names in groupby(known, key=dict(ranges).__getitem__):
        front = [name for name in names if name not in seen]
        seen.update(front)
        while front:
            reached = _neighbours(front, bonds_of, seen)
            for name, reason in reached.items():
                if ranges.get(name) != limit:
                    ranges[name], reasons[name], changed = limit, reason, True
            seen.update(reached)
            front = sorted(reached)
    return changed


def _neighbours(
    front: Sequence[str], bonds_of: Mapping[str, Sequence[_Bond]], seen: set[str]
) -> dict[str, tuple[_Bond, str]]:
    """Unseen tensors tied to those of `front`, each with its tie and origin."""
    reached: dict[str, tuple[_Bond, str]] = {}
    for name in front:
        for bond in bonds_of[name]:
            for neighbour in bond.tensors:
                if neighbour not in seen:
                    reached.setdefault(neighbour, (bond, name))
    return reached


def _fill(
    bonds: Sequence[_Bond], ranges: dict[str, float], reasons: dict[str, tuple[_Bond, str]]
) -> bool:
    """Copy ranges to tensors without one: with the data flow, else against it."""
    for forward in (True, False):
        filled: dict[str, tuple[float, _Bond, str]] = {}
        for bond in (bond for bond in bonds if bond.rule.kind == "fill"):
            for name in bond.tensors:
                if name in ranges or (name in bond.outputs) != forward:
                    continue
                for limit, origin in _offers(bond, forward, ranges):
                    if name not in filled or limit > filled[name][0]:
                        filled[name] = (limit, bond, origin)
        for name, (limit, bond, origin) in filled.items():
            ranges[name], reasons[name] = limit, (bond, origin)
        if filled:
            return True
    return False


def _offers(
    bond: _Bond, forward: bool, ranges: Mapping[str, float]
) -> tuple[tuple[float, str], ...]:
    """(range, tensor) of the other side of a node."""
    if bond.rule.bound is not None:
        return ((bond.rule.bound, ""),) if forward else ()
    neighbours = (name for name in bond.tensors if (name in bond.outputs) != forward)
    return tuple((ranges[name], name) for name in neighbours if name in ranges)


def _missing(bonds: Sequence[_Bond], ranges: Mapping[str, float]) -> tuple[MissingRange, ...]:
    missing: dict[str, MissingRange] = {}
    for bond in bonds:
        for name in bond.tensors:
            if name not in ranges:
                missing.setdefault(name, MissingRange(name, bond.rule.id, bond.node))
    return tuple(missing[name] for name in sorted(missing))
