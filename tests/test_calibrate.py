"""One pass from samples to a table."""

import tracemalloc

import numpy as np
import pytest

from calibration import METHODS, CalibrationError, InputSpec, calibrate, memory_dataset
from calibration import open_dataset as open_files
from calibration.calibrate import observe_tensors
from calibration.threshold import DEAD_AMAX

MODEL = "c" * 64


def samples(count, seed=1):
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(size=(1, 8)).astype(np.float32)} for _ in range(count)]


def run(sample):
    """A model with a hidden tensor, a dead one, a constant one and an integer one."""
    x = sample["x"]
    return {
        "x": x,
        "hidden": np.maximum(x, 0) * np.float32(3),
        "dead": np.zeros_like(x),
        "one": np.ones(4, np.float32),
        "index": np.arange(3),
        "nothing": x[:, :0],
    }


def test_minmax_finds_the_largest_magnitude_over_all_samples():
    data = samples(20)
    result = calibrate(run, memory_dataset(data), ["hidden", "x"], "minmax", model_sha256=MODEL)
    x = np.stack([sample["x"] for sample in data])
    assert result.table.tensors == {
        "hidden": float(np.float32(3) * x.max()),
        "x": float(np.abs(x).max()),
    }


def test_the_table_says_what_it_was_made_of():
    data = memory_dataset(samples(7))
    table = calibrate(run, data, ["x"], model_sha256=MODEL).table
    assert (table.method, table.samples, table.model_sha256) == ("entropy", 7, MODEL)
    assert table.data_sha256 == data.sha256()


@pytest.mark.parametrize("method", sorted(METHODS))
def test_dead_and_constant_tensors_are_named_and_get_an_amax(method):
    data = memory_dataset(samples(3))
    result = calibrate(run, data, ["x", "dead", "one"], method, model_sha256=MODEL)
    assert (result.dead, result.constant) == (("dead",), ("one",))
    assert result.table.tensors["dead"] == DEAD_AMAX
    assert result.table.tensors["one"] == 1.0


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_order_of_the_samples_does_not_change_an_amax(method):
    data = samples(30)
    one = calibrate(run, memory_dataset(data), ["x", "hidden"], method, model_sha256=MODEL)
    other = calibrate(run, memory_dataset(data[::-1]), ["x", "hidden"], method, model_sha256=MODEL)
    assert one.table.tensors == other.table.tensors


def test_each_sample_is_run_once_and_reported():
    ran, seen = [], []
    data = samples(4)

    def counted(sample):
        ran.append(sample["x"])
        return run(sample)

    calibrate(
        counted,
        memory_dataset(data),
        ["x"],
        on_progress=lambda done, total: seen.append((done, total)),
        model_sha256=MODEL,
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [id(x) for x in ran] == [id(sample["x"]) for sample in data]


def test_fewer_samples_than_asked_and_what_was_skipped_are_reported(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.png").write_bytes(b"")

    def load(path):
        if path.name == "b.png":
            raise OSError("cut off")
        return np.ones((1, 8), np.float32)

    data = open_files(tmp_path, load, [InputSpec("x", (1, 8))], limit=10)
    result = calibrate(run, data, ["x"], model_sha256=MODEL)
    assert (result.asked, result.samples, result.table.samples) == (10, 2, 2)
    assert [(skipped.name, skipped.reason) for skipped in result.skipped] == [("b.png", "cut off")]


def test_an_unknown_method_is_refused_before_the_model_runs():
    def never(_sample):
        raise AssertionError("the model was run")

    with pytest.raises(CalibrationError, match="no calibration method 'best'"):
        calibrate(never, memory_dataset(samples(1)), ["x"], "best", model_sha256=MODEL)


@pytest.mark.parametrize(
    ("tensors", "count", "words"),
    [
        (["conv9"], 1, "no tensor 'conv9' in sample 0"),
        (["index"], 1, "'index' is int64"),
        (["x", "nothing"], 2, "'nothing' was empty in every sample"),
        ([], 1, "no tensors"),
        (["x"], 0, "held no sample"),
    ],
)
def test_what_cannot_be_calibrated_is_named(tensors, count, words):
    with pytest.raises(CalibrationError, match=words):
        calibrate(run, memory_dataset(samples(count)), tensors, model_sha256=MODEL)


def test_a_model_that_overflows_is_named_with_tensor_and_sample():
    def overflow(sample):
        return {"x": np.where(sample["x"] > 2.0, np.float32(np.inf), sample["x"])}

    data = samples(50)
    first = next(i for i, sample in enumerate(data) if (sample["x"] > 2.0).any())
    with pytest.raises(CalibrationError, match=f"'x'.*infinite.*sample {first}:"):
        calibrate(overflow, memory_dataset(data), ["x"], model_sha256=MODEL)


def test_memory_does_not_grow_with_the_number_of_samples():
    def peak(count):
        big = np.random.default_rng(2).normal(size=(1, 50_000)).astype(np.float32)
        data = memory_dataset([{"x": big}] * count)
        tracemalloc.start()
        observe_tensors(lambda sample: {"x": sample["x"] * 2}, data, ["x"])
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert peak(60) < 1.1 * peak(3)
