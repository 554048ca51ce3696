"""Calibration sees the true activations of the model."""

import gc
from pathlib import Path

import numpy as np
import onnx
from model_fixtures import small_convnet
from onnx.reference import ReferenceEvaluator

from calibration.observer import ALL_BINS, numpy_counts, observe
from toolkit.importer import import_model
from toolkit.int8.observe import ActivationRunner, opencv_counts
from toolkit.passes import run_passes


def test_activations_are_those_of_the_reference(tmp_path: Path, rng: np.random.Generator) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    model, _ = run_passes(import_model(path).model)
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    found = ActivationRunner(model, ("x", "c0", "r0", "a1", "r1", "f", "y"))({"x": x})
    plain = onnx.load(path)
    for name in ("c0", "r0", "a1", "r1", "f"):
        output = onnx.ValueInfoProto()
        output.name = name
        plain.graph.output.append(output)
    names = [output.name for output in plain.graph.output]
    expected = dict(zip(names, ReferenceEvaluator(plain).run(None, {"x": x}), strict=True))
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(found["x"], x)


def test_weights_outlive_the_graph_that_they_came_from(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    def make() -> ActivationRunner:
        model, _ = run_passes(import_model(tmp_path / "m.onnx").model)
        return ActivationRunner(model, ("y",))

    small_convnet(tmp_path / "m.onnx", rng, channels=24)
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    runner = make()
    first = runner({"x": x})["y"]
    gc.collect()
    overwritten = [rng.normal(size=size).astype(np.float32) for size in (648, 5184, 24, 240) * 50]
    assert len(overwritten) == 200
    np.testing.assert_array_equal(runner({"x": x})["y"], first)


def test_opencv_counts_what_numpy_counts(rng: np.random.Generator) -> None:
    for size in (1, 1000, 300_000):
        numbers = rng.integers(0, ALL_BINS, size).astype(np.uint16)
        numbers[: size // 2] = 0  # what a rectifier gives
        np.testing.assert_array_equal(opencv_counts(numbers), numpy_counts(numbers))
    values = rng.normal(size=100_000).astype(np.float32)
    fast, plain = observe("x", values, 0, opencv_counts), observe("x", values, 0)
    np.testing.assert_array_equal(fast.bins, plain.bins)


def test_counting_is_exact_beyond_what_float32_counts() -> None:
    numbers = np.zeros((1 << 24) + 3, np.uint16)
    assert opencv_counts(numbers)[0] == (1 << 24) + 3
