"""The demo detector in the emulation: how near it is to onnxruntime, and that fast is exact."""

from pathlib import Path

import numpy as np
import pytest

import configs
from device.runtime.session import open_session
from pipelines.config import load_model
from pipelines.stages.preprocess import preprocess
from pipelines.vision import cv2
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.quantize.ranges.measure import RangeOptions

MODEL = configs.ROOT / "models" / "robot-objects.toml"
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Arrays]]:
    """Outputs for three scenes, by how the DLA's segments ran."""
    model = load_model(MODEL)
    files = sorted((MODEL.parent / model.calibration).glob("*.jpg"))[:12]
    scenes = [preprocess(cv2.imread(str(one)), model.preprocess)[0].copy() for one in files]
    path = tmp_path_factory.mktemp("engine") / "detector.engine"
    data = [{"images": scene} for scene in scenes]
    options = BuildOptions(data=data, ranges=RangeOptions("minmax"), kernels=False)
    build_engine(MODEL.parent / model.file, "agx-orin-64gb", path, options)
    return {
        "portable": run(path, scenes[:3]),
        "exact": run(path, scenes[:3], dla="exact"),
        "fast": run(path, scenes[:3], dla="fast"),
        "ideal": run(path, scenes[:3], dla="fast", scales="ideal"),
    }


def run(path: Path, scenes: list[np.ndarray], **how: object) -> list[Arrays]:
    with open_session(path, **how) as session:
        emulated = [one.implementation for one in session.reports if one.processor == "dla0"]
        assert set(emulated) == ({"emulated"} if how else {"portable"})
        return [session.infer({"images": scene}) for scene in scenes]


def sqnr_db(reference: list[Arrays], actual: list[Arrays], name: str) -> float:
    want = np.concatenate([one[name].ravel() for one in reference]).astype(np.float64)
    have = np.concatenate([one[name].ravel() for one in actual])
    noise = ((want - have) ** 2).sum()
    return float(10 * np.log10((want**2).sum() / noise)) if noise else float("inf")


def test_fast_is_exact(outputs: dict[str, list[Arrays]]) -> None:
    for exact, fast in zip(outputs["exact"], outputs["fast"], strict=True):
        assert all((exact[name] == fast[name]).all() for name in exact)


@pytest.mark.parametrize("name", ["boxes", "scores"])
def test_with_ideal_scales_only_roundings_differ(
    name: str, outputs: dict[str, list[Arrays]]
) -> None:
    assert sqnr_db(outputs["portable"], outputs["ideal"], name) > 35


@pytest.mark.parametrize("name", ["boxes", "scores"])
def test_scales_of_16_bits_cost_more(name: str, outputs: dict[str, list[Arrays]]) -> None:
    hardware = sqnr_db(outputs["portable"], outputs["exact"], name)
    assert 20 < hardware < sqnr_db(outputs["portable"], outputs["ideal"], name)
