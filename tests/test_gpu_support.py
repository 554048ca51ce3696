"""What the GPU backend says of nodes before anything is cut or lowered."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from gpu_graphs import Case, node, normal
from onnx import helper

from toolkit.gpu.emit.table import EMITTERS
from toolkit.gpu.ir.elementwise_ops import OPERATORS
from toolkit.gpu.support import CONSTANTS, MOST_INDICES, REWRITTEN, RULES, ask_support

Rng = np.random.Generator


def asked(case: Case, **how: object) -> dict[str, str]:
    return dict(ask_support(ir.from_proto(case.model()), **how).refused)


HEADS = {"q": (1, 4, 8, 256), "k": (1, 4, 8, 256), "v": (1, 4, 8, 256)}
REFUSED = {
    "an operator without kernel": (
        Case([node("Det", "x", "y")], {"x": (2, 3, 3)}, {}),
        "'Det:y' (Det) has no kernel yet",
    ),
    "results whose size depends on numbers": (
        Case([node("NonZero", "x", "y")], {"x": (2, 3)}, {}, dtypes={"y": "int64"}),
        "depends on the numbers",
    ),
    "tensors of unknown shape": (
        Case([node("Relu", "x", "y")], {"x": ("rows", 3)}, {}),
        "'x' has the shape [rows,3], which no formula gives",
    ),
    "four spatial dimensions": (
        Case(
            [node("Conv", "x w", "y")],
            {"x": (1, 2, 3, 3, 3, 3)},
            {"w": np.ones((2, 2, 1, 1, 1, 1), np.float32)},
        ),
        "has 4 spatial dimensions; kernels take 1 to 3",
    ),
    "more indices than kernels read": (
        Case(
            [node("GatherND", "x i", "y")],
            {"x": (2,) * (MOST_INDICES + 1)},
            {"i": np.zeros((3, MOST_INDICES + 1), np.int64)},
        ),
        f"takes {MOST_INDICES + 1} indices for an element",
    ),
    "cubic samples of volumes": (
        Case(
            [node("GridSample", "x g", "y", mode="bicubic")],
            {"x": (1, 2, 3, 3, 3), "g": (1, 2, 2, 2, 3)},
            {},
            opset=19,
        ),
        "samples 3 dimensions (cubic)",
    ),
    "a border of a computed number": (
        Case(
            [node("ReduceMax", "x", "m", keepdims=0), node("Pad", "x p m", "y")],
            {"x": (2, 3)},
            {"p": np.array([0, 1, 0, 1])},
        ),
        "'Pad:y' (Pad) reads 'm', which is computed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_node_alone_tells_is_refused(name: str) -> None:
    case, text = REFUSED[name]
    (reason,) = asked(case).values()
    assert text in reason


def test_an_operator_that_others_define_is_asked_as_those() -> None:
    """Heads that are deeper than a block of attention, by MatMul and Softmax."""
    case = Case([node("Attention", "q k v", "y")], HEADS, {}, opset=23)
    supported = ask_support(ir.from_proto(case.model()))
    assert not supported.refused
    kinds = {one.op_type for one in supported.model.graph}
    assert {"MatMul", "Softmax"} <= kinds
    assert "Attention" not in kinds


def test_a_definition_that_has_no_kernels_leaves_the_reason_of_the_operator() -> None:
    case = Case([node("Bernoulli", "x", "y")], {"x": (2, 3)}, {})
    supported = ask_support(ir.from_proto(case.model()))
    assert supported.refused == {"Bernoulli:y": "node 'Bernoulli:y' (Bernoulli) has no kernel yet"}
    assert "(RandomUniformLike) has no kernel" in supported.last["Bernoulli:y"]


def test_only_the_nodes_named_are_asked() -> None:
    case = Case([node("Det", "x", "d"), node("Det", "x", "y")], {"x": (2, 3, 3)}, {}, ("d", "y"))
    assert set(asked(case, names=["Det:y"])) == {"Det:y"}


def test_open_sizes_are_left_to_lowering() -> None:
    """Shapes are formulas there, and what computes with sizes needs no kernel."""
    nodes = [
        node("Shape", "x", "s"),
        node("Det", "x", "d"),
        node("Relu", "x", "y"),
    ]
    case = Case(nodes, {"x": ("rows", 3, 3)}, {}, ("s", "d", "y"), {"s": "int64"})
    assert set(asked(case, dynamic=True)) == {"Det:d"}


def test_rules_are_asked_of_operators_that_have_kernels() -> None:
    known = {*EMITTERS, *OPERATORS, *REWRITTEN}
    rows = [kinds for kinds, _ in RULES] + [kinds for kinds, _, _ in CONSTANTS]
    assert {kind for kinds in rows for kind in kinds} <= known
    assert not REWRITTEN & (EMITTERS.keys() | OPERATORS.keys())
    assert all(onnx.defs.has(kind) for kind in REWRITTEN)


def test_weights_that_a_recurrence_computes_are_refused(rng: Rng) -> None:
    weights = {"b": normal(rng, 1, 24), "r": normal(rng, 1, 12, 3)}
    nodes = [
        node("Relu", "v", "w"),
        helper.make_node("LSTM", ["x", "w", "r", "b"], ["y"], name="l", hidden_size=3),
    ]
    case = Case(nodes, {"x": (2, 1, 4), "v": (1, 12, 4)}, weights)
    assert asked(case) == {"l": "node 'l' (LSTM) has weights that are not constant"}
