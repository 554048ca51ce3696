"""Two parts of the samples that judge each other: who is where, and with what ranges."""

from pathlib import Path

import numpy as np
import pytest
from model_fixtures import small_convnet

from calibration.calibrate import Observation, observe_tensors
from calibration.dataset import memory_dataset
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.quantize import calibrated_tensors, with_operands
from toolkit.quantize.ranges.split import MAX_REPORTED, MAX_VALIDATION, MIN_SAMPLES, Split
from toolkit.quantize.trials.fit import Halves, fit, merge_observations
from toolkit.quantize.trials.trial import TrialModel


def numbered(count: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full((1, 2), number, np.float32)} for number in range(count)]


def kept_and_held(count: int, *, halve: bool) -> tuple[list[int], list[int]]:
    """Which samples judge, and which of them are held out; each is observed or held out."""
    split = Split(memory_dataset(numbered(count)), halve)
    observed = [int(sample["x"][0, 0]) for sample in split]
    validation = [int(sample["x"][0, 0]) for sample in split.validation]
    held = [validation[number] for number in split.held_out]
    assert len(observed) == len(split)
    assert sorted(observed + held) == list(range(count))
    return validation, held


@pytest.mark.parametrize("count", [MIN_SAMPLES, 7, 2 * MAX_VALIDATION, 2 * MAX_VALIDATION + 9, 100])
def test_every_sample_is_observed_or_held_and_as_many_of_each_judge(count: int) -> None:
    validation, held = kept_and_held(count, halve=True)
    assert validation == sorted(validation)
    assert len(held) == min(count // 2, MAX_VALIDATION)
    assert len(validation) - len(held) == min(-(-count // 2), MAX_VALIDATION)


@pytest.mark.parametrize("count", [MIN_SAMPLES, 2 * MAX_REPORTED + 3, 100])
def test_what_is_only_reported_is_held_out_too(count: int) -> None:
    validation, held = kept_and_held(count, halve=False)
    assert len(held) == min(count // 2, MAX_REPORTED)
    assert validation == [0, *held]


@pytest.mark.parametrize("halve", [False, True])
@pytest.mark.parametrize("count", [2, MIN_SAMPLES - 1])
def test_of_few_samples_the_last_is_held_out(count: int, halve: bool) -> None:
    split = Split(memory_dataset(numbered(count)), halve)
    assert [int(sample["x"][0, 0]) for sample in split] == list(range(count - 1))
    assert len(split) == count - 1
    assert [int(split.validation[number]["x"][0, 0]) for number in split.held_out] == [count - 1]
    assert not split.unseen


@pytest.mark.parametrize("halve", [False, True])
def test_a_single_sample_is_not_held_out(halve: bool) -> None:
    split = Split(memory_dataset(numbered(1)), halve)
    assert len(list(split)) == len(split) == len(split.validation) == 1
    assert split.held_out.size == 0


def test_each_part_is_judged_with_the_ranges_of_the_other(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    graph = run_passes(import_model(small_convnet(tmp_path / "m.onnx", rng)).model)[0]
    tensors = calibrated_tensors(graph)
    # Samples of very different size: whose range is used shows.
    samples = [
        {"x": rng.normal(scale=scale, size=(1, 3, 32, 32)).astype(np.float32)}
        for scale in (1.0, 3.0, 0.5, 9.0)
    ]
    held = np.array([1, 3])

    def observe(numbers: list[int]) -> Observation:
        run = ActivationRunner(graph, tensors)
        return observe_tensors(run, memory_dataset([samples[n] for n in numbers]), tensors)

    first, held_out = observe([0, 2]), observe([1, 3])
    halves = Halves(first.histograms, held_out.histograms, held)
    result = fit(graph, merge_observations(first, held_out), ("minmax",), samples, halves=halves)
    whole = {
        name: max(first.histograms[name].amax, held_out.histograms[name].amax) for name in tensors
    }
    assert {name: result.amax[name] for name in tensors} == pytest.approx(whole)
    assert result.observation.samples == 4

    trial, exact = TrialModel(graph), ActivationRunner(graph, ["y"])
    signal = np.mean([np.sum(exact(sample)["y"].astype(np.float64) ** 2) for sample in samples])
    for number, sample in enumerate(samples):
        part = first if number in held else held_out
        seen = {name: one.amax for name, one in part.histograms.items()}
        ranges = with_operands(graph, seen)
        noise = trial({name: ranges[name] for name in trial.tensors}, sample)["y"]
        expected = np.sum((noise.astype(np.float64) - exact(sample)["y"]) ** 2) / signal
        amax = {name: result.amax[name] for name in trial.tensors}
        assert result.noise.errors(amax, np.array([number]))[0] == pytest.approx(expected, rel=0.05)
