"""Tasks on workers that refuse, stop or fail, each on an executor of threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from device.errors import TandemError
from toolkit.errors import WorkersError
from toolkit.workers import RefusedError, Workers, open_workers

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
        first, second = (workers._submit(count_run, ()) for _ in range(2))
        assert first.result(30) == second.result(30)
    assert len(RUNS) == 2


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
