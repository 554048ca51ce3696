"""Budgets: what they allow, and the search against optima found by trying everything."""

import itertools
import math
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_fixtures import small_convnet

from calibration.budget import Budget, BudgetResult, largest_int8_share, parse_budget
from calibration.errors import CalibrationError
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.trials.metrics import METRICS, Material, OutputNoise
from toolkit.quantize.trials.trial import TrialModel


@pytest.mark.parametrize(
    ("text", "budget", "float_value", "limit"),
    [
        ("map50:-0.5", Budget("map50", "loss", 0.5), 98.0, 97.5),
        ("cosine:-1%", Budget("cosine", "percent", 1.0), 0.5, 0.495),
        ("loss:-10%", Budget("loss", "percent", 10.0), -2.0, -2.2),
        ("sqnr:30", Budget("sqnr", "least", 30.0), math.inf, 30.0),
        (" a:b:-0 ", Budget("a:b", "loss", 0.0), 1.0, 1.0),
    ],
)
def test_budgets_say_what_is_the_least(text, budget, float_value, limit) -> None:
    assert parse_budget(text) == budget
    assert budget.limit(float_value) == pytest.approx(limit)


@pytest.mark.parametrize(
    "text", ["", "map50", ":-1", "map50:", "map50:-x", "m:-inf", "m:5%", "m:nan"]
)
def test_what_is_no_budget_is_refused(text) -> None:
    with pytest.raises(CalibrationError, match="not a budget"):
        parse_budget(text)


def test_a_limit_that_the_float_model_misses_is_refused() -> None:
    with pytest.raises(CalibrationError, match=r"itself has map50 90, .* at least 95"):
        Budget("map50", "least", 95).limit(90.0)
    with pytest.raises(CalibrationError, match="itself has map50 nan"):
        Budget("map50", "least", 95).limit(math.nan)
    with pytest.raises(CalibrationError, match=r"such as 'sqnr:30'"):
        Budget("sqnr", "loss", 1).limit(math.inf)


def additive(costs: dict[str, float]):
    """100 minus the costs of what is in INT8."""
    return lambda keep: 100.0 - sum(cost for name, cost in costs.items() if name not in keep)


def best_share(macs, measure, limit) -> float:
    """By trying every set of nodes."""
    total = sum(macs.values())
    sets = itertools.chain.from_iterable(
        itertools.combinations(macs, size) for size in range(len(macs) + 1)
    )
    fitting = [nodes for nodes in sets if measure(frozenset(nodes)) >= limit]
    return max(1 - sum(macs[name] for name in nodes) / total for nodes in fitting)


def check(result: BudgetResult, macs, measure) -> None:
    """What every answer must be: measured, within the limit, and not to be had for less."""
    assert result.value == measure(result.keep_float) >= result.limit
    total = sum(macs.values())
    float_macs = sum(macs[name] for name in result.keep_float)
    assert result.share == pytest.approx(1 - float_macs / total)
    if result.complete:
        for name in result.keep_float:
            assert not measure(result.keep_float - {name}) >= result.limit


def test_equal_nodes_are_kept_in_the_order_of_their_cost(rng: np.random.Generator) -> None:
    for _ in range(20):
        costs = {f"n{i}": float(rng.exponential()) for i in range(8)}
        macs = dict.fromkeys(costs, 5.0)
        measure, allowed = additive(costs), float(rng.uniform(0, 6))
        result = largest_int8_share(macs, measure, Budget("m", "loss", allowed))
        check(result, macs, measure)
        assert result.share == pytest.approx(best_share(macs, measure, 100 - allowed))


def test_one_ruinous_node_is_found_with_the_rest_in_int8(rng: np.random.Generator) -> None:
    costs = {f"n{i}": 0.01 for i in range(30)} | {"bad": 40.0, "worse": 60.0}
    macs = {name: float(rng.uniform(1, 100)) for name in costs}
    measure = additive(costs)
    result = largest_int8_share(macs, measure, Budget("m", "loss", 0.5))
    assert result.keep_float == {"bad", "worse"}
    assert {row.node for row in result.costs[:2]} == {"bad", "worse"}
    costed = {row.node: row.cost for row in result.costs}
    assert costed == pytest.approx(costs)
    assert (result.float_value, result.value) == (100.0, pytest.approx(99.7))
    assert result.int8_value == pytest.approx(-0.3)


def test_masked_nodes_are_found(rng: np.random.Generator) -> None:
    """Two nodes ruin the metric, each alone as much as both: leaving one out shows nothing."""
    names = [f"n{i}" for i in range(10)]
    bad = set(rng.choice(names, 2, replace=False).tolist())
    macs = {name: float(rng.uniform(1, 9)) for name in names}
    result = largest_int8_share(
        macs, lambda keep: 100.0 if bad <= keep else 10.0, Budget("m", "loss", 1.0)
    )
    assert result.keep_float == bad


