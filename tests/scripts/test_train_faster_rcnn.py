"""What trains and compares Faster R-CNN: its scenes, and how boxes are counted."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from scripts.networks.shape_scenes import CLASSES, MOST_SHAPES, _inside, scene  # noqa: E402
from scripts.train_faster_rcnn import confident, matched, row_text, scenes  # noqa: E402

SIDE = 64


def test_scenes_are_the_same_for_a_seed_and_hold_what_their_boxes_say() -> None:
    drawn = scenes(SIDE, 12, 5, "cpu")
    for one, again in zip(drawn, scenes(SIDE, 12, 5, "cpu"), strict=True):
        assert torch.equal(one.picture, again.picture)
        assert torch.equal(one.boxes, again.boxes)
        assert one.picture.shape == (3, SIDE, SIDE)
        assert 0 <= float(one.picture.min()) <= float(one.picture.max()) <= 1
        assert 1 <= len(one.labels) == len(one.boxes) <= MOST_SHAPES
        assert all(1 <= label <= len(CLASSES) for label in one.labels.tolist())
        low, high = one.boxes[:, :2], one.boxes[:, 2:]
        assert bool((low >= 0).all() and (high <= SIDE).all() and (high - low >= 2).all())
    second = scene(SIDE, torch.Generator("cpu").manual_seed(6))
    assert not torch.equal(second.picture, drawn[0].picture)


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("disc", [(0, 0), (0.7, 0.7)], [(0.8, 0.8)]),
        ("ring", [(0, 0.9), (-0.6, 0)], [(0, 0.5), (0, 1.1)]),
        ("square", [(0.7, -0.7)], [(0.71, 0)]),
        ("triangle", [(0, 0.5), (0, -0.9)], [(0, 0.6), (0.5, -0.5)]),
        ("cross", [(0.9, 0.2), (0.2, -0.9)], [(0.3, 0.3)]),
    ],
)
def test_each_shape_is_where_it_should_be(
    name: str, inside: list[tuple[float, float]], outside: list[tuple[float, float]]
) -> None:
    u, v = torch.tensor([*inside, *outside]).T
    expected = [True] * len(inside) + [False] * len(outside)
    assert _inside(name, u, v).tolist() == expected


def outputs(boxes: list[list[float]], labels: list[int], scores: list[float]) -> dict:
    return {
        "boxes": np.array(boxes, np.float32).reshape(-1, 4),
        "labels": np.array(labels),
        "scores": np.array(scores, np.float32),
    }


def test_boxes_are_counted_by_overlap_and_confidence() -> None:
    (one,) = scenes(SIDE, 1, 5, "cpu")
    truth = outputs(one.boxes.tolist(), one.labels.tolist(), [0.9] * len(one.labels))
    unsure = outputs([[0, 0, 1, 1]], [1], [0.49])  # not confident: in no count
    expected = {name: np.concatenate((truth[name], unsure[name])) for name in truth}
    same = matched([one], [expected], [truth])
    assert (same.expected, same.found[0.5], same.found[0.9]) == (len(one.labels),) * 3
    assert (same.extra, same.worst_score_difference, same.truth) == (0, 0.0, 1.0)
    # A tenth of the width to the right, with scores of 0.4: found, though not confident any more.
    width = truth["boxes"][:, 2:3] - truth["boxes"][:, :1]
    moved = {**truth, "boxes": truth["boxes"].copy(), "scores": truth["scores"] - np.float32(0.5)}
    moved["boxes"][:, [0, 2]] += 0.1 * width
    shifted = matched([one], [expected], [moved])
    assert (shifted.found[0.5], shifted.found[0.9]) == (len(one.labels), 0)
    assert shifted.worst_score_difference == pytest.approx(0.5)
    assert shifted.truth == 0.0
    # Boxes that PyTorch has not are extra, if they are confident.
    more = outputs([[0, 0, 2, 2], [2, 2, 4, 4]], [1, 1], [0.5, 0.49])
    assert matched([one], [expected], [more]).extra == 1
    assert len(confident(more)["scores"]) == 1


def test_a_row_says_why_there_is_no_engine_or_what_it_lost() -> None:
    assert "it is too large" in row_text({"program": "Tandem int8", "problem": "it is too large"})
    row = {
        "program": "Tandem int8", "ms": 1.5, "expected": 3, "found": {0.5: 3, 0.9: 2}, "extra": 1,
        "worst_score_difference": 0.25, "truth": 0.5, "build_s": 9.0, "kept": 4,
        "refused": ["output scores: too low"], "cpu": {"If: it decides sizes": 2},
        "segments": [{"segment": "gpu.0", "runs": "cuda", "ms": 1.0}],
    }  # fmt: skip
    text = row_text(row)
    for part in ("of 3 boxes", "3 at IoU 0.5, 2 at IoU 0.9", "1 others", "within 0.250",
                 "finds 50.0 %", "4 nodes kept in FP16", "refuses it: output scores: too low",
                 "2 on the CPU, If: it decides sizes", "gpu.0"):  # fmt: skip
        assert part in text
