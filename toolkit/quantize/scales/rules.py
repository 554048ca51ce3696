"""Make INT8 ranges obey the DLA: tensors that its layers tie together get one range.

Let a(t) be the amax of tensor t, and let each node of the DLA tie some of its tensors to one range
(the rows "tie" of `SCALE_RULES`). Ties are an equivalence; on each of its classes C

    a'(t) = max { a(u) : u in C, u has a range }      for every t in C

which is the least a' >= a that obeys every tie: no range shrinks, and none grows beyond what a rule
asks for. Where no tensor of a class has a range (tables translated from foreign models), the rows
"fill" carry one over from a neighbour, first with the data flow, then against it; of several
neighbours the largest counts. They never touch a range that exists: a rectifier may well have a
smaller one than its operand. Ties and fills repeat until nothing changes.

The result depends on no order of nodes, and applying the rules to it changes nothing.
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
    # What only moves numbers has nothing to rescale them with.
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
    # A convolution runs in INT8 before a sum only if its own output has a range. The other operand
    # gives one (rule element-wise); where that has none either, the sum does.
    ScaleRule("conv-feeds-add", _ops("Add Sum"), "fill", "inputs and outputs",
              f"{TRANSLATOR}: --add_unary_ew_scales_for_dla", "observed",
              when=lambda node: any(_made_by(value, "Conv") for value in node.inputs)),
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
        """after / before, by which the step of INT8 grew; 1 where there was no range."""
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
        """The largest factor by which a step grew, 1 where none did: log2 of it is bits lost."""
        return max((change.factor for change in self.changes), default=1.0)


@dataclass(frozen=True, slots=True)
class _Bond:
    """One application of a row to a node: the tensors that it binds, in the order of the node.

    `made` are those that the node makes; the others it reads.
    """

    rule: ScaleRule
    node: str
    tensors: tuple[str, ...]
    made: frozenset[str]


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
    wanted = frozenset(nodes)
    bonds = _bonds(model.graph, wanted, rules)
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


def _bonds(
    graph: ir.Graph, wanted: frozenset[str], rules: Sequence[ScaleRule]
) -> tuple[_Bond, ...]:
    found = []
    for node in graph:
        if str(node.name) not in wanted or node.domain != "":
            continue
        for rule in rules:
            if node.op_type in rule.ops and (rule.when is None or rule.when(node)):
                found.append(_bond(node, rule))
    # Sorted, so that reasons do not depend on the order of nodes.
    return tuple(sorted(found, key=lambda bond: (bond.rule.id, bond.node)))


def _bond(node: ir.Node, rule: ScaleRule) -> _Bond:
    inputs = node.inputs[:1] if rule.which == "data" else node.inputs
    outputs = () if rule.which == "inputs" else node.outputs
    made = frozenset(str(value.name) for value in outputs if _has_range(value))
    read = [str(value.name) for value in inputs if value is not None and _has_range(value)]
    return _Bond(rule, str(node.name), tuple(dict.fromkeys([*read, *sorted(made)])), made)


def _has_range(value: ir.Value) -> bool:
    """Whether a value is an activation in floating point (or of unknown type)."""
    if not value.name or ir.convenience.get_const_tensor(value) is not None:
        return False
    return value.dtype in {None, ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


def _made_by(value: ir.Value | None, op: str) -> bool:
    maker = None if value is None else value.producer()
    return maker is not None and maker.op_type == op


def _tie(
    bonds: Sequence[_Bond], ranges: dict[str, float], reasons: dict[str, tuple[_Bond, str]]
) -> bool:
    """Spread the largest range over each class of tied tensors, breadth first from its holders."""
    at: dict[str, list[_Bond]] = {}
    for bond in bonds:
        if bond.rule.kind == "tie":
            for name in bond.tensors:
                at.setdefault(name, []).append(bond)
    changed, seen = False, set[str]()
    # From the largest range down: whoever is reached first by one belongs to its class.
    known = sorted((name for name in at if name in ranges), key=lambda name: (-ranges[name], name))
    for top, holders in groupby(known, key=dict(ranges).__getitem__):
        front = [name for name in holders if name not in seen]
        seen.update(front)
        while front:
            reached = _neighbours(front, at, seen)
            for name, reason in reached.items():
                if ranges.get(name) != top:
                    ranges[name], reasons[name], changed = top, reason, True
            seen.update(reached)
            front = sorted(reached)
    return changed


def _neighbours(
    front: Sequence[str], at: Mapping[str, Sequence[_Bond]], seen: set[str]
) -> dict[str, tuple[_Bond, str]]:
    """The tensors tied to those of `front` and not seen yet, each with the tie and its origin."""
    reached: dict[str, tuple[_Bond, str]] = {}
    for name in front:
        for bond in at[name]:
            for other in bond.tensors:
                if other not in seen:
                    reached.setdefault(other, (bond, name))
    return reached


def _fill(
    bonds: Sequence[_Bond], ranges: dict[str, float], reasons: dict[str, tuple[_Bond, str]]
) -> bool:
    """Give tensors without a range that of a neighbour: with the data flow, else against it."""
    for forward in (True, False):
        found: dict[str, tuple[float, _Bond, str]] = {}
        for bond in (bond for bond in bonds if bond.rule.kind == "fill"):
            for name in bond.tensors:
                if name in ranges or (name in bond.made) != forward:
                    continue
                for value, origin in _offers(bond, forward, ranges):
                    if name not in found or value > found[name][0]:
                        found[name] = (value, bond, origin)
        for name, (value, bond, origin) in found.items():
            ranges[name], reasons[name] = value, (bond, origin)
        if found:
            return True
    return False


def _offers(
    bond: _Bond, forward: bool, ranges: Mapping[str, float]
) -> tuple[tuple[float, str], ...]:
    """The ranges, with their tensors, that the other side of a node offers."""
    if bond.rule.bound is not None:
        return ((bond.rule.bound, ""),) if forward else ()
    others = (name for name in bond.tensors if (name in bond.made) != forward)
    return tuple((ranges[name], name) for name in others if name in ranges)


def _missing(bonds: Sequence[_Bond], ranges: Mapping[str, float]) -> tuple[MissingRange, ...]:
    found: dict[str, MissingRange] = {}
    for bond in bonds:
        for name in bond.tensors:
            if name not in ranges:
                found.setdefault(name, MissingRange(name, bond.rule.id, bond.node))
    return tuple(found[name] for name in sorted(found))
