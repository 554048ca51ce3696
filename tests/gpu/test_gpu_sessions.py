"""Sessions on a GPU: several at once, shared weights, tactics by measured times."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from gpu_graphs import Case, convolution, node

from device.engine.file import open_engine
from device.runtime.cuda import program
from device.runtime.executors import cuda
from device.runtime.session import Session, open_session
from device.runtime.timing_cache import add_timings, read_timings
from scripts.gpu_engine import build_on_gpu, relative_error
from toolkit.evaluate.bench.measure import BenchOptions, measure
from toolkit.gpu.codegen.triton_version import has_compiler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_compiler(), reason="Triton is not installed"),
]

THREADS = 4
RUNS = 50
FP16 = 1e-2


@pytest.fixture(autouse=True)
def _on_a_gpu(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Compile into a cache that the tests of one run share; nothing stays on the GPU."""
    if cuda.why_not() is not None:
        pytest.skip(str(cuda.why_not()))
    folder = tmp_path_factory.getbasetemp() / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    held = len(program._PROGRAMS)
    yield
    assert len(program._PROGRAMS) == held


def case(rng: np.random.Generator) -> Case:
    return convolution(rng, (2, 64, 30, 30), 128, (3, 3), node("Relu", "c", "y"))


def build(one: Case, folder: Path) -> Path:
    """An engine for this network; one in the same folder is replaced."""
    onnx.save(one.model(), folder / "m.onnx")
    path = folder / "m.engine"
    build_on_gpu(folder / "m.onnx", path, profile="h200", precision="fp16")
    return path


def test_sessions_in_threads_compute_the_same_and_share_weights(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    one = case(rng)
    path = build(one, tmp_path)
    inputs = [one.feeds(rng) for _ in range(THREADS)]
    wrong: list[int] = []
    with open_engine(path) as engine:
        sessions = [Session(engine) for _ in inputs]
    assert len(program._PROGRAMS) == 1
    expected = [session.infer(feeds)["y"] for session, feeds in zip(sessions, inputs, strict=True)]
    for feeds, actual in zip(inputs, expected, strict=True):
        assert relative_error(actual, one.truth(feeds)["y"]) < FP16

    def run_session(number: int) -> None:
        for run in range(RUNS):
            # Each thread goes through all sessions: none belongs to the thread that opened it.
            at = (number + run) % THREADS
            if not np.array_equal(sessions[at].infer(inputs[at])["y"], expected[at]):
                wrong.append(at)

    threads = [threading.Thread(target=run_session, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for session in sessions:
        session.close()
    assert wrong == []


def test_sessions_open_and_close_in_threads(tmp_path: Path, rng: np.random.Generator) -> None:
    one = case(rng)
    path, feeds = build(one, tmp_path), one.feeds(rng)
    with open_session(path) as session:
        expected = session.infer(feeds)["y"]
    wrong: list[object] = []

    def run_session() -> None:
        for _ in range(10):
            with open_session(path) as session:
                if not np.array_equal(session.infer(feeds)["y"], expected):
                    wrong.append(session)

    threads = [threading.Thread(target=run_session) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_file_that_takes_the_place_of_another_has_its_own_weights(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    first, second = case(rng), case(rng)
    feeds = first.feeds(rng)
    with open_session(build(first, tmp_path)) as old:
        with open_session(build(second, tmp_path)) as new:
            assert relative_error(new.infer(feeds)["y"], second.truth(feeds)["y"]) < FP16
        assert relative_error(old.infer(feeds)["y"], first.truth(feeds)["y"]) < FP16


def test_tactics_are_timed_once_and_then_taken_from_the_cache(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    one = case(rng)
    path, feeds, cache = build(one, tmp_path), one.feeds(rng), tmp_path / "times.json"
    truth = one.truth(feeds)["y"]
    with open_session(path, timing_cache=cache) as session:
        (executor,) = session.executors
        chosen = executor.tactics
        assert relative_error(session.infer(feeds)["y"], truth) < FP16
    (row,) = read_timings(cache).devices
    assert row.median_us
    written = cache.stat().st_mtime_ns
    with open_session(path, timing_cache=cache) as session:
        (executor,) = session.executors
        assert executor.tactics == chosen
    assert cache.stat().st_mtime_ns == written


def test_every_tactic_computes_the_same(tmp_path: Path, rng: np.random.Generator) -> None:
    """A cache in which another tactic is the fastest each time runs them all."""
    one = case(rng)
    path, feeds, cache = build(one, tmp_path), one.feeds(rng), tmp_path / "times.json"
    truth = one.truth(feeds)["y"]
    with open_session(path, timing_cache=cache):
        pass
    (row,) = read_timings(cache).devices
    seen = set()
    for favourite in row.median_us:
        times = {key: 1.0 if key == favourite else 2.0 for key in row.median_us}
        cache.unlink()
        add_timings(cache, row.gpu, times)
        with open_session(path, timing_cache=cache) as session:
            (executor,) = session.executors
            seen.add(executor.tactics)
            assert relative_error(session.infer(feeds)["y"], truth) < FP16
    assert len(seen) > 1


def test_outputs_are_written_into_given_arrays(tmp_path: Path, rng: np.random.Generator) -> None:
    one = case(rng)
    feeds = one.feeds(rng)
    with open_session(build(one, tmp_path)) as session:
        expected = session.infer(feeds)["y"]
        target = np.full_like(expected, np.nan)
        assert session.infer(feeds, {"y": target})["y"] is target
    assert np.array_equal(target, expected)


def test_page_locked_arrays_give_the_same_and_outlive_the_session(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    one = case(rng)
    given = one.feeds(rng)
    with open_session(build(one, tmp_path)) as session:
        expected = session.infer(given)["y"]
        feeds, outputs = session.arrays()
        feeds["x"][...] = given["x"]
        assert session.infer(feeds, outputs)["y"] is outputs["y"]
    gc.collect()
    assert np.array_equal(outputs["y"], expected)
    feeds["x"][...] = 0


def test_bench_times_the_gpu(tmp_path: Path, rng: np.random.Generator) -> None:
    with open_engine(build(case(rng), tmp_path)) as engine:
        result = measure(
            engine, BenchOptions(iterations=20, warmup_s=0.01, streams=2, profile=True)
        )
        ops = engine.manifest.segments[0].implementations[0].works  # type: ignore[union-attr]
    (gpu,) = result.gpu
    assert 0 < gpu.compute.median_ms <= result.latency.max_ms
    assert gpu.copy_in.min_ms > 0
    assert gpu.copy_out.min_ms > 0
    assert gpu.enqueue.min_ms > 0
    assert [row.nodes for row in result.layers] == [op.nodes for op in ops]
    assert all(row.kernels and row.time_ms > 0 for row in result.layers)
