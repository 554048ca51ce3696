"""States of observations: exact on disk, alive after a kill, never mixed up."""

import hashlib
import itertools
import math
import signal
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.calibrate import Checkpoint, calibrate, observe_tensors
from calibration.dataset import memory_dataset
from calibration.errors import CalibrationError
from calibration.observer import ALL_BINS, Histogram
from calibration.state import (
    MAGIC,
    State,
    decode_state,
    encode_state,
    read_state,
    write_state,
)

MODEL = "c" * 64
TENSORS = ["x", "hidden", "dead", "nothing"]


def samples(count, seed):
    """Samples whose sizes grow, so that ranges widen on the way."""
    rng = np.random.default_rng(seed)
    return [
        {"x": (rng.standard_t(2, size=(1, 50)) * 1.5**i).astype(np.float32)} for i in range(count)
    ]


def run(sample):
    x = sample["x"]
    return {"x": x, "hidden": np.maximum(x, 0), "dead": x * 0, "nothing": x[:, :0]}


def observed(data, tensors=tuple(TENSORS)):
    return observe_tensors(run, memory_dataset(data), list(tensors))


def bits(histogram):
    ends = (histogram.minimum.hex(), histogram.maximum.hex())
    return histogram.bins.tobytes(), histogram.exponent, ends


def all_bits(histograms):
    return {name: bits(histogram) for name, histogram in histograms.items()}


SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=25, deadline=None)
@given(SEEDS)
def test_a_state_comes_back_from_a_file_exactly(seed):
    state = observed(samples(1 + seed % 9, seed)).state(MODEL)
    data = encode_state(state)
    result = decode_state(data, "x")
    assert all_bits(result.histograms) == all_bits(state.histograms)
    assert (result.model_sha256, result.parts) == (state.model_sha256, state.parts)
    assert encode_state(result) == data


def test_large_counts_and_extreme_ranges_come_back_exactly(tmp_path):
    bins = np.zeros(ALL_BINS, np.int64)
    bins[[0, 2048, ALL_BINS - 1]] = [2**61, 2**33, 3]
    top = math.nextafter(math.ldexp(1.0, 1023), 0.0)
    state = observed(samples(1, 1), ["x"]).state(MODEL)
    state = with_histograms(state, {"x": Histogram(bins, 1023, -top, 5e-324)})
    write_state(tmp_path / "s", state)
    assert all_bits(read_state(tmp_path / "s").histograms) == all_bits(state.histograms)


def with_histograms(state, histograms):
    return type(state)(state.model_sha256, state.parts, histograms)


def test_the_file_is_compact():
    values = np.random.default_rng(3).normal(size=(1, 100_000)).astype(np.float32)
    state = observe_tensors(run, memory_dataset([{"x": values}]), ["x"]).state(MODEL)
    assert len(encode_state(state)) < 2 * ALL_BINS + 300


# Resuming.


class Killed(BaseException):
    """Stands for a process that ends."""


def _stopped_after(count, data, path, every=4, threads=1):
    """Observe until sample `count` and stop in the middle of it."""
    ran = itertools.count()

    def run_or_stop(sample):
        if next(ran) == count:
            raise Killed
        return run(sample)

    with pytest.raises(Killed):
        observe_tensors(
            run_or_stop,
            memory_dataset(data),
            TENSORS,
            checkpoint=Checkpoint(path, MODEL, every),
            threads=threads,
        )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [3, 4, 9, 15])
def test_a_stopped_observation_goes_on_and_loses_one_batch_at_most(tmp_path, count, threads):
    data, path = samples(16, 5), tmp_path / "state"
    _stopped_after(count, data, path, threads=threads)
    assert (read_state(path).samples if path.exists() else 0) == count // 4 * 4
    ran = []
    again = observe_tensors(
        lambda sample: ran.append(sample) or run(sample),
        memory_dataset(data),
        TENSORS,
        checkpoint=Checkpoint(path, MODEL, 4),
        threads=threads,
    )
    assert len(ran) == 16 - count // 4 * 4
    assert all_bits(again.histograms) == all_bits(observed(data).histograms)
    assert again.fed_sha256 == observed(data).fed_sha256
    assert encode_state(read_state(path)) == encode_state(observed(data).state(MODEL))


