"""GPU and DLA segments on one stream: what is copied, converted and captured, and what comes out.

tests/fixtures/cuda_double.py stands for the driver, tests/fixtures/tensorrt_double for TensorRT.
"""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import cuda_double
import numpy as np
import pytest
from model_fixtures import small_convnet
from msgspec.structs import replace
from tensorrt_fixtures import install, prepare_all

from device.engine.cuda_manifest import Cuda, Workspace
from device.engine.file import open_engine
from device.engine.manifest import Manifest
from device.engine.manifest_check import check_manifest
from device.engine.purposes import bytes_by_purpose, without_portable
from device.engine.tensorrt_manifest import TensorRT
from device.errors import EngineError, SessionError
from device.runtime.chain_steps import (
    Borders,
    Format,
    Member,
    Step,
    TensorBuffer,
    in_graphs,
    plan_steps,
)
from device.runtime.session import open_session
from device.session import DeviceArray, SessionPool
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import PlanOptions


@pytest.fixture
def gpu() -> Iterator[cuda_double.CudaDouble]:
    with cuda_double.installed() as double:
        yield double
    sys.modules.pop("tensorrt", None)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network in INT8, and in FP16: with two DLA segments between three of kernels."""
    folder, rng = tmp_path_factory.mktemp("engines"), np.random.default_rng(5)
    model = small_convnet(folder / "m.onnx", rng, size=8)
    data = [{"x": rng.normal(size=(1, 3, 8, 8)).astype(np.float32)} for _ in range(4)]
    with cuda_double.interpreted_cubins():
        for precision in ("int8", "fp16"):
            options = BuildOptions(
                data=data if precision == "int8" else None,
                precision=precision,
                accept_loss=True,
                plan=PlanOptions(forced=Forced(dla=("all",))),
            )
            build_engine(model, "orin-nx-16gb", folder / f"{precision}.engine", options)
    return folder


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_a_line_computes_what_its_segments_do_one_by_one(
    precision: str, engines: Path, gpu: cuda_double.CudaDouble, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator,
) -> None:  # fmt: skip
    install("10.3.0", tmp_path, monkeypatch)
    engine = engines / f"{precision}.engine"
    rows = prepare_all(engine, tmp_path / "plans")
    assert [row.problem for row in rows] == [None] * len(rows)
    feeds = {"x": rng.normal(size=(1, 3, 8, 8)).astype(np.float32)}
    with open_session(engine, plans=tmp_path / "plans") as session:
        kinds = {report.processor: report.implementation for report in session.reports}
        assert kinds == {"dla0": "tensorrt", "gpu": "cuda"}
        gpu.calls.clear()
        inputs, outputs = session.arrays()
        inputs["x"][:] = feeds["x"]
        actual = session.infer(inputs, outputs)["y"]
        calls = [call for call in gpu.calls if call in ("task", "cuGraphLaunch")]
        waits = gpu.calls.count("cuStreamSynchronize")
        assert actual is outputs["y"]
        assert np.array_equal(session.infer(feeds)["y"], actual)
        copies = [call for call in gpu.calls if "Memcpy" in call]
    # Graphs end at each task of the DLA, and the host waits once.
    assert calls == {
        "int8": ["cuGraphLaunch", "task", "cuGraphLaunch"],
        "fp16": ["cuGraphLaunch", "task"] * 2 + ["cuGraphLaunch"],
    }[precision]  # fmt: skip
    assert waits == 1
    # Copies are recorded into graphs once: that of the input, and that of the output.
    assert copies == ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"]
    with open_session(engine, plans=tmp_path / "none") as session:
        assert {report.implementation for report in session.reports} == {"cuda"}
        on_gpu = session.infer(feeds)["y"]
    # The double computes between the ports in floating point: a step or two of INT8 apart.
    share = 0.06 if precision == "int8" else 0.01
    assert np.abs(actual - on_gpu).max() < share * np.abs(on_gpu).max()


# --- the plan of steps

INT8 = ("int8", "chw32", 0.5)
OTHER = ("int8", "chw32", 0.25)


def kernels(name: str, inputs: str, outputs: str) -> Member:
    """A segment of kernels: all in C order."""
    plain = [tuple((t, None) for t in names.split()) for names in (inputs, outputs)]
    return Member(name, plain[0], plain[1], captured=True)


def dla(name: str, inputs: str, outputs: str, form: Format = INT8) -> Member:
    formats = [tuple((t, form) for t in names.split()) for names in (inputs, outputs)]
    return Member(name, formats[0], formats[1], captured=False)


STEPS = [
    # What the host gives is uploaded into the kernels' own place, and taken from there.
    ([kernels("a", "x", "y")], "upload x>a/x, run a, download y<a/y"),
    # A DLA between two segments of kernels: nothing passes over the host.
    (
        [kernels("a", "x", "t"), dla("d", "t", "u"), kernels("b", "u", "y")],
        "upload x>a/x, run a, enter t a/t>d/t, run d, leave u d/u>b/u, run b, download y<b/y",
    ),
    # Two DLA segments with one format: the second reads where the first wrote.
    (
        [dla("d", "x", "t"), dla("e", "t", "y")],
        "upload x>/x, enter x /x>d/x, run d, use t d/t, run e, leave y e/y>/y, download y</y",
    ),
    # Of another scale: over C order.
    (
        [dla("d", "x", "t"), dla("e", "t", "y", OTHER)],
        "upload x>/x, enter x /x>d/x, run d, leave t d/t>/t, enter t /t>e/t, run e, "
        "leave y e/y>/y, download y</y",
    ),
    # Two readers of an upload: once to the GPU.
    (
        [kernels("a", "x", "t"), kernels("b", "x t", "y")],
        "upload x>/x, copy x /x>a/x, run a, copy x /x>b/x, copy t a/t>b/t, run b, download y<b/y",
    ),
    # Kernels overwrite their inputs: the second reader gets its own from the DLA.
    (
        [dla("d", "x", "t"), kernels("a", "t", "u"), kernels("b", "t u", "y")],
        "upload x>/x, enter x /x>d/x, run d, leave t d/t>a/t, run a, leave t d/t>b/t, "
        "copy u a/u>b/u, run b, download y<b/y",
    ),
]


@pytest.mark.parametrize(("members", "expected"), STEPS)
def test_steps(members: list[Member], expected: str) -> None:
    steps = plan_steps(members, Borders(host_inputs=("x",), host_outputs=("y",)))
    assert ", ".join(map(text, steps)) == expected


def test_tensors_of_the_caller_are_read_and_written_where_they_are() -> None:
    members = [dla("d", "x", "t"), kernels("a", "t", "y")]
    steps = plan_steps(members, Borders(caller_inputs=("x",), caller_outputs=("y", "t")))
    assert ", ".join(map(text, steps)) == (
        "enter x caller/x>d/x, run d, leave t d/t>a/t, run a, copy y a/y>caller/y, "
        "leave t d/t>caller/t"
    )


def test_graphs_end_at_the_tasks_of_a_dla() -> None:
    members = [kernels("a", "x", "t"), dla("d", "t", "u"), dla("e", "u", "v"),
               kernels("b", "v", "y")]  # fmt: skip
    steps = plan_steps(members, Borders(host_inputs=("x",), host_outputs=("y",)))
    runs = [" ".join(step.kind for step in run) for run in in_graphs(steps, members)]
    assert runs == ["upload run enter", "run", "run", "leave run download"]


def text(step: Step) -> str:
    def place(one: TensorBuffer | None) -> str:
        return "" if one is None else f"{one.owner}/{one.tensor}"

    if step.kind == "run":
        return f"run {step.segment}"
    if step.kind == "upload":
        return f"upload {step.tensor}>{place(step.target)}"
    if step.kind == "download":
        return f"download {step.tensor}<{place(step.source)}"
    if step.kind == "use":
        return f"use {step.tensor} {place(step.source)}"
    return f"{step.kind} {step.tensor} {place(step.source)}>{place(step.target)}"


def test_a_line_runs_on_addresses_of_the_caller(
    engines: Path, gpu: cuda_double.CudaDouble, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator,
) -> None:  # fmt: skip
    install("10.3.0", tmp_path, monkeypatch)
    engine = engines / "int8.engine"
    prepare_all(engine, tmp_path / "plans")
    x = rng.normal(size=(1, 3, 8, 8)).astype(np.float32)
    with open_session(engine, plans=tmp_path / "plans") as session:
        expected = session.infer({"x": x})["y"]
        (stage,) = session._stages
        assert stage.chain is not None
        source, target = gpu.take(x.nbytes), gpu.take(expected.nbytes)
        gpu.memory[source][:] = x.reshape(-1).view(np.uint8)
        gpu.calls.clear()
        stage.chain.enqueue({"x": source}, {"y": target}, {})
        assert "cuStreamSynchronize" not in gpu.calls
        assert not any("DtoH" in call or "HtoD" in call for call in gpu.calls)
        stage.chain.wait()
        assert np.array_equal(gpu.memory[target].view(np.float32).reshape(1, 10), expected)
        # An output whose array only the run can make is the caller's to keep.
        result = stage.chain.run({"x": x}, {"y": None}, {})["y"]
        stage.chain.run({"x": x + 1}, {"y": None}, {})
        assert np.array_equal(result, expected)


def test_frames_on_two_streams_do_not_wait_for_each_other(
    engines: Path, gpu: cuda_double.CudaDouble, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator,
) -> None:  # fmt: skip
    install("10.3.0", tmp_path, monkeypatch)
    engine = engines / "int8.engine"
    prepare_all(engine, tmp_path / "plans")
    frames = [rng.normal(size=(1, 3, 8, 8)).astype(np.float32) for _ in range(2)]
    with open_session(engine, plans=tmp_path / "plans") as session:
        expected = [session.infer({"x": x})["y"] for x in frames]
    streams = [0x900000, 0x900008]
    gpu.streams |= {stream: [] for stream in streams}
    arrays = []
    for x in frames:
        arrays.append(DeviceArray(gpu.take(x.nbytes), x.shape, x.dtype))
        gpu.memory[int(arrays[-1])][:] = x.reshape(-1).view(np.uint8)
    with SessionPool(engine, plans=tmp_path / "plans") as pool:
        results = [
            pool.infer_on_device({"x": array}, stream=stream)["y"]
            for array, stream in zip(arrays, streams, strict=True)
        ]
        gpu._cuStreamSynchronize(streams[1])
        assert gpu.streams[streams[0]]  # the first frame has not run, and need not have
        assert np.array_equal(values(gpu, results[1]), expected[1])
        gpu._cuStreamSynchronize(streams[0])
        assert np.array_equal(values(gpu, results[0]), expected[0])


def values(gpu: cuda_double.CudaDouble, array: DeviceArray) -> np.ndarray:
    return gpu.memory[int(array)][: array.nbytes].view(array.dtype).reshape(array.shape)


# Of a chain with a DLA, and of kernels alone; 0 is a thread that has none.
@pytest.mark.parametrize(("foreign", "plans"), [(77, "plans"), (0, "plans"), (77, "none")])
def test_no_call_of_a_session_leaves_its_context_current(
    foreign: int, plans: str, engines: Path, gpu: cuda_double.CudaDouble, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install("10.3.0", tmp_path, monkeypatch)
    if plans == "plans":
        prepare_all(engines / "int8.engine", tmp_path / plans)
    x = np.zeros((1, 3, 8, 8), np.float32)
    gpu.current = foreign  # as pycuda.autoinit leaves it
    session = open_session(engines / "int8.engine", plans=tmp_path / plans)
    assert gpu.current == foreign
    for call in (
        lambda: session.infer({"x": x}),
        lambda: session.infer(*session.arrays()),
        lambda: session.segment_times_ms({"x": x}),
        session.close,
    ):
        call()
        gc.collect()
        assert gpu.current == foreign
    with pytest.raises(SessionError, match="closed"):
        session.infer({"x": x})


def test_a_session_gives_back_all_of_the_gpu(
    engines: Path, gpu: cuda_double.CudaDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    prepare_all(engines / "fp16.engine", tmp_path / "plans")
    with open_session(engines / "fp16.engine", plans=tmp_path / "plans"):
        assert gpu.memory
    gc.collect()
    assert not any((gpu.memory, gpu.graphs, gpu.kernels))
    assert list(gpu.streams) == [0]


def test_without_fallback_the_dla_segments_have_no_kernels(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    model = small_convnet(tmp_path / "m.onnx", rng)
    sizes = {}
    for fallback in (True, False):
        options = BuildOptions(
            precision="fp16",
            fallback=fallback,
            plan=PlanOptions(forced=Forced(dla=("all",))),
        )
        with cuda_double.interpreted_cubins():
            result = build_engine(model, "orin-nx-16gb", tmp_path / "e", options)
        with open_engine(tmp_path / "e") as opened:
            sizes[fallback] = bytes_by_purpose(opened.manifest, opened.entries)
            slim = without_portable(opened.manifest)
        kinds = {
            type(one).__name__
            for segment in slim.segments
            if segment.processor == "dla0"
            for one in segment.implementations
        }
        assert kinds == ({"TensorRT", "Cuda"} if fallback else {"TensorRT", "Portable"})
        assert ("fallback=False" in result.report) == fallback
    assert sizes[True]["GPU kernels in place of the DLA"] > 0
    assert "GPU kernels in place of the DLA" not in sizes[False]


# --- what an engine may ask of the board


def first_form(manifest: Manifest) -> tuple[int, TensorRT]:
    """The first DLA segment's place, and what TensorRT makes of it."""
    return next(
        (at, one)
        for at, segment in enumerate(manifest.segments)
        for one in segment.implementations
        if isinstance(one, TensorRT)
    )


