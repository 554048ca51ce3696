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
from docs_fixtures import ROOT
from foreign_models import foreign_model
from model_fixtures import save, small_convnet
from onnx import TensorProto, helper

import configs
from calibration.trt_cache import decode_cache
from device.engine.file import open_engine
from device.engine.manifest import DimRange
from device.profile import load_profile
from device.runtime.tensorrt.releases import find_gpu_release, find_release
from device.session import open_session
from toolkit.cli.commands.export import export as command
from toolkit.dla.rules.rule import parse_version
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.errors import BuildError
from toolkit.export.folder import export_trtexec
from toolkit.export.half import rounded_up, to_half
from toolkit.export.joined_network import network_of
from toolkit.export.releases import releases_of
from toolkit.importers.onnx import import_model
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import PlanOptions
from toolkit.partition.planning.trtexec_flags import FLAGS, has_flag

TRTEXEC: dict[str, frozenset[str]] = {
    version: frozenset(names.split())
    for version, names in json.loads(
        (Path(__file__).parents[1] / "data/trtexec_flags.json").read_text()
    ).items()
}
"""The flags that trtexec's option parser reads, by release: names out of NVIDIA's sources."""

LISTS = {"8.5.2": "8.5.2", "8.6.2": "8.6.1", "10.3.0": "10.3.0", "10.7.0": "10.7.0",
         "10.13.0": "10.13.0", "10.16.2": "10.16", "11.4.1": "11.1"}  # fmt: skip
"""A release -> the nearest older one whose sources are public."""

PROFILES = {
    "xavier-nx-16gb": ("8.5.2",),
    "agx-xavier-32gb": ("8.5.2",),
    "orin-nano-8gb": ("8.5.2", "8.6.2", "10.3.0", "10.7.0", "10.16.2"),
    "orin-nx-16gb": ("8.5.2", "8.6.2", "10.3.0", "10.7.0"),
    "agx-orin-64gb": ("8.5.2", "8.6.2", "10.3.0", "10.7.0", "11.4.1"),
    "agx-thor": ("10.13.0", "10.16.2", "11.4.1"),
}
"""Profile -> the releases that a plan gets a script for; all but Nano's and Thor's use the DLA."""


