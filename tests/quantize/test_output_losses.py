"""What INT8 loses at the outputs: their parts, the metrics that fit them, and the limits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from model_fixtures import save
from onnx import helper

from toolkit.errors import BuildError
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.loss import metrics
from toolkit.quantize.loss.judge import Judgement, check, error_of, judge
from toolkit.quantize.loss.metrics import Candidates, OutputLoss
from toolkit.quantize.loss.parts import (
    OutputPart,
    mixing_concats,
    output_parts,
    output_tensors,
    split_outputs,
)
from toolkit.quantize.ranges.report_text import judgement_lines

ANCHORS = 60


def graph_of(path: Path) -> ir.Model:
    return run_passes(import_model(path).model)[0]


def detector(path: Path, *, transposed: bool = False) -> Path:
    """A head as YOLOv8's: x [1,4,A] * 100 beside sigmoid(w x) [1,2,A] in one output."""
    nodes = [
        helper.make_node("Mul", ["x", "size"], ["boxes"], "scaled"),
        helper.make_node("Conv", ["x", "w"], ["logits"], "conv"),
        helper.make_node("Sigmoid", ["logits"], ["scores"], "sigmoid"),
        helper.make_node("Concat", ["boxes", "scores"], ["both"], "concat", axis=1),
        helper.make_node("Transpose", ["both"], ["y"], "turn", perm=[0, 2, 1]),
    ]
    weights = {"size": np.full(1, 100, np.float32), "w": np.ones((2, 4, 1), np.float32)}
    name, shape = ("y", [1, ANCHORS, 6]) if transposed else ("both", [1, 6, ANCHORS])
    nodes = nodes if transposed else nodes[:-1]
    return save(path, nodes, {"x": [1, 4, ANCHORS]}, {name: shape}, weights)


@pytest.mark.parametrize(("transposed", "axis"), [(False, 1), (True, 2)])
def test_boxes_and_scores_in_one_output_are_two_parts(
    transposed: bool, axis: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    graph = graph_of(detector(tmp_path / "m.onnx", transposed=transposed))
    boxes, scores = output_parts(graph)
    assert (boxes.kind, scores.kind) == ("values", "scores")
    assert (boxes.axis, scores.axis) == (axis, axis)
    name = boxes.output
    array = rng.normal(size=(1, ANCHORS, 6) if transposed else (1, 6, ANCHORS))
    parts = split_outputs((boxes, scores), {name: array})
    assert parts.keys() == {f"{name}[0:4]", f"{name}[4:6]"}
    np.testing.assert_array_equal(np.concatenate(list(parts.values()), axis=axis), array)
    assert {"scores", "boxes"} <= output_tensors(graph)
    assert "logits" not in output_tensors(graph)


def test_levels_of_one_head_are_one_part(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Sigmoid", ["x"], ["a"]),
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Sigmoid", ["r"], ["b"]),
        helper.make_node("Concat", ["a", "b"], ["y"], axis=1),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 4]}, {"y": [1, 8]})
    assert output_parts(graph_of(path)) == (OutputPart("y", "y", "scores"),)


def test_concats_that_mix_scores_with_boxes_are_named(tmp_path: Path) -> None:
    assert list(mixing_concats(graph_of(detector(tmp_path / "m.onnx")))) == ["concat"]


def test_concats_before_the_sigmoid_of_scores_mix_too(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "size"], ["boxes"], "scaled"),
        helper.make_node("Concat", ["boxes", "x"], ["both"], "mixing", axis=1),
        helper.make_node("Split", ["both", "sizes"], ["a", "b"], "split", axis=1),
        helper.make_node("Sigmoid", ["b"], ["scores"], "sigmoid"),
        helper.make_node("Relu", ["a"], ["r"], "relu"),
        helper.make_node("Concat", ["x", "x"], ["twice"], "not mixing", axis=1),
        helper.make_node("Relu", ["twice"], ["t"], "relu2"),
    ]
    weights = {"size": np.full(1, 100, np.float32), "sizes": np.array([4, 4], np.int64)}
    outputs = {"scores": [1, 4, ANCHORS], "r": [1, 4, ANCHORS], "t": [1, 8, ANCHORS]}
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 4, ANCHORS]}, outputs, weights)
    assert list(mixing_concats(graph_of(path))) == ["mixing"]


