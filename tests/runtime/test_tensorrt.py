"""DLA segments through TensorRT: what is asked of it, what it refuses, and that nothing is lost.

No board is at hand: tests/fixtures/tensorrt_double stands for TensorRT, strict about the API of
four versions, and tests/fixtures/cuda_double for the driver.
"""

import gc
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import cuda_double
import cv2
import msgspec
import numpy as np
import onnx
import pytest
from model_fixtures import save, small_convnet
from msgspec import UNSET
from tensorrt_fixtures import HERE, VERSIONS, build, install, prepare

from device.engine.file import Engine, open_engine
from device.engine.manifest import Portable, TensorInfo
from device.engine.tensorrt_manifest import Port, TensorRT
from device.errors import SessionError
from device.protocol.messages import ChildMessage, Ready, Stats
from device.runtime.cuda.context import Stream
from device.runtime.executors.loaded import LoadedPlan
from device.runtime.executors.tensorrt import TensorRTExecutor
from device.runtime.pool import MAX_SESSIONS, turns_of
from device.runtime.prepare import children
from device.runtime.prepare import prepare_engine as prepare_module
from device.runtime.prepare.children import Limits
from device.runtime.prepare.prepare_engine import Job, prepare_engine
from device.runtime.tensorrt.board import Board, read_board
from device.runtime.tensorrt.layout import pack, packed_shape, unpack
from device.runtime.tensorrt.plans import MAX_PLANS, Record, form_for, timing_cache
from device.runtime.tensorrt.releases import find_release
from device.session import Session, SessionPool, open_session
from pipelines.config import PipelineConfig, PreprocessConfig, SourceConfig
from pipelines.decode_config import Classification
from pipelines.model_config import PipelineModel
from pipelines.open_models import ModelFiles, open_models
from pipelines.runtime.batch import BatchRunner, Model
from pipelines.runtime.pipeline import RunOptions, run_pipeline
from pipelines.runtime.trace import TraceWriter
from pipelines.sinks.result import FrameResult
from pipelines.sources.batching import Pace
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.engine.tensorrt import tensorrt_segment
from toolkit.graph.extract import extract_segments
from toolkit.importers.onnx import import_model
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import PlanOptions


@pytest.fixture(autouse=True)
def gpu() -> Iterator[cuda_double.CudaDouble]:
    """A driver in every test; the module tensorrt is gone after it."""
    with cuda_double.installed() as double:
        yield double
    sys.modules.pop("tensorrt", None)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network in INT8, all of it but the last node on the DLA."""
    return build(tmp_path_factory.mktemp("engine"), precision="int8")


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install the double as one version of TensorRT, for this process and its children."""
    return install(str(request.param), tmp_path, monkeypatch)


