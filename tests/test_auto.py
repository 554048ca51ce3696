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
from toolkit.importer import import_model
from toolkit.int8.metrics import OutputNoise
from toolkit.int8.trial import TrialModel
from toolkit.passes import run_passes

SAMPLES = 16


class Additive:
    """e_s(a) = sum over tensors of noise[tensor][amax] times a sample's weight."""

    def __init__(self, rng: np.random.Generator, tensors: int = 6, methods: int = 3) -> None:
        self.candidates = {
            f"t{i}": {f"m{j}": float(1 + i + j / 4) for j in range(methods)} for i in range(tensors)
        }
        self.noise = {
            name: {amax: float(rng.uniform(0.1, 9)) for amax in found.values()}
            for name, found in self.candidates.items()
        }
        self.weights = rng.uniform(0.8, 1.2, SAMPLES)
        self.asked: list[tuple[dict[str, float | None], int]] = []

    def __call__(self, assignment, samples=ALL):
        weights = self.weights[samples]
        self.asked.append((dict(assignment), weights.size))
        return sum(self.noise[name][amax] for name, amax in assignment.items()) * weights

    def best(self) -> dict[str, float]:
        return {name: min(noise, key=noise.__getitem__) for name, noise in self.noise.items()}

    def single(self, method: str) -> float:
        everywhere = {name: found[method] for name, found in self.candidates.items()}
        return float(self(everywhere).mean())


def test_additive_noise_is_brought_to_its_least(rng: np.random.Generator) -> None:
    errors = Additive(rng)
    result = choose_ranges(errors.candidates, errors)
    least = sum(min(noise.values()) for noise in errors.noise.values()) * errors.weights.mean()
    # Tensors whose candidates differ by less than a hundredth of the whole may stay.
    assert least * (1 - 1e-9) <= result.error <= least * 1.1
    assert result.error == pytest.approx(float(errors(result.amax).mean()))
    assert result.complete


def test_the_result_is_never_worse_than_a_single_method(rng: np.random.Generator) -> None:
    """Whatever the errors are: here, unrelated to the tensors."""
    candidates = Additive(rng).candidates
    for _ in range(20):
        known: dict[tuple[tuple[str, float], ...], np.ndarray] = {}

        def errors(assignment, samples=ALL, known=known):
            key = tuple(sorted(assignment.items()))
            return known.setdefault(key, rng.exponential(size=SAMPLES))[samples]

        limit = int(rng.integers(3, 40))
        result = choose_ranges(candidates, errors, max_trials=limit)
        assert result.error <= min(result.single.values())
        assert all(gain >= 0 for gain in result.gain_db.values())
        assert result.error == errors(result.amax).mean()
        assert result.trials <= limit + 3  # the candidates of the tensor at hand are finished
        assert {name: choice.amax for choice in result.choices for name in [choice.tensor]} == dict(
            result.amax
        )


def test_differences_that_may_be_chance_change_nothing() -> None:
    """One sample likes b of t much better, and all others like it a little less; u must be a."""
    candidates = {"t": {"a": 1.0, "b": 2.0}, "u": {"a": 1.0, "b": 2.0}}
    chance = np.r_[-2.0, np.full(SAMPLES - 1, 0.1)]

    def errors(assignment, samples=ALL):
        t = chance * (assignment.get("t") == 2.0)
        u = np.full(SAMPLES, 5.0) * (assignment.get("u") == 2.0)
        return (10.0 + t + u)[samples]

    assert chance.mean() < 0
    assert choose_ranges(candidates, errors).amax == {"t": 1.0, "u": 1.0}


@pytest.mark.parametrize(
    ("gains", "left"),
    [
        (np.r_[np.full(SAMPLES // 2, 0.9), np.full(SAMPLES // 2, 1.1)], True),
        # Surely better on the whole, by the first half alone.
        (np.r_[np.full(SAMPLES // 2, 2.0), np.full(SAMPLES // 2, -0.05)], False),
        # Better in both halves, by 1.5 standard errors: enough for a tensor, not for the whole.
        (1.0 + np.sqrt(SAMPLES - 1) / 1.5 * np.tile([1.0, -1.0], SAMPLES // 2), False),
    ],
)
def test_the_best_single_method_is_left_only_for_what_is_proven(
    gains: np.ndarray, left: bool
) -> None:
    candidates = {"t": {"a": 1.0, "b": 2.0}, "u": {"a": 1.0, "b": 2.0}}

    def errors(assignment, samples=ALL):
        t = gains * (assignment.get("t") == 2.0)
        u = np.full(SAMPLES, 20.0) * (assignment.get("u") == 2.0)
        return (30.0 - t + u)[samples]

    assert gains.mean() > 0
    result = choose_ranges(candidates, errors)
    assert result.amax == {"t": 2.0 if left else 1.0, "u": 1.0}
    assert result.fallback == (None if left else "a")


def test_candidates_that_agree_are_tried_once(rng: np.random.Generator) -> None:
    errors = Additive(rng, tensors=1)
    errors.candidates["t0"] = {"a": 1.0, "b": 1.0, "c": 1.001}
    errors.noise["t0"] = {1.0: 2.0, 1.001: 2.0}
    result = choose_ranges(errors.candidates, errors)
    assert len(errors.asked) == 3  # the three methods everywhere, nothing else
    assert (result.amax, result.fallback) == ({"t0": 1.0}, "a")


def test_noise_on_its_own_is_asked_of_the_callable_for_it(rng: np.random.Generator) -> None:
    whole, own = Additive(rng), Additive(rng)
    own.noise = whole.noise
    result = choose_ranges(whole.candidates, whole, own, sweeps=0)
    assert all(len(assignment) == 1 for assignment, _ in own.asked)
    assert all(len(assignment) == 6 for assignment, _ in whole.asked)
    assert len(whole.asked) == 4
    assert result.error < min(result.single.values())


def test_hopeless_candidates_see_few_samples(rng: np.random.Generator) -> None:
    errors = Additive(rng, tensors=1, methods=2)
    errors.noise["t0"] = {1.0: 1.0, 1.25: 50.0}
    choose_ranges(errors.candidates, errors, errors, sweeps=0)
    assert sum(n for assignment, n in errors.asked[2:] if assignment["t0"] == 1.25) == SAMPLES // 4


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
    from toolkit.int8.observe import ActivationRunner

    pictures = [
        {"x": (rng.standard_t(2, size=(1, 3, 32, 32))).astype(np.float32)} for _ in range(16)
    ]
    seen = observe_tensors(
        ActivationRunner(model, trial.tensors), memory_dataset(pictures[:8]), trial.tensors
    ).histograms
    candidates = {
        name: {method: choose_amax(histogram, method) for method in METHODS}
        for name, histogram in seen.items()
    }
    noise = OutputNoise(trial, pictures[8:])
    result = choose_ranges(candidates, noise.errors, noise.own_errors)
    nothing = frozenset[str]()
    for method, error in result.single.items():
        everywhere = {name: found[method] for name, found in candidates.items()}
        decibels = noise.sqnr_db(everywhere, nothing)["y"]
        assert decibels == pytest.approx(-10 * math.log10(error))
        assert noise.sqnr_db(result.amax, nothing)["y"] >= decibels - 1e-9
    return result


def test_a_network_loses_to_no_single_method(tmp_path: Path, rng: np.random.Generator) -> None:
    trial, model = network(tmp_path, rng)
    result = search(trial, model, rng)
    assert set(result.amax) == set(trial.tensors)
    assert result.complete
    assert result.trials < 100
