"""An engine exported for trtexec is the same network, and every flag is one its release knows."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from click.testing import CliRunner
from foreign_models import foreign_model
from model_fixtures import save, small_convnet
from onnx import TensorProto, helper

from calibration.trt_cache import decode_cache
from device.engine.file import open_engine
from device.engine.manifest import DimRange
from device.session import open_session
from toolkit.cli.commands.export import export as command
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.errors import BuildError
from toolkit.export.folder import export_trtexec
from toolkit.export.half import rounded_up, to_half
from toolkit.export.network import network_of
from toolkit.export.releases import FLAGS, RELEASES, Release, has_flag
from toolkit.importers.onnx import import_model
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import PlanOptions

TRTEXEC_10_3 = {
    "onnx", "saveEngine", "minShapes", "optShapes", "maxShapes", "useDLACore", "allowGPUFallback",
    "memPoolSize", "inputIOFormats", "outputIOFormats", "skipInference", "layerDeviceTypes",
    "fp16", "int8", "calib", "layerPrecisions", "precisionConstraints",
}  # fmt: skip
"""The flags of trtexec 10.3.0, from its option parser, that an export may use."""


def samples(rng: np.random.Generator, count: int = 4) -> list[dict[str, np.ndarray]]:
    return [{"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)} for _ in range(count)]


def engine(folder: Path, rng: np.random.Generator, **options: object) -> Path:
    """Build `small_convnet`; a DLA takes all but the last node for the objective energy."""
    model = small_convnet(folder / "m.onnx", rng)
    profile = str(options.pop("profile", "orin-nx-16gb"))
    build_engine(model, profile, folder / "m.engine", BuildOptions(kernels=False, **options))  # type: ignore[arg-type]
    return folder / "m.engine"


def on_dla(folder: Path, rng: np.random.Generator) -> Path:
    return engine(folder, rng, data=samples(rng), plan=PlanOptions(forced=Forced(dla=("all",))))


def arguments(script: Path) -> dict[str, str]:
    """The arguments that a script passes to trtexec, as a shell reads them."""
    text = script.read_text().partition("trtexec")[2].replace("\\\n", " ")
    words = [word for word in shlex.split(text) if word != "$@"]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def run(model: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    types = {"tensor(float16)": np.float16, "tensor(float)": np.float32}
    typed = {i.name: feeds[i.name].astype(types[i.type]) for i in session.get_inputs()}
    return [np.asarray(array, np.float32) for array in session.run(None, typed)]


def test_both_models_compute_what_the_engine_does(tmp_path: Path, rng: np.random.Generator) -> None:
    path = on_dla(tmp_path, rng)
    export_trtexec(path, tmp_path / "out")
    feeds = samples(rng, 1)[0]
    with open_session(path) as session:
        (actual,) = session.infer(feeds).values()
    (plain,) = run(tmp_path / "out/implicit/model.onnx", feeds)
    (typed,) = run(tmp_path / "out/explicit/model.onnx", feeds)
    (exact,) = run(tmp_path / "m.onnx", feeds)
    # The plain model has the weights rounded to INT8; the typed one also the activations.
    spread = np.abs(exact).max()
    assert np.abs(plain - exact).max() < 0.05 * spread
    assert np.abs(typed - actual).max() < 0.05 * spread


def test_a_cache_holds_the_scales_of_the_engine(tmp_path: Path, rng: np.random.Generator) -> None:
    path = on_dla(tmp_path, rng)
    export_trtexec(path, tmp_path / "out")
    text = (tmp_path / "out/implicit/calibration-10.3.0.cache").read_text()
    cache = decode_cache(text, "the cache")
    assert (cache.version, cache.algorithm) == ("100300", "EntropyCalibration2")
    with open_engine(path) as opened:
        crossing = [t for t in opened.manifest.tensors if t.scale is not None]
    assert crossing
    for tensor in crossing:
        value = next(name for name in cache.scales if tensor.name.startswith(name))
        assert cache.scales[value] == pytest.approx(tensor.scale, rel=1e-6)
    graph = onnx.load(tmp_path / "out/implicit/model.onnx").graph
    names = {value.name for value in graph.input}
    names |= {output for node in graph.node for output in node.output}
    assert set(cache.scales) <= names


def test_the_implicit_model_has_no_qdq_and_the_explicit_one_has(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    export_trtexec(on_dla(tmp_path, rng), tmp_path / "out")
    implicit = {n.op_type for n in onnx.load(tmp_path / "out/implicit/model.onnx").graph.node}
    explicit = onnx.load(tmp_path / "out/explicit/model.onnx")
    assert not implicit & {"QuantizeLinear", "DequantizeLinear"}
    assert {"QuantizeLinear", "DequantizeLinear"} <= {n.op_type for n in explicit.graph.node}
    zeros = [i for i in explicit.graph.initializer if i.data_type == TensorProto.INT8]
    assert zeros
    assert not any(onnx.numpy_helper.to_array(zero).any() for zero in zeros)
    floats = {i.name for i in explicit.graph.initializer if i.data_type == TensorProto.FLOAT}
    assert floats == set()  # FP32 would run in FP32, which no DLA has


def test_every_flag_is_one_that_the_release_knows(tmp_path: Path, rng: np.random.Generator) -> None:
    export_trtexec(on_dla(tmp_path, rng), tmp_path / "out")
    scripts = sorted((tmp_path / "out").rglob("*.sh"))
    assert [path.name for path in scripts] == [
        "trtexec-11.4.1.sh", "trtexec-10.3.0.sh", "trtexec-10.7.0.sh", "trtexec-8.6.2.sh",
    ]  # fmt: skip
    for script in scripts:
        flags = {flag.removeprefix("--") for flag in arguments(script)}
        assert flags <= TRTEXEC_10_3
        if "11.4.1" in script.name:
            gone = {"int8", "fp16", "calib", "layerPrecisions", "precisionConstraints"}
            assert not flags & gone


@pytest.mark.parametrize(
    ("flag", "known"),
    [
        ("--layerDeviceTypes", "8.6.2 10.3.0 10.7.0 11.4.1"),
        ("--skipInference", "8.6.2 10.3.0 10.7.0 11.4.1"),
        ("--buildOnly", "8.5.2"),
        ("--calib", "8.5.2 8.6.2 10.3.0 10.7.0"),
        ("--memPoolSize", "8.5.2 8.6.2 10.3.0 10.7.0 11.4.1"),
    ],
)
def test_a_flag_is_known_from_its_first_release_to_its_last(flag: str, known: str) -> None:
    assert [row.version for row in RELEASES if has_flag(row, flag)] == known.split()


def test_the_script_runs_trtexec_beside_its_files(tmp_path: Path, rng: np.random.Generator) -> None:
    """trtexec stands here as a program that prints its arguments: the real one needs a board."""
    export_trtexec(on_dla(tmp_path, rng), tmp_path / "out dir")
    program = tmp_path / "bin/trtexec"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\npwd\nfor word in "$@"; do echo "$word"; done\n')
    program.chmod(0o755)
    script = tmp_path / "out dir/implicit/trtexec-8.6.2.sh"
    shown = subprocess.run(
        [script, "--verbose"], env={"PATH": f"{program.parent}:/bin:/usr/bin"},
        capture_output=True, text=True, check=True, cwd="/",
    ).stdout.splitlines()  # fmt: skip
    assert shown[0] == str(script.parent)
    assert shown[-2:] == ["--layerDeviceTypes=fc_Reshape:GPU", "--verbose"]
    calib = next(word for word in shown if word.startswith("--calib=")).partition("=")[2]
    assert (script.parent / calib).is_file()


def test_a_mixed_plan_is_refused_for_the_release_without_device_types(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    result = export_trtexec(on_dla(tmp_path, rng), tmp_path / "out")
    (row,) = [r for era in result.eras for r in era.recipes if r.release.version == "8.5.2"]
    assert "no --layerDeviceTypes (it came with 8.6)" in row.problem
    assert not (tmp_path / "out/implicit/trtexec-8.5.2.sh").exists()


def test_boards_without_a_dla_get_no_dla_flag(tmp_path: Path, rng: np.random.Generator) -> None:
    path = engine(tmp_path, rng, profile="orin-nano-8gb", data=samples(rng))
    export_trtexec(path, tmp_path / "out")
    for script in (tmp_path / "out").rglob("*.sh"):
        assert "DLA" not in script.read_text()


def test_an_fp16_engine_has_no_cache(tmp_path: Path, rng: np.random.Generator) -> None:
    path = engine(tmp_path, rng, precision="fp16")
    export_trtexec(path, tmp_path / "out")
    assert list((tmp_path / "out").rglob("*.cache")) == []
    assert "--fp16" in arguments(tmp_path / "out/implicit/trtexec-10.3.0.sh")
    (typed,) = run(tmp_path / "out/explicit/model.onnx", feeds := samples(rng, 1)[0])
    (exact,) = run(tmp_path / "m.onnx", feeds)
    assert np.abs(typed - exact).max() < 0.01 * np.abs(exact).max()


def test_dynamic_sizes_become_shape_profiles(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = {"w": rng.normal(size=(4, 3, 3, 3)).astype(np.float32)}
    nodes = [helper.make_node("Conv", ["in:0", "w"], ["y"], name="a,b", pads=[1] * 4)]
    model = save(
        tmp_path / "m.onnx", nodes, {"in:0": ["batch", 3, 8, 8]}, {"y": ["batch", 4, 8, 8]}, weights
    )
    dims = (DimRange(name="batch", min=1, opt=4, max=8),)
    options = BuildOptions(kernels=False, dims=dims)
    build_engine(model, "orin-nano-8gb", tmp_path / "m.engine", options)
    export_trtexec(tmp_path / "m.engine", tmp_path / "out")
    flags = arguments(tmp_path / "out/implicit/trtexec-10.3.0.sh")
    assert flags["--minShapes"] == "'in:0':1x3x8x8"
    assert flags["--maxShapes"] == "'in:0':8x3x8x8"
    names = [node.name for node in onnx.load(tmp_path / "out/implicit/model.onnx").graph.node]
    assert names == ["a_b"]


def test_an_unusable_engine_leaves_no_folder(tmp_path: Path, rng: np.random.Generator) -> None:
    path = engine(tmp_path, rng, dummy_ranges=True, precision="int8")
    with pytest.raises(BuildError, match="dummy ranges"):
        export_trtexec(path, tmp_path / "out")
    (tmp_path / "there").mkdir()
    with pytest.raises(BuildError, match=r"there exists; give --output"):
        export_trtexec(path, tmp_path / "there")
    assert not list(tmp_path.glob("*out*"))


def test_the_command_says_what_it_wrote(tmp_path: Path, rng: np.random.Generator) -> None:
    path = on_dla(tmp_path, rng)
    shown = CliRunner().invoke(command, [str(path), "-o", str(tmp_path / "text")])
    assert shown.exit_code == 0, shown.output
    assert "implicit/trtexec-8.6.2.sh: TensorRT 8.6.2 (JetPack 6.0)" in shown.output
    assert "not for TensorRT 8.5.2" in shown.output
    as_json = CliRunner().invoke(command, [str(path), "-o", str(tmp_path / "json"), "--json"])
    assert json.loads(as_json.output) == json.loads((tmp_path / "json/export.json").read_text())


def test_a_network_made_by_others_computes_the_same_in_half(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    source = foreign_model("mtcnn-onet")
    build_engine(source, "orin-nx-16gb", tmp_path / "m.engine", BuildOptions(kernels=False))
    export_trtexec(tmp_path / "m.engine", tmp_path / "out")
    feeds = {"input": rng.normal(size=(1, 3, 48, 48)).astype(np.float32)}
    typed = run(tmp_path / "out/explicit/model.onnx", feeds)
    for half, exact in zip(typed, run(source, feeds), strict=True):
        assert np.abs(half - exact).max() < 0.01 * np.abs(exact).max()


# --- typing


def test_operands_that_onnx_has_in_float32_alone_keep_it(tmp_path: Path) -> None:
    weights = {"scales": np.array([1, 1, 2, 2], np.float32)}
    nodes = [
        helper.make_node("Resize", ["x", "", "scales"], ["big"], name="resize", mode="nearest"),
        helper.make_node("GlobalMaxPool", ["big"], ["g"], name="pool"),
        helper.make_node("Shape", ["big"], ["s"], name="shape"),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 2, 4, 4]}, {"g": [1, 2, 1, 1]}, weights)
    model = import_model(path).model
    proto = ir.to_proto(to_half(model, half_io=False))
    onnx.checker.check_model(proto, full_check=True)
    kinds = {i.name: i.data_type for i in proto.graph.initializer}
    assert TensorProto.FLOAT in kinds.values()
    assert [o.type.tensor_type.elem_type for o in proto.graph.output] == [TensorProto.FLOAT]


def test_a_weight_beyond_float16_is_refused_by_name(tmp_path: Path) -> None:
    weights = {"w": np.array([7e4], np.float32)}
    nodes = [helper.make_node("Mul", ["x", "w"], ["y"], name="mul")]
    path = save(tmp_path / "m.onnx", nodes, {"x": [1]}, {"y": [1]}, weights)
    with pytest.raises(BuildError, match=r"Constant 'w' holds 70000, beyond .* 65504"):
        to_half(import_model(path).model, half_io=True)


@pytest.mark.parametrize("scale", [1e-8, 6e-5, 0.1, 1.0, 65504.0, 1e6])
def test_a_scale_is_rounded_up_and_stays_finite(scale: float) -> None:
    half = rounded_up(np.array(scale, np.float32))
    assert np.isfinite(half)
    assert float(half) >= min(scale, 65504.0)
    assert float(half) >= 2.0**-14  # below it, float16 loses digits
    assert float(np.nextafter(half, np.float16(0))) < max(scale, 2.0**-14)


def test_every_flag_of_the_table_is_spelt_as_trtexec_does() -> None:
    assert all(re.fullmatch(r"--[a-zA-Z0-9]+", flag) for flag in FLAGS)
    assert {flag.removeprefix("--") for flag in FLAGS} - TRTEXEC_10_3 == {"buildOnly"}


def test_the_network_of_an_engine_names_where_each_node_runs(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    with open_engine(on_dla(tmp_path, rng)) as opened:
        network = network_of(opened)
    assert network.processors["conv0"] == "dla0"
    assert network.processors["fc_Reshape"] == "gpu"
    assert isinstance(RELEASES[0], Release)