def loss_of(losses: tuple[OutputLoss, ...], metric: metrics.Metric) -> OutputLoss:
    (loss,) = [loss for loss in losses if loss.metric is metric]
    return loss


@pytest.mark.parametrize(("drop", "broken"), [(0.1, False), (0.1001, True)])
def test_a_top_score_may_drop_to_the_limit(
    drop: float, broken: bool, rng: np.random.Generator
) -> None:
    reference = [rng.uniform(0, 0.2, (1, 3, ANCHORS)) for _ in range(3)]
    candidate = [array.copy() for array in reference]
    reference[1][0, 2, 7], candidate[1][0, 2, 7] = 0.8, 0.8 - drop
    loss = loss_of(metrics.score_losses("y", reference, candidate, 1), metrics.SCORE_DROP)
    assert loss.value == pytest.approx(drop)
    assert loss.broken == broken
    assert loss.of == 1


def test_scores_that_are_no_detections_have_nothing_to_lose(rng: np.random.Generator) -> None:
    reference = [rng.uniform(0, 0.2, (1, ANCHORS))]
    assert metrics.score_losses("y", reference, [np.zeros((1, ANCHORS))]) == ()
    part = OutputPart("y", "y", "scores")
    judgement = judge([part], [{"y": reference[0]}], [{"y": np.zeros((1, ANCHORS))}], basis="seen")
    assert judgement.nothing_to_lose == ("y",)
    assert not judgement.broken


def test_scores_that_become_nan_are_a_loss(rng: np.random.Generator) -> None:
    reference = [rng.uniform(0.3, 0.9, (1, 3, ANCHORS)) for _ in range(2)]
    candidate = [array.copy() for array in reference]
    candidate[1][0, 2, 7] = np.nan
    for class_axis in (None, 1):
        losses = metrics.score_losses("y", reference, candidate, class_axis)
        assert all(loss.broken for loss in losses)
    boxes = np.stack([np.array([10.0 * n, 0.0, 10.0 * n + 5.0, 5.0]) for n in range(ANCHORS)])
    exact = metrics.Candidates(boxes, np.full((ANCHORS, 1), 0.8))
    actual = metrics.Candidates(boxes, np.full((ANCHORS, 1), np.nan))
    losses = metrics.detection_losses("y", [exact], [actual])
    assert loss_of(losses, metrics.DETECTION_DROP).broken
    (rise,) = metrics.score_losses("y", [np.zeros((1, 3))], [np.full((1, 3), np.nan)])
    assert rise.broken


def test_a_class_that_becomes_nan_does_not_stay() -> None:
    reference = [np.tile([[0.9, 0.1]], (5, 1))]  # class 0, where argmax puts NaN too
    loss = metrics.class_loss("y", reference, [np.full((5, 2), np.nan)], 1, logits=False)
    assert loss is not None
    assert loss.broken


def test_a_score_out_of_nothing_is_a_loss(rng: np.random.Generator) -> None:
    reference, candidate = [np.full((1, ANCHORS), 0.01)], [np.full((1, ANCHORS), 0.01)]
    candidate[0][0, 5] = 0.6
    (loss,) = metrics.score_losses("y", reference, candidate)
    assert loss.metric is metrics.SCORE_RISE
    assert loss.broken


def boxes_at(centres: np.ndarray, size: float) -> np.ndarray:
    return np.concatenate([centres, np.full_like(centres, size)], axis=1)


def test_a_detection_may_move_to_the_next_anchor_but_not_away() -> None:
    centres = np.stack([np.arange(0.0, 40.0), np.full(40, 10.0)], axis=1)
    scores = np.zeros((40, 2))
    scores[20, 1] = 0.9
    reference = Candidates(boxes_at(centres, 20.0), scores)
    moved, away = np.zeros((40, 2)), np.zeros((40, 2))
    moved[21, 1], away[39, 1] = 0.88, 0.9
    near = metrics.detection_losses("y", [reference], [Candidates(reference.boxes, moved)])
    far = metrics.detection_losses("y", [reference], [Candidates(reference.boxes, away)])
    assert loss_of(near, metrics.DETECTION_DROP).value == pytest.approx(0.02)
    assert loss_of(far, metrics.DETECTION_DROP).value == pytest.approx(0.9)
    other_class = Candidates(reference.boxes, moved[:, ::-1])
    lost = metrics.detection_losses("y", [reference], [other_class])
    assert loss_of(lost, metrics.DETECTION_DROP).value == pytest.approx(0.9)


