"""Explanations: every rule that speaks of a node, its value, and the refusals of judge."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_graphs import one_node

from scripts.dla_cases import CASES, V1, V2, WHOLE, binary, conv, softmax
from scripts.golden import LIGHT_MODELS
from toolkit.dla.rules.explain import RuleLine, explain_node, render_explanation
from toolkit.dla.rules.notes import NOTES
from toolkit.dla.rules.ops import NATIVE, STATUS
from toolkit.dla.rules.rule import ALL_PRECISIONS
from toolkit.dla.rules.verdicts import RULES, judge
from toolkit.graph.node_view import NodeView, TensorView, views
from toolkit.graph.passes import run_passes
from toolkit.graph.window import Window
from toolkit.importers.onnx import import_model


def line(view: NodeView, rule: str, *situation: object) -> RuleLine:
    (single,) = (row for row in explain_node(view, *situation).lines if row.rule == rule)
    return single


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_refused_lines_are_the_verdicts(case):
    lines = explain_node(case.fails, case.dla, case.tensorrt, case.precision).lines
    refused = [(row.rule, row.actual, row.hint) for row in lines if row.status == "refused"]
    verdicts = judge(case.fails, case.dla, case.tensorrt, case.precision)
    assert refused == [(verdict.rule, verdict.actual, verdict.hint) for verdict in verdicts]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_every_rule_of_the_operator_has_one_line_that_says_why(case):
    for view in (case.passes, case.fails):
        lines = explain_node(view, case.dla, case.tensorrt, case.precision).lines
        bound = [rule.id for rule in RULES if rule.ops is None or view.op in rule.ops]
        assert [row.rule for row in lines] == bound
        for row in lines:
            assert (row.status == "does not apply") == bool(row.why)
            assert (row.status == "does not apply") == (row.actual == "")
            assert row.limit
            assert row.source
            assert "{" not in row.limit + row.actual + row.source


def test_a_value_is_told_even_where_the_rule_passes():
    view = conv((1, 64, 40, 56), 128, (5, 3), strides=[2, 1], group=4)
    actual_by_rule = {row.rule: row.actual for row in explain_node(view, V2, "10.3", "int8").lines}
    assert actual_by_rule["conv.kernel"] == "kernel 5x3"
    assert actual_by_rule["conv.stride"] == "strides 2x1"
    assert actual_by_rule["conv.channels"] == "64 input channels"
    assert actual_by_rule["conv.maps"] == "128 output maps"
    assert actual_by_rule["conv.groups"] == "4 groups"
    # 64 x 5 x 3 bytes are one bank; 2 entries of 32 channels x 56 / 4 = 28, 5 lines: 140 of 256.
    assert actual_by_rule["conv.cbuf-int8"] == "1 weight and 1 data banks"


def test_the_largest_of_many_values_is_told():
    view = one_node("Relu", [(3, 70, 5, 11)], (3, 70, 5, 11))
    assert line(view, "G4", V2, "10.3", "int8").actual == "dimension 70 of 'in0'"
    assert line(view, "G2", V2, "10.3", "int8").actual == "batch 3"
    assert line(view, "G10", V2, "10.3", "int8").actual == f"{3 * 70 * 5 * 11} elements in 'in0'"


def test_a_rule_that_does_not_apply_says_what_keeps_it():
    assert line(conv(), "conv.cbuf-fp16", V2, "10.3", "int8").why == "precision int8"
    assert line(conv(), "G2.v1", V2, "10.3", "int8").why == "DLA v2"
    assert line(conv(), "G11", V2, "10.3", "int8").why == "TensorRT 10.3"
    assert line(conv(), "G11", V2, None, "int8").why == "TensorRT 10.3.0"
    nearest = next(c.passes for c in CASES if c.rule == "resize.nearest")
    assert line(nearest, "resize.linear", V2, "10.3", "int8").why.startswith("nothing")


def test_the_text_tells_refusals_first_with_limit_source_and_help():
    text = render_explanation(explain_node(conv(strides=[9, 1]), V2, "10.3", "int8"))
    first, refused, accepted, *_ = text.split("\n\n")
    assert first == "node (Conv) on DLA v2, int8, TensorRT 10.3: 1 of 28 rules refuses it"
    assert "conv.stride" in refused
    assert "strides 9x1, but strides must be in [1, 8]" in refused
    assert "documented: NvInfer.h 10.3" in refused
    assert "kernel 3x3: kernel height and width must be in [1, 32]" in accepted
    fp32 = render_explanation(explain_node(conv(), V2, "10.3", "fp32"))
    assert "helps: build with --precision int8" in fp32


def test_the_text_of_a_node_that_may_run_names_no_refusal():
    text = render_explanation(explain_node(conv(), V2, "10.3", "int8"))
    assert "none of 28 rules refuses it" in text
    assert "refused by" not in text


def test_conflicts_between_sources_are_told():
    (verdict,) = judge(binary("Min", WHOLE, WHOLE), V2, "10.3", "int8")
    source = line(binary("Min", WHOLE, WHOLE), "min.conflict", V2, "10.3", "int8").source
    assert verdict.rule == "min.conflict"
    assert "matrix" in source
    assert "NvInfer.h" in source


def test_remarks_follow_generation_and_precision():
    def notes(view, dla, precision):
        return {note.id for note in explain_node(view, dla, None, precision).notes}

    assert "note.sparse" in notes(conv(), V2, "int8")
    assert "note.sparse" not in notes(conv(), V1, "int8")
    assert "note.sparse" not in notes(conv(), V2, "fp16")
    assert "note.raised" in notes(softmax(1, 8, 1, 1), V2, "int8")
    assert notes(one_node("TopK", [WHOLE, (1,)], WHOLE, WHOLE), V2, "int8") == set()


def test_remarks_speak_of_known_operators_and_have_a_source():
    assert len({note.id for note in NOTES}) == len(NOTES)
    for note in NOTES:
        assert note.source
        assert (note.ops or set()) <= STATUS.keys()


def test_a_network_of_six_hundred_nodes_is_judged_in_a_tenth_of_a_second():
    model, _ = run_passes(import_model(LIGHT_MODELS / "light_densenet121.onnx").model)
    nodes = views(model.graph)
    assert len(nodes) > 500

    def seconds() -> float:
        start = time.process_time()
        for view in nodes:
            judge(view, V2, "10.3", "int8")
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 0.1


SIZES = st.one_of(st.integers(0, 9000), st.sampled_from([1, 2, 3, 4, None, "N"]))
SHAPES = st.one_of(st.none(), st.lists(SIZES, max_size=6).map(tuple))
NUMBERS = st.lists(st.floats(-5, 40), max_size=6).map(tuple)
WHOLE_NUMBERS = st.lists(st.integers(-5, 140), max_size=6).map(tuple)
TENSORS = st.builds(
    TensorView,
    name=st.sampled_from("abcde"),
    dtype=st.sampled_from(["float32", "float16", "int64", "bool", "unknown"]),
    shape=SHAPES,
    constant=st.booleans(),
    values=st.one_of(st.none(), NUMBERS),
)
NAMES = [
    "axis",
    "count_include_pad",
    "group",
    "max",
    "min",
    "mode",
    "nearest_mode",
    "size",
    "transA",
]
ATTRIBUTES = st.dictionaries(
    st.sampled_from(NAMES),
    st.one_of(st.integers(-9, 9), st.floats(-9, 9), st.sampled_from(["nearest", "linear"])),
)
LISTS = st.dictionaries(
    st.sampled_from(["axes", "output_padding", "output_shape", "perm"]), WHOLE_NUMBERS
)


@st.composite
def windows(draw: st.DrawFn) -> Window:
    rank = draw(st.integers(1, 3))
    part = st.tuples(*[st.integers(0, 140)] * rank)
    pads = draw(st.one_of(st.none(), st.tuples(*[st.integers(0, 140)] * (2 * rank))))
    return Window(draw(part), draw(part), draw(part), pads)


@st.composite
def any_nodes(draw: st.DrawFn) -> NodeView:
    return NodeView(
        name="node",
        op=draw(st.sampled_from([*sorted(NATIVE), "Erf", "TopK"])),
        domain=draw(st.sampled_from(["", "com.example"])),
        inputs=tuple(draw(st.lists(st.one_of(st.none(), TENSORS), max_size=6))),
        outputs=tuple(draw(st.lists(TENSORS, max_size=3))),
        attributes=tuple(sorted((draw(ATTRIBUTES) | draw(LISTS)).items())),
        window=draw(st.one_of(st.none(), windows())),
        reads=(),
        before=tuple(draw(st.lists(st.sampled_from(["Slice", "Relu"]), max_size=2))),
        after=tuple(draw(st.lists(st.sampled_from(["Cast", "Concat"]), max_size=2))),
        has_subgraph=draw(st.booleans()),
        macs=None,
        weight_bytes=0,
    )


@given(
    view=any_nodes(),
    generation=st.sampled_from([V1, V2]),
    precision=st.sampled_from(ALL_PRECISIONS),
)
def test_no_node_however_malformed_breaks_a_rule(view, generation, precision):
    lines = explain_node(view, generation, None, precision).lines
    refused = [line.rule for line in lines if line.status == "refused"]
    assert refused == [verdict.rule for verdict in judge(view, generation, None, precision)]
    assert all(line.actual or line.why for line in lines)
