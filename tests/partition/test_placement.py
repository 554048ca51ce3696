"""From rules and costs to a placement: what the solver is given, and the reasons that come back."""

from dataclasses import replace

import pytest
from placement_fixtures import chain

from device.profile import load_profile
from toolkit.errors import PlanError
from toolkit.graph.node_view import views
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.formulate import formulate
from toolkit.partition.planning.objectives import BUILD_GOALS, goal_named
from toolkit.partition.planning.plan import Model, PlanOptions, make_plan, plan_together

ORIN = load_profile("agx-orin-64gb")
NANO = load_profile("orin-nano-8gb")
LAPTOP = load_profile("laptop")


def plan_of(graph, profile=ORIN, objective="gpu-relief", **given):
    options = PlanOptions(
        precision=given.pop("precision", "int8"),
        objective=objective,
        max_crossings=given.pop("max_crossings", None),
        min_gain=given.pop("min_gain", 0.0),
    )
    return make_plan(Model("m", graph.graph, **given), profile, options)


def rules(plan) -> list[str]:
    return [row.rule if row.processor == "gpu" else row.processor for row in plan.placements]


def test_nodes_that_pass_go_to_the_dla_and_others_to_the_gpu():
    plan = plan_of(chain(*["Conv"] * 12, "Erf"))
    assert rules(plan) == ["dla0"] * 12 + ["op.not-exposed"]
    assert "operator Erf" in plan.placements[-1].reason


def test_a_profile_without_dla_gets_the_gpu_alone():
    plan = plan_of(chain("Conv", "Erf"), NANO)
    assert {row.processor for row in plan.placements} == {"gpu"}
    assert {row.reason for row in plan.placements} == {"profile has no DLA"}
    assert len(plan.figures) == 1


def test_a_profile_without_gpu_gets_the_cpu_alone():
    plan = plan_of(chain("Conv", "Erf"), LAPTOP, precision="fp32")
    assert {row.processor for row in plan.placements} == {"cpu"}
    assert {row.reason for row in plan.placements} == {"profile has no GPU"}


def test_int8_needs_a_scale_on_every_side():
    plan = plan_of(chain(*["Conv"] * 40), has_scale=lambda name: name != "t19")
    assert rules(plan) == ["dla0"] * 19 + ["S1"] * 2 + ["dla0"] * 19
    assert "'t19'" in plan.placements[19].reason


def test_fp16_needs_no_scale():
    xavier = load_profile("agx-xavier-32gb")
    convs = chain(*["Conv"] * 12, channels=256)
    plan = plan_of(convs, xavier, precision="fp16", has_scale=lambda name: False)
    assert {row.processor for row in plan.placements} == {"dla0"}


def test_fp32_stays_on_the_gpu():
    assert rules(plan_of(chain("Conv", "Conv"), precision="fp32")) == ["G1", "G1"]


def test_float_nodes_stay_on_the_gpu():
    plan = plan_of(chain(*["Conv"] * 9), keep_float=frozenset({"n4"}))
    assert rules(plan)[4] == "K1"


def test_what_stays_on_the_gpu_by_choice_says_what_moving_it_would_do():
    plan = plan_of(chain(*["Conv"] * 8), objective="latency")
    assert {row.rule for row in plan.placements} == {"P2"}
    reason = plan.placements[0].reason
    assert "with its island of 8 nodes there the latency of a frame alone would be" in reason
    there, here = _numbers(reason)[-2:]
    assert there > here
    assert here == pytest.approx(plan.total_us, rel=1e-3)


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split() if word.replace(".", "", 1).isdigit()]


def test_a_bound_on_crossings_keeps_the_plan_on_the_gpu():
    free = plan_of(chain(*["Conv"] * 8, "Erf", *["Conv"] * 8))
    bound = plan_of(chain(*["Conv"] * 8, "Erf", *["Conv"] * 8), max_crossings=0)
    assert free.figures[0].crossings > 0
    assert bound.figures[0].crossings == 0
    assert {row.processor for row in bound.placements} == {"gpu"}


@pytest.mark.parametrize("objective", BUILD_GOALS)
def test_no_plan_is_worse_than_the_placements_without_a_solver(objective):
    plan = plan_of(chain(*["Conv"] * 10, "Erf", *["Conv"] * 10), objective=objective)
    field = {
        "throughput": "busiest_us",
        "latency": "latency_us",
        "energy": "energy_mj",
        "gpu-relief": "gpu_us",
    }[objective]
    mine, *others = (getattr(row, field) for row in plan.figures)
    assert mine <= min(others) * (1 + 1e-6)
    assert mine == pytest.approx(plan.search.value)


def test_throughput_uses_both_cores_in_turn():
    one = plan_of(chain(*["Conv"] * 12), load_profile("orin-nx-8gb"), objective="throughput")
    two = plan_of(chain(*["Conv"] * 12), load_profile("orin-nx-16gb"), objective="throughput")
    assert two.figures[0].frames_per_second > one.figures[0].frames_per_second * 1.2


def test_models_at_rates_share_the_processors():
    first, second = chain(*["Conv"] * 8), chain(*["Conv"] * 12, channels=128)
    models = [Model("a", first.graph, rate_hz=100), Model("b", second.graph, rate_hz=50)]
    shared = plan_together(models, ORIN, PlanOptions(objective="gpu-relief", tensorrt="10.3"))
    assert [plan.name for plan in shared.plans] == ["a", "b"]
    assert {s.processor for plan in shared.plans for s in plan.segments} <= {"gpu", "dla0", "dla1"}


def test_rates_that_do_not_fit_are_refused_with_the_processor():
    models = [Model("a", chain(*["Conv"] * 8).graph, rate_hz=1e5)]
    with pytest.raises(PlanError, match="do not fit"):
        plan_together(models, ORIN, PlanOptions(objective="energy", tensorrt="10.3"))


def test_an_unknown_objective_is_refused_by_name():
    with pytest.raises(
        PlanError, match="take one of energy, gpu-relief, latency, makespan, throughput"
    ):
        goal_named("speed")


def test_a_kernel_that_rules_part_falls_apart():
    nodes = views(chain("Conv", "Relu", "Erf").graph)
    costs = CostModel(nodes, ORIN, precision="int8")
    whole = formulate("m", nodes, (), costs, ("gpu", "dla0"), outputs=["y"])
    parted = formulate("m", nodes, ["n2"], costs, ("gpu", "dla0"), outputs=["y"])
    assert [[v.name for v in group] for group in whole.nodes.values()] == [["n0", "n1", "n2"]]
    assert [[v.name for v in group] for group in parted.nodes.values()] == [["n0", "n1"], ["n2"]]
    refused = parted.network.tasks[1]
    assert set(refused.time_us) == {"gpu"}


def test_batches_have_segments_of_their_own():
    nodes = views(chain("Conv", "Conv").graph)
    second = replace(nodes[1], outputs=(replace(nodes[1].outputs[0], shape=(2, 64, 56, 56)),))
    costs = CostModel((nodes[0], second), ORIN, precision="int8")
    result = formulate("m", (nodes[0], second), (), costs, ("gpu", "dla0"), outputs=["y"])
    assert [task.lane for task in result.network.tasks] == ["1", "2"]