def test_offsets_from_the_cells_of_a_grid_are_no_boxes(rng: np.random.Generator) -> None:
    """Left, top, right, bottom from a cell look like centre and size, but follow the picture."""
    cells = np.stack(np.meshgrid(np.arange(20.0), np.arange(20.0)), axis=-1).reshape(-1, 2) * 16
    sizes = [rng.uniform(20, 60, (400, 2)) for _ in range(3)]
    moves = [rng.uniform(-8, 8, (400, 2)) for _ in range(3)]
    boxes = [np.hstack([cells + move, size]) for move, size in zip(moves, sizes, strict=True)]
    corners = [np.hstack([one[:, :2] - one[:, 2:], one[:, :2] + one[:, 2:]]) for one in boxes]
    offsets = [rng.uniform(0.2, 5.0, (400, 4)) for _ in range(3)]
    scores = np.zeros((400, 1))
    scores[210] = 0.9
    for kind, detections in ((boxes, 3), (corners, 3), (offsets, None), (offsets[:1], 1)):
        samples = [Candidates(one, scores) for one in kind]
        losses = metrics.detection_losses("y", samples, samples)
        counts = [loss.of for loss in losses if loss.metric is metrics.DETECTION_DROP]
        assert counts == ([] if detections is None else [detections])


def test_queries_have_no_place_of_their_own(rng: np.random.Generator) -> None:
    samples = [
        Candidates(boxes_at(rng.uniform(0, 300, (300, 2)), 20.0), np.full((300, 1), 0.9))
        for _ in range(2)
    ]
    losses = metrics.detection_losses("y", samples, samples)
    assert loss_of(losses, metrics.DETECTION_DROP).value == 0.0


def test_boxes_are_read_as_corners_where_the_values_say_so() -> None:
    low = np.stack([np.arange(10.0) * 50, np.zeros(10)], axis=1)
    corners = np.concatenate([low, low + 30], axis=1)
    scores = np.eye(10)[:, :1] * 0.9
    reference, candidate = Candidates(corners, scores), Candidates(corners + 2.0, scores * 0.9)
    losses = metrics.detection_losses("y", [reference], [candidate])
    assert loss_of(losses, metrics.DETECTION_DROP).value == pytest.approx(0.09)


def test_detections_far_apart_in_score_keep_their_order() -> None:
    centres = np.stack([np.arange(4.0) * 100, np.zeros(4)], axis=1)
    boxes = boxes_at(centres, 20.0)
    reference = Candidates(boxes, np.array([[0.9], [0.6], [0.55], [0.3]]))
    swapped = Candidates(boxes, np.array([[0.5], [0.58], [0.6], [0.3]]))
    loss = loss_of(
        metrics.detection_losses("y", [reference], [swapped]), metrics.RANKING
    )  # 0.6 and 0.55 have no order; 0.9 fell below both
    assert (loss.of, loss.value) == (5, pytest.approx(3 / 5))


@pytest.mark.parametrize("logits", [False, True])
def test_classes_are_judged_where_the_reference_is_certain(logits: bool) -> None:
    certain, unsure = [0.9, 0.05, 0.05], [0.4, 0.35, 0.25]
    reference, flipped = np.array([certain, certain, unsure]), np.array([certain, unsure, unsure])
    flipped[1:] = flipped[1:, ::-1]
    if logits:
        reference, flipped = np.log(reference), np.log(flipped)
    loss = metrics.class_loss("y", [reference], [flipped], 1, logits=logits)
    assert loss is not None
    assert (loss.value, loss.of) == (0.5, 2)
    assert metrics.class_loss("y", [reference[2:]], [flipped[2:]], 1, logits=logits) is None


