"""The choice per tensor, on errors whose least is known and on a small network."""

import math
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from model_fixtures import small_convnet

from calibration.auto import MAX_TRIALS, AutoResult, choose_ranges
from calibration.calibrate import observe_tensors
from calibration.dataset import memory_dataset
from calibration.errors import CalibrationError
from calibration.threshold import METHODS, choose_amax
from calibration.trials import ALL
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.trials.metrics import OutputNoise
from toolkit.quantize.trials.trial import TrialModel

SAMPLES = 16


class Additive:
    """e_s(a) = sum over tensors of noise[tensor][amax] times a sample's weight."""

    def __init__(self, rng: np.random.Generator, tensors: int = 6, methods: int = 3) -> None:
        self.candidates = {
            f"t{i}": {f"m{j}": float(1 + i + j / 4) for j in range(methods)} for i in range(tensors)
        }
        self.noise = {
            name: {amax: float(rng.uniform(0.1, 9)) for amax in ranges.values()}
            for name, ranges in self.candidates.items()
        }
        self.weights = rng.uniform(0.8, 1.2, SAMPLES)
        self.assignments: list[tuple[dict[str, float | None], int]] = []

    def __call__(self, assignment, samples=ALL):
        weights = self.weights[samples]
        self.assignments.append((dict(assignment), weights.size))
        return sum(self.noise[name][amax] for name, amax in assignment.items()) * weights

    def best(self) -> dict[str, float]:
        return {name: min(noise, key=noise.__getitem__) for name, noise in self.noise.items()}

    def single(self, method: str) -> float:
        everywhere = {name: ranges[method] for name, ranges in self.candidates.items()}
        return float(self(everywhere).mean())


def test_additive_noise_is_brought_to_its_least(rng: np.random.Generator) -> None:
    errors = Additive(rng)
    result = choose_ranges(errors.candidates, errors)
    least = sum(min(noise.values()) for noise in errors.noise.values()) * errors.weights.mean()
    # Tensors that add less than a hundredth of the whole may stay.
    assert least * (1 - 1e-9) <= result.error <= least * 1.1
    assert result.error == pytest.approx(float(errors(result.amax).mean()))
    assert result.complete


def surely_better(one: np.ndarray, second: np.ndarray) -> bool:
    difference = one - second
    return difference.mean() < -2 * difference.std(ddof=1) / math.sqrt(difference.size)


def test_no_wider_method_is_better_than_the_result_and_no_narrower_one_surely(
    rng: np.random.Generator,
) -> None:
    """Whatever the errors are: here, unrelated to the tensors. m0 is the narrowest method."""
    candidates = Additive(rng).candidates
    for _ in range(20):
        known: dict[tuple[tuple[str, float], ...], np.ndarray] = {}

        def errors(assignment, samples=ALL, known=known):
            key = tuple(sorted(assignment.items()))
            return known.setdefault(key, rng.exponential(size=SAMPLES))[samples]

        limit = int(rng.integers(3, 40))
        result = choose_ranges(candidates, errors, max_trials=limit)
        alone = {
            method: errors({tensor: ranges[method] for tensor, ranges in candidates.items()})
            for method in result.single
        }
        assert result.error <= result.single[result.start]
        if result.start == "m2":
            assert not surely_better(alone["m1"], alone["m2"])
        assert result.error == errors(result.amax).mean()
        assert result.trials <= limit + 1  # the candidate at hand is finished
        assert {choice.tensor: choice.amax for choice in result.choices} == dict(result.amax)


WIDE, NARROW = 2.0, 1.0


