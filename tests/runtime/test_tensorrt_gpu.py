"""GPU segments through TensorRT: what is built, which of plan and kernels runs, and what is said.

tests/fixtures/tensorrt_double stands for TensorRT, tests/fixtures/cuda_double for the driver.
"""

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cuda_double
import msgspec
import numpy as np
import onnx
import pytest
from model_fixtures import save
from tensorrt_fixtures import VERSIONS, install, prepare, prepare_all
from tensorrt_gpu_fixtures import X, build

from device.engine.file import open_engine
from device.engine.manifest import DimRange, Manifest, TensorInfo
from device.engine.manifest_check import check_manifest
from device.engine.purposes import bytes_by_purpose
from device.engine.tensorrt_manifest import TensorRTGpu
from device.errors import EngineError, SessionError
from device.runtime.prepare import prepare_engine as prepare_module
from device.runtime.prepare.children import TIMING, Ended, Limits, run_child
from device.runtime.prepare.prepare_engine import Job, prepare_engine
from device.runtime.tensorrt.board import read_board
from device.runtime.tensorrt.plans import Comparison, Record, form_for
from device.runtime.tensorrt.releases import find_gpu_release
from device.session import Session, open_session
from toolkit.cli.manifest_text import manifest_text
from toolkit.engine.build import BuildOptions, BuildResult, build_engine
from toolkit.engine.tensorrt_gpu import tensorrt_gpu_segment
from toolkit.graph.extract import extract_segments
from toolkit.importers.onnx import import_model

SMALL = (1, 16)


@pytest.fixture(autouse=True)
def gpu() -> Iterator[cuda_double.CudaDouble]:
    """A driver in every test; the module tensorrt is gone after it."""
    with cuda_double.installed() as double:
        yield double
    sys.modules.pop("tensorrt", None)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BuildResult]:
    """Engines whose GPU segments have no kernels, by precision."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: build(folder, name, "tensorrt") for name in ("fp32", "fp16", "int8")}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine in FP16 with kernels, which are interpreted, and a form for TensorRT."""
    folder = tmp_path_factory.mktemp("both")
    nodes = [node("Relu", "x", "y")]
    model = save(folder / "m.onnx", nodes, {"x": list(SMALL)}, {"y": list(SMALL)}, {})
    options = BuildOptions(precision="fp16", gpu_backend="auto")
    with cuda_double.interpreted_cubins():
        return build_engine(model, "orin-nx-16gb", folder / "both.engine", options).path


def feeds(shape: tuple[int, ...] = X) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(7).normal(size=shape).astype(np.float32)}


def record_of(plans: Path) -> Path:
    (path,) = plans.glob("*.json")
    return path


# --- what is built, and what runs


