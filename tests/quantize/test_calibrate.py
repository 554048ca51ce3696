"""One pass from samples to a table."""

import threading
import time
import tracemalloc

import numpy as np
import pytest

from calibration.calibrate import calibrate, observe_tensors
from calibration.dataset import InputSpec, memory_dataset
from calibration.dataset import open_dataset as open_files
from calibration.errors import CalibrationError
from calibration.threshold import DEAD_AMAX, METHODS

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
    assert (table.method, table.samples, table.model_sha256) == ("minmax", 7, MODEL)
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
    second = calibrate(run, memory_dataset(data[::-1]), ["x", "hidden"], method, model_sha256=MODEL)
    assert one.table.tensors == second.table.tensors


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
    assert (result.requested, result.samples, result.table.samples) == (10, 2, 2)
    assert [(skipped.name, skipped.reason) for skipped in result.skipped] == [("b.png", "cut off")]


def test_an_unknown_method_is_refused_before_the_model_runs():
    def never(_sample):
        raise AssertionError("the model was run")

    with pytest.raises(CalibrationError, match="no calibration method 'best'"):
        calibrate(never, memory_dataset(samples(1)), ["x"], "best", model_sha256=MODEL)


@pytest.mark.parametrize(
    ("tensors", "count", "message"),
    [
        (["conv9"], 1, "no tensor 'conv9' in sample 0"),
        (["index"], 1, "'index' is int64"),
        (["x", "nothing"], 2, "'nothing' was empty in every sample"),
        ([], 1, "no tensors"),
        (["x"], 0, "held no sample"),
    ],
)
def test_what_cannot_be_calibrated_is_named(tensors, count, message):
    with pytest.raises(CalibrationError, match=message):
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

    # After 12 samples some were counted: those of a small tensor wait for one another.
    assert peak(60) < 1.1 * peak(12)


def bits(histograms):
    return {
        name: (seen.bins.tobytes(), seen.exponent, seen.minimum.hex(), seen.maximum.hex())
        for name, seen in histograms.items()
    }


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_change_no_bit(rng, threads):
    data = [
        {"x": (rng.standard_t(1, size=(1, 3000)) * 2.0**i).astype(np.float32)} for i in range(12)
    ]

    def run_unevenly(sample):
        time.sleep(float(np.abs(sample["x"][0, 0])) % 0.005)
        return {"x": sample["x"], "y": np.maximum(sample["x"], 0)}

    one = observe_tensors(run_unevenly, memory_dataset(data), ["x", "y"])
    seen = []
    many = observe_tensors(
        run_unevenly,
        memory_dataset(data),
        ["x", "y"],
        lambda done, total: seen.append((done, total)),
        threads=threads,
    )
    assert bits(many.histograms) == bits(one.histograms)
    assert (many.samples, many.fed_sha256) == (one.samples, one.fed_sha256)
    assert seen == [(done, 12) for done in range(1, 13)]


def test_with_threads_the_first_sample_that_fails_is_named():
    def overflow(sample):
        number = int(sample["x"][0, 0])
        time.sleep(0.1 if number == 2 else 0.0)
        return {"x": np.where(number >= 2, np.float32(np.nan), sample["x"])}

    data = [{"x": np.full((1, 8), number, np.float32)} for number in range(20)]
    before = threading.active_count()
    with pytest.raises(CalibrationError, match=r"'x' holds 8 NaN .* sample 2:"):
        observe_tensors(overflow, memory_dataset(data), ["x"], threads=3)
    assert threading.active_count() == before


def test_an_interrupt_stops_all_threads_after_the_samples_at_hand():
    ran = []

    def interrupted(done, _total):
        if done == 4:
            raise KeyboardInterrupt

    def counted(sample):
        ran.append(1)
        return run(sample)

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        observe_tensors(counted, memory_dataset(samples(50)), ["x"], interrupted, threads=2)
    assert threading.active_count() == before
    assert 4 <= len(ran) <= 7


def test_with_threads_a_loader_may_reuse_its_memory():
    class Reused:
        requested, skipped = 9, ()

        def __len__(self):
            return 9

        def __iter__(self):
            memory = np.zeros((1, 100), np.float32)
            for number in range(9):
                memory[:] = number + 1
                yield {"x": memory}

    def slow(sample):
        time.sleep(0.01)
        return {"x": sample["x"]}

    result = observe_tensors(slow, Reused(), ["x"], threads=2).histograms["x"]
    assert np.flatnonzero(result.bins).size == 9
    assert (result.minimum, result.maximum, result.elements) == (1.0, 9.0, 900)
