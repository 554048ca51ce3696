"""libtandem runs the plans that `tandem-agent prepare` made, by the Python session's rules.

Neither TensorRT nor a DLA is here: a double gives the bytes that were recorded at the borders of
the Python session's segment, where that session's own double computed them by onnxruntime.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import cuda_double
import numpy as np
import onnxruntime
import pytest
from msgspec.structs import replace
from native_fixtures import NativeSession, compiled
from nvinfer_fixtures import build_programs, environment, frames_of, pictures, write_frames
from shared_folder import shared_folder
from tensorrt_fixtures import build, install, prepare_all

from device.engine.file import open_engine, write_engine
from device.engine.tensorrt_manifest import TensorRT
from device.errors import SessionError
from device.runtime.tensorrt.board import read_board
from device.runtime.tensorrt.plans import find_plan
from device.session import open_session

LIBRARY = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so*"))


@dataclass(frozen=True)
class Prepared:
    """An engine with its plans, what the double gives for it, and the Python session's outputs."""

    engine: Path
    plans: Path
    frames: Path
    inputs: bytes
    expected: bytes


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory, "programs", build_programs)


def prepared(folder: Path, precision: str) -> Prepared:
    engine, frames, expected = build(folder, precision=precision), [], []
    inputs = pictures(np.random.default_rng(11))
    with cuda_double.installed(), pytest.MonkeyPatch.context() as patch:
        install("10.3.0", folder, patch)
        assert {row.problem for row in prepare_all(engine, folder / "plans")} == {None}
        with open_session(engine, plans=folder / "plans", threads=1) as session:
            for x in inputs:
                expected.append(session.infer({"x": x})["y"].tobytes())
                frames.append(frames_of(session))
    sys.modules.pop("tensorrt", None)
    recorded = write_frames(folder / "frames", frames)
    data = b"".join(x.tobytes() for x in inputs)
    return Prepared(engine, folder / "plans", recorded, data, b"".join(expected))


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepared(tmp_path_factory.mktemp("int8"), "int8")


@pytest.fixture(scope="module")
def fp16(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepared(tmp_path_factory.mktemp("fp16"), "fp16")


def run(programs: Path, one: Prepared, folder: Path, **settings: str) -> tuple[str, bytes]:
    """Return what `run_engine` says, without a fault that a sanitizer or the double sees."""
    (folder / "in").write_bytes(one.inputs)
    command = [programs / "run_engine", one.engine, LIBRARY, folder / "in", folder / "out"]
    process = subprocess.run(
        command, env=environment(programs, one.plans, one.frames, **settings), timeout=100,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode in {0, 1}, process.stderr[-3000:]
    assert process.stderr == ""
    return process.stdout, (folder / "out").read_bytes() if (folder / "out").exists() else b""


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_a_plan_gives_the_bits_of_the_python_session(
    precision: str, programs: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    one = request.getfixturevalue(precision)
    printed, outputs = run(programs, one, tmp_path)
    assert (
        "dla0: tensorrt: TensorRT 10.3.0, DLA cores 0, 1 in turn, formats by the CPU\n" in printed
    )
    assert outputs == one.expected
    assert len({outputs[i : i + 40] for i in range(0, len(outputs), 40)}) > 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"VERSION": "100700"}, "no plan for this board as it is (TensorRT 10.7.0"),
        ({"VERSION": "8602"}, "no plan for this board as it is (TensorRT 8.6.2"),
        ({"VERSION": "101200"}, "TensorRT 10.12.0 has no DLA here: 10.8 to 11.4.0"),
        ({"VERSION": "8402"}, "TensorRT 8.4.2 has no DLA here: it is older than 8.5"),
        ({"CORES": "0"}, "it is for DLA core 0, and this board has 0"),
        ({"FAIL": "runtime"}, "TensorRT 10.3.0 does not start: 1: [double.cpp::call::7] Error"),
        ({"FAIL": "load"}, "run `tandem-agent prepare --again`: 1: [double.cpp::call::7] Error"),
        ({"FAIL": "context"}, "DLA core 0 has no room for its plan; a core holds 16 loadables"),
    ],
)
def test_a_plan_that_cannot_be_loaded_leaves_the_segment_to_the_cpu(
    settings: dict[str, str], says: str, programs: Path, int8: Prepared, tmp_path: Path
) -> None:
    printed, outputs = run(programs, int8, tmp_path, **settings)
    assert f"dla0: portable: tensorrt: {'it has ' if says.startswith('no plan') else ''}" in printed
    assert says in printed
    if "has no plan" in printed:
        assert f"run `tandem-agent prepare {int8.engine}`" in printed
    assert len(outputs) == len(int8.expected)


