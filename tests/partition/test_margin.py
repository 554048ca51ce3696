"""The least gain of a move to the DLA, and the energy of a frame."""

from dataclasses import replace

import msgspec
import pytest
from placement_fixtures import chain

from device.profile import load_profile
from scripts.networks import NETWORKS
from toolkit.engine.precision_gain import frame_us
from toolkit.graph.node_view import views
from toolkit.partition.costs.constants import idle_power, load_costs
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.batch import Batching
from toolkit.partition.planning.objectives import BUILD_GOALS
from toolkit.partition.planning.plan import Model, PlanOptions, make_plan
from toolkit.partition.planning.plan_text import render_plan
from toolkit.partition.planning.verdict import verdict

ORIN, NX = load_profile("agx-orin-64gb"), load_profile("orin-nx-16gb")
XAVIER = load_profile("xavier-nx-8gb")
FORKED = ("Conv", "Conv", "Erf") * 3 + ("Conv",) * 8


def planned(graph, objective="throughput", min_gain=None, profile=ORIN, **given):
    options = PlanOptions(objective=objective, tensorrt="10.3", min_gain=min_gain)
    return make_plan(Model("m", graph, **given), profile, options)


def on_dla(plan) -> set[str]:
    return {row.node for row in plan.placements if row.processor == "dla0"}


@pytest.mark.parametrize("name", ["mobilenet_v2", "googlenet"])
def test_for_latency_small_classifiers_stay_on_the_gpu_of_orin_nx(name: str) -> None:
    plan = planned(NETWORKS[name].model().graph, "latency", profile=NX)
    assert not on_dla(plan)
    assert plan.figures[0].latency_us == plan.figures[1].latency_us


def test_a_move_that_gains_less_is_taken_back_and_the_text_says_so() -> None:
    graph = chain(*["Conv"] * 12).graph
    free = planned(graph, min_gain=0.0)
    here, gpu = free.figures[:2]
    gained = 1 - gpu.frames_per_second / here.frames_per_second
    assert on_dla(free)
    assert 0.01 < gained < 0.99
    at_limit = planned(graph, min_gain=gained - 0.005)
    assert on_dla(at_limit)
    beyond = planned(graph, min_gain=gained + 0.005)
    assert not on_dla(beyond)
    assert beyond.search.foregone == pytest.approx(gained)
    assert not beyond.search.proven
    text = render_plan(beyond)
    error = ", within the model's error" if gained < beyond.search.model_error else ""
    assert f"would gain {gained:.1%}{error}: moves must gain {beyond.search.min_gain:.0%}" in text
    assert "us, a gain of " in text  # the reason of the nodes


@pytest.mark.parametrize(("foregone", "within"), [(0.099, True), (0.1, False), (0.4, False)])
def test_within_the_models_error_is_what_the_model_cannot_tell(foregone, within) -> None:
    plan = planned(chain("Conv", "Conv").graph, "latency")
    search = replace(plan.search, min_gain=0.5, model_error=0.1, foregone=foregone)
    text = verdict(replace(plan, search=search))
    assert f"would gain {foregone:.1%}" in text
    assert "moves must gain 50%" in text
    assert ("within the model's error" in text) == within


def test_an_island_pays_for_its_crossings_by_itself() -> None:
    graph = chain(*FORKED, channels=128, side=32).graph
    free, strict = planned(graph, "gpu-relief", 0.0), planned(graph, "gpu-relief", 0.5)
    islands = {segment.nodes for segment in strict.segments if segment.processor == "dla0"}
    remaining = {name for nodes in islands for name in nodes}
    assert remaining <= on_dla(free)
    assert len(strict.crossings) <= len(free.crossings)


def test_the_default_is_half_the_spread_of_the_rows_concerned() -> None:
    graph = chain(*["Conv"] * 12).graph
    costs = CostModel(views(graph), ORIN, precision="int8")
    assert planned(graph).search.min_gain == pytest.approx(costs.spread("dla").half / 2)
    power = planned(graph, "energy").search.min_gain
    assert power == pytest.approx(costs.spread("power").half / 2)


def test_no_island_of_a_transformer_is_moved_for_less_than_the_error() -> None:
    plan = planned(NETWORKS["vit_small"].model().graph, "energy")
    assert plan.figures[0].segments <= 3
    assert plan.figures[0].energy_mj <= plan.figures[1].energy_mj


