"""INT8 ranges on the DLA: the rules against a naive fixpoint, and each row by itself."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from toolkit.errors import BuildError
from toolkit.quantize.corrections.effect import Effect, effects_of
from toolkit.quantize.scales.rules import SCALE_RULES, UnifiedRanges, unify_scales

Node = tuple[str, str, tuple[str, ...], tuple[str, ...]]  # name, op, inputs, outputs

INTEGERS = {"shape": np.array([0, -1], np.int64), "pads": np.zeros(8, np.int64)}
FLOATS = {"w": np.ones((4, 4, 1, 1), np.float32), "scales": np.array([1, 1, 2, 2], np.float32)}


def graph(nodes: Sequence[Node], attributes: Mapping[str, Mapping[str, object]] = {}) -> ir.Model:
    """A model of nodes, whose operands "shape", "pads", "w" and "scales" are constants."""
    constants = INTEGERS | FLOATS
    actual = [name for _, _, _, outputs in nodes for name in outputs]
    read = {name for _, _, inputs, _ in nodes for name in inputs} - {""}
    feeds = sorted(read - set(actual) - set(constants))
    proto = helper.make_graph(
        [
            helper.make_node(op, inputs, outputs, name=name, **attributes.get(name, {}))
            for name, op, inputs, outputs in nodes
        ],
        "test",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in feeds],
        [helper.make_tensor_value_info(actual[-1], TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
        value_info=[helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in actual[:-1]],
    )
    return ir.serde.deserialize_model(helper.make_model(proto))


def unify(
    nodes: Sequence[Node],
    amax: Mapping[str, float],
    attributes: Mapping[str, Mapping[str, object]] = {},
) -> UnifiedRanges:
    return unify_scales(graph(nodes, attributes), amax, {name for name, *_ in nodes})


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "tied"),
    [
        ("Concat", ("a", "b"), ("y",), {"a", "b", "y"}),
        ("MaxPool", ("a",), ("y",), {"a", "y"}),
        ("AveragePool", ("a",), ("y",), {"a", "y"}),
        *((op, ("a", "b"), ("y",), {"a", "b"}) for op in ("Add", "Sub", "Mul", "Max", "Min")),
        ("Sum", ("a", "b", "c"), ("y",), {"a", "b", "c"}),
        ("Add", ("a", "w"), ("y",), set()),
        ("Mul", ("a", "a"), ("y",), set()),
        ("Reshape", ("a", "shape"), ("y",), {"a", "y"}),
        ("Flatten", ("a",), ("y",), {"a", "y"}),
        ("Transpose", ("a",), ("y",), {"a", "y"}),
        ("Squeeze", ("a",), ("y",), {"a", "y"}),
        ("Unsqueeze", ("a", "shape"), ("y",), {"a", "y"}),
        ("Pad", ("a", "pads"), ("y",), {"a", "y"}),
        ("Slice", ("a", "shape", "shape"), ("y",), {"a", "y"}),
        ("Split", ("a",), ("y", "z"), {"a", "y", "z"}),
        ("Identity", ("a",), ("y",), {"a", "y"}),
        ("Resize", ("a", "", "scales"), ("y",), {"a", "y"}),
        ("Conv", ("a", "w"), ("y",), set()),
        ("Relu", ("a",), ("y",), set()),
        ("Sigmoid", ("a",), ("y",), set()),
        ("Softmax", ("a",), ("y",), set()),
    ],
)
def test_each_operator_ties_the_tensors_that_the_facts_name(
    op: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    tied: set[str],
    rng: np.random.Generator,
) -> None:
    names = [n for n in dict.fromkeys(inputs + outputs) if n not in {"", *INTEGERS, *FLOATS}]
    amax = {name: float(rng.uniform(0.1, 9)) for name in names}
    result = unify([("n", op, inputs, outputs)], amax)
    top = max((amax[name] for name in tied), default=0.0)
    assert result.amax == {name: top if name in tied else amax[name] for name in names}
    assert {change.tensor for change in result.changes} == {n for n in tied if amax[n] < top}
    assert not result.missing


def test_only_nearest_resizing_keeps_the_scale() -> None:
    nodes: list[Node] = [("n", "Resize", ("a", "", "scales"), ("y",))]
    assert unify(nodes, {"a": 2.0, "y": 1.0}, {"n": {"mode": "linear"}}).changes == ()
    assert unify(nodes, {"a": 2.0, "y": 1.0}, {"n": {"mode": "nearest"}}).amax["y"] == 2.0


RESIDUAL: list[Node] = [
    ("c0", "Conv", ("x", "w"), ("a",)),
    ("c1", "Conv", ("a", "w"), ("b",)),
    ("add", "Add", ("a", "b"), ("s",)),
    ("pool", "MaxPool", ("s",), ("p",)),
    ("cat", "Concat", ("p", "a"), ("y",)),
]


def test_changes_name_the_rule_the_node_and_the_tensor_that_the_range_came_from() -> None:
    result = unify(RESIDUAL, {"x": 1.0, "a": 3.0, "b": 4.0, "s": 5.5, "p": 5.0, "y": 6.0})
    assert result.amax == {"x": 1.0, "a": 6.0, "b": 6.0, "s": 6.0, "p": 6.0, "y": 6.0}
    why = {c.tensor: (c.before, c.after, c.rule, c.node, c.from_tensor) for c in result.changes}
    assert why == {
        "a": (3.0, 6.0, "concat", "cat", "y"),
        "b": (4.0, 6.0, "element-wise", "add", "a"),
        "p": (5.0, 6.0, "concat", "cat", "y"),
        "s": (5.5, 6.0, "pooling", "pool", "p"),
    }
    assert result.worst_factor == 2.0


def test_nodes_off_the_dla_tie_nothing() -> None:
    amax = {"x": 1.0, "a": 3.0, "b": 4.0, "s": 6.0, "p": 5.0, "y": 7.0}
    result = unify_scales(graph(RESIDUAL), amax, {"add"})
    assert result.amax == amax | {"a": 4.0}
    assert unify_scales(graph(RESIDUAL), amax, ()).changes == ()


def test_a_rectifier_may_have_a_smaller_range_and_fills_a_missing_one() -> None:
    nodes: list[Node] = [("r0", "Relu", ("x",), ("a",)), ("r1", "Relu", ("a",), ("y",))]
    assert unify(nodes, {"x": 3.0, "a": 1.0, "y": 1.0}).changes == ()
    assert unify(nodes, {"x": 3.0}).amax == {"x": 3.0, "a": 3.0, "y": 3.0}
    assert unify(nodes, {"y": 2.0}).amax == {"x": 2.0, "a": 2.0, "y": 2.0}
    # With the data flow comes first.
    assert unify(nodes, {"x": 3.0, "y": 2.0}).amax["a"] == 3.0


def test_a_sigmoid_without_a_range_lies_within_one() -> None:
    result = unify([("s", "Sigmoid", ("x",), ("y",))], {"x": 8.0})
    assert result.amax["y"] == 1.0
    assert unify([("s", "Sigmoid", ("x",), ("y",))], {"x": 8.0, "y": 0.5}).changes == ()


def test_a_convolution_that_feeds_a_sum_gets_a_range() -> None:
    nodes: list[Node] = [("c", "Conv", ("x", "w"), ("a",)), ("add", "Add", ("a", "b"), ("y",))]
    from_partner = unify(nodes, {"x": 1.0, "b": 3.0, "y": 4.0})
    assert (from_partner.amax["a"], from_partner.changes[0].rule) == (3.0, "element-wise")
    from_sum = unify(nodes, {"x": 1.0, "y": 4.0})
    assert (from_sum.amax["a"], from_sum.amax["b"]) == (4.0, 4.0)
    assert {change.rule for change in from_sum.changes} == {"conv-feeds-add"}
    assert [change.before for change in from_sum.changes] == [None, None]


def test_what_no_rule_can_fill_is_named_as_missing() -> None:
    result = unify([("add", "Add", ("a", "b"), ("y",))], {"y": 4.0})
    assert [(m.tensor, m.rule, m.node) for m in result.missing] == [
        ("a", "element-wise", "add"),
        ("b", "element-wise", "add"),
    ]
    assert result.amax == {"y": 4.0}


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_range_that_is_no_positive_number_is_refused(value: float) -> None:
    with pytest.raises(BuildError, match="Tensor 'a' has the range"):
        unify([("add", "Add", ("a", "b"), ("y",))], {"a": value})


def test_the_effect_is_measured_once_where_nothing_changed() -> None:
    requests: list[Mapping[str, float]] = []

    def measure(amax: Mapping[str, float]) -> dict[str, float]:
        requests.append(amax)
        return {"x": -amax["x"], "y": 10.0 - amax["y"]}

    nodes: list[Node] = [("p", "MaxPool", ("x",), ("y",))]
    result = effects_of(measure, {"x": 2.0, "y": 1.0}, unify(nodes, {"x": 2.0, "y": 1.0}).amax)
    assert (result, len(requests)) == ({"x": Effect(-2.0, -2.0), "y": Effect(9.0, 8.0)}, 2)
    assert result["y"].gain == -1.0
    same = effects_of(measure, {"x": 2.0, "y": 2.0}, unify(nodes, {"x": 2.0, "y": 2.0}).amax)
    assert (same["y"].gain, len(requests)) == (0.0, 3)


def test_every_row_says_its_source() -> None:
    assert all(rule.source and rule.ops for rule in SCALE_RULES)
    assert len({rule.id for rule in SCALE_RULES}) == len(SCALE_RULES)


UNARY = ("Conv", "Relu", "MaxPool", "Transpose", "Sigmoid")
OPERANDS = dict.fromkeys(UNARY, 1) | {"Add": 2, "Mul": 2, "Concat": 3}


@st.composite
def random_graphs(draw: st.DrawFn) -> tuple[list[Node], list[Node], dict[str, float]]:
    """A graph, the same in another order, and ranges of some of its tensors."""
    tensors, nodes = ["x0", "x1"], list[Node]()
    for number in range(draw(st.integers(1, 12))):
        op = draw(st.sampled_from(sorted(OPERANDS)))
        read = [draw(st.sampled_from(tensors)) for _ in range(OPERANDS[op])]
        operands = (*read, "w") if op == "Conv" else tuple(read)
        nodes.append((f"n{number}", op, operands, (f"t{number}",)))
        tensors.append(f"t{number}")
    ranges = st.one_of(st.none(), st.sampled_from([0.5, 1.0, 2.0]), st.floats(0.01, 100))
    amax = {name: value for name in tensors if (value := draw(ranges)) is not None}
    todo, order, known = list(nodes), list[Node](), {"x0", "x1", "w"}
    while todo:
        ready = [node for node in todo if known.issuperset(node[2])]
        order.append(draw(st.sampled_from(ready)))
        todo.remove(order[-1])
        known.update(order[-1][3])
    return nodes, order, amax


def tied_sets(nodes: Sequence[Node]) -> list[set[str]]:
    """What the facts tie, written anew."""
    results = []
    for _, op, inputs, outputs in nodes:
        if op in {"Concat", "MaxPool", "Transpose"}:
            results.append({*inputs, *outputs})
        elif op in {"Add", "Mul"}:
            results.append(set(inputs))
    return results


def naive_ties(nodes: Sequence[Node], amax: Mapping[str, float]) -> dict[str, float]:
    """Raise each set of tied tensors to its largest range until nothing changes."""
    ranges, before = dict(amax), None
    while ranges != before:
        before = dict(ranges)
        for members in tied_sets(nodes):
            known = [ranges[name] for name in members if name in ranges]
            ranges.update(dict.fromkeys(members, max(known)) if known else {})
    return ranges


@given(random_graphs())
def test_ties_are_the_least_ranges_that_obey_the_rules(
    case: tuple[list[Node], list[Node], dict[str, float]],
) -> None:
    nodes, _, amax = case
    ties = [rule for rule in SCALE_RULES if rule.kind == "tie"]
    result = unify_scales(graph(nodes), amax, {name for name, *_ in nodes}, ties)
    assert result.amax == naive_ties(nodes, amax)


@given(random_graphs())
def test_the_rules_hold_afterwards_never_shrink_and_change_nothing_twice(
    case: tuple[list[Node], list[Node], dict[str, float]],
) -> None:
    nodes, _, amax = case
    result = unify(nodes, amax)
    missing = {entry.tensor for entry in result.missing}
    for members in tied_sets(nodes):
        assert len({result.amax.get(name) for name in members}) == 1
        assert members <= missing or not members & missing
    assert all(result.amax[name] >= before for name, before in amax.items())
    changed = {name for name in result.amax if result.amax[name] != amax.get(name)}
    assert [change.tensor for change in result.changes] == sorted(changed)
    again = unify(nodes, result.amax)
    assert (again.amax, again.changes, again.missing) == (result.amax, (), result.missing)


@given(random_graphs())
def test_the_order_of_nodes_and_ranges_changes_neither_ranges_nor_reasons(
    case: tuple[list[Node], list[Node], dict[str, float]],
) -> None:
    nodes, order, amax = case
    turned = dict(sorted(amax.items(), reverse=True))
    assert unify(nodes, amax) == unify(order, turned)
