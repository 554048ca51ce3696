"""RNN, GRU and LSTM in steps, interpreted on the CPU, against onnxruntime."""

import numpy as np
import pytest
from gpu_graphs import Case, normal
from gpu_interpreter import check
from onnx import helper

from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.operations import MAX_STEPS

pytest.importorskip("triton", reason="Triton is not installed")

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
EPILOGUE, BATCH, WIDTH, HIDDEN = 5, 3, 6, 8


def recurrence(
    op: str,
    rng: np.random.Generator,
    given: tuple[str, ...] = ("b",),
    outputs: tuple[str, ...] = ("y", "h", "c"),
    steps: int = EPILOGUE,
    **attributes: object,
) -> Case:
    """A recurrence with random weights; `given`: which of b, h0, c0 and p it has."""
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    gates = GATES[op]
    weights = {
        "w": normal(rng, directions, gates * HIDDEN, WIDTH) * 2,
        "r": normal(rng, directions, gates * HIDDEN, HIDDEN) * 2,
        "b": rng.normal(size=(directions, 2 * gates * HIDDEN)).astype(np.float32),
        "p": rng.normal(size=(directions, 3 * HIDDEN)).astype(np.float32),
    }
    names = ["x", "w", "r", "b", "", "h0", "c0", "p"]
    used = {"x", "w", "r", *given}
    inputs = [name if name in used else "" for name in names]
    while not inputs[-1]:
        inputs.pop()
    state = (BATCH, directions, HIDDEN) if attributes.get("layout") else (directions, BATCH, HIDDEN)
    shapes = {"x": (BATCH, steps, WIDTH) if attributes.get("layout") else (steps, BATCH, WIDTH)}
    shapes |= {name: state for name in ("h0", "c0") if name in used}
    outputs = outputs if op == "LSTM" else outputs[:2]
    node = helper.make_node(op, inputs, outputs, name="cell", hidden_size=HIDDEN, **attributes)
    used_weights = {name: value for name, value in weights.items() if name in used}
    return Case([node], shapes, used_weights, tuple(name for name in outputs if name))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("op", GATES)
def test_recurrences(op: str, direction: str, precision: str, rng: np.random.Generator) -> None:
    check(recurrence(op, rng, direction=direction), precision, rng)


FORMS = {
    "no bias": ("LSTM", (), {}),
    "a state to begin with": ("LSTM", ("b", "h0", "c0"), {"direction": "bidirectional"}),
    "peepholes": ("LSTM", ("b", "h0", "c0", "p"), {}),
    "reset after the product": ("GRU", ("b", "h0"), {"linear_before_reset": 1}),
    "reset before the product": ("GRU", ("b", "h0"), {"direction": "bidirectional"}),
    "reset after, no state": ("GRU", ("b",), {"linear_before_reset": 1}),
    "other activations": ("RNN", ("b", "h0"), {"activations": ["Relu"]}),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str, rng: np.random.Generator) -> None:
    op, given, attributes = FORMS[name]
    check(recurrence(op, rng, given, **attributes), "fp32", rng)


@pytest.mark.parametrize("outputs", [("y",), ("", "h"), ("", "", "c")])
def test_outputs_that_are_left_out(outputs: tuple[str, ...], rng: np.random.Generator) -> None:
    check(recurrence("LSTM", rng, outputs=outputs), "fp32", rng)


def test_a_step_of_an_lstm_is_a_product_and_few_expressions(rng: np.random.Generator) -> None:
    case = recurrence("LSTM", rng, outputs=("", "h"))
    kernels = [call.spec.title for call in case.lower("fp32").launches]
    assert kernels.count("gemm strided") == 1 + (EPILOGUE - 1)  # the first step starts from 0
    assert kernels.count("elementwise") <= 5 * EPILOGUE


@pytest.mark.parametrize("steps", [MAX_STEPS, MAX_STEPS + 1])
def test_steps_up_to_the_limit(steps: int, rng: np.random.Generator) -> None:
    case = recurrence("RNN", rng, outputs=("", "h"), steps=steps)
    if steps <= MAX_STEPS:
        case.lower("fp32")
        return
    with pytest.raises(NotCoveredError, match=f"{steps} steps; kernels take {MAX_STEPS}"):
        case.lower("fp32")
