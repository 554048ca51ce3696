"""From ONNX file to running engine: models made by others, determinism, and bad input."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.version_converter
import pytest
from click.testing import CliRunner
from model_fixtures import save, small_convnet
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from calibration.errors import CalibrationError
from calibration.table import read_table
from device.engine.file import open_engine
from device.engine.manifest import DimRange, Portable
from device.errors import EngineError, ProfileError, SessionError, TandemError
from device.runtime.session import Session
from toolkit.cli.main import tandem as command_line
from toolkit.engine.build import BuildOptions, BuildResult, build_engine
from toolkit.errors import BuildError, ImportModelError
from toolkit.quantize.ranges.measure import RangeOptions

LIGHT = (
    "bvlc_alexnet",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "resnet50",
    "shufflenet",
    "squeezenet",
    "vgg19",
    "zfnet512",
)


def infer(engine: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with open_engine(engine) as opened, Session(opened) as session:
        return session.infer(feeds)


def ramp(shape: tuple[int, ...]) -> np.ndarray:
    """The input that the onnx wheel's expected outputs were made with."""
    size = int(np.prod(shape))
    return (np.arange(size, dtype=np.float32) / size).reshape(shape)


def calibrated(tmp_path: Path, rng: np.random.Generator, profile: str) -> tuple[Path, BuildResult]:
    model = small_convnet(tmp_path / "m.onnx", rng)
    samples = [{"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)} for _ in range(4)]
    out = tmp_path / "m.engine"
    return model, build_engine(
        model, profile, out, BuildOptions(data=samples, ranges=RangeOptions("minmax"))
    )


@pytest.fixture(scope="module")
def orin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BuildResult]:
    """A model and its INT8 engine on the GPU and the DLA of agx-orin-64gb, to be read only."""
    rng = np.random.default_rng()
    return calibrated(tmp_path_factory.mktemp("orin"), rng, "agx-orin-64gb")


# The largest has 574 MB; FP32 leaves the DLA of the first profile idle, as the second has none.
LARGE = (
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "vgg19", "zfnet512",
)  # fmt: skip


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(
    ("name", "profile"),
    [
        *(
            pytest.param(name, "agx-orin-64gb", marks=[pytest.mark.slow] * (name in LARGE))
            for name in LIGHT
        ),
        *(
            pytest.param(name, "orin-nano-8gb", marks=[pytest.mark.slow] * (name != "squeezenet"))
            for name in LIGHT
        ),
    ],
)
def test_light_models_give_the_shipped_outputs_in_fp32(
    tmp_path: Path, light_models: Path, name: str, profile: str
) -> None:
    out = tmp_path / "light.engine"
    model = light_models / f"light_{name}.onnx"
    result = build_engine(model, profile, out, BuildOptions(precision="fp32"))
    (shape,) = (t.shape for t in result.manifest.tensors if t.name in result.manifest.inputs)
    x = ramp(tuple(d for d in shape if isinstance(d, int)))
    (actual,) = infer(out, {result.manifest.inputs[0]: x}).values()
    expected = numpy_helper.to_array(
        onnx.load_tensor(str(light_models / f"light_{name}_output_0.pb"))
    )
    out.unlink()
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("squeezenet", False),
        # It compiles for many seconds, and nothing here runs the kernels.
        pytest.param("squeezenet", True, marks=pytest.mark.slow),
        pytest.param("resnet50", False, marks=pytest.mark.slow),
    ],
)
def test_light_models_split_between_gpu_and_dla_in_int8(
    tmp_path: Path,
    light_models: Path,
    rng: np.random.Generator,
    name: str,
    kernels: bool,
) -> None:
    model = light_models / f"light_{name}.onnx"
    graph_input = {"squeezenet": "data_0", "resnet50": "gpu_0/data_0"}[name]
    samples = [{graph_input: rng.uniform(0, 1, (1, 3, 224, 224)).astype(np.float32)}]
    out = tmp_path / "m.engine"
    options = BuildOptions(data=samples, ranges=RangeOptions("minmax"), kernels=kernels)
    result = build_engine(model, "agx-orin-64gb", out, options)
    processors = {segment.processor for segment in result.manifest.segments}
    assert processors == {"gpu", "dla0"}
    crossing = {c.tensor for c in result.manifest.crossings}
    assert all(t.dtype == "int8" for t in result.manifest.tensors if t.name in crossing)
    assert infer(out, samples[0])


