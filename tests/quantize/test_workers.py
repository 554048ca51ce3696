"""Tasks on workers that refuse, stop or fail, each on an executor of threads."""

import pytest

from toolkit.workers import open_workers

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