@pytest.fixture(params=("8.6.1", "11.4.1"))
def either_era(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The double as a release with ranges, or as a strongly typed one."""
    return install(str(request.param), tmp_path, monkeypatch)


def test_a_finished_segment_computes_what_the_portable_one_does(
    engine: Path, version: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    row = prepare(engine, tmp_path / "plans")
    assert (row.problem, row.cached, row.refused_layers) == (None, False, ())
    feeds = {"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)}
    with open_session(engine, plans=tmp_path / "plans") as session:
        (dla,) = [report for report in session.reports if report.processor == "dla0"]
        actual = session.infer(feeds)["y"]
        again = session.infer(feeds)["y"]
    assert dla.implementation == "tensorrt"
    # The plan is for throughput, on a board with two cores.
    assert f"TensorRT {version}, DLA cores 0, 1 in turn" in dla.reason
    with open_session(engine, plans=tmp_path / "none") as session:
        portable = session.infer(feeds)["y"]
    # The double computes between the ports in floating point: a step or two of INT8 apart.
    assert np.abs(actual - portable).max() < 0.06 * np.abs(portable).max()
    assert np.array_equal(actual, again)


def test_fp16_segments_run_with_half_ports(
    either_era: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    engine = build(tmp_path, precision="fp16")
    with open_engine(engine) as opened:
        job = Job(opened, tmp_path / "plans", read_board(), Limits(60), lambda *_: None)
        rows = prepare_engine(job)
    assert rows
    assert [row.problem for row in rows] == [None] * len(rows)
    feeds = {"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)}
    with open_session(engine, plans=tmp_path / "plans") as session:
        actual = session.infer(feeds)["y"]
    with open_session(engine, plans=tmp_path / "none") as session:
        assert np.allclose(actual, session.infer(feeds)["y"], rtol=0.01, atol=0.01)


def test_a_plan_is_built_once(
    engine: Path, either_era: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(engine, tmp_path / "plans")
    monkeypatch.delattr(prepare_module, "run_child")  # nothing may build any more
    row = prepare(engine, tmp_path / "plans")
    assert row.cached
    assert not list((tmp_path / "plans").glob(".build-*"))


def test_the_other_core_is_chosen_when_it_is_loaded(
    engine: Path, either_era: str, tmp_path: Path
) -> None:
    prepare(engine, tmp_path / "plans")
    with open_session(engine, plans=tmp_path / "plans", dla_core=1) as session:
        (reason,) = [row.reason for row in session.reports if row.processor == "dla0"]
        assert "DLA core 1" in reason
        feeds = {"x": np.ones((1, 3, 32, 32), np.float32)}
        before = session.infer(feeds)["y"]
        session.use_dla_core(0)
        (reason,) = [row.reason for row in session.reports if row.processor == "dla0"]
        assert "DLA core 0" in reason
        assert cores_of(session) == [0]
        assert np.array_equal(session.infer(feeds)["y"], before)
        with pytest.raises(SessionError, match="for DLA core 2, and this board has 2"):
            session.use_dla_core(2)
        assert cores_of(session) == [0]
        session.infer(feeds)
    with pytest.raises(SessionError, match="for DLA core 2, and this board has 2"):
        open_session(engine, plans=tmp_path / "plans", dla_core=2)


def cores_of(session: Session) -> list[int]:
    return [
        plan.core
        for executor in session.executors
        if isinstance(executor, TensorRTExecutor)
        for plan in executor._plans
    ]


def watched_cores(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[], object] = lambda: None
) -> list[int | None]:
    """Return a list that gets the core of each run of a plan from now on."""
    cores: list[int | None] = []
    enqueue = LoadedPlan.enqueue

    def watched(self: LoadedPlan, addresses: dict[str, int], stream: Stream) -> None:
        before()
        cores.append(self.core)
        enqueue(self, addresses, stream)

    monkeypatch.setattr(LoadedPlan, "enqueue", watched)
    return cores


def test_frames_take_turns_on_the_cores(
    engine: Path, either_era: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(engine, tmp_path / "plans")
    cores = watched_cores(monkeypatch)
    with open_session(engine, plans=tmp_path / "plans") as session:
        for _ in range(3):
            session.infer({"x": np.zeros((1, 3, 32, 32), np.float32)})
    assert cores == [0, 1, 0]


def test_frames_of_two_threads_are_on_both_cores_at_the_same_time(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    prepare(engine, tmp_path / "plans")
    feeds = [{"x": np.full((1, 3, 32, 32), value, np.float32)} for value in (0.5, -1.0)]
    with open_session(engine, plans=tmp_path / "plans") as session:
        expected = [session.infer(feed)["y"] for feed in feeds]
    meeting = threading.Barrier(2, timeout=30)  # passes only if both are inside
    cores = watched_cores(monkeypatch, meeting.wait)
    with (
        SessionPool(engine, plans=tmp_path / "plans") as pool,
        ThreadPoolExecutor(2) as threads,
    ):
        for number, reports in enumerate(pool.reports):
            (reason,) = [row.reason for row in reports if row.processor == "dla0"]
            assert f"DLA core {number}" in reason
        results = [result["y"] for result in threads.map(pool.infer, feeds)]
    assert sorted(core or 0 for core in cores) == [0, 1]
    assert all(np.array_equal(*pair) for pair in zip(results, expected, strict=True))


def test_one_thread_takes_the_sessions_of_a_pool_in_turn(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    prepare(engine, tmp_path / "plans")
    cores = watched_cores(monkeypatch)
    pool = SessionPool(engine, 3, plans=tmp_path / "plans")
    for _ in range(4):
        pool.infer({"x": np.zeros((1, 3, 32, 32), np.float32)})
    pool.close()
    assert cores == [0, 1, 0, 0]  # the third session is on the first core again
    with pytest.raises(SessionError, match="closed"):
        pool.infer({"x": np.zeros((1, 3, 32, 32), np.float32)})


def pipeline_of(folder: Path, images: int) -> PipelineConfig:
    """Write images of different grey, and return a pipeline that classifies them."""
    (folder / "in").mkdir()
    for number in range(images):
        picture = np.full((32, 32, 3), 20 * number, np.uint8)
        cv2.imwrite(str(folder / "in" / f"{number}.png"), picture)
    (folder / "labels.txt").write_text("\n".join("abcdefghij") + "\n")
    return PipelineConfig(
        name="turns",
        source=SourceConfig(uri=str(folder / "in"), frames="every"),
        preprocess=PreprocessConfig(width=32, height=32),
        decode=Classification(scores="y", top=10),
    )


def on_core(config: PipelineConfig, core: int) -> PipelineConfig:
    """Return the pipeline with its model on one core."""
    model = PipelineModel(
        name="m", preprocess=config.preprocess, decode=config.decode, dla_core=core
    )
    return msgspec.structs.replace(config, models=(model,), preprocess=UNSET, decode=UNSET)


def run_with(
    config: PipelineConfig, engine: Path, folder: Path
) -> tuple[list[FrameResult], list[ChildMessage], Model]:
    """Run a pipeline with the sessions that it and its engine's plan ask for."""
    results: list[FrameResult] = []
    messages: list[ChildMessage] = []

    def session(engine: Engine, dla_core: int | None, turn: int | None) -> Session:
        return Session(engine, plans=folder / "plans", dla_core=dla_core, turn=turn)

    files = {config.first.name: ModelFiles(engine, folder / "labels.txt")}
    with ExitStack() as stack:
        (model,) = open_models(config, files, stack, session).values()
        run_pipeline(
            config,
            model,
            RunOptions(emit=messages.append),
            watch=results.append,
        )
    return results, messages, model


def dla_of(results: Sequence[FrameResult]) -> list[list[str]]:
    return [[p for p in one.event.processors if p.startswith("dla")] for one in results]


def test_a_pipeline_has_a_session_for_each_core_and_says_which_ran_a_frame(
    engine: Path, either_era: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(engine, tmp_path / "plans")
    config = pipeline_of(tmp_path, 8)
    alone, _, model = run_with(on_core(config, 1), engine, tmp_path)
    assert (len(model.lanes), dla_of(alone)) == (1, [["dla1"]] * 8)
    meeting = threading.Barrier(2, timeout=30)  # passes only if both are inside
    is_warm = threading.Event()
    enqueue, warm_up = LoadedPlan.enqueue, BatchRunner.warm_up
    # Two frames between which this process had no CPU look like those of a slow camera, which would
    # be inferred one by one.
    monkeypatch.setattr(Pace, "gap_s", lambda self: 0.0)

    def watched(self: LoadedPlan, addresses: dict[str, int], stream: Stream) -> None:
        if is_warm.is_set():
            meeting.wait()
        enqueue(self, addresses, stream)

    def warmed(self: BatchRunner) -> None:
        warm_up(self)
        is_warm.set()

    monkeypatch.setattr(LoadedPlan, "enqueue", watched)
    monkeypatch.setattr(BatchRunner, "warm_up", warmed)
    results, messages, model = run_with(config, engine, tmp_path)
    assert (len(model.lanes), dla_of(results)) == (2, [["dla0"], ["dla1"]] * 4)
    assert [one.frame.seq for one in results] == list(range(8))
    for one, expected in zip(results, alone, strict=True):  # each has what its own frame shows
        assert one.event.detections == expected.event.detections
    assert len({one.event.detections for one in results}) == 8
    (ready,) = [one for one in messages if isinstance(one, Ready)]
    assert all(f"DLA core {core}" in " ".join(ready.segments) for core in (0, 1))
    stats = [one for one in messages if isinstance(one, Stats)]
    assert [sum(one.processors.get(p, 0) for one in stats) for p in ("dla0", "dla1")] == [4, 4]
    assert rows_of(results, tmp_path / "trace.json") == ["dla0", "dla1"] * 4


def rows_of(results: Sequence[FrameResult], path: Path) -> list[str]:
    """Return in which row of a trace the inference of each frame is, of its processors the DLA."""
    with TraceWriter(path) as trace:
        for result in results:
            trace.add(result)
    events = json.loads(path.read_text())["traceEvents"]
    rows = {one["tid"]: one["args"]["name"] for one in events if one["ph"] == "M"}
    ran = {one["args"]["seq"]: rows[one["tid"]] for one in events if one["name"] == "model"}
    return [name for seq in sorted(ran) for name in ran[seq].split(", ") if "dla" in name]


def test_an_engine_that_has_one_core_or_none_has_one_session(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    prepare(engine, tmp_path / "plans")
    with open_engine(engine) as opened:
        with Session(opened, plans=tmp_path / "plans", turn=0) as session:
            assert turns_of(opened, session) == 2
            monkeypatch.setattr("device.runtime.pool.core_count", lambda: 1)
            assert turns_of(opened, session) == 1
        with Session(opened, plans=tmp_path / "none", turn=0) as session:
            assert turns_of(opened, session) == 1
            assert {name for one in session.reports for name in one.runs_on} == {"cpu"}


@pytest.mark.parametrize("count", [0, MAX_SESSIONS + 1])
def test_a_pool_of_no_sessions_or_too_many_is_refused(count: int, engine: Path) -> None:
    with pytest.raises(SessionError, match=f"a pool of {count} sessions was asked for; give 1 to"):
        SessionPool(engine, count)


def test_plans_are_loaded_into_the_primary_context(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: cuda_double.CudaDouble
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    prepare(engine, tmp_path / "plans")
    contexts: list[int] = []
    load = LoadedPlan.__init__

    def watched(self: LoadedPlan, where: str, data: bytes, core: int) -> None:
        contexts.append(gpu.current)
        load(self, where, data, core)

    monkeypatch.setattr(LoadedPlan, "__init__", watched)
    primary, foreign = gpu.current, 77
    gpu.current = foreign  # as pycuda.autoinit leaves it
    with open_session(engine, plans=tmp_path / "plans") as session:
        assert gpu.current == foreign
        session.use_dla_core(1)
        assert gpu.current == foreign
    assert contexts == [primary] * 3  # two cores in turn, then the one


def test_a_plan_that_does_not_load_costs_speed_alone(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    prepare(engine, tmp_path / "plans")
    monkeypatch.setenv("TENSORRT_DOUBLE_FAIL", "load")
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    with open_session(engine, plans=tmp_path / "plans") as session:
        (dla,) = [report for report in session.reports if report.processor == "dla0"]
        session.infer({"x": np.zeros((1, 3, 32, 32), np.float32)})
    assert dla.implementation == "portable"
    assert "does not load its plan" in dla.degraded
    assert dla.degraded in caplog.text


def test_a_segment_that_is_not_loaded_leaves_no_memory_taken(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: cuda_double.CudaDouble
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    prepare(engine, tmp_path / "plans")
    with pytest.raises(SessionError, match="this board has 2"):
        open_session(engine, plans=tmp_path / "plans", dla_core=2)
    gc.collect()
    assert not gpu.memory


def test_timings_are_those_of_the_board_as_it_is(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    plans, board = tmp_path / "plans", read_board()
    for mode in ("0000", "0002"):
        with open_engine(engine) as opened:
            job = Job(opened, plans, replace(board, power_mode=mode), Limits(60), lambda *_: None)
            (row,) = prepare_engine(job)
        assert (row.problem, row.cached) == (None, False)
    caches = sorted(plans.glob("timing-*"))
    assert [cache.read_bytes() for cache in caches] == [b"timings", b"timings"]


@pytest.mark.parametrize("content", [b"damaged", b"of another TensorRT"])
def test_timings_that_do_not_fit_are_measured_again(
    content: bytes, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    cache = timing_cache(tmp_path / "plans", read_board())
    cache.parent.mkdir()
    cache.write_bytes(content)
    assert prepare(engine, tmp_path / "plans").problem is None
    assert cache.read_bytes() == b"timings"


def test_what_a_killed_build_left_is_removed(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    killed = tmp_path / "plans" / f".build-{2**22 + 1}-x"  # above the largest process id of Linux
    running = tmp_path / "plans" / f".build-{os.getpid()}-x"
    for folder in (killed, running):
        folder.mkdir(parents=True)
    prepare(engine, tmp_path / "plans")
    assert (killed.exists(), running.exists()) == (False, True)


# --- what goes wrong


FAILURES = [
    ("refuse:conv0", r"does not run layer conv0 on the DLA; keep it off"),
    ("segfault", r"crashed \(SIGSEGV\) while it built the segment, after: \[DlaLayer\]"),
    ("memory", r"not enough memory to build; stop other programs"),
    ("null", r"TensorRT builds no plan; its last line: building with"),
    ("parse", r"cannot read the segment: Unsupported ONNX operator Foo"),
    ("cores", r"TensorRT finds no DLA core"),
]


@pytest.mark.parametrize(("failure", "problem"), FAILURES)
def test_a_failed_build_is_one_sentence_and_the_segment_runs_without_the_dla(
    engine: Path, failure: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv("TENSORRT_DOUBLE_FAIL", failure)
    row = prepare(engine, tmp_path / "plans")
    assert row.problem is not None
    assert re.search(problem, row.problem), row.problem
    with open_session(engine, plans=tmp_path / "plans") as session:
        (dla,) = [report for report in session.reports if report.processor == "dla0"]
        session.infer({"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)})
    assert dla.implementation == "portable"
    assert "tensorrt: TensorRT refused it on this board: " in dla.reason
    assert not list((tmp_path / "plans").glob("*.plan"))
    # What was refused is not tried at each start, but on request.
    monkeypatch.delenv("TENSORRT_DOUBLE_FAIL")
    assert prepare(engine, tmp_path / "plans").cached
    assert prepare(engine, tmp_path / "plans", again=True).problem is None


def test_a_build_that_hangs_is_ended(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv("TENSORRT_DOUBLE_FAIL", "hang")
    row = prepare(engine, tmp_path / "plans", limits=Limits(5))
    assert row.problem is not None
    assert "longer than 5 s" in row.problem
    assert "`tandem-agent prepare --again --timeout-s`" in row.problem
    # Within the same limit it would end the same way; with a larger one it is tried again.
    assert prepare(engine, tmp_path / "plans", limits=Limits(5)).cached
    monkeypatch.delenv("TENSORRT_DOUBLE_FAIL")
    assert prepare(engine, tmp_path / "plans", limits=Limits(60)).problem is None


def test_the_page_of_the_board_says_how_many_plans_are_kept() -> None:
    page = (HERE.parents[1] / "docs/board.md").read_text()
    assert re.findall(r"those of the last (\d+) segments", page) == [str(MAX_PLANS)]


def test_the_least_recently_used_plans_go(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    plans = tmp_path / "plans"
    plans.mkdir()
    for number in range(MAX_PLANS + 1):  # of releases and JetPacks before; the first is the oldest
        for suffix in ("json", "plan", "log"):
            (plans / f"old{number}.{suffix}").write_text("")
        os.utime(plans / f"old{number}.json", (number, number))
    assert not prepare(engine, plans).cached
    assert len(list(plans.glob("*.json"))) == len(list(plans.glob("*.plan"))) == MAX_PLANS
    assert not list(plans.glob("old0.*")) + list(plans.glob("old1.*"))
    (record,) = set(plans.glob("*.json")) - set(plans.glob("old*"))
    os.utime(record, (0, 0))
    assert prepare(engine, plans).cached
    assert record.stat().st_mtime > 0  # what runs is in use


def test_a_build_that_the_system_kills_is_tried_again(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    killed = (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    with monkeypatch.context() as patch:
        patch.setattr(children, "module_command", lambda *_: killed)
        row = prepare(engine, tmp_path / "plans")
        assert row.problem is not None
        assert "SIGKILL" in row.problem
    row = prepare(engine, tmp_path / "plans")
    assert (row.problem, row.cached) == (None, False)


@pytest.mark.parametrize(
    ("limit", "larger"),
    [
        ({}, False),
        ({"passing": True}, True),
        ({"limit_s": 60.0}, False),
        ({"limit_s": 59.0}, True),
        ({"limit_bytes": 100}, False),
        ({"limit_bytes": 99}, True),
    ],
)
def test_a_failure_is_tried_again_where_it_may_go_well(limit: dict, larger: bool) -> None:
    record = Record(format=1, segment="s", board={}, sha256="", seconds=1.0, problem="p", **limit)
    assert prepare_module._may_go_well(record, Limits(60.0, 100)) == larger


def test_a_build_that_takes_all_memory_is_ended(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv("TENSORRT_DOUBLE_FAIL", "grow")
    row = prepare(engine, tmp_path / "plans", limits=Limits(120, 600 * 2**20))
    assert row.problem is not None
    assert "the limit is 600" in row.problem


def test_another_tensorrt_builds_again_and_the_old_plan_stays_for_the_old_one(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    with monkeypatch.context() as patch:
        install("10.3.0", tmp_path / "old", patch)
        assert not prepare(engine, tmp_path / "plans").cached
    with monkeypatch.context() as patch:
        install("10.7.0", tmp_path / "new", patch)
        with open_session(engine, plans=tmp_path / "plans") as session:
            (reason,) = [row.reason for row in session.reports if row.processor == "dla0"]
            assert "no plan for this board: run `tandem-agent prepare" in reason
        assert not prepare(engine, tmp_path / "plans").cached
    assert len(list((tmp_path / "plans").glob("*.plan"))) == 2


def test_a_damaged_plan_is_not_loaded_and_is_built_again(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    prepare(engine, tmp_path / "plans")
    (plan,) = (tmp_path / "plans").glob("*.plan")
    plan.write_bytes(plan.read_bytes()[:-1] + b"x")
    with open_session(engine, plans=tmp_path / "plans") as session:
        (reason,) = [row.reason for row in session.reports if row.processor == "dla0"]
    assert "its plan is damaged" in reason
    assert not prepare(engine, tmp_path / "plans").cached
    (record,) = (tmp_path / "plans").glob("*.json")
    record.write_text("{")
    assert not prepare(engine, tmp_path / "plans").cached


def test_a_task_that_is_not_enqueued_is_an_error(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    prepare(engine, tmp_path / "plans")
    monkeypatch.setenv("TENSORRT_DOUBLE_FAIL", "submit")
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    feeds = {"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)}
    with (
        open_session(engine, plans=tmp_path / "plans") as session,
        pytest.raises(SessionError, match=r"does not enqueue it on DLA core 0"),
    ):
        session.infer(feeds)


def test_without_tensorrt_the_report_says_so(engine: Path, tmp_path: Path) -> None:
    with open_session(engine, plans=tmp_path) as session:
        (dla,) = [report for report in session.reports if report.processor == "dla0"]
    assert "tensorrt: TensorRT is not installed" in dla.reason
    assert not dla.degraded  # a computer without a DLA


def test_a_board_with_a_dla_and_without_tensorrt_is_degraded(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = replace(read_board(), dla_cores=2)
    monkeypatch.setattr("device.runtime.executors.table.read_board", lambda: board)
    with open_session(engine, plans=tmp_path) as session:
        (dla,) = [report for report in session.reports if report.processor == "dla0"]
    assert dla.implementation == "portable"
    assert "not on the DLA: tensorrt: TensorRT is not installed" in dla.degraded


def test_a_board_with_one_core_of_two_says_that_frames_take_no_turns(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    prepare(engine, tmp_path / "plans")
    monkeypatch.setenv("TENSORRT_DOUBLE_FAIL", "one core")
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    with open_session(engine, plans=tmp_path / "plans") as session:
        (dla,) = [report for report in session.reports if report.processor == "dla0"]
    assert "DLA core 0, the only one here: frames take no turns" in dla.reason


def test_a_version_that_is_none_does_not_end_the_session(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("device.runtime.executors.tensorrt.tensorrt_version", lambda: "10.3.rc")
    with open_session(engine, plans=tmp_path) as session:
        (dla,) = [report for report in session.reports if report.processor == "dla0"]
    assert dla.implementation == "portable"
    assert "calls itself version '10.3.rc'" in dla.reason


@pytest.mark.parametrize(
    ("version", "form"),
    [
        ("8.4.1", None), ("8.5.0", "ranged"), ("8.6.2", "ranged"), ("10.0.1", "ranged"),
        ("10.7.0", "ranged"), ("10.8.0", None), ("10.16.2", None), ("11.4.0", None),
        ("11.4.1", "typed"), ("12.0.0", "typed"),
    ],
)  # fmt: skip
def test_each_release_takes_one_form_or_none(version: str, form: str | None) -> None:
    assert find_release(version).form == form
    assert "GPU_FALLBACK" not in find_release(version).builder_flags


@pytest.mark.parametrize("version", VERSIONS)
def test_the_double_has_nothing_that_its_version_lacks(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(version, tmp_path, monkeypatch)
    import tensorrt as trt

    builder = trt.Builder(trt.Logger())
    config = builder.create_builder_config()
    typed = version.startswith("11")
    assert hasattr(trt.BuilderFlag, "INT8") is not typed
    tensor = trt.ITensor("t", (1,), trt.DataType.INT8)
    if typed:
        with pytest.raises(AttributeError, match="no attribute 'set_dynamic_range'"):
            tensor.set_dynamic_range(-1.0, 1.0)
    else:
        assert tensor.set_dynamic_range(-1.0, 1.0)
        with pytest.raises(TypeError, match="min is str"):
            tensor.set_dynamic_range("1", 1.0)
    with pytest.raises(AttributeError, match="no attribute 'dla_core'"):
        config.dla_core = 0
    with pytest.raises(TypeError, match="incompatible arguments"):
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE)
    with pytest.raises(TypeError, match="pool is BuilderFlag"):
        config.set_memory_pool_limit(trt.BuilderFlag.DEBUG, 4096)


# --- the engine


def test_a_dla_segment_stores_its_weights_once(engine: Path) -> None:
    with open_engine(engine) as opened:
        (segment,) = [s for s in opened.manifest.segments if s.processor == "dla0"]
        dla, portable = segment.implementations
        assert isinstance(dla, TensorRT)
        assert isinstance(portable, Portable)
        large = {weight.entry for form in (dla.ranged, dla.typed) for weight in form.weights}
        assert large
        assert large <= set(portable.weights)


def test_boards_without_a_dla_carry_nothing_for_tensorrt(tmp_path: Path) -> None:
    model = small_convnet(tmp_path / "m.onnx", np.random.default_rng(1))
    build_engine(model, "orin-nano-8gb", tmp_path / "e", BuildOptions(kernels=False))
    with open_engine(tmp_path / "e") as opened:
        kinds = {type(i) for s in opened.manifest.segments for i in s.implementations}
    assert kinds == {Portable}


# --- layouts


@pytest.mark.parametrize("channels", [1, 15, 16, 17, 31, 32, 33, 64])
@pytest.mark.parametrize(("dtype", "layout"), [("int8", "chw32"), ("float16", "chw16")])
def test_packing_is_undone_by_unpacking(
    channels: int, dtype: str, layout: str, rng: np.random.Generator
) -> None:
    scale = 0.02 if dtype == "int8" else None
    port = Port(tensor="t", dtype=dtype, format=layout, scale=scale)  # type: ignore[arg-type]
    array = rng.uniform(-2, 2, (2, channels, 3, 5)).astype(np.float32)
    memory = np.full(packed_shape(port, array.shape), 7, dtype)
    pack(port, array, memory)
    flat = memory.transpose(0, 1, 4, 2, 3).reshape(2, -1, 3, 5)
    assert not flat[:, channels:].any()
    target = np.empty_like(array)
    unpack(port, memory, target)
    assert np.abs(target - array).max() <= (0.0101 if scale else 0.002)


def test_quantization_rounds_halves_away_from_zero_and_saturates() -> None:
    port = Port(tensor="t", dtype="int8", format="chw32", scale=1.0)
    values = np.array([0.5, 1.5, 2.5, -0.5, -2.5, 400, -400, 0.49], np.float32)
    memory = np.zeros(packed_shape(port, (1, 8, 1, 1)), np.int8)
    pack(port, values.reshape(1, 8, 1, 1), memory)
    assert memory.ravel()[:8].tolist() == [1, 2, 3, -1, -3, 127, -128, 0]


# --- the board


def test_the_board_is_read_from_its_files(tmp_path: Path) -> None:
    files = {
        "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic",
        "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0000\0nvidia,tegra234\0",
        "var/lib/nvpmodel/status": "pmode:0002 fmode:fanNull",
        "usr/lib/aarch64-linux-gnu/nvidia/libnvdla_compiler.so": "compiler",
        "sys/bus/platform/devices/15880000.nvdla0/uevent": "",
        "sys/bus/platform/devices/158c0000.nvdla1/uevent": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    board = read_board(tmp_path)
    assert (board.l4t, board.soc, board.dla_cores, board.power_mode) == (
        "36.4.3", "tegra234", 2, "0002",
    )  # fmt: skip
    assert len(board.dla_compiler) == 64
    assert read_board(tmp_path / "empty") == Board(board.tensorrt, "", "", "", 0, "")


# --- the command


def test_the_command_says_what_was_built(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from device.runtime.prepare.__main__ import main

    install("10.3.0", tmp_path, monkeypatch)
    command = ["prepare", str(engine), "--plans", str(tmp_path / "plans")]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 0
    assert "dla0.0: built in" in capfd.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, "--json"])
    assert main() == 0
    (row,) = json.loads(capfd.readouterr().out)
    assert row["cached"]


# --- what a form cannot say


def test_scales_below_the_normals_of_fp16_are_not_typed(tmp_path: Path) -> None:
    engine = build_scaled(tmp_path, 1e-4)
    with open_engine(engine) as opened:
        (form,) = forms(opened)
        ports = {port.scale for port in (*form.inputs, *form.outputs)}
        assert min(scale for scale in ports if scale is not None) < 2.0**-14
        assert form.ranged_problem == ""
        assert "has the INT8 scale" in form.typed_problem
        board = replace(read_board(), tensorrt="11.4.1")
        with pytest.raises(SessionError, match=r"scales in FP16, from 6\.1e-05 on"):
            form_for(form, board)
        assert form_for(form, replace(board, tensorrt="10.3.0")) == form.ranged


def test_typed_scales_are_normal_in_fp16(engine: Path) -> None:
    with open_engine(engine) as opened:
        (form,) = forms(opened)
        assert form.typed_problem == ""
        model = onnx.load_from_string(opened.entry(form.typed.model).tobytes())
    constants = {c.name: onnx.numpy_helper.to_array(c) for c in model.graph.initializer
                 if not c.external_data}  # fmt: skip
    scales = [constants[node.input[1]] for node in model.graph.node if "Linear" in node.op_type]
    assert scales
    assert all(scale.dtype == np.float16 and (scale >= 2.0**-14).all() for scale in scales)


def test_ports_of_two_dimensions_are_refused_with_the_reason(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(16, 8)).astype(np.float32)}
    nodes = [onnx.helper.make_node("Gemm", ["x", "w"], ["y"], name="gemm")]
    model = save(tmp_path / "m.onnx", nodes, {"x": [1, 16]}, {"y": [1, 8]}, weights)
    tensors = {
        name: TensorInfo(name=name, dtype="float32", shape=shape)
        for name, shape in (("x", (1, 16)), ("y", (1, 8)))
    }
    (piece,) = extract_segments(import_model(model).model, {"gemm": "dla0.0"}, ["dla0.0"])
    form = tensorrt_segment(piece, tensors).implementation
    assert form.ranged_problem == form.typed_problem
    assert "'x' has 2 dimensions, and TensorRT's chw16 takes 3 or more" in form.typed_problem


def build_scaled(folder: Path, factor: float) -> Path:
    """The network in INT8 behind an input whose range is small."""
    rng = np.random.default_rng(5)
    model = small_convnet(folder / "m.onnx", rng)
    data = [{"x": (factor * rng.normal(size=(1, 3, 32, 32))).astype(np.float32)} for _ in range(4)]
    options = BuildOptions(
        data=data,
        precision="int8",
        kernels=False,
        accept_loss=True,
        plan=PlanOptions(forced=Forced(dla=("all",))),
    )
    build_engine(model, "orin-nx-16gb", folder / "small.engine", options)
    return folder / "small.engine"


def forms(opened: Engine) -> list[TensorRT]:
    return [
        one
        for segment in opened.manifest.segments
        for one in segment.implementations
        if isinstance(one, TensorRT)
    ]


@pytest.mark.parametrize("option", ["--timeout-s=nan", "--timeout-s=0", "--timeout-s=inf",
                                    "--max-memory-mb=0"])  # fmt: skip
def test_a_limit_that_is_none_is_refused(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from device.runtime.prepare.__main__ import main

    monkeypatch.setattr(sys, "argv", ["prepare", "m.engine", option])
    with pytest.raises(SystemExit):
        main()
    assert "above 0" in capsys.readouterr().err
