"""`import tandem`: what build, plan, calibrate and run_pipeline make of their arguments."""

import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
from model_fixtures import small_convnet
from msgspec.structs import replace

import configs
import tandem
from device.engine.file import open_engine, write_engine
from device.engine.preprocessing import Preprocessing
from device.engine.purposes import entries_read
from device.protocol.messages import ChildMessage, Ready
from device.update.bundle import ENGINE, LABELS, PIPELINE, write_bundle
from scripts.public_api import FILE, public_api
from toolkit.graph.max_memory import max_memory_bytes

MODELS = configs.ROOT / "models"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_convnet(tmp_path / "net.onnx", np.random.default_rng(0))


def samples(model: Path, count: int = 4) -> list[np.ndarray]:
    dims = onnx.load(model).graph.input[0].type.tensor_type.shape.dim
    shape = [dim.dim_value or 1 for dim in dims]
    rng = np.random.default_rng(1)
    return [rng.random(shape, np.float32) for _ in range(count)]


def test_an_engine_lies_beside_its_model_unless_told_otherwise(model: Path) -> None:
    result = tandem.build(model)
    assert result.path == model.with_suffix(".engine")
    assert result.manifest.provenance.precision == "fp32"
    assert str(result.path) in result.report


def test_the_memory_that_a_model_may_take_is_limited(model: Path) -> None:
    for call in (
        lambda limit: tandem.build(model, max_memory_bytes=limit),
        lambda limit: tandem.plan(model, profile="agx-orin-64gb", max_memory_bytes=limit),
        lambda limit: tandem.calibrate(model, samples(model), max_memory_bytes=limit),
    ):
        with pytest.raises(tandem.TandemError, match="max_memory_bytes is 0; give a number"):
            call(0)
    with pytest.raises(tandem.TandemError, match="`max_memory_bytes`"):
        tandem.build(model, max_memory_bytes=1000)
    assert max_memory_bytes() > 1000  # the limit ended with the call


def test_two_files_to_write_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(tandem.TandemError, match=r"two files.*'a\.engine' and out='.*b\.engine'"):
        tandem.build(model, "a.engine", out=tmp_path / "b.engine")
    assert not list(tmp_path.glob("*.engine"))


def test_a_model_in_memory_is_built_as_its_file_is(model: Path, tmp_path: Path) -> None:
    file = tandem.build(model, tmp_path / "a.engine").path
    memory = tandem.build(onnx.load(model), tmp_path / "b.engine").path
    feed = samples(model)[0]
    results = []
    for path in (file, memory):
        with tandem.open_session(path) as session:
            results.append(session.infer({session.inputs[0].name: feed}))
    for name, expected in results[0].items():
        np.testing.assert_array_equal(results[1][name], expected)


