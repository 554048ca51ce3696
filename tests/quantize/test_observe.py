"""Calibration sees the true activations of the model."""

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from model_fixtures import small_convnet
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from calibration.calibrate import observe_tensors
from calibration.dataset import memory_dataset
from calibration.observer import FINE_BINS, MAX_PER_COUNT, numpy_counts, observe
from toolkit.errors import BuildError
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.observe import (
    ActivationRunner,
    SharedRunner,
    observe_graph,
    opencv_counts,
)
from toolkit.quantize.quantize import calibrated_tensors


def test_activations_are_those_of_the_reference(tmp_path: Path, rng: np.random.Generator) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    model, _ = run_passes(import_model(path).model)
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    activations = ActivationRunner(model, ("x", "c0", "r0", "a1", "r1", "f", "y"))({"x": x})
    plain = onnx.load(path)
    for name in ("c0", "r0", "a1", "r1", "f"):
        output = onnx.ValueInfoProto()
        output.name = name
        plain.graph.output.append(output)
    names = [output.name for output in plain.graph.output]
    expected = dict(zip(names, ReferenceEvaluator(plain).run(None, {"x": x}), strict=True))
    for name, array in expected.items():
        np.testing.assert_allclose(activations[name], array, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(activations["x"], x)


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


def test_lent_activations_are_those_of_a_call_in_every_thread(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model, _ = run_passes(import_model(small_convnet(tmp_path / "m.onnx", rng)).model)
    runner = ActivationRunner(model, ("x", "r0", "a1", "y"), threads=1)
    shared = SharedRunner(runner)
    feeds = [{"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)} for _ in range(40)]

    def lent(fed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        result = shared(fed)
        time.sleep(0.001)  # time for another thread to write where it must not
        return {name: array.copy() for name, array in result.items()}

    with ThreadPoolExecutor(3) as pool:
        result = list(pool.map(lent, feeds))
    for fed, arrays in zip(feeds, result, strict=True):
        for name, array in runner(fed).items():
            np.testing.assert_array_equal(arrays[name], array)


def test_lending_writes_into_the_same_memory_again(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model, _ = run_passes(import_model(small_convnet(tmp_path / "m.onnx", rng)).model)
    runner = ActivationRunner(model, ("y",))
    shared = SharedRunner(runner)
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    first = shared({"x": x})["y"]
    assert np.shares_memory(first, shared({"x": x + 1})["y"])
    np.testing.assert_array_equal(first, runner({"x": x + 1})["y"])


def test_activations_of_a_size_that_the_data_decide_are_lent_too(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["where"], name="where"),
        helper.make_node("Cast", ["where"], ["found"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["found"], ["y"], name="sum", keepdims=0),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [info("x", TensorProto.FLOAT, [6])],
        [info("y", TensorProto.FLOAT, [])],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9),
        tmp_path / "m.onnx",
    )
    model, _ = run_passes(import_model(tmp_path / "m.onnx").model)
    runner = SharedRunner(ActivationRunner(model, ("found",)))
    for x, expected in (([0, 1, 0, 0, 0, 0], [[1]]), ([1, 0, 0, 1, 0, 1], [[0, 3, 5]])):
        assert runner({"x": np.array(x, np.float32)})["found"].tolist() == expected


def test_a_sample_that_does_not_fit_is_refused_when_lent_too(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model, _ = run_passes(import_model(small_convnet(tmp_path / "m.onnx", rng)).model)
    runner = SharedRunner(ActivationRunner(model, ("y",)))
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    runner({"x": x})
    for bad in ({"x": x[:, :2]}, {"z": x}, {"x": x.astype(np.float64)}):
        with pytest.raises(BuildError, match="cannot run the model on a calibration sample"):
            runner(bad)


def test_a_graph_is_observed_as_one_sample_after_the_other_would_be(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model, _ = run_passes(import_model(small_convnet(tmp_path / "m.onnx", rng)).model)
    tensors = calibrated_tensors(model)
    data = memory_dataset(
        [{"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)} for _ in range(9)]
    )
    result = observe_graph(model, data, tensors)
    plain = observe_tensors(ActivationRunner(model, tensors, threads=1), data, tensors)
    assert result.fed_sha256 == plain.fed_sha256
    for name, seen in plain.histograms.items():
        np.testing.assert_array_equal(result.histograms[name].bins, seen.bins)
        assert result.histograms[name].amax == seen.amax


def test_opencv_counts_what_numpy_counts(rng: np.random.Generator) -> None:
    for size in (1, 1000, MAX_PER_COUNT):
        numbers = rng.integers(0, FINE_BINS, size).astype(np.uint16)
        numbers[: size // 2] = 0  # what a rectifier gives
        np.testing.assert_array_equal(opencv_counts(numbers), numpy_counts(numbers))
    values = rng.normal(size=100_000).astype(np.float32)
    fast, plain = observe("x", values, 0, opencv_counts), observe("x", values, 0)
    np.testing.assert_array_equal(fast.bins, plain.bins)


def test_counting_is_exact_beyond_what_float32_counts() -> None:
    values = np.ones((1 << 24) + 3, np.float32)
    assert observe("x", values, 0, opencv_counts).bins.max() == (1 << 24) + 3