def test_int8_engine_matches_the_reference_of_its_own_graph(
    orin: tuple[Path, BuildResult], rng: np.random.Generator
) -> None:
    model, result = orin
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    actual = infer(result.path, {"x": x})["y"]
    env: dict[str, np.ndarray] = {"x": x}
    with open_engine(result.path) as engine:
        for segment in engine.manifest.segments:
            portable = next(one for one in segment.implementations if isinstance(one, Portable))
            proto = onnx.load_model_from_string(engine.entry(portable.model).tobytes())
            for tensor in proto.graph.initializer:
                if tensor.name in portable.weights:
                    tensor.CopyFrom(
                        numpy_helper.from_array(engine.entry(tensor.name).copy(), tensor.name)
                    )
            feeds = {name: env[name] for name in segment.inputs}
            outputs = ReferenceEvaluator(proto).run(list(segment.outputs), feeds)
            env.update(zip(segment.outputs, outputs, strict=True))
    plain = ReferenceEvaluator(onnx.load(model)).run(None, {"x": x})[0]
    # Integer kernels round the same sums as the reference; they may differ by a step where a sum
    # falls on the edge between two, and a step is far below what INT8 costs.
    int8_error = np.abs(env["y"] - plain).max()
    assert np.abs(actual - env["y"]).max() <= max(int8_error, 0.02 * np.abs(plain).max())
    assert 0 < int8_error < 0.1 * np.abs(plain).max()


@pytest.mark.parametrize(
    "profile",
    [
        *("laptop", "orin-nano-8gb", "agx-orin-64gb"),
        pytest.param("agx-xavier-32gb", marks=pytest.mark.slow),
    ],
)
def test_each_profile_uses_the_processors_that_it_has(
    tmp_path: Path, rng: np.random.Generator, profile: str, request: pytest.FixtureRequest
) -> None:
    if profile == "agx-orin-64gb":
        _, result = request.getfixturevalue("orin")
    else:
        request.getfixturevalue("without_kernels")
        _, result = calibrated(tmp_path, rng, profile)
    used = {segment.processor for segment in result.manifest.segments}
    allowed = {"laptop": {"cpu"}, "orin-nano-8gb": {"gpu"}}.get(profile, {"gpu", "dla0", "dla1"})
    assert used <= allowed
    assert {row.node for row in result.manifest.plan} == {
        node for segment in result.manifest.segments for node in segment.nodes
    }
    assert all(row.reason for row in result.manifest.plan)