def test_everything_in_int8_takes_two_trials(rng: np.random.Generator) -> None:
    requests: list[frozenset[str]] = []
    measure = additive({"a": 0.1, "b": 0.2})
    result = largest_int8_share(
        {"a": 1.0, "b": 2.0},
        lambda keep: (requests.append(keep), measure(keep))[1],
        Budget("m", "loss", 0.5),
    )
    assert (result.keep_float, result.share, len(requests)) == (frozenset(), 1.0, 2)
    assert not result.costs


def test_a_fine_metric_tells_equal_costs_apart() -> None:
    """The metric is flat until too much noise has gathered; each node alone seems free."""
    noise = {"a": 1.0, "b": 9.0, "c": 4.0}
    fine = additive(noise)
    result = largest_int8_share(
        dict.fromkeys(noise, 1.0),
        lambda keep: 50.0 if fine(keep) >= 90.0 else 45.0,
        Budget("m", "loss", 1.0),
        fine=fine,
    )
    assert [(row.node, row.cost) for row in result.costs] == [("b", 0.0), ("c", 0.0), ("a", 0.0)]
    assert result.keep_float == {"b"}


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 9)), min_size=1, max_size=7),
    st.floats(0, 12),
    st.integers(2, 40),
    st.randoms(use_true_random=False),
)
def test_whatever_the_metric_the_answer_fits(nodes, allowed, trials, random) -> None:
    """Costs that depend on each other at random, and few trials."""
    macs = {f"n{i}": work for i, (work, _) in enumerate(nodes)}
    macs["n0"] += 1.0
    base = additive({f"n{i}": cost for i, (_, cost) in enumerate(nodes)})
    known: dict[frozenset[str], float] = {frozenset(macs): 100.0}

    def measure(keep: frozenset[str]) -> float:
        noisy = base(keep) + random.uniform(-3, 3)
        return known.setdefault(keep, math.nan if random.random() < 0.1 else noisy)

    seen: list[int] = []
    result = largest_int8_share(
        macs,
        measure,
        Budget("m", "loss", allowed),
        max_trials=trials,
        on_progress=lambda done, limit: seen.append(done),
    )
    check(result, macs, measure)
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) <= trials
    assert any(step.fits and step.value == result.value for step in result.path)


@pytest.mark.parametrize(
    ("macs", "trials", "match"),
    [
        ({}, 9, "no node"),
        ({"a": math.nan}, 9, "node 'a' has nan"),
        ({"a": 1.0}, 1, "max_trials is 1"),
    ],
)
def test_what_cannot_be_searched_is_refused(macs, trials, match) -> None:
    with pytest.raises(CalibrationError, match=match):
        largest_int8_share(macs, lambda keep: 1.0, Budget("m", "loss", 1), max_trials=trials)


def fragile(tmp_path: Path, rng: np.random.Generator) -> tuple[ir.Model, dict[str, float], list]:
    """A network with one tensor whose range clips nearly everything."""
    model = run_passes(import_model(small_convnet(tmp_path / "m.onnx", rng)).model)[0]
    samples = [{"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)} for _ in range(4)]
    trial = TrialModel(model)
    activations = ActivationRunner(model, trial.tensors)(samples[0])
    return model, {name: float(np.abs(activations[name]).max()) for name in trial.tensors}, samples


@pytest.mark.parametrize(("metric", "least"), [("sqnr", 20.0), ("cosine", 0.99), ("margin", 0.9)])
def test_the_node_that_cannot_bear_int8_stays_in_float(
    tmp_path: Path, rng: np.random.Generator, metric: str, least: float
) -> None:
    model, amax, samples = fragile(tmp_path, rng)
    trial = TrialModel(model)
    measure = METRICS[metric].build(Material(OutputNoise(trial, samples)))
    macs = dict.fromkeys(trial.nodes, 1.0)
    plain = largest_int8_share(macs, lambda k: measure(amax, k), Budget(metric, "least", least))
    assert plain.keep_float == frozenset()
    amax["x"] = 1e-2
    result = largest_int8_share(macs, lambda k: measure(amax, k), Budget(metric, "least", least))
    assert result.keep_float == {"conv0"}
    assert result.costs[0].node == "conv0"
    assert result.int8_value < least <= result.value
    assert result.float_value == METRICS[metric].float_value or metric == "cosine"


def test_map50_asks_for_a_detector(tmp_path: Path, rng: np.random.Generator) -> None:
    model, _, samples = fragile(tmp_path, rng)
    with pytest.raises(CalibrationError, match="map50 needs"):
        METRICS["map50"].build(Material(OutputNoise(TrialModel(model), samples)))


def test_costs_of_a_ratio_that_is_infinite_for_float_are_noises() -> None:
    noise = {"a": 1e-3, "b": 1e-1, "c": 1e-2}

    def ratio(keep: frozenset[str]) -> float:
        power = sum(actual for name, actual in noise.items() if name not in keep)
        return -10 * math.log10(power) if power else math.inf

    result = largest_int8_share(dict.fromkeys(noise, 1.0), ratio, Budget("sqnr", "least", 19.0))
    assert [row.node for row in result.costs] == ["b", "c", "a"]
    assert {row.node: row.cost for row in result.costs} == pytest.approx(noise)
    assert result.keep_float == {"b"}