def test_areas_are_judged_by_their_overlap_and_peaks_by_their_height() -> None:
    area = np.zeros((1, 1, 20, 20))
    area[..., 5:15, 5:15] = 0.9
    shifted = np.roll(area, 5, axis=3)
    loss = metrics.mask_loss("y", [area], [shifted])
    assert loss is not None
    assert loss.value == pytest.approx(50 / 150)
    assert loss.broken
    peak = np.zeros((1, 1, 20, 20))
    peak[0, 0, 3, 3] = 0.9
    assert metrics.mask_loss("y", [peak], [area]) is None


def test_noise_as_large_as_the_signal_is_an_error_that_says_what_to_do(
    rng: np.random.Generator,
) -> None:
    exact = rng.normal(size=(1, 8))
    judgement = judge(
        [OutputPart("y", "y", "values")], [{"y": exact}], [{"y": 0 * exact}], basis="held out"
    )
    assert judgement.losses[0].value == pytest.approx(0.0)
    message = r"output y: SQNR 0\.0 dB \(limit: at least 3 dB\).*1 sample held.*--accept-loss"
    with pytest.raises(BuildError, match=message):
        check(judgement, "m.onnx")


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_are_beyond_the_limit(number: float) -> None:
    candidate = np.ones((1, 4))
    candidate[0, 2] = number
    assert metrics.sqnr("y", [np.ones((1, 4))], [candidate], judged=True).broken


def test_a_figure_that_is_not_a_number_is_beyond_every_limit() -> None:
    loss = OutputLoss("y", metrics.SQNR, float("nan"), 1)
    assert Judgement((loss,), 1, "held out").broken == (loss,)


@pytest.mark.parametrize(
    ("metric", "value", "spent"),
    [
        (metrics.SCORE_DROP, 0.0, 0.0),
        (metrics.SCORE_DROP, 0.1, 1.0),
        (metrics.RANKING, 1.0, 0.0),
        (metrics.RANKING, 0.9, 1.0),
        (metrics.RANKING, 0.8, 2.0),
        (metrics.SQNR, 3.0, 1.0),
        (metrics.SQNR, 23.0, 0.01),
        (metrics.SQNR, float("inf"), 0.0),
        (metrics.SQNR, float("-inf"), float("inf")),
        (metrics.SQNR, float("nan"), float("inf")),
    ],
)
def test_losses_of_all_metrics_compare_by_the_share_of_the_limit(
    metric: metrics.Metric, value: float, spent: float
) -> None:
    loss = OutputLoss("y", metric, value, 1)
    assert loss.spent == pytest.approx(spent)
    assert Judgement((loss,), 1, "seen").spent == loss.spent
    assert Judgement((replace(loss, judged=False),), 1, "seen").spent == 0.0


@pytest.mark.parametrize("number", [0.0, np.nan, -np.inf])
def test_an_output_without_a_signal_in_fp32_is_reported_and_not_judged(number: float) -> None:
    exact, noisy = np.full((1, 4), number), np.full((1, 4), 0.01)
    for kind in ("values", "scores", "probabilities"):
        part = OutputPart("y", "y", kind, class_axis=1)  # type: ignore[arg-type]
        judgement = judge([part], [{"y": exact}], [{"y": noisy}], basis="held out")
        assert judgement.no_signal == ("y",)
        assert not judgement.broken
        check(judgement, "m.onnx")


def test_nan_instead_of_zero_is_beyond_the_limit() -> None:
    part = OutputPart("y", "y", "values")
    nan = [{"y": np.full((1, 4), np.nan)}]
    assert judge([part], [{"y": np.zeros((1, 4))}], nan, basis="held out").broken


def test_elements_that_are_not_finite_in_fp32_are_left_out(rng: np.random.Generator) -> None:
    exact = rng.normal(size=(1, 40))
    candidate = exact + 0.01
    expected = metrics.sqnr("y", [exact[:, 3:]], [candidate[:, 3:]], judged=True)
    exact[0, :3] = [np.nan, np.inf, -np.inf]
    loss = metrics.sqnr("y", [exact], [candidate], judged=True)
    assert loss is not None
    assert expected is not None
    assert loss.value == pytest.approx(expected.value)
    scores = np.array([[np.nan, 0.1, 0.2]])
    assert metrics.score_losses("y", [scores], [scores]) == ()


