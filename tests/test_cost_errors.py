"""Intervals of predictions: what they hold, and how they add up."""

import numpy as np
import pytest

from device.profile import load_profile
from scripts.cost_result import error_rows, errors_of, read_fit, within, without_model
from scripts.networks import NETWORKS
from toolkit.graph.node_view import views
from toolkit.partition.costs.constants import load_costs
from toolkit.partition.costs.errors import (
    ErrorRow,
    Interval,
    Spread,
    largest,
    network_class,
    spread_of,
    total,
)
from toolkit.partition.costs.fusion import fuse
from toolkit.partition.planning.plan import Model, PlanOptions, make_plan, plan_together
from toolkit.partition.planning.plan_html import plan_html
from toolkit.partition.planning.plan_json import plan_builtins
from toolkit.partition.planning.plan_text import render_plan
from toolkit.partition.planning.quantities import between


def held_out():
    fit_run = read_fit()
    errors = errors_of(fit_run.times, fit_run.checks, fit_run.power)
    return [error for error in errors if error.part != "power"]


def test_held_out_rows_are_within_their_interval_80_percent_of_the_time() -> None:
    rows = load_costs().errors
    inside = [within(error, rows) for error in held_out()]
    assert len(inside) > 800
    assert 0.75 <= np.mean(inside) <= 0.85


def test_bounds_that_do_not_know_the_model_hold_as_many() -> None:
    inside = [within(error, rows) for error, rows in without_model(held_out())]
    assert 0.75 <= np.mean(inside) <= 0.85


def test_rows_that_no_fit_has_seen_are_within_their_interval() -> None:
    costs = load_costs()
    checks = [p for p in read_fit().checks if p.case.engine == "gpu"]
    spreads = [
        spread_of(
            costs.errors, "gpu", p.case.precision, p.network,
            fitted=p.case.device in costs.fitted_devices,
        )
        for p in checks
    ]  # fmt: skip
    inside = [s.low <= 1 / p.ratio <= s.high for s, p in zip(spreads, checks, strict=True)]
    assert 0.75 <= np.mean(inside) <= 0.85


def test_rows_that_no_fit_has_seen_are_near() -> None:
    errors = [abs(p.ratio - 1) for p in read_fit().checks]
    assert np.median(errors) <= 0.09
    assert np.quantile(errors, 0.9) <= 0.20


def test_the_bounds_in_the_constants_are_those_of_the_rows() -> None:
    fit_run = read_fit()
    rows = error_rows(errors_of(fit_run.times, fit_run.checks, fit_run.power))
    assert load_costs().errors == rows


def test_the_narrowest_group_that_holds_the_figure_counts() -> None:
    rows = [
        ErrorRow(part="gpu", rows=99, low=0.5, high=2.0),
        ErrorRow(part="gpu", precision="int8", rows=50, low=0.7, high=1.5),
        ErrorRow(part="gpu", precision="int8", network="plain", rows=20, low=0.9, high=1.1),
    ]
    assert spread_of(rows, "gpu", "int8", "plain", fitted=True) == Spread(0.9, 1.1)
    assert spread_of(rows, "gpu", "int8", "grouped", fitted=True) == Spread(0.7, 1.5)
    assert spread_of(rows, "gpu", "fp16", "plain", fitted=True) == Spread(0.5, 2.0)
    with pytest.raises(ValueError, match="no errors of dla"):
        spread_of(rows, "dla", "fp16", "plain", fitted=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("resnet18", "plain"), ("mobilenet_v2", "grouped"), ("vit_small", "attention")],
)
def test_the_class_of_a_network(name: str, expected: str) -> None:
    assert network_class(fuse(views(NETWORKS[name].model().graph))) == expected


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
