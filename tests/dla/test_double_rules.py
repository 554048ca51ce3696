"""The double's rules of the DLA, read from NVIDIA's pages, beside those of Tandem's table.

Both were written apart. Every node of every case is put to both, and what one refuses and the other
takes is explained in DIFFERENCES, or one of them is wrong.
"""

import re
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from tensorrt_double import dla_rules as double
from tensorrt_double.onnx_layers import layers_of

from device.engine.manifest import Precision
from device.profile import Dla
from scripts.case_models import case_model
from scripts.dla_cases import CASES, V2
from scripts.one_node import one_node
from toolkit.dla.rules.rule import parse_version
from toolkit.dla.rules.verdicts import USUAL_TENSORRT, judge
from toolkit.graph.node_view import NodeView, TensorView, views

POLICY = frozenset({"P1"})  # of the planner, not of the DLA
GENERATIONS = {"v1": "xavier", "v2": "orin"}

DIFFERENCES: dict[tuple[str, str], str] = {
    ("unary.v1", "beyond"): "NvInfer.h 8.5.2:3687 has kABS and no word of Xavier; the table is "
    "cautious, as the operator matrix that has Abs is of Orin",
    ("min.conflict", "beyond"): "NvInfer.h 10.3.0:2470 and the page's row ElementWise have Min, "
    "the matrix says that TensorRT does not offer it; the table is cautious",
    ("G17", "beyond"): "no page limits constants; the table is cautious, as TensorRT makes them "
    "FP16 before the DLA stores FP19",
    ("product.form", "beyond"): "the matrix asks of MatMul a constant second input alone; the "
    "table is cautious, as a 1x1 convolution has no rows beside each other",
    ("softmax.rows", "beyond"): "the guide of TensorRT 8.4 is stricter than its NvInfer.h, "
    "8.4.1:2280 to 2290; the table is cautious",
}
"""(rule of the table, side of its case) -> why the table refuses what the pages let pass."""

RANK_3 = (
    "", "beyond", one_node("Add", [(1, 8, 4), (1, 8, 4)], (1, 8, 4)), V2, None, "int8"
)  # fmt: skip
"""The table has one rule on ranks for many operators, and one case for it."""


def layer_of(view: NodeView) -> double.Layer:
    """Return a node for the double, without the model around it."""
    return double.Layer(
        name=view.name,
        op=view.op,
        domain=view.domain,
        attributes={key: value for key, value in view.attributes if value is not None},
        inputs=tuple(None if t is None else tensor_of(t) for t in view.inputs),
        outputs=tuple(tensor_of(t) for t in view.outputs),
        before=view.before,
        after=view.after,
    )


def tensor_of(tensor: TensorView) -> double.Tensor:
    shape = None if tensor.shape is None else tuple(
        size if isinstance(size, int) else None for size in tensor.shape
    )  # fmt: skip
    value = None
    if tensor.values is not None and shape is not None:
        value = np.reshape(np.array(tensor.values), [size or 0 for size in shape])
    return double.Tensor(tensor.name, shape, tensor.dtype, tensor.constant, value)


def build_of(dla: Dla, tensorrt: str | None, precision: Precision) -> double.Build:
    version = parse_version(tensorrt or USUAL_TENSORRT[dla.generation])
    return double.Build(GENERATIONS[dla.generation], version, precision)


def sides() -> Iterator[tuple[str, str, NodeView, Dla, str | None, Precision]]:
    """Every node of every case, with what it is built for."""
    for case in CASES:
        assert case.dla is not None
        dla, precision, tensorrt = case.passes_on or (case.dla, case.precision, case.tensorrt)
        assert dla is not None
        yield case.rule, "at", case.passes, dla, tensorrt, precision
        yield case.rule, "beyond", case.fails, case.dla, case.tensorrt, case.precision


def test_what_one_refuses_the_other_refuses_too_or_it_is_explained() -> None:
    only_table, only_pages, count = {}, {}, 0
    for rule, side, view, dla, tensorrt, precision in sides():
        table = {v.rule for v in judge(view, dla, tensorrt, precision)} - POLICY
        pages = double.problems(layer_of(view), build_of(dla, tensorrt, precision))
        count += 1
        if table and not pages:
            only_table[rule, side] = sorted(table)
        if pages and not table:
            only_pages[rule, side] = pages
    assert count >= 240
    assert only_pages == {}, "the table takes what NVIDIA's pages refuse"
    assert only_table == {key: [key[0]] for key in DIFFERENCES}


def test_a_node_of_a_model_is_read_as_the_node_of_the_case() -> None:
    """The reader of ONNX in the double comes to the same answer as without a model around it."""
    read = 0
    for rule, side, view, dla, tensorrt, precision in sides():
        model = case_model(view, half=False)
        if model is None:
            continue
        (node,) = (layer for layer in layers_of(model) if layer.name == "node")
        build = build_of(dla, tensorrt, precision)
        # ONNX may infer another shape than the case has.
        problems, alone = (
            double.problems(node, build),
            double.problems(layer_of(onnx_view(model)), build),
        )
        assert bool(problems) == bool(alone), (rule, side, problems, alone)
        read += 1
    assert read > 150


def onnx_view(model: onnx.ModelProto) -> NodeView:
    return next(v for v in views(ir.from_proto(model).graph) if v.name == "node")


def test_every_rule_names_its_place() -> None:
    page = re.compile("page|NvInfer|matrix|guide|runtime|JetPack|issue|ONNX|log|Working with DLA")
    assert all(page.search(rule.source) for rule in double.RULES)


@pytest.mark.parametrize("rule", double.RULES, ids=lambda rule: rule.source)
def test_every_rule_refuses_some_case(rule: double.Rule) -> None:
    assert any(
        rule.holds(layer := layer_of(view), build := build_of(dla, tensorrt, precision))
        and rule.problem(layer, build)
        for _, _, view, dla, tensorrt, precision in (*sides(), RANK_3)
    )
