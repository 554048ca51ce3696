"""Operators that ONNX defines by others, as their definitions."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from gpu_graphs import Case, node, normal
from onnx import helper

from toolkit.gpu.passes.functions import expand_functions

FUNCTIONS = {
    "an attribute left to its default": Case(
        [node("ThresholdedRelu", "x", "y")], {"x": (2, 3)}, {}
    ),
    "an attribute of its own": Case([node("Celu", "x", "y", alpha=0.3)], {"x": (2, 3)}, {}),
    "an operator after it": Case(
        [node("Selu", "x", "m"), node("Relu", "m", "y")], {"x": (2, 3)}, {}
    ),
    "small constants": Case(
        [node("LayerNormalization", "x s b", "y", axis=-1)],
        {"x": (2, 5, 4)},
        {"s": np.array([1, 2, -1, 0.5], np.float32), "b": np.ones(4, np.float32)},
    ),
    "constants beside the segment": Case(
        [node("LayerNormalization", "x s", "y", axis=-1)],
        {"x": (2, 600)},
        {"s": np.linspace(-1, 1, 600, dtype=np.float32)},
    ),
    "an input left out": Case(
        [helper.make_node("Clip", ["x", "", "top"], ["y"], name="Clip:y")],
        {"x": (3, 4)},
        {"top": np.array(0.4, np.float32)},
    ),
    "two of them": Case([node("Softsign", "x", "m"), node("Mish", "m", "y")], {"x": (3, 4)}, {}),
}


REPLACED = {"Celu", "Clip", "LayerNormalization", "Mish", "Selu", "Softsign", "ThresholdedRelu"}


def answer(segment: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """What onnxruntime computes of a segment."""
    model = ir.to_proto(segment)
    onnx.checker.check_model(model, full_check=True)
    for one in model.graph.node:
        one.name = ""  # onnxruntime wants names of their own
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, feeds)
    return result


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_definition_computes_what_the_operator_does(name: str, rng: np.random.Generator) -> None:
    case = FUNCTIONS[name]
    segment = case.segment().model
    before = ir.to_proto(segment).SerializeToString(deterministic=True)
    names = {one.name for one in segment.graph}
    expanded = expand_functions(segment, names)
    assert expanded is not None
    assert {one.name for one in expanded.graph} == names
    assert ir.to_proto(segment).SerializeToString(deterministic=True) == before
    kinds = {one.op_type for one in expanded.graph}
    assert not kinds & REPLACED
    feeds = case.feeds(rng)
    (truth,) = case.truth(feeds).values()
    np.testing.assert_allclose(answer(expanded, feeds), truth, rtol=1e-4, atol=1e-5)


def test_only_the_nodes_asked_for_are_replaced() -> None:
    case = FUNCTIONS["two of them"]
    expanded = expand_functions(case.segment().model, ["Mish:y"])
    assert expanded is not None
    kinds = [one.op_type for one in expanded.graph]
    assert "Softsign" in kinds
    assert "Mish" not in kinds


def test_what_no_operators_define_stays(rng: np.random.Generator) -> None:
    case = Case([node("MatMul", "x w", "y")], {"x": (2, 3)}, {"w": normal(rng, 3, 4)})
    assert expand_functions(case.segment().model, ["MatMul:y"]) is None
    assert expand_functions(FUNCTIONS["two of them"].segment().model, []) is None
