"""Faster R-CNN as torchvision exports it: imported, planned, built, run, and PyTorch's boxes."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from device.engine.manifest import Manifest
from device.session import open_session
from scripts.networks.faster_rcnn import export, image, make_network
from scripts.train_faster_rcnn import agreement, run_torch
from toolkit.engine.build import BuildOptions, BuildResult, build_engine

SIDE = 128  # the same structure as at 800, in seconds


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """The model with a ResNet-18 at a small size, and PyTorch's detections."""
    path = tmp_path_factory.mktemp("model") / "m.onnx"
    network = make_network("resnet18", SIDE)
    export(network, SIDE, path)
    return path, dict(run_torch(network, SIDE, "cpu"))


def on_device(manifest: Manifest, op: str) -> list[str]:
    """Return the processors of the nodes of an operator."""
    return [row.processor for row in manifest.plan if row.op == op]


@pytest.mark.slow
def test_boxes_are_pytorchs(small: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    model, expected = small
    assert len(expected["scores"]) > 0
    result = build_engine(model, "laptop", tmp_path / "m.engine", BuildOptions(precision="fp32"))
    with open_session(result.path) as session:
        actual = session.infer({"image": image(SIDE)})
    same = agreement(expected, actual)
    assert same.found == same.expected
    assert same.worst_score_difference < 1e-3
    assert same.worst_corner_difference < 0.05


def test_agreement_tells_detections_apart() -> None:
    one = {
        "boxes": np.array([[0, 0, 10, 10], [20, 20, 40, 40]], np.float32),
        "labels": np.array([1, 2]),
        "scores": np.array([0.9, 0.8], np.float32),
    }
    assert dataclasses.astuple(agreement(one, one)) == (2, 2, 0.0, 0.0)
    # By half a pixel: IoU 0.82 of the smaller one, 0.906 of the larger.
    moved = {**one, "boxes": one["boxes"] + np.float32(0.5)}
    assert agreement(one, moved).found == 1
    assert agreement(one, {**one, "labels": np.array([1, 3])}).found == 1
    assert agreement(one, {name: values[:0] for name, values in one.items()}).found == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)  # kernels of 400 nodes, and 800x800 on a CPU
@pytest.mark.parametrize("profile", ["orin-nx-16gb", "agx-orin-64gb", "h200"])
def test_the_large_one_builds_and_finds_pytorchs_boxes(profile: str, tmp_path: Path) -> None:
    network = make_network()
    export(network, 800, tmp_path / "m.onnx")
    options = BuildOptions(precision="fp16")
    result: BuildResult = build_engine(tmp_path / "m.onnx", profile, tmp_path / "m.engine", options)
    convolutions = on_device(result.manifest, "Conv")
    assert len(convolutions) > 60
    assert set(convolutions) <= {"gpu", "dla0", "dla1"}
    with open_session(result.path) as session:
        actual = session.infer({"image": image(800)})
    same = agreement(run_torch(network, 800, "cpu"), actual)
    assert same.expected > 50
    assert same.found >= 0.95 * same.expected  # portable on a CPU: in FP32
