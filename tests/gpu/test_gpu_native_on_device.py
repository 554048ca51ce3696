"""libtandem on a GPU: what the Python session gives, bit for bit."""

import os
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from native_fixtures import Native, NativeSession, compiled

import configs
from device.engine.manifest import Precision
from device.runtime.executors import cuda
from device.runtime.session import open_session
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.gpu.codegen.triton_version import has_compiler

pytestmark = pytest.mark.gpu
BUILT = os.environ.get("TANDEM_NATIVE_LIBRARY")  # built elsewhere, for a GPU without xxhash.h
RUNS = 20


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Native:
    return compiled(tmp_path_factory) if BUILT is None else Native(Path(BUILT))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_the_detector_gives_the_bits_of_the_python_session(
    native: Native, precision: Precision, tmp_path: Path, rng: np.random.Generator
) -> None:
    if cuda.why_not() is not None:
        pytest.skip(str(cuda.why_not()))
    if not has_compiler():
        pytest.skip("Triton is not installed")
    data = configs.ROOT / "scenes/calibration" if precision == "int8" else None
    options = BuildOptions(precision=precision, data=data)
    build_engine(configs.ROOT / "models/robot-objects.onnx", "h200", tmp_path / "e", options)
    shape = (RUNS, 1, 3, 320, 320)
    pictures = rng.random(shape, dtype=np.float32)
    with open_session(tmp_path / "e") as session:
        assert [report.implementation for report in session.reports] == ["cuda"]
        truth = [bits(session.infer({"images": picture})) for picture in pictures]
    results: list[list[dict[str, bytes]]] = [[], [], [], []]

    def run(rows: list[dict[str, bytes]]) -> None:
        native_session = NativeSession(native, tmp_path / "e")
        assert [kind for _, kind, _ in native_session.reports()] == ["cuda"]
        rows += [bits(native_session.infer({"images": picture})) for picture in pictures]
        native_session.close()

    threads = [Thread(target=run, args=(rows,)) for rows in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [truth] * len(threads)


def bits(outputs: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in outputs.items()}
