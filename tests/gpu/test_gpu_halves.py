"""Activations in few instructions where results keep the digits of FP16: when, and how exactly."""

import math
from dataclasses import replace
from pathlib import Path

import gpu_interpreter
import int8_reference
import numpy as np
import onnx
import pytest
from gpu_graphs import Case, node
from int8_graphs import Graph

from device.engine.file import open_engine
from device.runtime.executors import cuda
from device.runtime.session import Session
from scripts.gpu_engine import build_on_gpu
from toolkit.gpu.codegen.compile_kernels import compile_kernels
from toolkit.gpu.codegen.triton_version import has_compiler
from toolkit.gpu.target import GpuTarget

needs_triton = pytest.mark.skipif(not has_compiler(), reason="Triton is not installed")

ORIN, XAVIER = GpuTarget(87, 8), GpuTarget(72, 8)
SILU = (node("Sigmoid", "x", "s"), node("Mul", "s x", "y"))


def steps_of(
    *nodes: onnx.NodeProto, precision: str = "fp16", gpu: GpuTarget = ORIN
) -> tuple[str, ...]:
    """The steps of the one kernel that a graph of x becomes."""
    (call,) = Case(nodes, {"x": (8, 128)}, {}, opset=20).lower(precision, gpu).launches
    steps = dict(call.spec.constants)["EXPRESSION"]
    assert isinstance(steps, tuple)
    return tuple(str(step[0]) for step in steps if isinstance(step, tuple))


@pytest.mark.parametrize(
    ("precision", "gpu", "step"),
    [("fp16", ORIN, "silu_half"), ("fp16", XAVIER, "silu"), ("fp32", ORIN, "silu")],
)
def test_a_number_times_its_sigmoid_is_one_step(precision: str, gpu: GpuTarget, step: str) -> None:
    assert steps_of(*SILU, precision=precision, gpu=gpu) == (step,)


@pytest.mark.parametrize(
    ("one", "step"),
    [
        (node("Tanh", "x", "y"), "tanh_half"),
        (node("Gelu", "x", "y"), "gelu_half"),
        (node("Gelu", "x", "y", approximate="tanh"), "gelu_tanh_half"),
        (node("Sigmoid", "x", "y"), "sigmoid"),  # a score near 0 keeps its digits
    ],
)
def test_other_activations_in_half(one: onnx.NodeProto, step: str) -> None:
    assert steps_of(one) == (step,)
    assert steps_of(one, gpu=XAVIER) == (step.removesuffix("_half"),)


def test_a_sigmoid_that_is_read_twice_or_of_another_number_stays() -> None:
    twice = (*SILU[:1], node("Mul", "s x", "m"), node("Add", "m s", "y"))
    assert steps_of(*twice) == ("sigmoid", "mul", "add")
    second = (node("Neg", "x", "n"), node("Sigmoid", "n", "s"), node("Mul", "s x", "y"))
    assert steps_of(*second) == ("neg", "sigmoid", "mul")


def silu_of_a_product(rng: np.random.Generator) -> Case:
    """A 1x1 convolution, its SiLU on a grid, and what reads that."""
    graph = Graph(rng, {"x": (2, 64, 30, 28)})
    first = graph.product("Conv", graph.rounded("x"), (96, 64, 1, 1), bias="int32")
    rounded = graph.rounded(graph.add("Mul", first, graph.add("Sigmoid", first)))
    window: dict[str, object] = {"kernel_shape": [1, 1], "strides": [1, 1]}
    return graph.case(graph.add("MaxPool", rounded, **window))


def test_what_is_rounded_to_int8_has_no_more_digits(rng: np.random.Generator) -> None:
    case = silu_of_a_product(rng)
    steps = [str(dict(call.spec.constants).get("EPILOGUE")) for call in case.lower("int8").launches]
    results = [one for one in steps if "silu" in one]
    assert results == ["(('silu_half', 0), ('round_int8_by', 1, 0))"]
    old = [str(call.spec.constants) for call in case.lower("int8", XAVIER).launches]
    assert "silu_half" not in "".join(old)