def test_a_model_in_memory_is_not_called_as_exporters_call_every_graph(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's graphs are all called main_graph."""
    monkeypatch.chdir(tmp_path)
    proto = onnx.load(model)
    proto.graph.name = "main_graph"
    assert tandem.build(proto).path == Path("model.engine")
    proto.graph.node[0].op_type = "NoSuchOperator"
    for out, name in ((None, "model"), (tmp_path / "doors.engine", "doors")):
        with pytest.raises(tandem.TandemError) as caught:
            tandem.build(proto, out)
        assert "main_graph" not in str(caught.value)
        assert f"{name}.onnx" in str(caught.value)
    proto.graph.name = "doors-v2"
    with pytest.raises(tandem.TandemError, match=r"doors-v2\.onnx"):
        tandem.plan(proto, profile="orin-nano-8gb")


def test_calibration_is_data_or_a_table_and_makes_int8(model: Path, tmp_path: Path) -> None:
    data = samples(model)
    table = tandem.calibrate(model, data, method="minmax", samples=3, out=tmp_path / "t.json")
    assert (table.method, table.samples) == ("minmax", 3)
    assert tandem.read_table(tmp_path / "t.json") == table
    for number, calibration in enumerate((data, table)):
        out = tmp_path / f"{number}.engine"
        built = tandem.build(model, out, calibration=calibration)
        assert built.manifest.provenance.precision == "int8"
    assert built.manifest.provenance.calibration is not None
    assert built.manifest.provenance.calibration.samples == 3


def test_arguments_go_before_options(model: Path, tmp_path: Path) -> None:
    options = tandem.BuildOptions(precision="fp16", data=samples(model))
    built = tandem.build(model, tmp_path / "m.engine", precision="fp32", options=options)
    assert built.manifest.provenance.precision == "fp32"


def test_a_plan_needs_no_board_and_takes_the_precision(model: Path) -> None:
    plan = tandem.plan(model, profile="agx-orin-64gb", precision="fp16")
    assert (plan.name, plan.profile, plan.precision) == ("net", "agx-orin-64gb", "fp16")
    assert "plan for agx-orin-64gb, fp16" in tandem.plan_text(plan)


def test_an_unknown_profile_is_a_tandem_error(model: Path) -> None:
    with pytest.raises(tandem.TandemError, match="no-such-board"):
        tandem.plan(model, profile="no-such-board")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped detector with the shipped pipeline, which has an mqtt sink."""
    folder = tmp_path_factory.mktemp("bundle")
    tandem.build(MODELS / "robot-objects.onnx", folder / ENGINE)
    (folder / LABELS).write_bytes((MODELS / "robot-objects.labels.txt").read_bytes())
    pipeline = configs.ROOT / "pipelines" / "robot-objects.toml"
    (folder / PIPELINE).write_bytes(pipeline.read_bytes())
    return folder


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "file"])
def test_a_pipeline_runs_without_a_broker(bundle: Path, tmp_path: Path, packed: bool) -> None:
    target = bundle
    if packed:
        target = tmp_path / "robot.bundle"
        write_bundle(
            target, engine=bundle / ENGINE, pipeline=bundle / PIPELINE, labels=bundle / LABELS,
            name="robot", version="1", profile="laptop",
        )  # fmt: skip
    results: list[tandem.FrameResult] = []
    messages: list[ChildMessage] = []
    frames = tandem.run_pipeline(
        target, source=str(configs.ROOT / "scenes" / "heldout"), frames=3,
        on_result=results.append, on_message=messages.append,
    )  # fmt: skip
    assert frames == len(results) == 3
    assert isinstance(messages[0], Ready)
    labels = set((bundle / LABELS).read_text().split())
    actual = {one.label for result in results for one in result.event.detections}
    assert actual
    assert actual <= labels


def test_a_pipeline_that_preprocesses_otherwise_than_the_calibration_does_not_run(
    bundle: Path, tmp_path: Path
) -> None:
    with open_engine(bundle / ENGINE) as engine:
        entries = {name: engine.entry(name) for name in entries_read(engine.manifest)}
        manifest = replace(engine.manifest, preprocessing=Preprocessing(color="bgr"))
        write_engine(tmp_path / ENGINE, manifest, entries)
    for name in (PIPELINE, LABELS):
        (tmp_path / name).write_bytes((bundle / name).read_bytes())
    with pytest.raises(tandem.TandemError, match="is not the preprocessing that the engine was"):
        tandem.run_pipeline(tmp_path, source=str(configs.ROOT / "scenes" / "heldout"), frames=1)


def test_a_pipeline_stops_when_told(bundle: Path) -> None:
    stop = threading.Event()
    seen = []

    def end(result: tandem.FrameResult) -> None:
        seen.append(result)
        stop.set()

    pictures = str(configs.ROOT / "scenes" / "heldout")
    assert tandem.run_pipeline(bundle, source=pictures, on_result=end, stop=stop) == len(seen)
    assert len(seen) < 10


def test_the_promised_names_and_parameters_are_those_of_the_golden_text() -> None:
    promised, actual = FILE.read_text().splitlines(), public_api().splitlines()
    lost = sorted(set(promised) - set(actual))
    assert not lost, f"users' programs break without these (docs/compatibility.md): {lost}"
    assert promised == actual, "names are new: run `python -m scripts.public_api --write`"
