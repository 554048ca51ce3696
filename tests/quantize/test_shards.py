"""Calibration in shards: bit for bit the result of one process, whoever dies or is late."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from model_fixtures import small_convnet
from PIL import Image
from video_fixtures import write_video

from calibration.arrays import Sample
from calibration.errors import CalibrationError
from calibration.runs import Arrays
from calibration.table import encode_table
from device.start.process_tree import ProcessRow, descendants, process_rows
from toolkit.cache import read_entry, write_entry
from toolkit.cli.main import tandem as command_line
from toolkit.engine.measure import CalibrateRequest, measure_model, measure_shard
from toolkit.errors import WorkersError
from toolkit.quantize import observe
from toolkit.quantize.observe import SharedRunner
from toolkit.quantize.ranges import shards
from toolkit.quantize.ranges.measure import RangeOptions, Ranges
from toolkit.quantize.ranges.report_text import ranges_text
from toolkit.workers import RefusedError, Workers, _answer, open_workers, versions

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


@pytest.mark.parametrize(
    ("limit", "expected"), [(0, observe.sample_threads()), (1, 1), (9, observe.sample_threads())]
)
def test_a_task_runs_no_more_samples_at_a_time_than_it_has_threads(
    model: Path, arrays: Path, monkeypatch: pytest.MonkeyPatch, limit: int, expected: int
) -> None:
    counts = []

    def observe_run(*arguments: Any, **options: Any) -> Any:
        counts.append(options.get("threads"))
        return observe.observe_run(*arguments, **options)

    monkeypatch.setattr(shards, "observe_run", observe_run)
    with Workers(lambda: ThreadPoolExecutor(1), threads=limit) as workers:
        measured(model, arrays, RangeOptions("minmax", workers=workers))
    head, *of_shards = counts
    assert head is None  # of the command itself
    assert set(of_shards) == {expected}


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
            processes = getattr(workers._executor, "_processes", None)
            if processes:
                time.sleep(0.3)
                os.kill(next(iter(processes)), signal.SIGKILL)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def test_dead_channels_are_found_across_shards(
    model: Path, arrays: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = onnx.load(model)
    weight, bias = (
        next(row for row in graph.graph.initializer if row.name == name) for name in ("w0", "b0")
    )
    taps = onnx.numpy_helper.to_array(weight).copy()
    taps[2, 0] = 0.1  # so that the outlier of 1000 gives 100
    weight.CopyFrom(onnx.numpy_helper.from_array(taps, "w0"))
    values = onnx.numpy_helper.to_array(bias).copy()
    values[:3] = (-1e9, -1e9, -60.0)  # the third lives in the shard with the outlier alone
    bias.CopyFrom(onnx.numpy_helper.from_array(values, "b0"))
    onnx.save(graph, model)
    plain = measured(model, arrays)
    assert any(row.dead == 2 for row in plain.dead_channels.values()), plain.dead_channels
    with threads() as workers:
        assert_same(measured(model, arrays, replace(PLAIN, workers=workers)), plain)


class Wrapped(Executor):
    """Threads whose tasks go through `wrap` first."""

    def __init__(self, wrap: Callable[[int, Callable[[], bytes]], bytes]) -> None:
        self._pool, self._wrap, self.count = ThreadPoolExecutor(3), wrap, 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._pool.submit(self._wrap, self.count, lambda: fn(*args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


def test_lost_tasks_are_run_again(model: Path, arrays: Path) -> None:
    def lose(number: int, run: Callable[[], bytes]) -> bytes:
        if number in (1, 2, 6):
            raise ConnectionError("the worker is gone")
        return run()

    plain = measured(model, arrays)
    with Workers(lambda: Wrapped(lose)) as workers:
        assert_same(measured(model, arrays, replace(PLAIN, workers=workers)), plain)


def test_a_slow_task_is_given_to_another_and_counts_once(
    model: Path, arrays: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = threading.Event()

    def delay(number: int, run: Callable[[], bytes]) -> bytes:
        if number == 2:
            late.wait(60)
        return run()

    monkeypatch.setattr("toolkit.workers.MIN_LATE_S", 0.2)
    plain = measured(model, arrays)
    executor = Wrapped(delay)
    with Workers(lambda: executor) as workers:
        actual = measured(model, arrays, replace(PLAIN, workers=workers))
        late.set()
    assert_same(actual, plain)
    assert executor.count > 6


def test_a_worker_that_computes_other_bits_is_refused_by_name(
    model: Path, arrays: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.workers.REFUSED_S", 0.0)

    class Runner(SharedRunner):
        def __call__(self, feeds: Sample) -> Arrays:
            return {name: array * 1.5 for name, array in super().__call__(feeds).items()}

    monkeypatch.setattr(shards, "SharedRunner", Runner)
    with (
        threads() as workers,
        pytest.raises(WorkersError, match=r"process \d+ computes other bits"),
    ):
        measured(model, arrays, replace(PLAIN, workers=workers))


def test_a_worker_without_memory_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.workers.REFUSED_S", 0.0)
    answer = _answer(allocate, versions(()), ())
    assert f"process {os.getpid()}".encode() in answer
    assert b"has too little memory" in answer


def test_a_worker_with_less_free_memory_than_a_model_takes_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolkit.workers.REFUSED_S", 0.0)
    monkeypatch.setattr("toolkit.workers.available_bytes", lambda: 1 << 30)
    with Workers(lambda: ThreadPoolExecutor(1)) as workers:
        assert dict(workers.run(bytes, {1: ()}, model_bytes=200 << 20)) == {1: b""}
        with pytest.raises(WorkersError) as raised:
            dict(workers.run(bytes, {1: ()}, model_bytes=300 << 20))
    reason = f"process {os.getpid()} has 1024 MiB of memory free, and a task needs 1156 MiB"
    assert reason in str(raised.value)


def allocate() -> bytes:
    return bytes(1 << 60)


def test_finished_shards_are_taken_from_the_cache_and_damaged_ones_made_again(
    model: Path, arrays: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    def note(number: int, run: Callable[[], bytes]) -> bytes:
        ran.append(number)
        return run()

    with Workers(lambda: Wrapped(note)) as workers:
        options = replace(PLAIN, workers=workers)
        plain = measured(model, arrays, options)
        count = len(ran)
        assert_same(measured(model, arrays, options), plain)
        assert len(ran) == count > 3
        damaged = next((tmp_path / "cache" / "shards").glob("*/*"))
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
        assert_same(measured(model, arrays, options), plain)
        assert len(ran) == count + 1
    assert "is damaged and is made again" in caplog.text


def test_workers_that_live_on_see_files_that_were_added(model: Path, arrays: Path) -> None:
    with threads(2) as workers:
        options = replace(PLAIN, workers=workers)
        moved = (arrays / "5.npy").rename(arrays.parent / "5.npy")
        measured(model, arrays, options)
        moved.rename(arrays / "5.npy")
        assert_same(measured(model, arrays, options), measured(model, arrays))


def test_a_worker_with_other_files_is_refused(model: Path, arrays: Path) -> None:
    texts: list[str] = []

    class Spy(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            texts.append(args[2][0])
            return super().submit(fn, *args, **kwargs)

    with Workers(lambda: Spy(1)) as workers:
        measured(model, arrays, replace(PLAIN, workers=workers))
    with pytest.raises(RefusedError, match="other files for samples 20 to 30"):
        shards.observe_shard(texts[0], "0" * 64, 20, 30)


def test_a_file_that_changes_while_its_shard_runs_is_named(
    model: Path, arrays: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its samples and its hash were read before."""
    tasks: list[tuple[Any, ...]] = []

    class Spy(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            tasks.append(args[2])
            return super().submit(fn, *args, **kwargs)

    with Workers(lambda: Spy(1)) as workers:
        measured(model, arrays, replace(PLAIN, workers=workers))
    last = max(tasks, key=lambda task: task[3])
    shards.observe_shard(*last)  # keeps the hash of the file
    monkeypatch.setattr(shards, "observe_run", changing(arrays / "5.npy"))
    with pytest.raises(RefusedError, match=r"read 5\.npy while it was changed"):
        shards.observe_shard(*last)
    monkeypatch.setattr(shards, "observe_run", observe.observe_run)
    with pytest.raises(RefusedError, match="other files"):  # the hash is that of the file now
        shards.observe_shard(*last)


def double(path: Path) -> None:
    np.save(path, np.load(path) * 2.0)


def changing(path: Path, change: Callable[[Path], object] = double) -> Callable[..., Any]:
    """An `observe_run` after which a file has other samples."""

    def observe_run(*arguments: Any, **options: Any) -> Any:
        observation = observe.observe_run(*arguments, **options)
        change(path)
        return observation

    return observe_run


def test_a_file_that_changes_while_workers_calibrate_is_named(
    model: Path, arrays: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.workers.REFUSED_S", 0.0)
    monkeypatch.setattr(shards, "observe_run", changing(arrays / "5.npy"))
    with threads(1) as workers, pytest.raises(CalibrationError, match=r"5\.npy was changed"):
        measured(model, arrays, replace(PLAIN, workers=workers))


def test_a_file_that_changes_while_a_shard_of_this_process_runs_is_named(
    model: Path, arrays: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "observe_run", changing(arrays / "5.npy"))
    request = CalibrateRequest(model, arrays, options=PLAIN, accept_loss=True)
    with pytest.raises(CalibrationError, match=r"5\.npy was changed while samples \d+ to 54 ran"):
        measure_shard(request, 1, 2, lambda step, share: None)


@pytest.mark.parametrize("replaced", [True, False])
def test_a_video_that_changes_while_its_shard_runs_is_named(
    model: Path,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    replaced: bool,  # by a file of the same size, or written to
) -> None:
    frames = list(rng.integers(0, 255, (50, 32, 32, 3), dtype=np.uint8))
    video = write_video(tmp_path / "v.mp4", frames)

    def replace_it(path: Path) -> None:
        copy = path.with_suffix(".new")
        copy.write_bytes(path.read_bytes())
        copy.replace(path)

    def append_to_it(path: Path) -> None:
        with path.open("ab") as file:
            file.write(b"more")

    change = replace_it if replaced else append_to_it
    monkeypatch.setattr("toolkit.workers.REFUSED_S", 0.0)
    monkeypatch.setattr(shards, "observe_run", changing(video, change))
    with threads(1) as workers, pytest.raises(CalibrationError, match=r"v\.mp4 was changed"):
        measured(model, video, replace(PLAIN, workers=workers))


def test_an_entry_that_is_no_such_shard_is_made_again(
    model: Path, arrays: Path, tmp_path: Path
) -> None:
    with threads(2) as workers:
        options = replace(PLAIN, workers=workers)
        plain = measured(model, arrays, options)
        first, second, third, *_ = sorted((tmp_path / "cache" / "shards").glob("*/*"))
        write_entry("shards", first.name, b"no shard")
        write_entry("shards", second.name, read_entry("shards", third.name) or b"")
        assert_same(measured(model, arrays, options), plain)


def test_no_task_names_a_secret(model: Path, arrays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_PASSWORD", "s3cret-value")
    texts: list[str] = []
    real = shards.observe_shard

    class Spy(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            texts.append(repr(args) + pickle.dumps(args).decode("latin1"))
            return super().submit(fn, *args, **kwargs)

    with Workers(lambda: Spy(2)) as workers:
        measured(model, arrays, replace(PLAIN, workers=workers))
    assert real is shards.observe_shard
    assert texts
    assert not any("s3cret" in text or len(text) > 20_000 for text in texts)


def observed_shards(model: Path, data: Path, folder: Path, count: int) -> list[Path]:
    request = CalibrateRequest(model, data, options=PLAIN)
    paths = []
    for index in range(count):
        paths.append(folder / f"{index}.state")
        paths[-1].write_bytes(measure_shard(request, index, count, lambda step, share: None))
    return paths


def test_states_give_the_result_of_one_process(model: Path, pictures: Path, tmp_path: Path) -> None:
    plain = measured(model, pictures)
    paths = observed_shards(model, pictures, tmp_path, 3)
    for order in (paths, [*paths[::-1], paths[0]]):  # one of them twice
        assert_same(measured(model, pictures, replace(PLAIN, states=tuple(order))), plain)


def test_states_that_lack_a_shard_or_are_of_something_else_are_refused(
    model: Path, arrays: Path, tmp_path: Path
) -> None:
    paths = observed_shards(model, arrays, tmp_path, 3)
    with pytest.raises(CalibrationError, match=r"2 states lack samples \d+ to \d+"):
        measured(model, arrays, replace(PLAIN, states=(paths[0], paths[2])))
    block = np.load(arrays / "5.npy")
    np.save(arrays / "5.npy", block + 1)
    with pytest.raises(CalibrationError, match=r"2\.state is of another version, model, option"):
        measured(model, arrays, replace(PLAIN, states=tuple(paths)))
    paths[1].write_bytes(paths[1].read_bytes()[:-9])
    with pytest.raises(CalibrationError, match=r"1\.state is damaged"):
        measured(model, arrays, replace(PLAIN, states=(paths[1],)))


def test_states_of_a_machine_that_computes_other_bits_are_refused(
    model: Path, arrays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SharedRunner.__call__
    with monkeypatch.context() as patch:
        patch.setattr(
            SharedRunner,
            "__call__",
            lambda self, feeds: {
                name: np.nextafter(array, np.float32(9))
                for name, array in real(self, feeds).items()
            },
        )
        paths = observed_shards(model, arrays, tmp_path, 1)
    with pytest.raises(CalibrationError, match="a machine that computes other bits"):
        measured(model, arrays, replace(PLAIN, states=tuple(paths)))


def test_a_build_on_workers_is_that_of_one_process(
    model: Path, arrays: Path, tmp_path: Path
) -> None:
    command = ["build", str(model), "--data", str(arrays), "--method", "minmax", "--accept-loss"]
    for name, words in (("plain", []), ("spread", ["--workers", "2"])):
        engine = ["-o", str(tmp_path / f"{name}.engine")]
        done = CliRunner().invoke(command_line, [*command, *words, *engine])
        assert done.exit_code == 0, done.output
    plain, spread = (tmp_path / f"{name}.engine" for name in ("plain", "spread"))
    assert plain.read_bytes() == spread.read_bytes()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_workers(model: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    np.save(tmp_path / "d.npy", rng.normal(size=(6000, 3, 32, 32)).astype(np.float32))
    words = ["calibrate", str(model), "--data", str(tmp_path / "d.npy"), "--method", "minmax"]
    command = [sys.executable, "-m", "toolkit.cli", *words, "--workers", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        processes = list[ProcessRow]()
        while len(processes) < 3 and process.poll() is None:  # two workers, and who tracks them
            processes = descendants(process.pid)
            time.sleep(0.1)
        assert len(processes) >= 3
        process.send_signal(signal.SIGINT)
        _, output = process.communicate(timeout=60)
    assert "Traceback" not in output
    deadline = time.monotonic() + 20
    while alive(processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(processes)


def alive(processes: list[ProcessRow]) -> set[int]:
    return {row.pid for row in processes} & process_rows().keys()


def test_the_command_line_makes_shards_and_goes_on_from_them(
    model: Path, arrays: Path, tmp_path: Path
) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(command_line, ["calibrate", str(model), *words])
        assert done.exit_code == 0, done.output
        return done.output

    common = ("--data", str(arrays), "--method", "minmax", "--accept-loss")
    run(*common, "-o", str(tmp_path / "plain.json"))
    states = [str(tmp_path / f"{index}.state") for index in (1, 2)]
    for index, state in enumerate(states, 1):
        assert json.loads(run(*common, "--shard", f"{index}/2", "-o", state, "--json")) == {
            "state": state
        }
    run(*states, *common, "-o", str(tmp_path / "merged.json"))
    assert (tmp_path / "merged.json").read_bytes() == (tmp_path / "plain.json").read_bytes()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--shard", "3/2"), "not I/N"),
        (("--shard", "1/2", "--workers", "2"), "--shard and --workers both cut"),
        (("--workers", "many"), "names no workers"),
        (("--workers", "2", "--resume", "state"), "leave it out"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    model: Path, arrays: Path, words: tuple[str, ...], problem: str
) -> None:
    command = ["calibrate", str(model), "--data", str(arrays), *words]
    done = CliRunner().invoke(command_line, command)
    assert done.exit_code != 0
    assert problem in " ".join([done.output, str(done.exception)])