@pytest.mark.parametrize(
    ("chosen", "second_range", "gains", "taken"),
    [
        # One sample gains much, all others lose a little: what clipping it away costs.
        (NARROW, WIDE, np.r_[np.full(SAMPLES - 1, -0.1), 2.0], True),
        (NARROW, WIDE, np.r_[np.full(SAMPLES - 1, -0.1), 1.4], False),
        (WIDE, NARROW, np.r_[np.full(SAMPLES - 1, -0.1), 2.0], False),
        # 1.5 and 2.5 standard errors.
        (WIDE, NARROW, 1 + np.sqrt(SAMPLES - 1) / 1.5 * np.tile([1.0, -1.0], SAMPLES // 2), False),
        (WIDE, NARROW, 1 + np.sqrt(SAMPLES - 1) / 2.5 * np.tile([1.0, -1.0], SAMPLES // 2), True),
    ],
)
def test_a_narrower_range_needs_proof_and_a_wider_one_does_not(
    chosen: float, second_range: float, gains: np.ndarray, taken: bool
) -> None:
    candidates = {"t": {"a": chosen, "b": second_range}, "u": {"a": 1.0, "b": 3.0}}

    def errors(assignment, samples=ALL):
        t = gains * (assignment.get("t") == chosen)  # so what gains much has large errors
        u = np.full(SAMPLES, 20.0) * (assignment.get("u") == 3.0)
        return (30.0 + t + u)[samples]

    result = choose_ranges(candidates, errors, start="a")
    assert result.amax == {"t": second_range if taken else chosen, "u": 1.0}


def test_candidates_that_agree_are_tried_once(rng: np.random.Generator) -> None:
    errors = Additive(rng, tensors=1)
    errors.candidates["t0"] = {"a": 1.0, "b": 1.0, "c": 1.001}
    errors.noise["t0"] = {1.0: 2.0, 1.001: 2.0}
    result = choose_ranges(errors.candidates, errors)
    assert len(errors.assignments) == 3  # the three methods everywhere, nothing else
    assert result.amax["t0"] in (1.0, 1.001)


def test_noise_on_its_own_is_asked_of_the_callable_for_it(rng: np.random.Generator) -> None:
    whole, single = Additive(rng), Additive(rng)
    single.noise = whole.noise
    result = choose_ranges(whole.candidates, whole, single)
    assert all(len(assignment) == 1 for assignment, _ in single.assignments)
    assert len(single.assignments) == 6
    assert all(len(assignment) == 6 for assignment, _ in whole.assignments)
    assert result.error <= min(result.single.values())


def test_tensors_that_add_nothing_are_left_as_they_are(rng: np.random.Generator) -> None:
    errors = Additive(rng, tensors=3)
    errors.noise["t1"] = dict.fromkeys(errors.noise["t1"], 1e-3)
    result = choose_ranges(errors.candidates, errors)
    start = {tensor: ranges[result.start] for tensor, ranges in errors.candidates.items()}
    assert result.amax["t1"] == start["t1"]
    tried = [assignment for assignment, _ in errors.assignments[3:] if len(assignment) == 3]
    assert tried
    assert all(assignment["t1"] == start["t1"] for assignment in tried)


def test_hopeless_candidates_see_few_samples(rng: np.random.Generator) -> None:
    errors = Additive(rng, tensors=1, methods=2)
    errors.noise["t0"] = {1.0: 1.0, 1.25: 50.0}
    choose_ranges(errors.candidates, errors, start="m0")
    last = [count for assignment, count in errors.assignments if assignment["t0"] == 1.25]
    assert last[0] == SAMPLES  # alone, everywhere
    assert 0 < sum(last[1:]) <= SAMPLES // 4


def test_worthless_candidates_lose(rng: np.random.Generator) -> None:
    errors = Additive(rng)
    for name in ("t0", "t3"):
        worst = max(errors.noise[name], key=errors.noise[name].__getitem__)
        errors.noise[name][worst] = math.nan
    result = choose_ranges(errors.candidates, errors)
    assert math.isfinite(result.error)


def test_progress_ends_where_it_said(rng: np.random.Generator) -> None:
    errors, seen = Additive(rng), list[tuple[int, int]]()
    result = choose_ranges(errors.candidates, errors, on_progress=lambda *a: seen.append(a))
    assert seen[-1][0] == result.trials
    assert all(done <= expected <= MAX_TRIALS for done, expected in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(
    ("candidates", "limit", "match"),
    [
        ({}, 9, "no tensors"),
        ({"a": {"x": 1.0}, "b": {"y": 1.0}}, 9, "tensor 'b' has candidates by y"),
        ({"a": {"x": 0.0}}, 9, "must be positive"),
        ({"a": {"x": 1.0, "y": 2.0}}, 1, "max_trials is 1"),
    ],
)
def test_what_cannot_be_searched_is_refused(candidates, limit, match) -> None:
    with pytest.raises(CalibrationError, match=match):
        choose_ranges(candidates, lambda a, s: np.ones(2)[s], max_trials=limit)


def network(tmp_path: Path, rng: np.random.Generator) -> tuple[TrialModel, ir.Model]:
    model = run_passes(import_model(small_convnet(tmp_path / "m.onnx", rng)).model)[0]
    return TrialModel(model), model


def search(trial: TrialModel, model: ir.Model, rng: np.random.Generator) -> AutoResult:
    from toolkit.quantize.observe import ActivationRunner

    samples = [
        {"x": (rng.standard_t(2, size=(1, 3, 32, 32))).astype(np.float32)} for _ in range(16)
    ]
    seen = observe_tensors(
        ActivationRunner(model, trial.tensors), memory_dataset(samples[:8]), trial.tensors
    ).histograms
    candidates = {
        name: {method: choose_amax(histogram, method) for method in METHODS}
        for name, histogram in seen.items()
    }
    noise = OutputNoise(trial, samples[8:])
    result = choose_ranges(candidates, noise.errors, noise.own_errors)
    for method, error in result.single.items():
        everywhere = {name: ranges[method] for name, ranges in candidates.items()}
        decibels = noise.sqnr_db(everywhere, frozenset())["y"]
        assert decibels == pytest.approx(-10 * math.log10(error))
    assert noise.sqnr_db(result.amax, frozenset())["y"] >= (
        -10 * math.log10(result.single[result.start]) - 1e-9
    )
    return result


def test_a_network_gains_over_the_method_it_starts_with(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    trial, model = network(tmp_path, rng)
    result = search(trial, model, rng)
    assert set(result.amax) == set(trial.tensors)
    assert result.complete
    assert result.trials < 100


def test_what_is_not_allowed_of_all_tensors_together_is_not_chosen(
    rng: np.random.Generator,
) -> None:
    moved: list[str] = []
    while len(moved) < 2:  # a draw of few tensors that gain says nothing
        errors = Additive(rng)
        free = choose_ranges(errors.candidates, errors, start="m2")
        rows = errors.candidates.items()
        moved = [name for name, ranges in rows if free.amax[name] != ranges["m2"]]

    def at_most_one(assignment) -> bool:
        return sum(amax != errors.candidates[t]["m2"] for t, amax in assignment.items()) <= 1

    bound = choose_ranges(errors.candidates, errors, start="m2", allowed=at_most_one)
    assert sum(bound.amax[name] != ranges["m2"] for name, ranges in errors.candidates.items()) == 1
    assert bound.error == pytest.approx(float(errors(bound.amax).mean()))


def test_trials_are_left_to_try_ranges_or_none_is_spent(rng: np.random.Generator) -> None:
    """Measuring tensors alone may not take all of the trials: it chooses nothing by itself."""
    tensors, samples = 40, 6
    candidates = {f"t{n}": {"wide": 2.0, "narrow": 1.0} for n in range(tensors)}
    alone: list[int] = []

    def errors(assignment, chosen=ALL):
        if len(assignment) == 1:
            alone.append(np.arange(samples)[chosen].size)
        return np.full(samples, sum(a for a in assignment.values()))[chosen]

    result = choose_ranges(candidates, errors, max_trials=40)
    assert alone == [3] * tensors  # the worst two, and half way
    assert result.amax != dict.fromkeys(candidates, 2.0)
    # 12 trials are 72 runs, 12 of them for the methods: one for each tensor leaves 20.
    alone.clear()
    result = choose_ranges(candidates, errors, max_trials=12)
    assert alone == [1] * tensors
    assert result.amax != dict.fromkeys(candidates, 2.0)
    alone.clear()
    result = choose_ranges(candidates, errors, max_trials=10)  # 48 left: not one for each
    assert (alone, result.trials, result.complete) == ([], 2, False)
    assert {choice.sensitivity for choice in result.choices} == {0.0}