def test_a_crossing_takes_the_energy_of_the_gpu_that_it_keeps_busy() -> None:
    costs = CostModel((), ORIN, precision="int8")
    empty = costs.crossing(0, "gpu", "dla0")
    assert empty.energy_mj == pytest.approx(costs.active_w("gpu") * empty.time_us * 1e-3)
    assert costs.crossing(10**6, "gpu", "dla0").energy_mj > empty.energy_mj


def test_frames_in_flight_share_the_idle_power() -> None:
    graph = chain(*["Conv"] * 12).graph
    costs = CostModel(views(graph), ORIN, precision="int8")
    plan = planned(graph, min_gain=0.0)
    row = plan.figures[0]
    assert row.frames_per_second * row.latency_us > 1.2e6  # frames overlap
    meter_w = row.frames_per_second * row.energy_mj * 1e-3
    assert meter_w > costs.idle_w
    assert row.frames_per_second * row.idle_mj * 1e-3 == pytest.approx(costs.idle_w)
    assert frame_us(plan) == pytest.approx(1e6 / row.frames_per_second)
    for_latency = planned(graph, "latency", 0.0)
    alone = for_latency.figures[0]
    assert alone.idle_mj == pytest.approx(costs.idle_w * 1e3 / alone.frames_per_second)
    assert frame_us(for_latency) == alone.latency_us


@pytest.mark.parametrize("rate_hz", [None, 100.0])
def test_energy_is_the_whole_boards_unless_a_rate_keeps_it_on(rate_hz) -> None:
    graph = chain("Conv", "Conv").graph
    plan = planned(graph, profile=XAVIER, rate_hz=rate_hz)
    costs = CostModel(views(graph), XAVIER, precision="int8")
    active = sum(costs.node(view.name, "gpu").energy_mj for view in views(graph))
    row = plan.figures[1]
    idle = costs.idle_w * row.latency_us * 1e-3 if rate_hz is None else 0.0
    assert row.idle_mj == pytest.approx(idle)
    assert row.energy_mj == pytest.approx(active + idle)
    text = render_plan(plan)
    assert ("of which idle" if rate_hz is None else "beyond the idle board") in text


def test_every_board_has_an_idle_power_of_its_own_with_source_and_confidence() -> None:
    orin = load_costs().energy.idle_w
    for name in ("xavier-nx-8gb", "orin-nx-16gb", "orin-nano-8gb", "agx-xavier-32gb"):
        power = idle_power(name)
        assert power is not None
        assert power.source
        assert power.confidence == "low"
        assert msgspec.structs.asdict(power) != msgspec.structs.asdict(orin)
    assert idle_power("xavier-nx-8gb").value < 10
    assert idle_power("laptop") is None


def test_times_and_energies_are_judged_by_their_own_errors() -> None:
    plan = planned(chain(*["Conv"] * 12).graph, min_gain=0.0)
    here = plan.figures[0]
    gpu = replace(plan.figures[1], energy_mj=here.energy_mj / 0.9, gpu_us=here.gpu_us / 0.9)
    for time_error, energy_error in ((0.05, 0.2), (0.2, 0.05)):
        search = replace(plan.search, time_error=time_error, energy_error=energy_error)
        text = verdict(replace(plan, figures=(here, gpu), search=search))
        assert ("of GPU time a frame (-10%, within" in text) == (time_error > 0.1)
        assert ("mJ a frame (-10%, within" in text) == (energy_error > 0.1)


def test_a_plan_of_a_batch_says_so() -> None:
    plan = planned(chain(*["Conv"] * 12).graph, min_gain=0.0)
    text = verdict(replace(plan, batching=Batching(8)))
    assert "of GPU time a batch of 8" in text
    assert "mJ a frame" in text


@pytest.mark.parametrize("profile", [ORIN, XAVIER], ids=["orin", "xavier"])
def test_no_plan_for_another_objective_takes_less_energy(profile) -> None:
    graph = chain(*["Conv"] * 6).graph
    least = planned(graph, "energy", 0.0, profile=profile)
    assert least.search.gap < 0.1
    for objective in BUILD_GOALS:
        energy_mj = planned(graph, objective, 0.0, profile=profile).figures[0].energy_mj
        assert least.figures[0].energy_mj * (1 - least.search.gap) <= energy_mj * (1 + 1e-9)
    assert all(
        least.figures[0].energy_mj * (1 - least.search.gap) <= row.energy_mj * (1 + 1e-9)
        for row in least.figures
        if not row.broken
    )
