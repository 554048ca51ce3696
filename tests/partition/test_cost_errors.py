"""Intervals of predictions: what they hold, and how they add up."""

import numpy as np
import pytest

from device.profile import load_profile
from scripts.cost_errors import errors_file, errors_of, without_boards, without_networks
from scripts.cost_result import read_fit
from scripts.networks import NETWORKS
from toolkit.graph.node_view import views
from toolkit.partition.costs.constants import gpu_errors, load_errors
from toolkit.partition.costs.errors import (
    FARTHER,
    ErrorRow,
    ErrorRows,
    ErrorScale,
    Interval,
    Spread,
    batched,
    distances,
    largest,
    total,
)
from toolkit.partition.costs.fusion import fuse
from toolkit.partition.costs.gpu import TimeShares
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.plan import Model, PlanOptions, make_plan, plan_together
from toolkit.partition.planning.plan_html import plan_html
from toolkit.partition.planning.plan_json import plan_builtins
from toolkit.partition.planning.plan_text import render_plan
from toolkit.partition.planning.quantities import between


def all_errors():
    fit_run = read_fit()
    return errors_of(fit_run.times, fit_run.checks, fit_run.power)


def inside_by_board(rows) -> dict[str, float]:
    """Return the share of rows of the GPU within their interval, of boards with ten rows."""
    groups: dict[str, list[bool]] = {}
    for error, spread in rows:
        if error.part == "gpu":
            groups.setdefault(error.case.device, []).append(holds(error, spread))
    return {board: float(np.mean(rows)) for board, rows in groups.items() if len(rows) >= 10}


def holds(error, spread) -> bool:
    return spread.low <= error.ratio <= spread.high


def test_boards_that_are_left_out_are_within_their_intervals_80_percent_of_the_time() -> None:
    rows = list(without_boards(all_errors()))
    assert 0.78 <= np.mean([holds(error, spread) for error, spread in rows]) <= 0.83
    assert np.median([2 * spread.half for _, spread in rows]) <= 0.24
    boards = inside_by_board(rows)
    assert len(boards) == 8
    # 42 of the 48 rows of AGX Xavier: left out, its networks are known from Ampere alone, where
    # they are farther off (docs/costs.md).
    assert boards.pop("agx-xavier-32gb") <= 0.88
    assert min(boards.values()) >= 0.75
    assert max(boards.values()) <= 0.855


def test_networks_that_are_left_out_are_within_their_intervals_80_percent_of_the_time() -> None:
    rows = list(without_networks(all_errors()))
    assert 0.75 <= np.mean([holds(error, spread) for error, spread in rows]) <= 0.85
    assert min(inside_by_board(rows).values()) >= 0.75


def test_rows_that_no_fit_has_seen_are_within_their_interval() -> None:
    checks = [e for e in all_errors() if e.part == "gpu" and e.left_out == "all"]
    inside = [holds(e, gpu_errors().spread(e.row, e.apart)) for e in checks]
    assert len(inside) > 280
    assert 0.75 <= np.mean(inside) <= 0.9


def test_rows_that_no_fit_has_seen_are_near() -> None:
    errors = [abs(p.ratio - 1) for p in read_fit().checks]
    assert np.median(errors) <= 0.09
    assert np.quantile(errors, 0.9) <= 0.20


def test_the_errors_in_the_file_are_those_of_the_rows() -> None:
    assert load_errors() == errors_file(all_errors())


DETECTOR = TimeShares(overhead=0.2, memory=0.06, cuda_cores=0.02, plain=0.1)
CLASSIFIER = TimeShares(overhead=0.3, memory=0.2, cuda_cores=0.0, plain=1.0)


def half_width(shares=DETECTOR, *, sm=87, precision="fp16", batch=False, **apart) -> float:
    known = {"board_fitted": True, "generation_fitted": True, "network_fitted": True}
    away = distances(precision, batch=batch, **(known | apart))
    return gpu_errors().spread(ErrorRow(sm, precision, batch, shares), away).half


@pytest.mark.parametrize("name", ["board_fitted", "generation_fitted", "network_fitted"])
def test_the_width_grows_with_every_distance_from_the_fit(name: str) -> None:
    assert half_width(**{name: False}) > 1.05 * half_width()


@pytest.mark.parametrize(
    "given",
    [{"precision": "int8"}, {"batch": True}, {"shares": CLASSIFIER}],
)
def test_the_width_grows_where_few_rows_are_like_the_figure(given) -> None:
    assert half_width(**given) > 1.02 * half_width()


def test_int8_on_a_board_outside_the_fit_is_wider_than_fp16_there() -> None:
    fp16, int8 = (half_width(precision=p, board_fitted=False) for p in ("fp16", "int8"))
    assert int8 > 1.1 * fp16


def test_bounds_are_those_of_rows_like_the_figure() -> None:
    rows = [
        ErrorRow(sm, "fp16", False, TimeShares(0.1, 0.1, 0.0, plain), error)
        for sm in (72, 87)
        for plain, wide in ((0.0, 0.1), (1.0, 0.4))
        for error in np.linspace(-wide, wide, 50) * (2 if sm == 72 else 1)
    ]
    errors = ErrorRows(rows)

    def high(sm: int, plain: float) -> float:
        figure = ErrorRow(sm, "fp16", False, TimeShares(0.1, 0.1, 0.0, plain))
        return float(np.log(errors.spread(figure, ()).high))

    assert high(87, 0.0) == pytest.approx(0.1, abs=0.03)
    assert high(87, 1.0) == pytest.approx(0.4, abs=0.08)
    assert high(72, 0.0) > 1.5 * high(87, 0.0)
    figure = ErrorRow(87, "fp16", False, TimeShares(0.1, 0.1, 0.0, 0.0))
    wider = errors.spread(figure, {"board", "network"}).high
    assert np.log(wider) == pytest.approx(FARTHER**2 * high(87, 0.0))