def test_two_builds_in_two_processes_give_the_same_bytes(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    for index in range(3):
        sample = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
        np.save(tmp_path / f"{index}.npy", sample)
    here, there = tmp_path / "here.engine", tmp_path / "there.engine"
    words = ["build", str(model), "--profile", "agx-orin-64gb", "--data", str(tmp_path), "-o"]
    done = CliRunner().invoke(command_line, [*words, str(here)])
    assert done.exit_code == 0, done.output
    other_seed = next(seed for seed in ("1", "2") if seed != os.environ.get("PYTHONHASHSEED"))
    environment = {**os.environ, "PYTHONHASHSEED": other_seed}
    command = [sys.executable, "-m", "toolkit.cli", *words, str(there)]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    assert here.read_bytes() == there.read_bytes()


def test_a_dynamic_batch_runs_at_every_size_of_its_range(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    weight = rng.normal(size=(4, 3, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    path = save(
        tmp_path / "m.onnx", nodes, {"x": ["n", 3, 8, 8]}, {"y": ["n", 4, 6, 6]}, {"w": weight}
    )
    out = tmp_path / "m.engine"
    dims = (DimRange(name="n", min=1, opt=2, max=4),)
    build_engine(path, "agx-orin-64gb", out, BuildOptions(dims=dims, kernels=False))
    with open_engine(out) as engine, Session(engine) as session:
        for batch in (1, 2, 3, 4):
            x = rng.normal(size=(batch, 3, 8, 8)).astype(np.float32)
            expected = ReferenceEvaluator(onnx.load(path)).run(None, {"x": x})[0]
            np.testing.assert_allclose(session.infer({"x": x})["y"], expected, atol=1e-4)
        with pytest.raises(SessionError, match="x"):
            session.infer({"x": np.zeros((5, 3, 8, 8), np.float32)})


def test_a_data_dependent_output_has_an_unknown_dimension(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["i"]), helper.make_node("Neg", ["i"], ["y"])]
    model = save(tmp_path / "m.onnx", nodes, {"x": [2, 3]}, {"i": [2, "k"]})
    graph = onnx.load(model)
    del graph.graph.node[1]
    graph.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    onnx.save(graph, model)
    build_engine(model, "laptop", tmp_path / "m.engine")
    x = np.array([[0, 1, 0], [2, 0, 3]], np.float32)
    np.testing.assert_array_equal(infer(tmp_path / "m.engine", {"x": x})["i"], np.nonzero(x))


# Pads as inputs without values, and slopes that no longer broadcast.
NOT_RAISED_BY_ONNX = ("Pad2d", "PReLU_1d_multi", "PReLU_2d_multi", "PReLU_3d_multi")


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(
    ("every", "at_least"), [(4, 17), pytest.param(1, 70, marks=pytest.mark.slow)]
)
def test_onnx_backend_models_of_others_build_and_agree(
    every: int, at_least: int, light_models: Path, tmp_path: Path
) -> None:
    """The pytorch-converted models of the onnx wheel (of opset 6) give the wheel's own outputs."""
    agreed = 0
    cases = sorted((light_models.parent / "pytorch-converted").iterdir())
    for case in cases[::every]:
        if any(part in case.name for part in NOT_RAISED_BY_ONNX):
            continue
        feeds, expected = [], []
        for kind, arrays in (("input", feeds), ("output", expected)):
            for file in sorted(case.glob(f"test_data_set_0/{kind}_*.pb")):
                arrays.append(numpy_helper.to_array(onnx.load_tensor(str(file))))
        raised = onnx.version_converter.convert_version(onnx.load(case / "model.onnx"), 13)
        onnx.save(raised, tmp_path / "m.onnx")
        result = build_engine(tmp_path / "m.onnx", "agx-orin-64gb", tmp_path / "m.engine")
        inputs = dict(zip(result.manifest.inputs, feeds, strict=True))
        outputs = infer(tmp_path / "m.engine", inputs)
        for actual, requested in zip(outputs.values(), expected, strict=True):
            np.testing.assert_allclose(actual, requested, rtol=1e-3, atol=1e-5, err_msg=case.name)
        agreed += 1
    assert agreed >= at_least


def test_int8_without_ranges_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    with pytest.raises(BuildError, match="INT8 needs activation ranges: give calibration data"):
        build_engine(model, "laptop", tmp_path / "m.engine", BuildOptions(precision="int8"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx"]


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        (np.float16, r"computes in FLOAT16 \(node 'sum', Add\)"),
        (np.int32, "no float32 tensor that INT8 could stand for"),
    ],
)
def test_int8_of_a_model_without_float32_is_refused(
    dtype: type[np.generic], says: str, tmp_path: Path
) -> None:
    nodes = [helper.make_node("Add", ["x", "x"], ["y"], name="sum")]
    code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    path = save(tmp_path / "m.onnx", nodes, {"x": [2]}, {"y": [2]}, dtype=code)
    options = BuildOptions(data=[{"x": np.ones(2, dtype)}])
    with pytest.raises(BuildError, match=says):
        build_engine(path, "laptop", tmp_path / "m.engine", options)


def test_a_sample_of_another_shape_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    options = BuildOptions(data=[{"x": np.zeros((1, 3, 32, 31), np.float32)}])
    with pytest.raises(CalibrationError, match=r"sample 0, input 'x', is float32 of shape"):
        build_engine(model, "laptop", tmp_path / "m.engine", options)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("m.onnx", "is the model itself"),
        (".", "is a folder; name the engine's file"),
        ("none/m.engine", "there is no folder .*none; make it"),
    ],
)
def test_an_engine_is_not_written_where_it_must_not_be(
    tmp_path: Path, rng: np.random.Generator, out: str, message: str
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    before = model.read_bytes()
    with pytest.raises(BuildError, match=message):
        build_engine(model, "laptop", tmp_path / out)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("m.onnx", before)]


def test_an_error_in_what_is_reported_leaves_no_engine(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notes say what nodes in floating point cost, for which a plan is made once more."""

    def fail(*_: object) -> None:
        raise BuildError("no plan")

    monkeypatch.setattr("toolkit.engine.build.kept_cost_notes", fail)
    model = small_convnet(tmp_path / "m.onnx", rng)
    with pytest.raises(BuildError, match="no plan"):
        build_engine(model, "laptop", tmp_path / "m.engine")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_a_table_is_not_written_over_the_model(tmp_path: Path, rng: np.random.Generator) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    before, data = model.read_bytes(), [{"x": np.zeros((1, 3, 32, 32), np.float32)}]
    options = BuildOptions(data=data, save_table=model)
    with pytest.raises(BuildError, match="is the model itself"):
        build_engine(model, "laptop", tmp_path / "m.engine", options)
    assert model.read_bytes() == before


def test_a_table_of_another_model_is_said(tmp_path: Path, rng: np.random.Generator) -> None:
    model, result = calibrated(tmp_path, rng, "laptop")
    assert result.notes == ()
    assert result.calibration is not None
    options = BuildOptions(table=result.calibration.table)
    assert build_engine(model, "laptop", result.path, options).notes == ()
    small_convnet(model, rng)
    notes = build_engine(model, "laptop", result.path, options).notes
    (note,) = notes
    assert note.startswith("the calibration table was measured on another model file, with SHA-256")
    assert note.endswith(": if their weights differ, calibrate this one")


def test_samples_of_other_inputs_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    samples = [{"z": np.zeros((1, 3, 32, 32), np.float32)}]
    with pytest.raises(
        CalibrationError, match=r"sample 0 feeds \['z'\], but the model's inputs are"
    ):
        build_engine(model, "laptop", tmp_path / "m.engine", BuildOptions(data=samples))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("profile", ProfileError, "orin-nano-8gb"),
        ("empty-data", CalibrationError, "empty"),
        ("corrupt-pictures", CalibrationError, "a.jpg"),
        ("truncated", ImportModelError, "m.onnx"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing_behind(
    tmp_path: Path, rng: np.random.Generator, change: str, error: type[TandemError], message: str
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    data = tmp_path / "empty"
    data.mkdir()
    profile = "orin-nano-8g" if change == "profile" else "agx-orin-64gb"
    if change == "corrupt-pictures":
        (data / "a.jpg").write_bytes(b"\xff\xd8 not a picture")
    if change == "truncated":
        model.write_bytes(model.read_bytes()[:500])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=message) as caught:
        build_engine(model, profile, tmp_path / "m.engine", BuildOptions(data=data))
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_engine_of_another_profile_is_refused(orin: tuple[Path, BuildResult]) -> None:
    _, result = orin
    with (
        open_engine(result.path) as engine,
        pytest.raises(SessionError, match="agx-orin-64gb"),
    ):
        Session(engine, profile="orin-nano-8gb")


def test_a_build_that_fails_keeps_the_old_engine(tmp_path: Path, rng: np.random.Generator) -> None:
    model, result = calibrated(tmp_path, rng, "laptop")
    before = result.path.read_bytes()
    model.write_bytes(model.read_bytes()[:200])
    with pytest.raises(ImportModelError):
        build_engine(model, "laptop", result.path)
    assert result.path.read_bytes() == before
    with pytest.raises(EngineError):
        open_engine(model)


def test_a_build_that_fails_after_calibration_keeps_the_table(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    samples = [{"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)} for _ in range(2)]
    out, table = tmp_path / "m.engine", tmp_path / "t.json"
    options = BuildOptions(data=samples, ranges=RangeOptions("minmax"), save_table=table)

    def in_the_way(step: str, share: float) -> None:
        if step == "write" and not out.exists():
            (out / "full").mkdir(parents=True)

    with pytest.raises(BuildError, match=r"m\.engine cannot take the engine: .*; give it another"):
        build_engine(model, "laptop", out, options, in_the_way)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.engine", "m.onnx", "t.json"]
    build_engine(model, "laptop", tmp_path / "2.engine", BuildOptions(table=read_table(table)))
    with pytest.raises(BuildError, match="Both data and a calibration table"):
        build_engine(
            model,
            "laptop",
            tmp_path / "3.engine",
            BuildOptions(data=samples, table=read_table(table)),
        )


def test_the_safetensors_library_opens_an_engine(orin: tuple[Path, BuildResult]) -> None:
    from safetensors import safe_open

    _, result = orin
    with safe_open(result.path, framework="np") as file, open_engine(result.path) as engine:
        assert set(file.keys()) == set(engine.entries)
        for name in file.keys():  # noqa: SIM118  (not a dict)
            np.testing.assert_array_equal(file.get_tensor(name), engine.entry(name))


def test_what_no_runtime_can_run_is_refused_by_node(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"], name="relu")]
    dtype = int(onnx.TensorProto.INT16)  # onnxruntime's takes 8 and 32 bits only
    path = save(tmp_path / "m.onnx", nodes, {"x": [2]}, {"y": [2]}, dtype=dtype)
    with pytest.raises(BuildError, match=r"m\.onnx cannot be run: .*'relu'"):
        build_engine(path, "laptop", tmp_path / "m.engine")
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_a_constant_model_of_others_builds(tmp_path: Path) -> None:
    """The folded graph has no node but those that own the outputs."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Neg", ["x"], ["y"]),
    ]
    model = save(tmp_path / "m.onnx", nodes, {"x": [2, 3]}, {"y": [2, 3]})
    graph = onnx.load(model)
    graph.graph.output.append(helper.make_tensor_value_info("s", onnx.TensorProto.INT64, [2]))
    onnx.save(graph, model)
    build_engine(model, "agx-orin-64gb", tmp_path / "m.engine", BuildOptions(kernels=False))
    outputs = infer(tmp_path / "m.engine", {"x": np.ones((2, 3), np.float32)})
    np.testing.assert_array_equal(outputs["s"], [2, 3])
    np.testing.assert_array_equal(outputs["y"], -np.ones((2, 3)))