def test_classes_masked_out_leave_the_others_to_be_judged() -> None:
    logits = np.array([[9.0, 1.0, 0.0, -np.inf], [0.0, 1.0, 9.0, -np.inf]])
    flipped = np.array([[9.0, 1.0, 0.0, -np.inf], [9.0, 1.0, 0.0, -np.inf]])
    loss = metrics.class_loss("y", [logits], [flipped], 1, logits=True)
    assert loss is not None
    assert (loss.value, loss.of) == (0.5, 2)


@pytest.mark.parametrize(
    ("nodes", "linear"),
    [
        ([("Gemm", ["x", "w"])], True),
        ([("MatMul", ["x", "w"]), ("Add", ["t0", "b"])], True),
        ([("MatMul", ["x", "w"]), ("Tanh", ["t0"])], False),
        ([("MatMul", ["x", "w"]), ("LpNormalization", ["t0"])], False),
        ([("MatMul", ["x", "w"]), ("Add", ["t0", "x"])], False),
    ],
)
def test_only_what_a_linear_layer_puts_out_may_be_logits(
    nodes: list[tuple[str, list[str]]], linear: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    onnx_nodes = [
        helper.make_node(op, names, ["y" if number == len(nodes) - 1 else f"t{number}"])
        for number, (op, names) in enumerate(nodes)
    ]
    weights = {"w": rng.normal(size=(12, 12)).astype(np.float32), "b": np.ones(12, np.float32)}
    path = save(tmp_path / "m.onnx", onnx_nodes, {"x": [1, 12]}, {"y": [1, 12]}, weights)
    (part,) = output_parts(import_model(path).model)
    assert part.linear == linear
    exact, flipped = np.eye(1, 12) * 9, np.eye(1, 12, 3) * 9
    judgement = judge([part], [{"y": exact}], [{"y": flipped}], basis="held out")
    assert (metrics.AGREEMENT in {loss.metric for loss in judgement.losses}) == linear


@pytest.mark.parametrize(
    ("value", "missed", "broken"),
    [(0.05, False, False), (0.0501, True, False), (0.1001, True, True)],
)
def test_a_target_is_missed_before_its_limit(value: float, missed: bool, broken: bool) -> None:
    loss = OutputLoss("y", metrics.DETECTION_DROP, value, 1)
    assert (loss.missed, loss.broken) == (missed, broken)
    assert Judgement((loss,), 1, "held out").target_spent == pytest.approx(value / 0.05)


def test_the_error_of_scores_is_that_of_their_logits(rng: np.random.Generator) -> None:
    """Where a score is 0.5 it changes by a third of the target; scores near 0 do not count."""
    logits = np.concatenate([[0.0], rng.uniform(-4.0, 4.0, 200), rng.uniform(-9.0, -7.0, 500)])
    change = rng.choice([-1.0, 1.0], logits.size) * 4.0 * 0.05 / 3.0
    exact, candidate = (1.0 / (1.0 + np.exp(-row))[None] for row in (logits, logits + change))
    assert metrics.score_error([exact], [candidate]) == pytest.approx(1.0)
    assert metrics.score_error([exact[:, 201:]], [candidate[:, 201:]]) == 0.0


def test_an_output_of_another_size_in_int8_is_reported_and_not_judged(
    rng: np.random.Generator,
) -> None:
    """As lists of detections after NMS; what a decoder pairs with them is not paired either."""
    boxes, scores = OutputPart("b", "b", "values"), OutputPart("s", "s", "scores")
    exact = [
        {"b": rng.normal(size=(1, n, 4)), "s": rng.uniform(0.3, 1, size=(1, n, 2))} for n in (5, 6)
    ]
    second = [exact[0], {**exact[1], "b": exact[1]["b"][:, :-1]}]
    judgement = judge([boxes, scores], exact, second, basis="held out")
    assert judgement.varying == ("b",)
    assert {loss.part for loss in judgement.losses} == {"s"}
    assert not judgement.broken
    assert "output b: its size depends on the data" in "\n".join(judgement_lines(judgement))


def test_lists_whose_length_differs_have_no_grid(rng: np.random.Generator) -> None:
    lists = []
    for count in (400, 500):
        centre, half = rng.uniform(0, 100, (count, 2)), rng.uniform(1, 5, (count, 2))
        boxes = np.concatenate([centre - half, centre + half], axis=1)
        lists.append(Candidates(boxes, rng.uniform(0, 1, (count, 2))))
    drop = metrics.detection_losses("s", lists, lists)[0]
    assert (drop.metric, drop.value) == (metrics.DETECTION_DROP, 0.0)


def lines_of(*texts: str) -> np.ndarray:
    """Probabilities [lines, 12 steps, 16 classes] of letters from "a" on; "_" is the blank."""
    steps = np.full((len(texts), 12), 0)
    for row, text in enumerate(texts):
        steps[row, : len(text)] = [0 if sign == "_" else ord(sign) - 96 for sign in text]
    return np.where(np.arange(16) == steps[..., None], 0.85, 0.01).astype(np.float32)


def test_text_is_judged_by_the_line_where_most_steps_are_blanks() -> None:
    exact = lines_of("ab", "a_a", "cc_d", "b", "")
    moved = lines_of("_a_b", "a_a", "c_d", "b___f", "a")  # one more letter, and one out of nothing
    part = OutputPart("y", "y", "probabilities", class_axis=2)
    judgement = judge([part], [{"y": exact}], [{"y": moved}], basis="held out")
    loss = loss_of(judgement.losses, metrics.LINES)
    assert (loss.of, loss.value) == (4, 0.75)
    assert loss.missed
    assert not loss.broken
    assert loss_of(judgement.losses, metrics.AGREEMENT).value > 0.8  # which says less
    nan = np.full_like(exact, np.nan)
    (of_nan,) = (metrics.line_loss("y", [exact], [nan]),)
    assert of_nan is not None
    assert of_nan.broken
    assert metrics.line_loss("y", [lines_of("", "")], [lines_of("a", "b")]) is None


def test_logits_beside_boxes_are_judged_as_the_scores_that_a_decoder_makes_of_them() -> None:
    """Values far below 0 make the SQNR, and say nothing of detections."""
    logits = np.full((1, 50, 1), -3.0)
    logits[0, :4] = -30000.0
    outputs = {"boxes": np.ones((1, 50, 16)), "logits": logits}
    parts = [OutputPart(name, name, "values", linear=True) for name in outputs]
    coarse = {**outputs, "logits": np.round(logits / 240.0) * 240.0}  # all others are 0: 0.5
    judgement = judge(parts, [outputs], [coarse], basis="held out")
    assert loss_of(judgement.losses, metrics.SCORE_RISE).broken
    assert error_of(parts, [outputs], [coarse]) > 1.0
    assert not judge(parts, [outputs], [outputs], basis="held out").broken
    alone = judge(parts[1:], [outputs], [coarse], basis="held out")
    assert not alone.broken


def test_logits_may_lose_what_no_score_shows() -> None:
    """All that is far below 0 moves, the one detection does not."""
    logits = np.full((1, 50, 1), -60.0)
    logits[0, 0] = 2.0
    outputs = {"boxes": np.ones((1, 50, 16)), "logits": logits}
    parts = [OutputPart(name, name, "values", linear=True) for name in outputs]
    moved = {**outputs, "logits": np.where(logits < 0.0, 2.2 * logits, logits)}
    judgement = judge(parts, [outputs], [moved], basis="held out")
    assert loss_of(judgement.losses, metrics.SCORE_DROP).value == 0.0
    assert not judgement.broken


def test_a_column_of_other_values_beside_boxes_is_judged_by_its_noise(
    rng: np.random.Generator,
) -> None:
    """Depths, for example."""
    outputs = {"boxes": np.ones((1, 50, 16)), "depth": rng.uniform(5.0, 60.0, (1, 50, 1))}
    parts = [OutputPart(name, name, "values", linear=True) for name in outputs]
    halved = {**outputs, "depth": outputs["depth"] / 2.0 + rng.normal(0.0, 100.0, (1, 50, 1))}
    assert judge(parts, [outputs], [halved], basis="held out").broken


@pytest.mark.filterwarnings("error")
def test_logits_of_float16_overflow_nothing() -> None:
    outputs = {
        "boxes": np.ones((1, 50, 16), np.float16),
        "logits": np.linspace(-95.0, 5.0, 50, dtype=np.float16).reshape(1, 50, 1),
    }
    parts = [OutputPart(name, name, "values", linear=True) for name in outputs]
    assert not judge(parts, [outputs], [outputs], basis="held out").broken
