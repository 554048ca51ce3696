"""Calibration on the workers of a Dask scheduler, some of which die."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from model_fixtures import small_convnet
from process_lines import next_line

from toolkit.cli.main import tandem as command_line
from toolkit.errors import WorkersError
from toolkit.quantize.ranges import shards
from toolkit.workers import open_workers

WAIT_S = 120.0


@pytest.fixture(autouse=True)
def _distributed() -> None:
    """Not where it is collected: that takes each worker of pytest a quarter of a second."""
    pytest.importorskip("distributed")


@pytest.fixture
def scheduler() -> Iterator[str]:
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--port", "0", "--no-show"]
    command += ["--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while (match := re.search(r"tcp://[\d.:]+", next_line(process, process.stderr))) is None:
            pass
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        drain.start()
        yield match[0]
        process.terminate()


def start_worker(address: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--no-nanny"]
    command += ["--nthreads", "1", "--no-dashboard"]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def kill_after_a_shard(worker: "subprocess.Popen[bytes]", stored: Path) -> None:
    """Ends a worker once the first result is in, while most shards are still to do."""
    end_s = time.monotonic() + WAIT_S
    while not any(stored.glob("*/*")):
        assert time.monotonic() < end_s, "no shard was done"
        time.sleep(0.002)
    worker.kill()
    worker.wait()


def test_a_table_is_that_of_one_process_though_a_worker_is_killed(
    scheduler: str, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shards, "MIN_SAMPLES", 20)
    model = small_convnet(tmp_path / "m.onnx", rng)
    np.save(tmp_path / "data.npy", rng.normal(size=(400, 3, 32, 32)).astype(np.float32))
    workers = [start_worker(scheduler), start_worker(scheduler)]
    try:
        common = ["calibrate", str(model), "--data", str(tmp_path / "data.npy")]
        common += ["--method", "minmax", "--accept-loss"]
        stored = tmp_path / "cache" / "shards"
        killer = threading.Thread(target=kill_after_a_shard, args=(workers[0], stored), daemon=True)
        killer.start()
        for name, words in (("dask", ["--workers", scheduler]), ("plain", [])):
            out = ["-o", str(tmp_path / f"{name}.json")]
            done = CliRunner().invoke(command_line, [*common, *words, *out])
            assert done.exit_code == 0, done.output
        assert (tmp_path / "dask.json").read_bytes() == (tmp_path / "plain.json").read_bytes()
        killer.join(10)
        assert workers[0].poll() == -signal.SIGKILL
        assert len(list(stored.glob("*/*"))) > 10
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def test_a_scheduler_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.workers.CONNECT", "1s")
    with (
        open_workers("tcp://127.0.0.1:9") as workers,
        pytest.raises(WorkersError, match=":9 cannot"),
    ):
        list(workers.run(bytes, {1: ()}))
