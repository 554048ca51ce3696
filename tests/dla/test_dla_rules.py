"""Every rule of the DLA, at its limit and one step beyond it."""

import pytest
from planning_graphs import constant, one_node

from device.engine.manifest import Precision
from device.profile import Dla
from scripts.dla_cases import CASES, V2, WHOLE, conv
from toolkit.dla.rules.general_checks import batch_of
from toolkit.dla.rules.verdicts import RULES, judge
from toolkit.errors import PlanError
from toolkit.graph.node_view import NodeView, TensorView


def rules_of(
    view: NodeView, dla: Dla | None, tensorrt: str | None, precision: Precision
) -> set[str]:
    assert dla is not None
    return {verdict.rule for verdict in judge(view, dla, tensorrt, precision)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_node_at_the_limit_passes_the_whole_table(case):
    dla, precision, tensorrt = case.passes_on or (case.dla, case.precision, case.tensorrt)
    assert rules_of(case.passes, dla, tensorrt, precision) == case.beside


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_node_beyond_the_limit_is_refused_by_its_rule(case):
    verdicts = judge(case.fails, case.dla, case.tensorrt, case.precision)
    (verdict,) = (verdict for verdict in verdicts if verdict.rule == case.rule)
    (rule,) = (rule for rule in RULES if rule.id == case.rule)
    assert verdict.node == "node"
    assert verdict.limit == rule.limit_text
    assert "{" not in verdict.limit
    assert verdict.actual
    assert verdict.reason == f"{verdict.actual}, but {verdict.limit}"
    assert verdict.certainty == rule.certainty


def test_every_rule_has_a_case_on_both_sides():
    assert {case.rule for case in CASES} == {rule.id for rule in RULES}


def test_rule_ids_are_distinct():
    ids = [rule.id for rule in RULES]
    assert len(set(ids)) == len(ids)


def test_all_broken_rules_are_reported_with_what_was_found():
    broken = conv(strides=[9, 9], dilations=[33, 33])
    verdicts = {verdict.rule: verdict for verdict in judge(broken, V2, "10.3", "int8")}
    assert {"conv.stride", "conv.dilation"} <= verdicts.keys()
    assert verdicts["conv.stride"].node == "node"
    assert verdicts["conv.stride"].actual == "strides 9x9"
    assert verdicts["conv.stride"].reason == "strides 9x9, but strides must be in [1, 8]"


def test_depthwise_convolutions_may_run_in_int8():
    depthwise = conv((1, 33, 8, 8), 33, group=33)
    assert rules_of(depthwise, V2, "10.3", "int8") == set()


def test_the_convolution_buffer_counts_the_dilated_kernel():
    # 64 channels, width 256: 128 entries a line, so 29 lines take 15 banks and 31 lines 16.
    plain = conv((1, 64, 256, 256), 8, (29, 1))
    dilated = conv((1, 64, 256, 256), 8, (15, 1), dilations=[2, 1])
    larger = conv((1, 64, 256, 256), 8, (16, 1), dilations=[2, 1])
    assert rules_of(plain, V2, "10.3", "int8") == set()
    assert rules_of(dilated, V2, "10.3", "int8") == set()
    assert rules_of(larger, V2, "10.3", "int8") == {"conv.cbuf-int8"}


def test_all_dimensions_but_the_last_three_count_as_batch():
    shapes = [(4, 8), (4, 8, 2), (4, 8, 2, 2), (3, 4, 8, 2, 2)]
    batches = [batch_of(TensorView("x", "float32", shape)) for shape in shapes]
    assert batches == [4, 4, 4, 12]
    assert batch_of(TensorView("x", "float32", ("N", 8, 2, 2))) is None


def test_a_product_with_an_unknown_operand_is_refused_without_a_crash():
    unknown = one_node("MatMul", [None, constant(64, 10)], None)
    assert "G5" in rules_of(unknown, V2, "10.3", "int8")
    assert "product.form" not in rules_of(unknown, V2, "10.3", "int8")


def test_an_operator_without_rules_gets_the_hint_of_its_rewrite():
    pooled = one_node("GlobalAveragePool", [WHOLE], (2, 8, 1, 1))
    (verdict,) = judge(pooled, V2, "10.3", "int8")
    assert "AveragePool" in verdict.hint


def test_unknown_shapes_are_refused_with_that_reason():
    (verdict,) = judge(one_node("Relu", [None], None), V2, "10.3", "int8")
    assert verdict.rule == "G5"
    assert verdict.actual == "unknown shape of 'in0'"


def test_a_malformed_tensorrt_version_is_named():
    with pytest.raises(PlanError, match="'ten' is not a TensorRT version"):
        judge(conv(), V2, "ten", "int8")
