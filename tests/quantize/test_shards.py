"""Calibration in shards: bit for bit the result of one process, whoever dies and whoever is late."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from model_fixtures import small_convnet
from PIL import Image

from calibration.errors import CalibrationError
from calibration.state import encode_state
from calibration.table import encode_table
from toolkit.cli.main import tandem as command_line
from toolkit.engine.measure import CalibrateRequest, measure_model, measure_shard
from toolkit.errors import WorkersError
from toolkit.quantize.ranges import shards
from toolkit.quantize.ranges.measure import RangeOptions, Ranges
from toolkit.quantize.ranges.report_text import ranges_text
from toolkit.workers import Workers, _answer, open_workers

PLAIN = RangeOptions("minmax")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shards, "MIN_SAMPLES", 5)
    monkeypatch.setattr(shards, "WORK", 1e12)


@pytest.fixture
def model(tmp_path: Path, rng: np.random.Generator) -> Path:
    return small_convnet(tmp_path / "m.onnx", rng)


@pytest.fixture
def arrays(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Files of several samples each, one of them far outside the range of the others."""
    folder = tmp_path / "arrays"
    folder.mkdir()
    for number in range(6):
        block = rng.normal(size=(9, 3, 32, 32)).astype(np.float32) * (1.0 + number)
        block[number, 0, 0, number] = 10.0 ** (number - 2)
        np.save(folder / f"{number}.npy", block)
    return folder


@pytest.fixture
def pictures(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Pictures, of which one in the head and two in the shards cannot be read."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(50):
        path = folder / f"{number:02}.png"
        if number in (3, 30, 31):
            path.write_bytes(b"no picture")
        else:
            Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(path)
    return folder


def measured(model: Path, data: Path, options: RangeOptions = PLAIN) -> Ranges:
    request = CalibrateRequest(model, data, options=options, accept_loss=True)
    return measure_model(request, lambda step, share: None)[0]


def threads(count: int = 3) -> Workers:
    return Workers(lambda: ThreadPoolExecutor(count))


def assert_same(actual: Ranges, expected: Ranges) -> None:
    assert encode_table(actual.table) == encode_table(expected.table)
    assert (actual.samples, actual.requested) == (expected.samples, expected.requested)
    assert actual.skipped == expected.skipped
    assert (actual.dead, actual.constant) == (expected.dead, expected.constant)
    assert list(actual.dead_channels.items()) == list(expected.dead_channels.items())
    assert actual.channel_samples == expected.channel_samples
    assert ranges_text(actual) == ranges_text(expected)
    for name, histogram in expected.histograms.items():
        assert np.array_equal(actual.histograms[name].bins, histogram.bins)


@pytest.mark.parametrize("method", ["minmax", "entropy", "auto"])
def test_workers_give_the_result_of_one_process(model: Path, arrays: Path, method: str) -> None:
    plain = measured(model, arrays, RangeOptions(method))
    with threads() as workers:
        assert_same(measured(model, arrays, RangeOptions(method, workers=workers)), plain)


def test_unreadable_pictures_are_counted_as_in_one_process(model: Path, pictures: Path) -> None:
    plain = measured(model, pictures)
    assert [row.name for row in plain.skipped] == ["03.png", "30.png", "31.png"]
    with threads() as workers:
        assert_same(measured(model, pictures, RangeOptions("minmax", workers=workers)), plain)


def test_a_killed_process_loses_nothing(model: Path, arrays: Path) -> None:
    plain = measured(model, arrays)
    with open_workers("2") as workers:
        killed = kill_first_worker(workers)
        assert_same(measured(model, arrays, RangeOptions("minmax", workers=workers)), plain)
        killed.join()


def kill_first_worker(workers: Workers) -> threading.Thread:
    """Kill a process of an executor with SIGKILL as soon as there is one."""

    def kill() -> None:
        for _ in range(3000):
            processes = getattr(workers._executor, "_processes", None)  # noqa: SLF001
            if processes:
                time.sleep(0.3)
                os.kill(next(iter(processes)), signal.SIGKILL)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread
