"""Tasks on workers that refuse, stop or fail, each on an executor of threads."""

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from device.errors import TandemError
from toolkit.cache import BUILDING, CALIBRATING
from toolkit.errors import WorkersError
from toolkit.quantize.ranges.shards import observe_shard
from toolkit.workers import (
    RefusedError,
    Workers,
    _Answer,
    _answer,
    _Dask,
    _Function,
    _Progress,
    open_workers,
    tasks_here,
    versions,
)

RUNS: list[int] = []


def count_run() -> bytes:
    RUNS.append(1)
    return b"done"


def test_dask_runs_a_task_that_is_given_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")
    RUNS.clear()
    with (
        distributed.LocalCluster(
            1, processes=False, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        open_workers(cluster.scheduler_address) as workers,
    ):
        first, second = (workers._submit(count_run, (), versions(())) for _ in range(2))
        assert first.result(30) == second.result(30)
    assert len(RUNS) == 2


def test_tasks_of_all_workers_of_a_host_share_its_cores() -> None:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2,
            processes=False,
            threads_per_worker=2,
            dashboard_address=None,
            protocol="tcp://",
        ) as cluster,
        open_workers(cluster.scheduler_address) as workers,
    ):
        cluster.wait_for_workers(2, timeout=60)
        by_host = workers.tasks_by_host()
        assert by_host == {"tcp://127.0.0.1": 4}
        assert dict(workers.run(say_tasks_here, {1: (by_host,)})) == {1: b"\4"}
    assert tasks_here(by_host) == 1  # in no worker of Dask
    with threads(2) as others:
        assert others.tasks_by_host() == {}


def test_workers_of_dask_import_the_module_of_their_tasks_before_these_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("distributed")
    (tmp_path / "module_of_tasks.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with distributed.LocalCluster(
        1, processes=False, threads_per_worker=1, dashboard_address=None
    ) as cluster:
        for module in ("module_of_tasks", "no_such_module"):
            with open_workers(cluster.scheduler_address) as workers:
                workers.prepare(module)
                assert dict(workers.run(count_run, {1: ()})) == {1: b"done"}
                assert [future.result(30) for future in workers._imports] == [None]
    assert sys.modules.pop("module_of_tasks").__file__ == str(tmp_path / "module_of_tasks.py")


def test_a_scheduler_that_cannot_be_reached_is_said_when_tasks_come() -> None:
    def start() -> Executor:
        raise WorkersError("the scheduler cannot be reached")

    with Workers(start) as unused:
        unused.prepare("os")
    with Workers(start) as workers:
        workers.prepare("os")
        with pytest.raises(WorkersError, match="cannot be reached"):
            dict(workers.run(count_run, {1: ()}))


def say_tasks_here(by_host: dict[str, int]) -> bytes:
    return bytes([tasks_here(by_host)])


def test_what_came_before_the_scheduler_of_dask_went_away_counts() -> None:
    client = SimpleNamespace(status="running", nthreads=dict, close=lambda: None)

    def result_and_end(*arguments: Any) -> bytes:
        client.status = "closed"
        return _answer(*arguments)

    class Last(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            return super().submit(result_and_end, *args, **kwargs)

    client.get_executor = lambda pure: Last(1)
    with Workers(lambda: _Dask(client, "tcp://gone:1")) as workers:
        assert dict(workers.run(count_run, {1: ()})) == {1: b"done"}
        with pytest.raises(WorkersError, match="tcp://gone:1 is gone"):
            dict(workers.run(count_run, {1: ()}))


def test_a_function_that_no_other_process_finds_by_name_is_refused_before_one_starts() -> None:
    def local() -> bytes:
        return b""

    unnamed: list[tuple[Callable[..., bytes], str]] = [
        (lambda: b"", r"\.<lambda> cannot run on workers"),
        (local, r"test_workers\.test_a_func.*\.local cannot run"),
        (partial(local), r"a partial of .*\.local cannot run"),
        (partial(count_run), r"a partial of .*test_workers\.count_run cannot run"),
        ([1].copy, "copy cannot run"),  # type: ignore[list-item]
    ]
    with open_workers("1") as workers:
        for function, message in unnamed:
            with pytest.raises(WorkersError, match=message):
                next(workers.run(function, {1: ()}))
            assert not workers._executor._processes  # type: ignore[union-attr]


def threads(count: int) -> Workers:
    return Workers(lambda: ThreadPoolExecutor(count))


def test_one_who_refuses_at_once_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.workers.REFUSED_S", 0.02)
    good = list[int]()
    first = threading.Lock()

    def work(number: int) -> bytes:
        with first:
            if not good:
                good.append(threading.get_ident())
        if good[0] != threading.get_ident():
            raise RefusedError("has no such file")
        time.sleep(0.05)  # the other refuses several meanwhile
        return bytes([number])

    with threads(2) as workers:
        results = dict(workers.run(work, {number: (number,) for number in range(12)}))
    assert results == {number: bytes([number]) for number in range(12)}


class Favouring(ThreadPoolExecutor):
    """A double of a scheduler of two workers that gives a task to the first one if it is idle."""

    def __init__(self) -> None:
        super().__init__(1, "first")
        self._second = ThreadPoolExecutor(1, "second")
        self._latest: Future[Any] | None = None

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._latest is not None and not self._latest.done():
            return self._second.submit(fn, *args, **kwargs)
        self._latest = super().submit(fn, *args, **kwargs)
        return self._latest

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._second.shutdown(wait, cancel_futures=cancel_futures)
        super().shutdown(wait, cancel_futures=cancel_futures)


def test_a_refused_task_is_given_to_another_though_the_refusing_worker_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolkit.workers.REFUSED_S", 0.2)

    def work() -> bytes:
        if threading.current_thread().name.startswith("first"):
            raise RefusedError("has no such file")
        return b"done"

    with Workers(Favouring) as workers:
        assert dict(workers.run(work, {1: ()}, alike=True)) == {1: b"done"}


class Foreign(ThreadPoolExecutor):
    """A double of a worker with other versions: the expected ones are changed on the way to it."""

    def __init__(self, **others: str) -> None:
        super().__init__(1)
        self._others = others

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        function, expected, *rest = args
        changed = {name: self._others.get(name, known) for name, known in expected.items()}
        return super().submit(fn, function, changed, *rest, **kwargs)


@pytest.mark.parametrize(
    ("name", "worker_version"),
    [("Tandem", "0.0.1+feed"), ("Python", "3.9"), ("numpy", "1.0"), ("onnx", "")],
)
def test_a_worker_of_another_version_is_refused_by_name_before_it_computes(
    name: str, worker_version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.workers.REFUSED_S", 0.0)
    RUNS.clear()
    building_version = re.escape(versions(BUILDING)[name])
    refusal = (
        rf"worker .*process {os.getpid()} runs {name} {building_version}, "
        rf"not {re.escape(worker_version or '(none)')}"
    )
    foreign = Workers(lambda: Foreign(**{name: worker_version}))
    with foreign as workers, pytest.raises(WorkersError, match=refusal):
        list(workers.run(count_run, {1: ()}))
    assert not RUNS


def test_a_worker_that_lacks_a_package_can_still_say_its_version() -> None:
    """Reading a task imports nothing of what it computes with."""
    expected = versions(()) | {"Python": "3.9"}
    task = pickle.dumps((_answer, (_Function(observe_shard), expected, ())))
    code = (
        "import sys, pickle; sys.modules['numpy'] = None; import toolkit.workers as workers;"
        " workers.REFUSED_S = 0; function, arguments = pickle.load(sys.stdin.buffer);"
        " sys.stdout.buffer.write(function(*arguments))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=task, capture_output=True, check=True)
    answer = msgspec.msgpack.decode(done.stdout, type=_Answer)
    assert answer.refused.startswith(f"runs Python {versions(())['Python']}, not 3.9")


def test_a_package_that_a_task_does_not_use_may_differ() -> None:
    with Workers(lambda: Foreign(triton="0.1")) as workers:
        run = workers.run(count_run, {1: ()}, packages=CALIBRATING)
        assert dict(run) == {1: b"done"}


def test_work_that_all_refuse_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.workers.REFUSED_S", 0.0)

    def refuse() -> bytes:
        raise RefusedError("has no such file")

    with threads(2) as workers, pytest.raises(WorkersError, match="has no such file"):
        list(workers.run(refuse, dict.fromkeys(range(12), ())))


def test_an_idle_worker_takes_over_from_most_that_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.workers.MIN_LATE_S", 0.1)
    stopped, over = list[int](), threading.Event()

    def work(number: int) -> bytes:
        if number and number not in stopped:
            stopped.append(number)
            over.wait(5)
        return b"done"

    begin = time.monotonic()
    with threads(3) as workers:
        assert len(dict(workers.run(work, {n: (n,) for n in range(3)}, alike=True))) == 3
        took = time.monotonic() - begin
        over.set()
    assert took < 4


def test_a_worker_without_work_repeats_the_last_task_of_a_slow_one_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.workers.MIN_LATE_S", 60.0)
    tasks = {number: (str(tmp_path), number) for number in range(4)}
    begin = time.monotonic()
    with open_workers("2") as workers:
        assert dict(workers.run(wait_in_the_first_run_of_the_last, tasks, alike=True)) == {
            number: bytes([number]) for number in tasks
        }
        took = time.monotonic() - begin
        (tmp_path / "over").touch()
    assert took < 30


def test_nobody_waits_for_a_copy_whose_result_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.workers.MIN_LATE_S", 60.0)
    tasks = {number: (str(tmp_path), number) for number in range(4)}
    begin = time.monotonic()
    with open_workers("2") as workers:
        assert len(dict(workers.run(wait_in_a_copy_of_the_last, tasks, alike=True))) == 4
    assert (tmp_path / "copy").exists()
    assert time.monotonic() - begin < 30


def wait_in_a_copy_of_the_last(folder: str, number: int) -> bytes:
    """The first run of the last task ends once another one has begun, which takes long."""
    if number != 3:
        return wait_in_the_first_run_of_the_last(folder, number)
    runs, copy = Path(folder, "3"), Path(folder, "copy")
    if runs.exists():
        copy.touch()
        time.sleep(40)
    runs.touch()
    until = time.monotonic() + 20
    while not copy.exists() and time.monotonic() < until:
        time.sleep(0.02)
    return bytes([number])


def wait_in_the_first_run_of_the_last(folder: str, number: int) -> bytes:
    """The first two tasks wait for each other, so that both workers give a result."""
    runs = Path(folder, str(number))
    is_first = not runs.exists()
    runs.touch()
    wait_for = {0: Path(folder, "1"), 1: Path(folder, "0"), 3: Path(folder, "over")}.get(number)
    until = time.monotonic() + 40
    while is_first and wait_for and not wait_for.exists() and time.monotonic() < until:
        time.sleep(0.02)
    return bytes([number])


def test_a_late_copy_that_fails_does_not_end_a_run_with_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolkit.workers.MIN_LATE_S", 0.1)
    runs, copy_ended = list[int](), threading.Event()

    def work(number: int) -> bytes:
        if number:  # ends last, so that the failure is read before
            copy_ended.wait(5)
            time.sleep(0.5)
            return b"done"
        runs.append(number)
        if len(runs) == 1:
            time.sleep(0.3)
            copy_ended.set()
            raise TandemError("the disk is full")
        return b"done"

    with threads(8) as workers:
        assert len(dict(workers.run(work, {0: (0,), 1: (1,)}, alike=True))) == 2


def test_a_copy_that_fails_does_not_end_a_run_while_another_may_succeed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolkit.workers.MIN_LATE_S", 0.5)
    runs, has_failed = list[int](), threading.Event()

    def work() -> bytes:
        runs.append(1)
        if len(runs) == 1:  # slow: a copy of it is given out
            has_failed.wait(5)
            time.sleep(0.3)
            return b"done"
        has_failed.set()
        raise TandemError("the disk is full")

    with threads(2) as workers:
        assert dict(workers.run(work, {1: ()}, alike=True)) == {1: b"done"}
    assert has_failed.is_set()


def test_a_task_whose_copies_fail_ends_a_run_though_the_first_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolkit.workers.MIN_LATE_S", 0.1)
    runs, over = list[int](), threading.Event()

    def work() -> bytes:
        runs.append(1)
        if len(runs) == 1:
            over.wait(20)
        raise TandemError("the disk is full")

    with threads(2) as workers:
        with pytest.raises(WorkersError, match="the disk is full"):
            dict(workers.run(work, {1: ()}, alike=True))
        assert len(runs) == 4
        over.set()


def test_only_workers_that_are_there_count_as_idle() -> None:
    progress = _Progress(dict.fromkeys(range(3), ()))
    for number, place in enumerate(("gone", "there")):
        progress.take_result(number, place)
    progress.running[Future()] = 2
    assert progress.copies_for_idle(lambda: None) == [2]  # the executor does not say
    assert progress.copies_for_idle(lambda: {"there", "new"}) == []
    assert progress.copies_for_idle(lambda: {"there", "gone"}) == [2]  # it has come back


def test_an_executor_says_which_processes_it_has() -> None:
    with open_workers("1") as workers:
        dict(workers.run(bytes, {1: ()}))
        (first,) = workers._places() or ()
        os.kill(int(first), signal.SIGKILL)
        dict(workers.run(bytes, {1: ()}))
        (second,) = workers._places() or ()
        assert second != first


def test_a_result_that_is_of_no_such_task_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(key: int, result: bytes) -> str:
        return "" if result == bytes([key]) else "gives another result"

    with (
        threads(1) as workers,
        pytest.raises(WorkersError, match=r"process \d+ gives another"),
    ):
        list(workers.run(bytes, {1: (1,)}, check=check))