def test_a_board_with_one_core_of_two_says_so(
    programs: Path, int8: Prepared, tmp_path: Path
) -> None:
    printed, outputs = run(programs, int8, tmp_path, CORES="1")
    assert "DLA core 0, the only one here: frames take no turns" in printed
    assert outputs == int8.expected


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("enqueue", "failed: TensorRT does not enqueue it on DLA core 0: 1: [double.cpp::call::7]"),
        ("address", "its plan has no input or output 'x': 1: [double.cpp::call::7]"),
    ],
)
def test_a_plan_that_fails_as_it_runs_is_an_error_of_one_line(
    call: str, says: str, programs: Path, int8: Prepared, tmp_path: Path
) -> None:
    printed, outputs = run(programs, int8, tmp_path, FAIL=call)
    (line,) = (line for line in printed.splitlines() if line.startswith("error: "))
    assert f"{int8.engine}: segment '" in line
    assert says in line
    assert outputs == b""


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("none", "no plan for this board"),
        ("flipped", "its plan is damaged: run `tandem-agent prepare"),
        ("gone", "its plan is damaged: run `tandem-agent prepare"),
        ("cut off", "no plan for this board"),
        ("other format", "no plan for this board"),
        ("refused", "TensorRT refused it on this board: layer 'c' is too large"),
    ],
)
def test_a_plan_counts_with_the_record_that_has_its_digest(
    fault: str, says: str, programs: Path, int8: Prepared, tmp_path: Path
) -> None:
    plans = shutil.copytree(int8.plans, tmp_path / "plans")
    (plan,), (path,) = plans.glob("*.plan"), plans.glob("*.json")
    record = json.loads(path.read_bytes())
    if fault == "flipped":
        plan.write_bytes(plan.read_bytes()[:-1] + b"\0")
    elif fault in {"gone", "none"}:
        (plan if fault == "gone" else path).unlink()
    elif fault == "cut off":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        changed = (
            {"format": 2} if fault == "other format" else {"problem": "layer 'c' is too large"}
        )
        path.write_text(json.dumps(record | changed))
    printed, _ = run(programs, Prepared(int8.engine, plans, *_rest(int8)), tmp_path)
    assert "dla0: portable: tensorrt: " in printed
    assert says in printed


def _rest(one: Prepared) -> tuple[Path, bytes, bytes]:
    return one.frames, one.inputs, one.expected


def test_a_plan_by_a_package_with_a_fourth_number_is_found(
    programs: Path, int8: Prepared, tmp_path: Path
) -> None:
    plans = shutil.copytree(int8.plans, tmp_path / "plans")
    (plan,), (path,) = plans.glob("*.plan"), plans.glob("*.json")
    record = json.loads(path.read_bytes())
    record["board"]["tensorrt"] = "10.3.0.30"
    key = keys(programs, int8.engine, Path("/"), "10.3.0.30").strip()
    assert key != plan.stem
    plan.rename(plans / f"{key}.plan")
    path.unlink()
    (plans / f"{key}.json").write_text(json.dumps(record))
    printed, outputs = run(programs, Prepared(int8.engine, plans, *_rest(int8)), tmp_path)
    assert "dla0: tensorrt: TensorRT 10.3.0" in printed
    assert outputs == int8.expected


# -- which plan is a segment's -------------------------------------------------------------------


def keys(programs: Path, engine: Path, root: Path, version: str) -> str:
    """What `plan_keys` prints."""
    command = [programs / "plan_keys", engine, root, version]
    settings = environment(programs, root, root)
    process = subprocess.run(
        command, env=settings, timeout=100, capture_output=True, text=True, check=False
    )
    assert process.stderr == ""
    return process.stdout


