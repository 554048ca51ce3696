"""Camera frames become an engine's input on a real GPU, within a level of the CPU's."""

import os
from pathlib import Path

import numpy as np
import pytest

from device.engine.file import open_engine
from device.runtime.executors import cuda
from device.runtime.frames import FrameInput, why_no_frames
from device.runtime.session import Session
from pipelines.config import load_model
from scripts.bench_frames import MODEL, build, compare
from toolkit.gpu.codegen.triton_version import has_compiler

pytestmark = pytest.mark.gpu
BUILT = os.environ.get("TANDEM_FRAMES_ENGINE")  # built elsewhere, for a GPU without a compiler


@pytest.fixture(scope="module")
def engine_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if cuda.why_not() is not None:
        pytest.skip(str(cuda.why_not()))
    if BUILT is not None:
        return Path(BUILT)
    if not has_compiler():
        pytest.skip("Triton is not installed")
    path = tmp_path_factory.mktemp("frames") / "robot.engine"
    build(path, "h200", "fp16")
    return path


def test_images_made_on_the_gpu_are_within_a_level_of_the_cpu_s(engine_path: Path) -> None:
    config = load_model(MODEL).preprocess
    with open_engine(engine_path) as engine, Session(engine) as session:
        assert why_no_frames(engine, session) is None
        target = FrameInput(engine, session, 1, {})
        rows = compare(target, config, np.random.default_rng())
        image = target.image(0)[None]
        outputs = target.infer(1)
        target.close()
        expected = session.infer({session.inputs[0].name: image})
    assert max(row.largest for row in rows) <= 1.01
    assert min(row.equal_share for row in rows) > 0.99
    for name, values in expected.items():
        assert np.array_equal(outputs[name], values)