def spoil(kernels: Cuda, what: str) -> Cuda:
    (source,) = kernels.inputs
    if what == "bytes":
        return replace(kernels, inputs=(replace(source, bytes=source.bytes - 64),))
    op, behind = kernels.works[0], kernels.workspace_bytes
    launch = op.tactics[0].launches[0]
    wrong = replace(launch, arguments=(Workspace(behind), *launch.arguments[1:]))
    tactic = replace(op.tactics[0], launches=(wrong,))
    works = (replace(op, tactics=(tactic,)),)
    return replace(kernels, works=works, workspace_bytes=behind + 256)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("count", "1 ports leave, 2 of them have kernels"),
        ("bytes", "bytes, its kernels"),
        ("address", "which is in none of its tensors"),
    ],
)
def test_kernels_of_a_port_touch_its_tensor_alone(what: str, message: str, engines: Path) -> None:
    with open_engine(engines / "fp16.engine") as opened:
        manifest, entries = opened.manifest, opened.entries
        at, form = first_form(manifest)
        broken = (
            replace(form, leave=form.leave * 2)
            if what == "count"
            else replace(form, enter=(spoil(form.enter[0], what), *form.enter[1:]))
        )
        segment = manifest.segments[at]
        others = tuple(one for one in segment.implementations if one is not form)
        segments = list(manifest.segments)
        segments[at] = replace(segment, implementations=(broken, *others))
        with pytest.raises(EngineError, match=message):
            check_manifest(replace(manifest, segments=tuple(segments)), entries)
