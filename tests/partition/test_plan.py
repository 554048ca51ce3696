"""The whole plan: kept texts of real networks, and how its parts fit together."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from onnx import helper
from planning_graphs import constant, graph_of

from device.profile import load_profile
from scripts.golden import BOARDS, FOLDER, GOLDENS, MODELS
from toolkit.errors import PlanError
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import Model, Plan, PlanOptions, make_plan
from toolkit.partition.planning.plan_text import render_plan
from toolkit.partition.planning.verdict import verdict

ORIN = load_profile("agx-orin-64gb")


def split_model(depth: int = 10):
    """A chain of convolutions, one Erf, and a chain of convolutions again."""
    nodes, weights, data = [], {}, "x"
    for index in range(2 * depth + 1):
        result = "y" if index == 2 * depth else f"t{index}"
        if index == depth:
            nodes.append(helper.make_node("Erf", [data], [result], name="erf"))
        else:
            weights[f"w{index}"] = constant(64, 64, 3, 3)
            operands = [data, f"w{index}"]
            nodes.append(
                helper.make_node("Conv", operands, [result], name=f"conv{index}", pads=[1] * 4)
            )
        data = result
    return graph_of(nodes, {"x": (1, 64, 56, 56)}, ["y"], weights)


def plan_of(model, profile=ORIN, objective="gpu-relief", **options) -> Plan:
    return make_plan(Model("m", model.graph), profile, PlanOptions(objective=objective, **options))


# Every network on one board, every board with two networks; all of them in the slow run, and the
# largest, whose plans take seconds.
LARGE = ("densenet121", "inception_v2", "vgg19")
QUICK = {
    f"{model}_{BOARDS[at % len(BOARDS)][0]}"
    for at, model in enumerate(MODELS)
    if model not in LARGE
}


def rows() -> Iterator[object]:
    for golden in GOLDENS:
        quick = golden not in GOLDENS[: len(MODELS) * len(BOARDS)] or (
            f"{golden.model}_{golden.profile}" in QUICK
        )
        yield pytest.param(golden, id=golden.path.stem, marks=() if quick else (pytest.mark.slow,))


@pytest.mark.parametrize("golden", rows())
def test_the_plan_of_a_known_network_equals_its_golden_text(golden):
    plan = golden.plan()
    on_gpu = all(row.processor == "gpu" for row in plan.placements)
    taken_back = on_gpu or plan.search.gap <= plan.search.min_gain
    assert plan.search.placement_proven or taken_back
    assert render_plan(plan) == golden.path.read_text()


def test_every_golden_text_has_a_network():
    assert {path.name for path in FOLDER.glob("plan_*.txt")} == {g.path.name for g in GOLDENS}


def test_segments_follow_each_other_and_hold_every_node():
    plan = plan_of(split_model())
    assert [segment.name for segment in plan.segments] == ["dla0.0", "gpu.0", "dla0.1"]
    assert [row.node for row in plan.placements] == [n for s in plan.segments for n in s.nodes]
    assert {row.segment for row in plan.placements} == {segment.name for segment in plan.segments}


def test_crossings_have_the_bytes_of_the_precision():
    plan = plan_of(split_model())
    actual = [(c.tensor, c.source, c.targets, c.bytes) for c in plan.crossings]
    size = 64 * 56 * 56
    assert actual == [("t9", "dla0.0", ("gpu.0",), size), ("t10", "gpu.0", ("dla0.1",), size)]


def test_the_total_is_the_processors_and_the_crossings():
    plan = plan_of(split_model())
    busy = dict(plan.busy_us)
    assert busy.keys() == {"dla0", "gpu"}
    assert plan.crossings_us > 2 * 30
    assert plan.total_us == pytest.approx(sum(busy.values()) + plan.crossings_us)
    assert plan.total_us == plan.figures[0].latency_us


def test_the_cost_of_a_segment_is_that_of_its_nodes_and_its_start():
    plan = plan_of(split_model())
    for segment, cost in zip(plan.segments, plan.costs, strict=True):
        nodes = sum(row.predicted_us for row in plan.placements if row.segment == segment.name)
        assert cost.predicted_us >= nodes - 0.01
        assert cost.nodes == len(segment.nodes)


def test_a_plan_is_compared_with_plans_that_need_no_solver():
    plan = plan_of(split_model())
    names = [row.name for row in plan.figures]
    assert names == ["this plan", "GPU only", "DLA with fallback", "greedy"]
    assert plan.figures[1].gpu_us == plan.figures[1].latency_us
    assert plan.figures[1].segments == 1


def test_the_verdict_says_what_the_dla_brings_and_what_it_costs():
    split, alone = plan_of(split_model()), plan_of(split_model(), objective="latency")
    assert verdict(split).startswith("The DLA pays:")
    assert "us of GPU time a frame" in verdict(split)
    assert "us of latency" in verdict(split).partition("It costs:")[2]
    assert verdict(alone) == "The DLA does not pay for latency: all nodes are on the GPU."
    nano = plan_of(split_model(), load_profile("orin-nano-8gb"))
    assert "no DLA" in verdict(nano)


def test_a_dynamic_batch_stays_on_the_gpu_with_the_reason():
    node = helper.make_node("Relu", ["x"], ["y"], name="relu")
    plan = plan_of(graph_of([node], {"x": ("N", 8, 4, 4)}, ["y"]))
    (row,) = plan.placements
    assert (row.processor, row.rule) == ("gpu", "G5")
    assert row.reason == "dynamic dimension of 'x', but every dimension must be one fixed number"


def test_refusals_are_grouped_by_rule_with_count_and_hint():
    nodes = [
        helper.make_node("Erf", ["x"], ["a"], name="erf"),
        helper.make_node("GlobalAveragePool", ["a"], ["b"], name="pool"),
        helper.make_node("Erf", ["b"], ["y"], name="erf2"),
    ]
    plan = plan_of(graph_of(nodes, {"x": (1, 8, 4, 4)}, ["y"]))
    actual = {(r.rule, r.nodes, r.same_reason) for r in plan.refusals}
    assert actual == {
        ("op.not-exposed", ("erf", "erf2"), True),
        ("op.not-exposed", ("pool",), True),
    }
    text = render_plan(plan)
    assert "3 x op.not-exposed, for example: operator Erf, but TensorRT does not offer it" in text
    assert "operators: 2 Erf, 1 GlobalAveragePool" in text
    assert "helps: use AveragePool" in text


def test_the_target_version_decides():
    nodes = [helper.make_node("GlobalMaxPool", ["x"], ["y"], name="pool")]
    model = graph_of(nodes, {"x": (1, 8, 4, 4)}, ["y"])
    rules = [plan_of(model, tensorrt=version).placements[0].rule for version in ("8.6.2", "10.3")]
    assert rules == ["op.version", "P2"]


def test_nodes_without_distinct_names_are_refused():
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="relu"),
        helper.make_node("Relu", ["a"], ["y"], name="relu"),
    ]
    with pytest.raises(PlanError, match="distinct name"):
        plan_of(graph_of(nodes, {"x": (1, 8, 4, 4)}, ["y"]))


def test_inputs_and_outputs_of_the_graph_are_no_crossings():
    plan = plan_of(split_model())
    assert {"x", "y"}.isdisjoint(crossing.tensor for crossing in plan.crossings)


@pytest.mark.parametrize(("forced_node", "paired_node"), [("greater", "cast"), ("cast", "greater")])
def test_a_comparison_and_its_cast_stay_together_when_one_is_kept_on_the_gpu(
    forced_node, paired_node
):
    weights = {"h": constant(1, 64, 56, 56)} | {f"w{i}": constant(64, 64, 3, 3) for i in range(5)}
    names = ["x", *(f"c{index}" for index in range(5))]
    nodes = [
        helper.make_node("Conv", [data, f"w{index}"], [result], name=result, pads=[1] * 4)
        for index, (data, result) in enumerate(pairwise(names))
    ]
    nodes += [
        helper.make_node("Greater", ["c4", "h"], ["more"], name="greater"),
        helper.make_node("Cast", ["more"], ["mask"], name="cast", to=1),
        helper.make_node("Mul", ["mask", "c4"], ["y"], name="mul"),
    ]
    model = graph_of(nodes, {"x": (1, 64, 56, 56)}, ["y"], weights)
    for gpu in ((), (forced_node,)):
        forced = Forced(("all",), gpu)
        rows = {row.node: row for row in plan_of(model, tensorrt="10.3", forced=forced).placements}
        places = {rows[name].processor for name in (forced_node, paired_node)}
        assert places == ({"gpu"} if gpu else {"dla0"})
    assert (rows[forced_node].rule, rows[paired_node].rule) == ("F1", "compare.pair")
