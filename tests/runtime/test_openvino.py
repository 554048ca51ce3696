"""Segments in OpenVINO: the numbers of onnxruntime, where it is asked for and nowhere else."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from engine_fixtures import (
    Network,
    Piece,
    engine_parts,
    node,
    picture,
    single_network,
    split_network,
    write_network,
)
from model_fixtures import small_convnet
from msgspec.structs import replace

from device import install_advice
from device.engine.file import write_engine
from device.engine.manifest import Portable, TensorInfo
from device.errors import SessionError, TandemError
from device.install_advice import pip_install
from device.runtime.pool import SessionPool
from device.runtime.session import Session, open_session
from pipelines.serving.instances import open_file
from toolkit.cli.main import tandem
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.evaluate.infer.open import open_runner

real = pytest.mark.skipif(
    find_spec("openvino") is None,
    reason="openvino is not installed (180 MB): pip install -e '.[openvino]'",
)
# "w" of 127 in every place, "x" in INT8 with the scale 1: sums far beyond 16 bits.
SATURATED = """
import sys
import numpy as np
from device.runtime.executors import openvino
from device.session import open_session
openvino.int8_products_saturate = lambda machine, flags: True
with open_session(sys.argv[1], executor="openvino", threads=1) as session:
    y = session.infer({"x": np.full((1, 64, 8, 8), 127, np.float32)})["y"]