def python_keys(engine: Path, root: Path, folder: Path, version: str) -> str:
    with pytest.MonkeyPatch.context() as patch, open_engine(engine) as opened:
        patch.setattr("device.runtime.tensorrt.board.tensorrt_version", lambda: version)
        board = read_board(root)
        return "".join(
            f"{find_plan(folder, opened, segment, implementation, board).key}\n"
            for segment in opened.manifest.segments
            for implementation in segment.implementations
            if isinstance(implementation, TensorRT)
        )


def orin(root: Path) -> Path:
    """The files of a board that its plans depend on."""
    for name, data in {
        "usr/lib/aarch64-linux-gnu/nvidia/libnvdla_compiler.so": bytes(range(256)) * 50,
        "etc/nv_tegra_release": b"# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic\n",
        "proc/device-tree/compatible": b"nvidia,p3768-0000\0nvidia,p3767\0nvidia,tegra234\0",
        "var/lib/nvpmodel/status": b"pmode:0002 fmode:fanNull",
        "sys/bus/platform/devices/15880000.nvdla0/x": b"",
        "sys/bus/platform/devices/158c0000.nvdla1/x": b"",
        "sys/bus/platform/devices/13e00000.host1x/x": b"",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


@pytest.mark.parametrize("version", ["8.6.2", "10.3.0", "10.7.0", "11.4.1"])
def test_the_plan_is_the_one_that_python_finds(
    version: str, programs: Path, int8: Prepared, fp16: Prepared, tmp_path: Path
) -> None:
    digests = set()
    for root in (orin(tmp_path / "orin"), tmp_path / "empty"):
        for one in (int8, fp16):
            key = keys(programs, one.engine, root, version)
            assert key == python_keys(one.engine, root, tmp_path, version)
            digests.add(key)
    assert len(digests) == 4  # each digest counts the board and the engine


def test_the_digest_counts_numbers_and_names_as_python_writes_them(
    programs: Path, int8: Prepared, tmp_path: Path, rng: np.random.Generator
) -> None:
    exponents = np.concatenate((np.arange(-7, 20), rng.integers(-307, 308, 200)))
    values = [float(f"{mantissa}e{e}") for e in exponents for mantissa in (1, rng.uniform(1, 10))]
    names = ['a"\\/\b\f\n\r\t\x01\x1f\x7f', "\xe9", "\u4e2d", "\U0001f600", "A", ""]
    ranges = dict(zip([*names, *map(str, range(len(values)))], [*values, 3.0], strict=False))
    ranges |= {"least": 5e-324, "most": 1.7976931348623157e308}
    with open_engine(int8.engine) as engine:
        segments = tuple(
            replace(segment, implementations=tuple(
                replace(one, ranges=ranges, half_nodes=("n/1", "\xe9"))
                if isinstance(one, TensorRT) else one
                for one in segment.implementations
            ))
            for segment in engine.manifest.segments
        )  # fmt: skip
        entries = {name: engine.entry(name).copy() for name in engine.entries}
        write_engine(tmp_path / "e", replace(engine.manifest, segments=segments), entries)
    key = keys(programs, tmp_path / "e", tmp_path, "10.3.0")
    assert key == python_keys(tmp_path / "e", tmp_path, tmp_path, "10.3.0")


def test_a_release_without_a_dla_is_refused_in_the_words_of_python(
    programs: Path, int8: Prepared, tmp_path: Path
) -> None:
    for version in ("8.4.1", "10.8.0", "10.13.3", "11.4.0"):
        with pytest.raises(SessionError) as caught:
            python_keys(int8.engine, tmp_path, tmp_path, version)
        assert keys(programs, int8.engine, tmp_path, version) == f"error: {caught.value}\n"


def test_a_library_without_tensorrt_names_its_option(
    int8: Prepared, tmp_path_factory: pytest.TempPathFactory
) -> None:
    session = NativeSession(compiled(tmp_path_factory), int8.engine)
    reasons = [reason for _, _, reason in session.reports()]
    session.close()
    assert any(
        "tensorrt: this libtandem is built without -DTANDEM_TENSORRT=ON" in r for r in reasons
    )
