"""A session whose TensorRT fails as a plan is loaded runs without it; one that fails later says so.

tests/fixtures/tensorrt_double stands for TensorRT, tests/fixtures/cuda_double for the driver.
"""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cuda_double
import msgspec
import numpy as np
import pytest
from tensorrt_fixtures import build, install, prepare
from tensorrt_gpu_fixtures import build as build_for_gpu

from device.engine.file import open_engine
from device.errors import SessionError
from device.runtime.cuda.driver import CudaError
from device.runtime.executors.table import SegmentReport
from device.runtime.pool import turns_of
from device.runtime.tensorrt.board import read_board
from device.session import Session, SessionPool, open_session

INJECT = "TENSORRT_DOUBLE_INJECT"
FEEDS = {"x": np.full((1, 3, 32, 32), 0.5, np.float32)}


@pytest.fixture(autouse=True)
def gpu() -> Iterator[cuda_double.CudaDouble]:
    """A driver in every test; the module tensorrt is gone after it."""
    with cuda_double.installed() as double:
        yield double
    forget()


def forget() -> None:
    for name in ("tensorrt", "tensorrt.injected"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network in INT8, all of it but the last node on the DLA."""
    return build(tmp_path_factory.mktemp("engine"), precision="int8")


@pytest.fixture(scope="module")
def gpu_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network in FP16 whose GPU segment has no kernels."""
    return build_for_gpu(tmp_path_factory.mktemp("gpu"), "fp16", "tensorrt").path


@pytest.fixture(scope="module")
def prepared(engine: Path, gpu_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    with cuda_double.installed(), pytest.MonkeyPatch.context() as patch:
        install("10.3.0", folder, patch)
        for each in (engine, gpu_engine):
            assert prepare(each, folder / "plans").problem is None
    forget()
    return folder / "plans"


@pytest.fixture
def plans(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install("10.3.0", tmp_path, monkeypatch)
    return shutil.copytree(prepared, tmp_path / "plans")


def inject(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INJECT, text)
    forget()


def report_of(session: Session, engine: Path) -> SegmentReport:
    processor = "dla0" if engine.name.startswith("int8.") else "gpu"
    return next(report for report in session.reports if report.processor == processor)


def calls_of(
    engine: Path, plans: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, int], dict[str, int]]:
    """Return how often TensorRT is called as a session is opened, and until one inference."""
    inject("trace=", monkeypatch)
    with open_session(engine, plans=plans) as session:
        assert report_of(session, engine).implementation == "tensorrt"
        from tensorrt.injected import CALLS

        loading = dict(CALLS)
        session.infer(FEEDS)
        return loading, dict(CALLS)


@pytest.mark.parametrize("how", ["raise", "null", "false"])
@pytest.mark.parametrize("which", ["engine", "gpu_engine"])
def test_whatever_call_fails_as_a_plan_is_loaded_the_session_runs_without_it(
    which: str, how: str, plans: Path, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch, gpu: cuda_double.CudaDouble,
) -> None:  # fmt: skip
    engine = request.getfixturevalue(which)
    calls, _ = calls_of(engine, plans, monkeypatch)
    assert {"Runtime.__init__", "Runtime.deserialize_cuda_engine"} <= set(calls)
    refused = set()
    for call, count in calls.items():
        for number in range(1, count + 1):
            inject(f"{call}={how}@{number}", monkeypatch)
            with open_session(engine, plans=plans) as session:
                report = report_of(session, engine)
                if report.implementation != "tensorrt":
                    refused.add(call)
                    assert report.degraded, call
                    assert "\n" not in report.degraded
                    session.infer(FEEDS)
            assert not gpu.captures
    if how == "raise":
        assert refused == set(calls)


@pytest.mark.parametrize("how", ["raise", "null", "false"])
@pytest.mark.parametrize("which", ["engine", "gpu_engine"])
def test_whatever_call_fails_as_a_plan_runs_is_an_error_of_the_session(
    which: str, how: str, plans: Path, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    engine = request.getfixturevalue(which)
    loading, until = calls_of(engine, plans, monkeypatch)
    running = [call for call, count in until.items() if count > loading.get(call, 0)]
    assert "IExecutionContext.execute_async_v3" in running
    for call in running:
        inject(f"{call}={how}@{loading.get(call, 0) + 1}", monkeypatch)
        with (
            open_session(engine, plans=plans) as session,
            pytest.raises(SessionError, match=r"TensorRT|no input or output"),
        ):
            session.infer(FEEDS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import=libnvdla_compiler.so: cannot open shared object file", "nvidia-l4t-dla-compiler"),
        ("import=libcudla.so.1: cannot open shared object file", "cannot be loaded: libcudla.so.1"),
        ("Runtime.__init__=null", "TypeError: pybind11::init(): factory function returned nullptr"),
        ("ICudaEngine.create_execution_context=null", "a core holds 16 loadables"),
        ("Runtime.num_DLA_cores=raise", "as DLA cores are counted"),
    ],
)
def test_a_refusal_says_what_tensorrt_said(
    text: str, says: str, engine: Path, plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(text, monkeypatch)
    with open_session(engine, plans=plans) as session:
        report = report_of(session, engine)
    assert says in report.degraded


def test_a_core_that_is_asked_for_and_fails_costs_speed_alone(
    engine: Path, plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject("Runtime.deserialize_cuda_engine=raise", monkeypatch)
    with open_session(engine, plans=plans, dla_core=1) as session:
        assert "deserialize_cuda_engine fails in C++" in report_of(session, engine).degraded
        session.infer(FEEDS)


def test_a_driver_that_has_no_memory_for_ports_costs_speed_alone(
    engine: Path, plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise CudaError("out of memory")

    monkeypatch.setattr("device.runtime.cuda.context.Context.allocate_host", refuse)
    with open_session(engine, plans=plans) as session:
        report = report_of(session, engine)
        assert (report.implementation, "out of memory" in report.degraded) == ("portable", True)
        session.infer(FEEDS)


def test_cores_that_cannot_be_counted_again_leave_one_session(
    engine: Path, plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(engine) as opened, Session(opened, plans=plans, turn=0) as session:
        assert turns_of(opened, session) == 2
        import tensorrt as trt

        monkeypatch.setattr(trt.Runtime, "__init__", lambda self, logger: 1 / 0)
        assert turns_of(opened, session) == 1
    inject("IExecutionContext.__init__=raise@2", monkeypatch)
    with SessionPool(engine, 2, plans=plans) as pool:
        ways = [
            row.implementation for rows in pool.reports for row in rows if row.processor == "dla0"
        ]
        assert ways == ["tensorrt", "portable"]
        assert pool.infer(FEEDS)["y"].shape == pool.infer(FEEDS)["y"].shape


@pytest.mark.parametrize("dla", ["portable", "exact"])
def test_a_dla_segment_on_the_cpu_of_a_board_is_degraded_whatever_the_reason(
    dla: str, engine: Path, plans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = replace(read_board(), dla_cores=2)
    monkeypatch.setattr("device.runtime.executors.table.read_board", lambda: board)
    with open_session(engine, plans=tmp_path / "none", dla=dla) as session:  # type: ignore[arg-type]
        report = report_of(session, engine)
    assert report.implementation in {"portable", "emulated"}
    assert "not on the DLA: " in report.degraded


def test_a_dla_segment_without_a_form_for_tensorrt_is_degraded_on_a_board(
    engine: Path, plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = replace(read_board(), dla_cores=2)
    monkeypatch.setattr("device.runtime.executors.table.read_board", lambda: board)
    with open_engine(engine) as opened:
        segments = opened.manifest.segments
        bare = tuple(
            msgspec.structs.replace(segment, implementations=segment.implementations[-1:])
            for segment in segments
        )
        monkeypatch.setattr(
            opened, "manifest", msgspec.structs.replace(opened.manifest, segments=bare)
        )
        with Session(opened, plans=plans) as session:
            report = report_of(session, engine)
    assert report.implementation == "portable"
    assert "not on the DLA: the engine carries no tensorrt" in report.degraded