print(y.min(), y.max())
"""


def in_openvino(path: Path) -> Session:
    session = open_session(path, threads=1, executor="openvino")
    assert {one.implementation for one in session.reports} == {"openvino"}
    return session


def one_node(op: str, shapes: dict[str, tuple[int | str | None, ...]], dtype: str) -> Network:
    x, y = shapes
    return Network(
        pieces=(Piece("cpu.0", "cpu", (node(op, (x,), y),), (x,), (y,)),),
        weights={},
        tensors=(
            TensorInfo(name=x, dtype="float32", shape=shapes[x]),
            TensorInfo(name=y, dtype=dtype, shape=shapes[y]),
        ),
        dims=(),
        inputs=(x,),
        outputs=(y,),
    )


def sqnr(expected: np.ndarray, actual: np.ndarray) -> float:
    noise = np.square(actual - expected, dtype=np.float64).mean()
    return float(10 * np.log10(np.square(expected, dtype=np.float64).mean() / noise))


@real
def test_fp32_has_the_numbers_of_onnxruntime(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    model = small_convnet(tmp_path / "net.onnx", rng)
    path = tmp_path / "net.engine"
    build_engine(model, "laptop", path, BuildOptions(precision="fp32"))
    with open_session(path, threads=1) as plain, in_openvino(path) as session:
        assert "OpenVINO 20" in session.reports[0].reason
        for _ in range(5):
            feeds = {"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)}
            expected, actual = plain.infer(feeds)["y"], session.infer(feeds)["y"]
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.ptp(expected))


@real
def test_int8_differs_from_onnxruntime_by_less_than_20_db_of_noise(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    model = small_convnet(tmp_path / "net.onnx", rng)
    samples = tmp_path / "samples.npy"
    np.save(samples, rng.normal(size=(16, 3, 32, 32)).astype(np.float32))
    path = tmp_path / "net.engine"
    options = BuildOptions(precision="int8", dummy_ranges=True, accept_loss=True)
    build_engine(model, "laptop", path, options)
    with open_session(path, threads=1) as plain, in_openvino(path) as session:
        feeds = [{"x": one[None]} for one in np.load(samples)]
        expected, actual = (
            np.concatenate([run.infer(one)["y"] for one in feeds]) for run in (plain, session)
        )
    assert sqnr(expected, actual) > 20


@real
@pytest.mark.parametrize("network", [single_network("batch"), split_network("batch")])
def test_each_size_of_a_dynamic_dimension_runs_in_the_callers_arrays(
    tmp_path: Path, network: Network
) -> None:
    path = write_network(tmp_path / "e", network)
    with open_session(path, threads=1) as plain, in_openvino(path) as session:
        for size in (4, 1, 3, 2):
            feeds = {"x": picture(size, size)}
            if size == 3:
                feeds["x"].flags.writeable = False
            target = np.full((size, 10), np.nan, np.float32)
            returned = session.infer(feeds, {"y": target})["y"]
            assert returned is target
            expected = plain.infer(feeds)["y"]
            np.testing.assert_allclose(returned, expected, rtol=0, atol=2e-2)
            earlier_output = session.infer(feeds)["y"]
            session.infer({"x": picture(size, 9)})
            assert earlier_output.tobytes() == returned.tobytes()


@real
def test_an_output_whose_size_only_a_run_tells_is_new_each_time(tmp_path: Path) -> None:
    network = one_node("NonZero", {"x": (6,), "y": (1, None)}, "int64")
    with in_openvino(write_network(tmp_path / "e", network)) as session:
        first = session.infer({"x": np.array([0, 1, 0, 2, 3, 0], np.float32)})["y"]
        second = session.infer({"x": np.array([5, 0, 0, 0, 0, 0], np.float32)})["y"]
    assert first.tolist() == [[1, 3, 4]]
    assert second.tolist() == [[0]]


@real
def test_sessions_side_by_side_give_what_one_gives(tmp_path: Path) -> None:
    path = write_network(tmp_path / "e", split_network("batch"))
    feeds = [{"x": picture(1 + seed % 4, seed)} for seed in range(24)]
    with in_openvino(path) as session:
        expected = [session.infer(one)["y"] for one in feeds]
    with SessionPool(path, 3, executor="openvino") as pool, ThreadPoolExecutor(3) as threads:
        assert pool.reports[2][0].implementation == "openvino"
        for one, actual in zip(expected, threads.map(pool.infer, feeds), strict=True):
            np.testing.assert_allclose(actual["y"], one, rtol=0, atol=1e-5)


@real
def test_a_model_that_openvino_refuses_runs_in_nothing_else(tmp_path: Path) -> None:
    path = write_network(tmp_path / "e", one_node("Det", {"x": (2, 2), "y": ()}, "float32"))
    with open_session(path) as plain:
        assert plain.infer({"x": np.eye(2, dtype=np.float32)})["y"] == 1
    with pytest.raises(SessionError, match=r"segment 'cpu\.0' cannot be loaded by OpenVINO: .*Det"):
        open_session(path, executor="openvino")


@real
def test_weights_outside_the_engine_are_not_read(tmp_path: Path) -> None:
    manifest, entries = engine_parts(single_network())
    (segment,) = manifest.segments
    (whole,) = segment.implementations
    assert isinstance(whole, Portable)
    fewer = replace(whole, weights=tuple(name for name in whole.weights if name != "w3"))
    changed = replace(manifest, segments=(replace(segment, implementations=(fewer,)),))
    write_engine(tmp_path / "e", changed, entries)
    with pytest.raises(SessionError, match="has weights 'w3' outside the engine"):
        open_session(tmp_path / "e", executor="openvino")


@real
def test_int8_is_exact_on_cpus_whose_products_saturate(tmp_path: Path) -> None:
    nodes = (
        node("QuantizeLinear", ("x", "s", "z"), "xq"),
        node("DequantizeLinear", ("xq", "s", "z"), "xd"),
        node("DequantizeLinear", ("w", "s", "z"), "wd"),
        node("Conv", ("xd", "wd"), "y"),
    )
    network = Network(
        pieces=(Piece("cpu.0", "cpu", nodes, ("x",), ("y",)),),
        weights={
            "w": np.full((8, 64, 3, 3), 127, np.int8),
            "s": np.array(1, np.float32),
            "z": np.array(0, np.int8),
        },
        tensors=(
            TensorInfo(name="x", dtype="float32", shape=(1, 64, 8, 8)),
            TensorInfo(name="y", dtype="float32", shape=(1, 8, 6, 6)),
        ),
        dims=(),
        inputs=("x",),
        outputs=("y",),
    )
    path = write_network(tmp_path / "e", network)
    command = [sys.executable, "-c", SATURATED, str(path)]
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert {float(word) for word in result.stdout.split()} == {127 * 127 * 64 * 9}


@pytest.mark.parametrize("words", ["infer {} --random 1", "bench {} --iterations 1"])
def test_a_missing_package_is_named_with_what_installs_it(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_network(tmp_path / "e.engine", single_network())
    monkeypatch.setattr(install_advice, "find_spec", lambda name: None)
    advice = f"openvino is not installed; {pip_install('openvino')}"
    with pytest.raises(SessionError, match=re.escape(advice)):
        open_session(path, executor="openvino")
    result = CliRunner().invoke(tandem, [*words.format(path).split(), "--executor", "openvino"])
    assert result.exit_code == 1
    assert "openvino is not installed" in " ".join(str(result.exception or result.output).split())


@pytest.mark.parametrize(
    "opener", [open_runner, lambda path, **given: open_file(path, 1, None, None, **given)]
)
def test_a_model_that_is_no_engine_does_not_pretend(opener: Any, tmp_path: Path) -> None:
    path = small_convnet(tmp_path / "model.onnx", np.random.default_rng(0))
    with pytest.raises(TandemError, match=r"onnxruntime.*build an engine of it"):
        opener(path, executor="openvino")


@real
def test_a_served_engine_runs_in_openvino(tmp_path: Path) -> None:
    write_network(tmp_path / "picture.engine", single_network("batch"))
    opened = open_file(tmp_path / "picture.engine", 2, None, None, "openvino")
    for runner in opened.runners:
        assert isinstance(runner, Session)
        assert runner.reports[0].implementation == "openvino"
        runner.close()


def test_it_is_taken_only_where_it_is_asked_for(tmp_path: Path) -> None:
    path = write_network(tmp_path / "e", single_network())
    code = (
        "import sys; from device.session import open_session;"
        "print(open_session(sys.argv[1]).reports[0].implementation, 'openvino' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["portable", "False"]
    with pytest.raises(SessionError, match="executor 'tvm': use one of auto, openvino"):
        open_session(path, executor="tvm")  # type: ignore[arg-type]