def test_a_finished_state_runs_nothing_and_gives_the_same_table(tmp_path):
    def never(_sample):
        raise AssertionError("the model was run")

    def result(run_it):
        data = memory_dataset(samples(10, 6))
        return calibrate(run_it, data, ["x", "dead"], model_sha256=MODEL, resume=tmp_path / "s")

    assert result(run) == result(never)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "d" * 64}, "state is of the model cccccccccccc, not of dddddddddddd"),
        ({"tensors": ["x", "other"]}, r"state is of other tensors.*lacks 1 \('other' for one"),
        ({"data": samples(16, 8)}, "state is of other data: 8 samples with hash"),
        ({"data": samples(16, 7)[::-1]}, "state is of other data"),
        ({"data": samples(5, 7)}, "state is of other data: 8 samples.*now the first 5 have"),
    ],
)
def test_a_state_of_something_else_is_refused_and_kept(tmp_path, change, message):
    path = tmp_path / "state"
    _stopped_after(9, samples(16, 7), path)
    before = path.read_bytes()
    data = memory_dataset(change.get("data", samples(16, 7)))
    keep = Checkpoint(path, change.get("model", MODEL), 4)
    with pytest.raises(CalibrationError, match=message):
        observe_tensors(run, data, change.get("tensors", TENSORS), checkpoint=keep)
    assert path.read_bytes() == before


def test_merged_shards_cannot_be_resumed(tmp_path):
    first, second = (observed(samples(2, seed)).state(MODEL) for seed in (1, 2))
    parts = tuple(sorted((*first.parts, *second.parts)))
    write_state(tmp_path / "s", State(MODEL, parts, first.histograms))
    with pytest.raises(CalibrationError, match="merged from 2 shards"):
        observe_tensors(
            run,
            memory_dataset(samples(2, 1)),
            TENSORS,
            checkpoint=Checkpoint(tmp_path / "s", MODEL),
        )


VICTIM = """
import sys, time
from pathlib import Path
import numpy as np
from calibration.calibrate import calibrate
from calibration.dataset import memory_dataset

rng = np.random.default_rng(12)
data = [{"x": rng.normal(size=(1, 30_000)).astype(np.float32) * (1 + i)} for i in range(200)]

def run(sample):
    time.sleep(0.03)
    return {"x": sample["x"], "y": np.abs(sample["x"])}

calibrate(run, memory_dataset(data), ["x", "y"], model_sha256="c" * 64, resume=Path(sys.argv[1]))
"""


def test_a_process_killed_in_the_middle_goes_on_to_the_same_bits(tmp_path):
    path = tmp_path / "state"
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, str(path)])
    end = time.monotonic() + 20
    while time.monotonic() < end and not (path.exists() and read_state(path).samples >= 16):
        time.sleep(0.002)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    stopped = read_state(path).samples
    assert 16 <= stopped < 200
    assert stopped % 8 == 0

    rng = np.random.default_rng(12)
    data = [{"x": rng.normal(size=(1, 30_000)).astype(np.float32) * (1 + i)} for i in range(200)]
    ran = []

    def again(sample):
        ran.append(1)
        return {"x": sample["x"], "y": np.abs(sample["x"])}

    resumed = calibrate(again, memory_dataset(data), ["x", "y"], model_sha256=MODEL, resume=path)
    assert len(ran) == 200 - stopped
    whole = calibrate(again, memory_dataset(data), ["x", "y"], model_sha256=MODEL)
    assert resumed == whole
    direct = observe_tensors(again, memory_dataset(data), ["x", "y"])
    assert all_bits(read_state(path).histograms) == all_bits(direct.histograms)