def test_a_figure_far_from_all_rows_takes_the_width_of_all_and_more() -> None:
    near = [ErrorRow(87, "int8", False, TimeShares(0.1, 0.5, 0.0, 1.0), e) for e in (-0.03, 0.03)]
    rest = [
        ErrorRow(87, "int8", False, TimeShares(0.1, share, 0.0, 0.0), error)
        for share in (0.0, 0.1)
        for error in np.linspace(-0.3, 0.3, 40)
    ]
    errors = ErrorRows([*near, *rest])
    like, far = (
        errors.spread(ErrorRow(87, "int8", False, TimeShares(0.1, memory, 0.0, 1.0)), ())
        for memory in (0.5, 0.9)
    )
    assert np.log(like.high) < 0.1
    assert np.log(far.high) > 0.25


def test_a_board_of_the_dla_whose_rows_are_farther_off_is_wider() -> None:
    scale = ErrorScale(rows=9, scale=0.1, low=-1.0, high=2.0, boards={"odd": 2.0})
    assert scale.spread("usual").low == pytest.approx(np.exp(-0.1))
    assert scale.spread("odd").high == pytest.approx(np.exp(0.4))


@pytest.mark.parametrize("batch", [1, 8])
def test_whether_a_network_is_in_a_batch(batch: int) -> None:
    assert batched(fuse(views(NETWORKS["resnet18"].model(batch).graph))) == (batch > 1)


def test_a_network_like_those_of_few_rows_has_wider_times() -> None:
    profile = load_profile("orin-nx-16gb")
    detector, classifier = (
        CostModel(views(NETWORKS[name].model().graph), profile, precision="fp16").spread("gpu")
        for name in ("yolov8n", "resnet18")
    )
    assert classifier.half > 1.3 * detector.half


def test_a_sum_holds_the_figure_itself() -> None:
    low, high = Spread(0.98, 1.8), Spread(0.9, 1.4)
    interval = total([(1.0, low), (1.0, high)])
    assert interval.low <= interval.value <= interval.high


def test_a_sum_of_independent_figures_is_as_wide_as_samples_of_it(rng) -> None:
    parts = [(100.0, Spread(0.8, 1.2)), (50.0, Spread(0.7, 1.5)), (200.0, Spread(0.95, 1.05))]
    z = 1.2816  # of a normal distribution, beyond which a tenth is
    samples = sum(size * (s.centre + s.half / z * rng.normal(size=200_000)) for size, s in parts)
    low, high = np.quantile(samples, (0.1, 0.9))
    interval = total(parts)
    assert interval.value == 350
    assert interval.low == pytest.approx(low, rel=0.005)
    assert interval.high == pytest.approx(high, rel=0.005)


def test_a_rate_is_the_inverse_of_a_time() -> None:
    rate = Interval(500.0, 400.0, 800.0).inverse
    assert (rate.value, rate.low, rate.high) == (2000.0, 1250.0, 2500.0)
    both = largest([Interval(5.0, 4.0, 6.0), Interval(4.0, 3.0, 9.0)])
    assert both == Interval(5.0, 4.0, 9.0)


def test_every_figure_of_a_plan_has_its_interval() -> None:
    graph = NETWORKS["resnet18"].model().graph
    plan = make_plan(Model("m", graph), load_profile("agx-orin-64gb"), PlanOptions(tensorrt="10.3"))
    for row in plan.figures:
        assert set(row.intervals) == {"latency_us", "frames_per_second", "gpu_us", "energy_mj"}
        for name, (low, high) in row.intervals.items():
            assert 0 < low < getattr(row, name) < high
    assert plan.figures[0].frames_per_second == pytest.approx(plan.simulated.throughput_hz)


def test_every_segment_has_its_interval_in_every_form() -> None:
    graph = NETWORKS["resnet18"].model().graph
    options = PlanOptions(tensorrt="10.3", objective="gpu-relief")
    shared = plan_together((Model("m", graph),), load_profile("agx-orin-64gb"), options)
    (plan,) = shared.plans
    page, text = plan_html(shared, {}, {plan.name: ["a note"]}), render_plan(plan)
    assert "Note: a note" in page
    for cost in plan.costs:
        for name, unit in (("predicted_us", "us"), ("energy_mj", "mJ")):
            low, high = cost.intervals[name]
            assert 0 < low < getattr(cost, name) < high
            assert between((low, high), unit) in text
            assert between((low, high), unit) in page
    for name, unit in (("latency_us", "us"), ("gpu_us", "us"), ("energy_mj", "mJ")):
        assert between(plan.figures[0].intervals[name], unit) in text
        assert f"({between(plan.figures[0].intervals[name], unit)})" in page
    segments = plan_builtins(plan)["segments"]
    assert [tuple(row["intervals"]) for row in segments] == [("predicted_us", "energy_mj")] * len(
        plan.costs
    )
