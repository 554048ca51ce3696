"""The whole plan: kept texts of real networks, and how its parts fit together."""

import pytest
from onnx import helper
from planning_graphs import constant, graph_of

from device.profile import load_profile
from scripts.golden import FOLDER, GOLDENS
from toolkit.errors import PlanError
from toolkit.planning.plan import Plan, make_plan
from toolkit.planning.plan_text import render_plan

ORIN = load_profile("agx-orin-64gb")


def split_model(depth: int = 10):
    """A chain of convolutions, one Erf, and a chain of convolutions again."""
    nodes, weights, data = [], {}, "x"
    for index in range(2 * depth + 1):
        made = "y" if index == 2 * depth else f"t{index}"
        if index == depth:
            nodes.append(helper.make_node("Erf", [data], [made], name="erf"))
        else:
            weights[f"w{index}"] = constant(64, 64, 3, 3)
            operands = [data, f"w{index}"]
            nodes.append(
                helper.make_node("Conv", operands, [made], name=f"conv{index}", pads=[1] * 4)
            )
        data = made
    return graph_of(nodes, {"x": (1, 64, 56, 56)}, ["y"], weights)


def plan_of(model, profile=ORIN, precision="int8", **options) -> Plan:
    return make_plan(model, profile, precision=precision, has_scale=lambda name: True, **options)


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.path.stem)
def test_the_plan_of_a_known_network_is_the_kept_one(golden):
    assert render_plan(golden.plan()) == golden.path.read_text()


def test_no_kept_text_is_left_over():
    assert {path.name for path in FOLDER.glob("plan_*.txt")} == {g.path.name for g in GOLDENS}


def test_segments_follow_each_other_and_hold_every_node():
    plan = plan_of(split_model())
    assert [segment.name for segment in plan.segments] == ["dla0.0", "gpu.0", "dla0.1"]
    assert [row.node for row in plan.placements] == [n for s in plan.segments for n in s.nodes]
    assert {row.segment for row in plan.placements} == {segment.name for segment in plan.segments}


def test_crossings_have_the_bytes_of_the_precision():
    plan = plan_of(split_model())
    found = [(c.tensor, c.source, c.targets, c.bytes) for c in plan.crossings]
    size = 64 * 56 * 56
    assert found == [("t9", "dla0.0", ("gpu.0",), size), ("t10", "gpu.0", ("dla0.1",), size)]


def test_the_total_is_the_processors_and_the_crossings():
    plan = plan_of(split_model())
    times = dict(plan.latency_us)
    assert times.keys() == {"dla0", "gpu"}
    by_processor = {
        name: sum(row.predicted_us for row in plan.placements if row.processor == name)
        for name in times
    }
    assert times == pytest.approx(by_processor, rel=1e-3)
    assert plan.crossings_us > 2 * 47
    assert plan.total_us == pytest.approx(sum(times.values()) + plan.crossings_us)


def test_tensors_between_the_same_segments_cross_together():
    def crossing_time(count):
        nodes = [
            helper.make_node("Erf", ["x"], [f"e{i}"], name=f"erf{i}") for i in range(count)
        ] + [helper.make_node("Sum", [f"e{i}" for i in range(count)], ["s"], name="sum")]
        data, weights = "s", {"w": constant(64, 64, 3, 3)}
        for i in range(12):
            made = f"c{i}"
            nodes.append(
                helper.make_node("Conv", [data, "w"], [made], name=f"conv{i}", pads=[1] * 4)
            )
            data = made
        plan = plan_of(graph_of(nodes, {"x": (1, 64, 56, 56)}, [data], weights))
        assert [segment.name for segment in plan.segments] == ["gpu.0", "dla0.0"]
        assert len(plan.crossings) == count
        return plan.crossings_us

    assert crossing_time(1) < crossing_time(3) < crossing_time(1) + 47


def test_the_gpu_alone_is_given_for_comparison():
    split, alone = plan_of(split_model()), plan_of(split_model(), load_profile("h200"), "fp16")
    assert split.gpu_only_us is not None
    assert split.gpu_only_us < split.total_us
    assert alone.gpu_only_us == pytest.approx(alone.total_us)


def test_a_plan_slower_than_the_gpu_alone_says_so():
    slow, fast = plan_of(split_model()), plan_of(split_model(), load_profile("h200"), "fp16")
    longer = slow.total_us - slow.gpu_only_us
    freed = slow.gpu_only_us - dict(slow.latency_us)["gpu"]
    text = render_plan(slow)
    assert f"SLOWER than the GPU alone by {longer:.0f} us" in text
    assert f"in return {freed:.0f} us of GPU time are free" in text
    assert "SLOWER" not in render_plan(fast)


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
    found = {(r.rule, r.nodes, r.same_reason) for r in plan.refusals}
    assert found == {
        ("op.not-exposed", ("erf", "erf2"), True),
        ("op.not-exposed", ("pool",), True),
    }
    text = render_plan(plan)
    assert "2 x op.not-exposed: operator Erf, but TensorRT does not offer it on the DLA" in text
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