def samples(rng: np.random.Generator, count: int = 4) -> list[dict[str, np.ndarray]]:
    return [{"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)} for _ in range(count)]


def engine(folder: Path, rng: np.random.Generator, **options: object) -> Path:
    """Build `small_convnet`; a DLA takes all but the last node for the objective energy."""
    model = small_convnet(folder / "m.onnx", rng)
    profile = str(options.pop("profile", "orin-nx-16gb"))
    build_engine(model, profile, folder / "m.engine", BuildOptions(kernels=False, **options))  # type: ignore[arg-type]
    return folder / "m.engine"


def on_dla(folder: Path, rng: np.random.Generator) -> Path:
    plan = PlanOptions(forced=Forced(dla=("all",)))
    return engine(folder, rng, profile="agx-orin-64gb", data=samples(rng), plan=plan)


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
    assert np.abs(typed - actual).max() < 0.15 * spread  # 0.065 at most in 80 draws


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


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_gets_scripts_of_its_releases_with_flags_that_they_know(
    profile: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    with_dla = load_profile(profile).dla_cores > 0
    plan = PlanOptions(forced=Forced(dla=("all",))) if with_dla else PlanOptions()
    path = engine(tmp_path, rng, profile=profile, data=samples(rng), plan=plan)
    result = export_trtexec(path, tmp_path / "out")
    scripts = {
        path.stem.removeprefix("trtexec-"): path for path in (tmp_path / "out").rglob("*.sh")
    }
    assert set(scripts) == set(PROFILES[profile])
    for version, script in scripts.items():
        given = arguments(script)
        flags = {flag.removeprefix("--") for flag in given}
        assert flags <= TRTEXEC[LISTS[version]], version
        assert ("--useDLACore" in given) == with_dla
        typed = script.parent.name == "explicit"
        assert typed == (version.startswith(("10.1", "11.")))
        assert ("--int8" in given) == ("--calib" in given) == (not typed)
        # A network of 10.x is typed if it is told so, one of 11 always.
        assert ("--stronglyTyped" in given) == version.startswith("10.1")
    assert {row.release.version for era in result.eras for row in era.recipes} == {
        release.version for release in releases_of(load_profile(profile))
    }


def test_a_release_without_a_dla_builds_no_plan_with_one(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    result = export_trtexec(on_dla(tmp_path, rng), tmp_path / "out")
    (row,) = [r for era in result.eras for r in era.recipes if r.release.version == "10.16.2"]
    assert "this TensorRT has none on Jetson" in row.problem
    assert "or without the DLA" in row.problem


def test_a_board_that_no_export_is_for_says_so(tmp_path: Path, rng: np.random.Generator) -> None:
    path = engine(tmp_path, rng, profile="jetson-nano", precision="fp16")
    with pytest.raises(
        BuildError, match=r"has TensorRT 7.1.3, 8.0.1, 8.2.1, and exports begin with 8.5"
    ):
        export_trtexec(path, tmp_path / "out")


def test_a_computer_without_a_jetpack_gets_every_release(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    export_trtexec(engine(tmp_path, rng, profile="laptop"), tmp_path / "out")
    scripts = {path.stem.removeprefix("trtexec-") for path in (tmp_path / "out").rglob("*.sh")}
    assert scripts == set(LISTS)


def test_a_profile_of_ones_own_is_given_as_its_file(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    text = (configs.ROOT / "profiles/orin-nano-8gb.toml").read_text()
    profile_file = tmp_path / "own.toml"
    profile_file.write_text(text.replace('name = "orin-nano-8gb"', 'name = "own"'))
    path = engine(tmp_path, rng, profile=str(profile_file), precision="fp16")
    with pytest.raises(BuildError, match="'own', which is not one of Tandem's; give its file"):
        export_trtexec(path, tmp_path / "out")
    options = [str(path), "-o", str(tmp_path / "out"), "--profile", str(profile_file)]
    shown = CliRunner().invoke(command, options)
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "out/implicit/trtexec-10.3.0.sh").exists()


@pytest.mark.parametrize("version", TRTEXEC)
def test_the_table_of_flags_is_that_of_the_release(version: str) -> None:
    release = parse_version(version)
    listed = {f"--{name}" for name in TRTEXEC[version]} & FLAGS.keys()
    noop = {"--stronglyTyped"} if release >= (11,) else set()
    assert {flag for flag in FLAGS if has_flag(release, flag)} == listed - noop


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


def test_a_release_that_places_no_single_layers_says_so(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    result = export_trtexec(on_dla(tmp_path, rng), tmp_path / "out")
    (row,) = [r for era in result.eras for r in era.recipes if r.release.version == "8.5.2"]
    assert row.problem == ""
    (note,) = row.notes
    assert "places no single layers (--layerDeviceTypes: it came with 8.6)" in note
    flags = arguments(tmp_path / "out/implicit/trtexec-8.5.2.sh")
    assert "--allowGPUFallback" in flags
    assert "--layerDeviceTypes" not in flags


@pytest.mark.slow
def test_the_detector_that_is_shipped_exports_in_both_eras(tmp_path: Path) -> None:
    """Its head is on the GPU, and some of its nodes in floating point: the DLA's rule on Q/DQ
    asks neither."""
    model = configs.ROOT / "models" / "robot-objects.onnx"
    options = BuildOptions(
        kernels=False, data=pictures(model), plan=PlanOptions(forced=Forced(dla=("all",))),
        accept_loss=True,
    )  # fmt: skip
    build_engine(model, "agx-orin-64gb", tmp_path / "m.engine", options)
    result = export_trtexec(tmp_path / "m.engine", tmp_path / "out")
    assert [era.problem for era in result.eras] == ["", ""]
    flags = arguments(tmp_path / "out/explicit/trtexec-11.4.1.sh")
    assert "--useDLACore" in flags
    on_gpu = {row.partition(":")[0] for row in flags["--layerDeviceTypes"].split(",")}
    graph = onnx.load(tmp_path / "out/explicit/model.onnx").graph
    restored = {out for n in graph.node if n.op_type == "DequantizeLinear" for out in n.output}
    convolutions = [n for n in graph.node if n.op_type == "Conv" and n.name not in on_gpu]
    assert convolutions
    assert all(node.input[0] in restored for node in convolutions)


def pictures(model: Path) -> list[dict[str, np.ndarray]]:
    (value,) = onnx.load(model).graph.input
    shape = [dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim]
    rng = np.random.default_rng(3)
    return [{value.name: rng.random(shape).astype(np.float32)} for _ in range(2)]


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
    assert "implicit/trtexec-8.6.2.sh: TensorRT 8.6.2 (JetPack 6.0 DP to 6.0)" in shown.output
    assert "not for TensorRT 10.16.2 (JetPack 7.2 to 7.2.1)" in shown.output
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
    assert {flag.removeprefix("--") for flag in FLAGS} - TRTEXEC["10.3.0"] == {"buildOnly"}


def test_the_network_of_an_engine_names_where_each_node_runs(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    with open_engine(on_dla(tmp_path, rng)) as opened:
        network = network_of(opened)
    assert network.processors["conv0"] == "dla0"
    assert network.processors["fc_Reshape"] == "gpu"


BOARDS = {
    "Xavier": ("agx-xavier-32gb", "agx-xavier-64gb", "xavier-nx-8gb", "xavier-nx-16gb"),
    "Orin Nano": ("orin-nano-4gb", "orin-nano-8gb"),
    "Orin NX": ("orin-nx-8gb", "orin-nx-16gb"),
    "AGX Orin": ("agx-orin-32gb", "agx-orin-64gb"),
    "Thor": ("agx-thor",),
}


@pytest.mark.parametrize("board", BOARDS)
def test_the_page_lists_the_releases_of_each_board(board: str) -> None:
    page = (ROOT / "docs/build.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {board} |")]
    _, _, releases, without_dla, _ = (cell.strip() for cell in row.split("|"))
    for name in BOARDS[board]:
        profile = load_profile(name)
        taken = releases_of(profile)
        assert releases == ", ".join(release.version for release in taken)
        refused = [r.version for r in taken if profile.dla_cores and not r.has_dla]
        assert all(version in without_dla for version in refused)


API = {"8.5.2": "8.6.1", "8.6.2": "8.6.1", "10.3.0": "10.3.0", "10.7.0": "10.7.0",
       "10.13.0": "10.7.0", "10.16.2": "10.7.0", "11.4.1": "11.4.0.106"}  # fmt: skip
"""A release -> the nearest one whose Python API is in tests/data/tensorrt_api."""


@pytest.mark.parametrize("profile", PROFILES)
def test_what_a_board_sets_is_in_the_api_of_its_releases(profile: str) -> None:
    for release in releases_of(load_profile(profile)):
        path = Path(__file__).parents[1] / f"data/tensorrt_api/{API[release.version]}.json"
        api = json.loads(path.read_text())
        for row in (find_release(release.version), find_gpu_release(release.version)):
            assert set(row.network_flags) <= set(api["NetworkDefinitionCreationFlag"]["enum"])
            flags = row.builder_flags
            names = sum(flags.values(), ()) if isinstance(flags, dict) else flags
            assert {*names, *getattr(row, "int8_flags", ())} <= set(api["BuilderFlag"]["enum"])


@pytest.mark.parametrize("place", ["dla", "gpu"])
def test_what_a_convolution_writes_for_a_silu_or_as_an_output_has_its_range(
    place: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Without one, a release that takes ranges runs the convolution in FP16."""
    sizes = {"w0": (8, 3, 3, 3), **{f"w{n}": (8, 8, 3, 3) for n in range(1, 5)}}
    weights = {name: rng.normal(size=s).astype(np.float32) * 0.2 for name, s in sizes.items()}
    nodes = []
    for n, source in enumerate(("x", "m0", "m1")):
        nodes += [
            helper.make_node("Conv", [source, f"w{n}"], [f"c{n}"], name=f"conv{n}", pads=[1] * 4),
            helper.make_node("Sigmoid", [f"c{n}"], [f"s{n}"], name=f"sigmoid{n}"),
            helper.make_node("Mul", [f"c{n}", f"s{n}"], [f"m{n}"], name=f"mul{n}"),
        ]
    nodes += [
        helper.make_node("Conv", ["m2", "w3"], ["y"], name="last", pads=[1] * 4),
        helper.make_node("Conv", ["m2", "w4"], ["before_z"], name="before_relu", pads=[1] * 4),
        helper.make_node("Relu", ["before_z"], ["z"], name="relu"),
    ]
    shape = [1, 3, 32, 32]
    results = {name: [1, 8, 32, 32] for name in ("m2", "y", "z")}
    model = save(tmp_path / "m.onnx", nodes, {"x": shape}, results, weights)
    data = samples(rng)
    forced = Forced(dla=("all",)) if place == "dla" else Forced(gpu=("all",))
    options = BuildOptions(
        "int8", kernels=False, data=data, plan=PlanOptions(forced=forced), accept_loss=True,
        gpu_backend="cuda" if place == "dla" else "both",
    )  # fmt: skip
    build_engine(model, "agx-orin-64gb", tmp_path / "m.engine", options)
    with open_engine(tmp_path / "m.engine") as opened:
        forms = [i for s in opened.manifest.segments for i in s.implementations]
    ranges = {n: a for form in forms if hasattr(form, "ranges") for n, a in form.ranges.items()}
    written = ["c0", "c1", "c2", "y", "z"]
    assert {*written, "before_z"} <= ranges.keys()
    export_trtexec(tmp_path / "m.engine", tmp_path / "out")
    text = (tmp_path / "out/implicit/calibration-10.3.0.cache").read_text()
    scales = decode_cache(text, "the cache").scales
    outputs = onnx.load(model)
    del outputs.graph.output[:]
    for name in written:
        outputs.graph.output.append(helper.make_tensor_value_info(name, 1, None))
    onnx.save(outputs, tmp_path / "all.onnx")
    rows = [run(tmp_path / "all.onnx", feeds) for feeds in data]
    for n, name in enumerate(written):
        largest = max(np.abs(row[n]).max() for row in rows)
        assert ranges[name] == pytest.approx(127 * scales[name], rel=1e-6)
        assert 0.4 * largest < ranges[name] <= 1.01 * largest
    # The typed form has no Q/DQ there: it computes the SiLU of what the convolution gives.
    typed = onnx.load(tmp_path / "out/explicit/model.onnx").graph
    assert not [
        n for n in typed.node if n.op_type == "QuantizeLinear" and n.input[0].startswith("c")
    ]