# Hostile files.


def _sealed(body):
    return MAGIC + hashlib.sha256(body).digest() + body


def _with_body(change):
    """A file whose hash is right and whose content is changed by `change`."""
    body = encode_state(observed(samples(2, 1), ["x", "hidden"]).state(MODEL))[40:]
    content = msgspec.msgpack.decode(body)
    change(content)
    return _sealed(msgspec.msgpack.encode(content))


def test_any_damage_is_found():
    data = encode_state(observed(samples(2, 1)).state(MODEL))
    rng = np.random.default_rng()
    for at in [0, 7, 8, 39, 40, len(data) - 1, *rng.integers(0, len(data), 50).tolist()]:
        damaged = bytearray(data)
        damaged[at] ^= 1 << rng.integers(8)
        with pytest.raises(CalibrationError, match=r"^f: |^f is (damaged|no calibration state)"):
            decode_state(bytes(damaged), "f")
        with pytest.raises(CalibrationError, match=r"damaged|no calibration state"):
            decode_state(data[:at], "f")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format=2), "format 2, but this version reads format 1"),
        (lambda c: c.update(more=1), "unknown field"),
        (lambda c: c.update(model_sha256="x"), "not a calibration state"),
        (lambda c: c.update(parts=[]), "not a calibration state"),
        (lambda c: c.update(parts=c["parts"] * 2), "not in order or not different"),
        (lambda c: c["parts"][0].update(samples=0), "not a calibration state"),
        (lambda c: c.update(tensors=c["tensors"][::-1]), "not in order or not different"),
        (lambda c: c.update(tensors=c["tensors"] * 2), "not in order or not different"),
        (lambda c: c["tensors"][0].update(size=3), "not a calibration state"),
        (lambda c: c["tensors"][0].update(first=ALL_BINS - 1), "too many bins"),
        (lambda c: c["tensors"][0].update(first=-1), "not a calibration state"),
        (lambda c: c["tensors"][0].update(counts=b"\1" * 3, size=2), "not a calibration state"),
        (lambda c: c["tensors"][0].update(counts=b"\xff" * 8 * 4, size=8), "more than 2.62"),
        (lambda c: c["tensors"][0].update(minimum=math.nan), "ranges from nan"),
        (lambda c: c["tensors"][0].update(maximum=math.inf), "ranges from"),
        (lambda c: c["tensors"][0].update(minimum=1e6), "ranges from"),
        (lambda c: c["tensors"][0].update(maximum=1e6), "has exponent"),
        (lambda c: c["tensors"][0].update(exponent=30), "has exponent 30"),
        (lambda c: c["tensors"][0].update(exponent=2000), "not a calibration state"),
        (lambda c: c["tensors"][0].update(counts=b""), "has a range but no element"),
        (lambda c: c["tensors"][0].update(first=1), "beside its largest number"),
        (lambda c: c["tensors"][0].update(maximum="1"), "not a calibration state"),
    ],
)
def test_a_file_that_no_data_can_have_made_is_refused(change, message):
    with pytest.raises(CalibrationError, match=rf"^f.*{message}"):
        decode_state(_with_body(change), "f")


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_anything_with_a_right_hash_is_a_state_or_a_calibration_error(body):
    with pytest.raises(CalibrationError):
        decode_state(_sealed(body), "f")


def test_deep_nesting_is_a_calibration_error():
    with pytest.raises(CalibrationError):
        decode_state(_sealed(b"\x81\xa1a" * 100_000), "f")


def test_paths_that_cannot_be_read_or_written_are_named(tmp_path):
    with pytest.raises(CalibrationError, match=r"none: cannot read the calibration state"):
        read_state(tmp_path / "none")
    with pytest.raises(CalibrationError, match="cannot write the calibration state"):
        write_state(tmp_path / "none" / "s", observed(samples(1, 1)).state(MODEL))