@pytest.mark.parametrize("version", VERSIONS)
def test_a_finished_segment_computes_what_the_portable_one_does(
    version: str, alone: dict[str, BuildResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(version, tmp_path, monkeypatch)
    engine = alone["int8"].path
    row = prepare(engine, tmp_path / "plans")
    assert (row.problem, row.cached, row.tensorrt_us) == (None, False, None)
    with open_session(engine, plans=tmp_path / "plans") as session:
        (report,) = session.reports
        actual = session.infer(feeds())["y"]
        inputs, outputs = session.arrays()
        inputs["x"][:] = feeds()["x"]
        assert session.infer(inputs, outputs)["y"] is outputs["y"]
        assert np.array_equal(outputs["y"], actual)
    assert report.implementation == "tensorrt"
    assert report.reason.startswith(f"tensorrt (TensorRT {version}, ")
    assert report.degraded == ""
    with open_session(engine, plans=tmp_path / "none") as session:
        expected = session.infer(feeds())["y"]
    # The double computes a form with ranges in floating point: a step or two of INT8 apart.
    assert np.abs(actual - expected).max() < 0.06 * np.abs(expected).max()
    log = next((tmp_path / "plans").glob("*.log")).read_text()
    typed = version.startswith("11")
    assert ("'FP16', 'INT8', 'OBEY_PRECISION_CONSTRAINTS'" in log) is not typed
    assert "TF32" not in log
    assert prepare(engine, tmp_path / "plans").cached


@pytest.mark.parametrize("version", ["8.6.1", "11.4.1"])
@pytest.mark.parametrize(("precision", "flags"), [("fp32", "[]"), ("fp16", "['FP16']")])
def test_floating_point_has_the_precision_of_the_engine(
    version: str, precision: str, flags: str, alone: dict[str, BuildResult], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install(version, tmp_path, monkeypatch)
    engine = alone[precision].path
    assert prepare(engine, tmp_path / "plans").problem is None
    with open_session(engine, plans=tmp_path / "plans") as session:
        actual = session.infer(feeds())["y"]
    with open_session(engine, plans=tmp_path / "none") as session:
        expected = session.infer(feeds())["y"]
    assert np.allclose(actual, expected, rtol=1e-5 if precision == "fp32" else 0.01, atol=0.01)
    log = next((tmp_path / "plans").glob("*.log")).read_text()
    assert f"building with {flags if version == '8.6.1' else '[]'} and ['WORKSPACE']" in log


def test_segments_on_gpu_and_dla_share_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: cuda_double.CudaDouble
) -> None:
    engine = build(tmp_path, "int8", "tensorrt", dla=True).path
    install("10.3.0", tmp_path, monkeypatch)
    rows = prepare_all(engine, tmp_path / "plans")
    assert [(row.segment, row.problem) for row in rows] == [("dla0.0", None), ("gpu.0", None)]
    with open_session(engine, plans=tmp_path / "plans") as session:
        assert [report.implementation for report in session.reports] == ["tensorrt", "tensorrt"]
        assert len(session._stages) == 1
        actual = session.infer(feeds())["y"]
        # A graph of copies and kernels, the DLA's task alone, a graph with the plan and the copies.
        assert enqueued(session, gpu) == ["cuGraphLaunch", "task", "cuGraphLaunch"]
        assert gpu.calls.count("cuStreamSynchronize") == 1
    with open_session(engine, plans=tmp_path / "none") as session:
        expected = session.infer(feeds())["y"]
    assert np.abs(actual - expected).max() < 0.06 * np.abs(expected).max()


def enqueued(session: Session, gpu: cuda_double.CudaDouble) -> list[str]:
    """What an inference gives the GPU and the DLA; the first captures."""
    session.infer(feeds())
    gpu.calls.clear()
    session.infer(feeds())
    return [call for call in gpu.calls if call in ("cuGraphLaunch", "plan", "task")]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_plan_is_captured_with_its_copies(
    version: str, alone: dict[str, BuildResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    gpu: cuda_double.CudaDouble,
) -> None:  # fmt: skip
    install(version, tmp_path, monkeypatch)
    prepare(alone["fp16"].path, tmp_path / "plans")
    with open_session(alone["fp16"].path, plans=tmp_path / "plans") as session:
        assert enqueued(session, gpu) == ["cuGraphLaunch"]
        assert session.reports[0].reason.startswith(f"tensorrt (TensorRT {version}, ")
        assert "in a CUDA graph)" in session.reports[0].reason
        profiler = session.executors[0].profiler
        assert profiler is not None
        gpu.calls.clear()
        assert len(profiler.compute_us(3)) == 3
        assert (gpu.calls.count("cuGraphLaunch"), gpu.calls.count("plan")) == (3, 0)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("capture", "TensorRT does not enqueue it on the GPU"),
        ("invalidate", "operation failed due to a previous error during capture"),
    ],
)
def test_a_plan_that_cannot_be_captured_is_enqueued_and_the_report_says_so(
    failure: str, reason: str, alone: dict[str, BuildResult], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, gpu: cuda_double.CudaDouble,
) -> None:  # fmt: skip
    install("10.3.0", tmp_path, monkeypatch)
    engine, plans = alone["fp16"].path, tmp_path / "plans"
    prepare(engine, plans)
    with open_session(engine, plans=plans) as session:
        expected = session.infer(feeds())["y"]
    monkeypatch.setenv("TENSORRT_DOUBLE_FAIL", failure)
    monkeypatch.delitem(sys.modules, "tensorrt")
    with open_session(engine, plans=plans) as session:
        (report,) = session.reports
        assert report.implementation == "tensorrt"
        assert "in no CUDA graph: TensorRT cannot be captured (" in report.reason
        assert reason in report.reason
        # Copies in and out are graphs, the plan between them is none.
        assert enqueued(session, gpu) == ["cuGraphLaunch", "plan", "cuGraphLaunch"]
        assert np.array_equal(session.infer(feeds())["y"], expected)


def test_a_plan_that_is_not_enqueued_leaves_the_kernels_in_use(
    both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    assert prepare(both, tmp_path / "plans").problem is None
    monkeypatch.setenv("TENSORRT_DOUBLE_FAIL", "submit")
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    with open_session(both, plans=tmp_path / "plans") as session:
        (report,) = session.reports
        session.infer(feeds(SMALL))
    assert report.implementation == "cuda"
    assert "TensorRT does not enqueue it on the GPU" in report.reason


@pytest.mark.parametrize("version", ["8.6.1", "11.4.1"])
def test_a_dynamic_batch_has_its_sizes(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = DimRange(name="N", min=1, opt=2, max=4)
    engine = build_dynamic(tmp_path, batch)
    install(version, tmp_path, monkeypatch)
    assert prepare(engine, tmp_path / "plans").problem is None
    rng = np.random.default_rng(3)
    for plans, kind in (("plans", "tensorrt"), ("none", "portable")):
        with open_session(engine, plans=tmp_path / plans) as session:
            assert session.reports[0].implementation == kind
            enqueued_each_time = (
                "in no CUDA graph: its sizes may change" in session.reports[0].reason
            )
            assert enqueued_each_time == (kind == "tensorrt")
            rng = np.random.default_rng(3)
            for size in (4, 1, 3):
                x = rng.normal(size=(size, 8)).astype(np.float32)
                y = session.infer({"x": x})["y"]
                assert y.shape == (size, 8)
                assert np.allclose(y, np.maximum(x, 0), atol=1e-6)


def build_dynamic(folder: Path, batch: DimRange) -> Path:
    nodes = [node("Relu", "x", "y")]
    model = save(folder / "d.onnx", nodes, {"x": ["N", 8]}, {"y": ["N", 8]}, {})
    options = BuildOptions(precision="fp32", gpu_backend="tensorrt", dims=(batch,), kernels=False)
    return build_engine(model, "orin-nano-8gb", folder / "d.engine", options).path


# --- both, and the faster


def test_auto_times_both_and_keeps_the_faster(
    both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    plans = tmp_path / "plans"
    with open_session(both, plans=plans) as session:
        assert session.reports[0].implementation == "cuda"
        assert "it has no plan for this board" in session.reports[0].reason
    row = prepare(both, plans)
    assert (row.problem, row.cached) == (None, False)
    assert row.tensorrt_us is not None
    assert row.cuda_us is not None
    assert 0 < row.tensorrt_us < row.cuda_us  # kernels are interpreted
    again = prepare(both, plans)
    assert (again.cached, again.tensorrt_us, again.cuda_us) == (True, row.tensorrt_us, row.cuda_us)
    with open_session(both, plans=plans) as session:
        (report,) = session.reports
        assert report.implementation == "tensorrt"
        assert f"TensorRT {row.tensorrt_us:.0f} us, kernels {row.cuda_us:.0f} us" in report.reason
    # The figures decide, and they are of these kernels.
    record = msgspec.json.decode(record_of(plans).read_bytes(), type=Record)
    assert record.compared is not None
    for changed, reason in (
        ({"tensorrt_us": 9e9}, "the kernels are faster: TensorRT 9000000000 us"),
        ({"kernels": "of another engine"}, "its plan was not timed against these kernels"),
    ):
        compared = msgspec.structs.replace(record.compared, **changed)
        write(plans, msgspec.structs.replace(record, compared=compared))
        with open_session(both, plans=plans) as session:
            assert session.reports[0].implementation == "cuda"
            assert reason in session.reports[0].reason
            assert session.reports[0].degraded == ""
            session.infer(feeds(SMALL))


def write(plans: Path, record: Record) -> None:
    record_of(plans).write_bytes(msgspec.json.encode(record))


@pytest.mark.parametrize(("tensorrt_us", "faster"), [(9.9, True), (10.0, False), (10.1, False)])
def test_a_plan_runs_if_it_is_faster(tensorrt_us: float, faster: bool) -> None:
    compared = Comparison(kernels="", tensorrt_us=tensorrt_us, cuda_us=10.0)
    assert compared.tensorrt_is_faster == faster


@pytest.mark.parametrize(
    ("failure", "problem"),
    [
        ("parse", "cannot read the segment: Unsupported ONNX operator Foo"),
        ("segfault", "crashed (SIGSEGV) while it built the segment"),
        ("type", "is float32 in the engine, and INT32 in this TensorRT"),
        ("crash", "not timed against its kernels: TensorRT crashed (SIGSEGV) while the segment"),
    ],
)
def test_what_tensorrt_refuses_leaves_the_kernels_in_use(
    failure: str, problem: str, both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv("TENSORRT_DOUBLE_FAIL", failure)
    row = prepare(both, tmp_path / "plans")
    assert row.problem is not None
    assert problem in row.problem
    monkeypatch.delenv("TENSORRT_DOUBLE_FAIL")
    with open_session(both, plans=tmp_path / "plans") as session:
        (report,) = session.reports
        session.infer(feeds(SMALL))
    assert report.implementation == "cuda"
    assert "TensorRT refused it on this board" in report.reason
    assert prepare(both, tmp_path / "plans").cached


@pytest.mark.parametrize(
    ("ended", "problem", "cached"),
    [
        (Ended(answer=b'{"problem": "the GPU has no room"}'), "the GPU has no room", False),
        (Ended(answer=b"no JSON"), "the timing gave no answer", False),
        (Ended(problem="killed", passing=True), "killed", False),
        (Ended(problem="it hung", limit_s=60.0), "it hung", True),
    ],
)
def test_a_plan_that_is_not_timed_waits_for_another_time(
    ended: Ended, problem: str, cached: bool, both: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install("10.3.0", tmp_path, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(
            prepare_module,
            "run_child",
            lambda task, *rest: ended if task is TIMING else run_child(task, *rest),
        )
        for again in (False, cached):
            row = prepare(both, tmp_path / "plans")
            assert row.problem is not None
            assert f"not timed against its kernels: {problem}" in row.problem
            assert row.cached == again
    times = b'{"tensorrt_us": 2.0, "cuda_us": 1.0}'
    monkeypatch.setattr(prepare_module, "run_child", lambda *_: Ended(answer=times))
    if not cached:  # the plan is there: nothing is built
        row = prepare(both, tmp_path / "plans")
        assert (row.problem, row.cached, row.kernels_run) == (None, False, True)


def test_a_refusal_without_kernels_is_degraded(
    alone: dict[str, BuildResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv("TENSORRT_DOUBLE_FAIL", "parse")
    prepare(alone["fp16"].path, tmp_path / "plans")
    with open_session(alone["fp16"].path, plans=tmp_path / "plans") as session:
        (report,) = session.reports
    assert report.implementation == "portable"
    assert "segment gpu.0 runs as portable, not through TensorRT: " in report.degraded


@pytest.mark.parametrize(("l4t", "degraded"), [("", False), ("36.4.3", True)])
def test_kernels_that_do_not_run_on_a_jetson_are_degraded(
    l4t: str, degraded: bool, both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = replace(read_board(), l4t=l4t)
    monkeypatch.setattr("device.runtime.executors.table.read_board", lambda: board)
    monkeypatch.setattr("device.runtime.executors.cuda.device_sm", lambda: 72)
    with open_session(both, plans=tmp_path / "none") as session:
        (report,) = session.reports
    assert report.implementation == "portable"
    message = "cuda: its kernels are for sm_87, this GPU is sm_72"
    assert message in report.reason
    assert ("segment gpu.0 runs as portable, not on the GPU: " in report.degraded) == degraded
    assert (message in report.degraded) == degraded


def test_a_session_gives_back_all_of_the_gpu(
    alone: dict[str, BuildResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    gpu: cuda_double.CudaDouble,
) -> None:  # fmt: skip
    install("10.3.0", tmp_path, monkeypatch)
    prepare(alone["fp16"].path, tmp_path / "plans")
    with open_session(alone["fp16"].path, plans=tmp_path / "plans"):
        assert gpu.memory
    monkeypatch.setenv("TENSORRT_DOUBLE_FAIL", "load")
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    with open_session(alone["fp16"].path, plans=tmp_path / "plans") as session:
        assert session.reports[0].implementation == "portable"
    gc.collect()
    assert not gpu.memory
    assert list(gpu.streams) == [0]


# --- the time of the whole engine


def test_the_time_of_the_whole_engine_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(tmp_path, "int8", "tensorrt", dla=True).path
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv("TENSORRT_DOUBLE_FAIL", "hang")
    limits = Limits(60, None, 1)
    with open_engine(engine) as opened:
        job = Job(opened, tmp_path / "plans", read_board(), limits, lambda *_: None)
        rows = prepare_engine(job)
        assert len(rows) == 2  # the first is ended, the second not begun
        for row in rows:
            assert row.problem is not None
            assert "the preparation as a whole took longer than 1 s" in row.problem
            assert "`tandem-agent prepare --total-timeout-s`" in row.problem
        monkeypatch.delenv("TENSORRT_DOUBLE_FAIL")
        rows = prepare_engine(replace(job, limits=Limits(60)))  # tried again without being asked
    assert [row.problem for row in rows] == [None, None]


# --- the engine


def test_the_build_says_what_runs_on_the_board(alone: dict[str, BuildResult], both: Path) -> None:
    assert "gpu.0: no kernels, only a form for TensorRT" in alone["int8"].report
    with open_engine(both) as opened:
        text = manifest_text(opened.manifest)
        purposes = bytes_by_purpose(opened.manifest, opened.entries)
    assert "carries tensorrt_gpu, cuda, portable" in text
    assert purposes["models for TensorRT"] > 0
    with open_engine(alone["int8"].path) as opened:
        assert "GPU kernels" not in bytes_by_purpose(opened.manifest, opened.entries)


@pytest.mark.parametrize(
    ("version", "form"),
    [
        ("8.4.1", None), ("8.5.0", "ranged"), ("8.6.2", "ranged"), ("10.7.0", "ranged"),
        ("10.8.0", "typed"), ("10.13.3", "typed"), ("11.4.0", "typed"), ("12.0.0", "typed"),
    ],
)  # fmt: skip
def test_each_release_takes_one_form_or_none(version: str, form: str | None) -> None:
    assert find_gpu_release(version).form == form


def test_sizes_that_are_known_only_when_run_have_no_form(tmp_path: Path) -> None:
    model = save(tmp_path / "m.onnx", [node("Relu", "x", "y")], {"x": [1, 4]}, {"y": [1, 4]}, {})
    (piece,) = extract_segments(import_model(model).model, {"Relu_y": "gpu.0"}, ["gpu.0"])
    for shape, reason in (((1, 4), None), ((1, None), "the size of tensor 'y' is known only")):
        tensors = {
            "x": TensorInfo(name="x", dtype="float32", shape=(1, 4)),
            "y": TensorInfo(name="y", dtype="float32", shape=shape),
        }
        form = tensorrt_gpu_segment(piece, tensors, "fp16")
        assert isinstance(form, str) == (reason is not None)
        if reason is not None:
            assert reason in str(form)


def test_a_weight_beyond_fp16_has_a_form_for_older_releases_alone(tmp_path: Path) -> None:
    weights = {"w": np.full((1, 4), 1e5, np.float32)}
    nodes = [node("Mul", "x w", "y")]
    model = save(tmp_path / "m.onnx", nodes, {"x": [1, 4]}, {"y": [1, 4]}, weights)
    (piece,) = extract_segments(import_model(model).model, {"Mul_y": "gpu.0"}, ["gpu.0"])
    tensors = {n: TensorInfo(name=n, dtype="float32", shape=(1, 4)) for n in ("x", "y")}
    form = tensorrt_gpu_segment(piece, tensors, "fp16")
    assert not isinstance(form, str)
    assert isinstance(form.implementation, TensorRTGpu)
    assert form.implementation.ranged is not None
    assert form.implementation.typed is None
    assert "beyond the largest float16" in form.implementation.typed_problem


def node(op: str, inputs: str, output: str) -> onnx.NodeProto:
    return onnx.helper.make_node(op, inputs.split(), [output], name=f"{op}_{output}")


def test_a_form_that_is_not_there_says_why() -> None:
    form = TensorRTGpu(precision="fp16", ranged_problem="it is too wide", typed_problem="so wide")
    board = replace(read_board(), tensorrt="10.3.0")
    with pytest.raises(SessionError, match="it is too wide"):
        form_for(form, board)
    with pytest.raises(SessionError, match="so wide"):
        form_for(form, replace(board, tensorrt="10.13.0"))
    with pytest.raises(SessionError, match=r"older than 8\.5"):
        form_for(form, replace(board, tensorrt="8.4.0"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranged": None}, "ranged needs a form, or the reason"),
        ({"typed_problem": "why"}, "typed needs a form, or the reason"),
        ({"ranged": None, "typed": None, "ranged_problem": "a", "typed_problem": "b"}, "no form"),
        ({"ranges": {"x": 0.0}}, "has the range 0.0; it must be above 0"),
    ],
)
def test_an_implementation_is_whole(change: dict, message: str, both: Path) -> None:
    with open_engine(both) as opened, pytest.raises(EngineError, match=message):
        check_manifest(changed(opened.manifest, **change), opened.entries)


def changed(manifest: Manifest, **change: object) -> Manifest:
    (segment,) = manifest.segments
    others = [i for i in segment.implementations if not isinstance(i, TensorRTGpu)]
    (form,) = [i for i in segment.implementations if isinstance(i, TensorRTGpu)]
    implementations = (msgspec.structs.replace(form, **change), *others)
    segment = msgspec.structs.replace(segment, implementations=implementations)
    return msgspec.structs.replace(manifest, segments=(segment,))
