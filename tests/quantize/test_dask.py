"""Calibration on the workers of a Dask scheduler, some of which die."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from model_fixtures import small_convnet
from process_lines import next_line
from python_versions import python_of

import configs
from toolkit.cli.main import tandem as command_line
from toolkit.errors import WorkersError
from toolkit.quantize.ranges import shards
from toolkit.workers import open_workers

WAIT_S = 120.0


@pytest.fixture(autouse=True)
def _distributed() -> None:
    """Not where it is collected: that takes each worker of pytest a quarter of a second."""
    pytest.importorskip("distributed")


@contextmanager
def dask_scheduler() -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--port", "0", "--no-show"]
    command += ["--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while (match := re.search(r"tcp://[\d.:]+", next_line(process, process.stderr))) is None:
            pass
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        drain.start()
        yield match[0], process
        process.terminate()


@pytest.fixture
def scheduler() -> Iterator[str]:
    with dask_scheduler() as (address, _process):
        yield address


def start_worker(address: str, python: str = sys.executable) -> "subprocess.Popen[bytes]":
    command = [python, "-m", "distributed.cli.dask_worker", address, "--no-nanny"]
    command += ["--nthreads", "1", "--no-dashboard"]
    env = {**os.environ, "PYTHONPATH": str(Path(configs.ROOT).parent)}
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, env=env)


@contextmanager
def started(address: str) -> Iterator["subprocess.Popen[bytes]"]:
    worker = start_worker(address)
    try:
        yield worker
    finally:
        worker.kill()
        worker.wait()


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


@pytest.mark.slow
def test_a_worker_of_another_python_is_refused_by_name_and_the_others_do_its_work(
    scheduler: str, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It has Tandem's sources and Dask, and no NumPy."""
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shards, "MIN_SAMPLES", 20)
    model = small_convnet(tmp_path / "m.onnx", rng)
    np.save(tmp_path / "data.npy", rng.normal(size=(200, 3, 32, 32)).astype(np.float32))
    python, minor = another_python(tmp_path / "other")
    workers = [start_worker(scheduler, python)]
    try:
        workers.append(start_worker(scheduler))
        words = ["calibrate", str(model), "--data", str(tmp_path / "data.npy"), "--accept-loss"]
        words += ["--method", "minmax"]
        for name, option in (("dask", ["--workers", scheduler]), ("plain", [])):
            out = ["-o", str(tmp_path / f"{name}.json")]
            done = CliRunner().invoke(command_line, [*words, *option, *out])
            assert done.exit_code == 0, done.output
        assert re.search(rf"worker tcp://.* runs Python {minor}, not 3\.\d+: both", caplog.text)
        assert (tmp_path / "dask.json").read_bytes() == (tmp_path / "plain.json").read_bytes()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def another_python(folder: Path) -> tuple[str, str]:
    """Make an environment of another Python for a worker of Dask; return its interpreter and its
    version, as 3.12."""
    this_minor = "{}.{}".format(*sys.version_info)
    others = {minor: python_of(minor) for minor in ("3.12", "3.10", "3.13") if minor != this_minor}
    present = [(minor, program) for minor, program in others.items() if program is not None]
    if not present:
        pytest.skip("this machine has no other Python")
    minor, program = present[0]
    subprocess.run([program, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    same = [f"{name}=={version(name)}" for name in ("dask", "distributed", "msgspec")]
    subprocess.run([python, "-m", "pip", "install", "-q", *same], check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    info = site / f"tandem_edge-{version('tandem-edge')}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Version: {version('tandem-edge')}\n")
    return python, minor


def test_a_scheduler_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.workers.CONNECT", "1s")
    with (
        open_workers("tcp://127.0.0.1:9") as workers,
        pytest.raises(WorkersError, match=":9 cannot"),
    ):
        list(workers.run(bytes, {1: ()}))


SLEEP = ["sleep", "0.3"]  # a task whose function each worker has: subprocess.check_output


def test_a_run_says_that_its_last_worker_is_gone_and_goes_on_when_one_comes(
    scheduler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("toolkit.workers.POLL_S", 0.2)
    monkeypatch.setattr("toolkit.workers.ALONE_S", 0.5)
    with started(scheduler) as first, open_workers(scheduler) as workers, ExitStack() as stack:
        # The last ones are long: a slow machine may not kill the worker after its last task.
        tasks = {number: (["sleep", seconds],) for number, seconds in enumerate(("0.3", "2", "2"))}
        results = workers.run(subprocess.check_output, tasks)
        next(results)
        caplog.clear()  # a worker that came late is said, too
        first.kill()

        def help_when_asked() -> None:
            until_s = time.monotonic() + WAIT_S
            while "shows no worker" not in caplog.text and time.monotonic() < until_s:
                time.sleep(0.1)
            stack.enter_context(started(scheduler))

        helper = threading.Thread(target=help_when_asked)
        helper.start()
        assert len(list(results)) == 2
        helper.join()
    sentence = (
        rf"scheduler {scheduler} shows no worker, and [12] tasks wait; the last that it had: tcp"
    )
    assert re.search(sentence, caplog.text)
    assert f"start workers (`dask worker {scheduler}`)" in caplog.text


def test_a_run_without_a_worker_ends_after_a_stated_time(
    scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.workers.POLL_S", 0.2)

    def run() -> None:
        with started(scheduler) as only, open_workers(scheduler) as workers:
            for _ in workers.run(subprocess.check_output, dict.fromkeys(range(4), (SLEEP,))):
                only.kill()
                monkeypatch.setattr("toolkit.workers.END_ALONE_S", 1.0)

    with pytest.raises(WorkersError, match=r"shows no worker, and [123] tasks wait.* came in 1 s"):
        run()


def test_a_scheduler_that_is_killed_ends_the_run_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolkit.workers.CONNECT", "3s")

    def run() -> None:
        with (
            dask_scheduler() as (address, process),
            started(address),
            open_workers(address) as workers,
        ):
            for _ in workers.run(subprocess.check_output, dict.fromkeys(range(9), (SLEEP,))):
                process.kill()

    with pytest.raises(WorkersError, match=r"the scheduler tcp://127.0.0.1:\d+ is gone: start it"):
        run()


def test_ctrl_c_ends_a_run_that_waits_for_a_worker(scheduler: str) -> None:
    code = (
        # A shell's background command has SIGINT ignored, and its children inherit that.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import subprocess, toolkit.workers as workers; workers.POLL_S = workers.ALONE_S = 0.2\n"
        f"with workers.open_workers({scheduler!r}) as those:\n"
        f"    list(those.run(subprocess.check_output, {{1: ({SLEEP},)}}))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        while "shows no worker, and 1 tasks wait:" not in next_line(run, run.stderr):
            pass
        run.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in run.communicate(timeout=WAIT_S / 4)[1]
        assert run.returncode in {1, 130, -signal.SIGINT}