@needs_triton
def test_gelu_with_its_polynomial_is_near_to_all_of_fp16s_digits() -> None:
    case = Case([node("Gelu", "x", "y")], {"x": (2003,)}, {}, opset=20)
    x = np.concatenate([np.linspace(-9, 9, 2000), [-900, 900, np.nan]]).astype(np.float16)
    actual = gpu_interpreter.run(case.lower("fp16"), {"x": x.astype(np.float32)})["y"]
    wide = x.astype(np.float64)
    truth = wide * np.array([0.5 * math.erfc(-one / math.sqrt(2)) for one in wide])
    assert np.isnan(actual[-1])
    # The polynomial is 2.5e-5 off; what is stored, half of the last digit.
    assert (np.abs(actual - truth)[:-1] <= 3e-5 + 2**-11 * np.abs(truth)[:-1]).all()


@needs_triton
def test_a_gelu_in_int8_is_at_most_one_step_away(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (2, 64, 6, 5)})
    first = graph.product("Conv", graph.rounded("x"), (96, 64, 1, 1), bias="int32")
    case = replace(graph.case(graph.rounded(graph.add("Gelu", first))), opset=20)
    feeds = case.feeds(rng)
    (actual,) = gpu_interpreter.run(case.lower("int8"), feeds).values()
    (truth,) = case.truth(feeds).values()
    step = np.diff(np.unique(truth)).min()
    assert np.abs(actual - truth).max() < 1.01 * step
    assert np.mean(actual != truth) < 0.01


@needs_triton
@pytest.mark.parametrize(
    "sm", [87, *(pytest.param(sm, marks=pytest.mark.slow) for sm in (72, 90, 110))]
)
def test_every_gpu_has_the_instructions(sm: int, rng: np.random.Generator) -> None:
    gpu = GpuTarget(sm, 8)
    cases = [(Case(SILU, {"x": (8, 128)}, {}), "fp16"), (silu_of_a_product(rng), "int8")]
    specs = [
        next(c.spec for c in case.lower(precision, gpu).launches if "silu" in str(c.spec.constants))
        for case, precision in cases
    ]
    assert [one is not None and one.spill_bytes for one in compile_kernels(specs, gpu)] == [0, 0]


def infer(
    model: onnx.ModelProto, folder: Path, precision: str, feeds: dict[str, np.ndarray]
) -> np.ndarray:
    if cuda.why_not() is not None:
        pytest.skip(str(cuda.why_not()))
    onnx.save(model, folder / "m.onnx")
    build_on_gpu(folder / "m.onnx", folder / "m.engine", profile="h200", precision=precision)
    with open_engine(folder / "m.engine") as engine, Session(engine) as session:
        (actual,) = session.infer(feeds).values()
    return actual


@pytest.mark.gpu
@needs_triton
def test_int8_of_a_silu_is_at_most_one_step_from_the_reference(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    case = silu_of_a_product(rng)
    feeds = case.feeds(rng)
    (output,) = case.outputs
    outputs = infer(case.model(), tmp_path, "int8", feeds)
    truth = int8_reference.run(case.model(), feeds)[output]
    values = np.unique(truth)
    step = float(np.diff(values).min())
    assert len(values) > 50
    assert np.abs(outputs - truth).max() < 1.01 * step
    assert np.mean(outputs != truth) < 0.03


# The largest error beside |x|: half of FP16's digits of it, and those of a tanh of 11 bits.
@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize(
    ("nodes", "precision", "limit"),
    [
        (SILU, "fp16", 2**-11 + 2**-12 + 1e-5),
        (SILU, "fp32", 1e-5),
        ((node("Gelu", "x", "y"),), "fp16", 2**-11 + 2**-12 + 6e-5),
        ((node("Tanh", "x", "y"),), "fp16", 2**-10.9 + 2**-11),
        ((node("Sigmoid", "x", "y"),), "fp32", 1e-5),
    ],
)
def test_activations_on_the_gpu(
    nodes: tuple[onnx.NodeProto, ...], precision: str, limit: float, tmp_path: Path
) -> None:
    x = np.linspace(-30, 30, 8 * 4096, dtype=np.float32).reshape(8, 4096)
    case = Case(nodes, {"x": x.shape}, {}, opset=20)
    wide = x.astype(np.float64)
    truth = case.truth({"x": x})["y"].astype(np.float64)
    outputs = infer(case.model(), tmp_path, precision, {"x": x})
    assert (np.abs(outputs - truth) <= limit * np.abs(wide) + 1e-7).all()
