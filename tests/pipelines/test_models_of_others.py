"""`scripts/models_of_others.py`: plans of models of others, and INT8 by what pipelines say."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from foreign_models import BY_NAME, foreign_model, foreign_picture

from pipelines.sinks.events import Detection, Event, TextLine
from scripts.models_of_others import (
    BACKGROUNDS,
    FIRST,
    PICTURES,
    PROFILES,
    SECOND,
    SUBJECTS,
    Int8Row,
    PlanRow,
    int8_table,
    judge_boxes,
    judge_classes,
    judge_text,
    main,
    measure,
    plan,
    plan_table,
    with_settings,
)

EVENT = Event(
    pipeline="p", seq=0, time="", t_capture_ns=0, t_recv_ns=0, t_result_ns=0, age_ms=0.0, width=9,
    height=9, latency_ms={}, detections=(),
)  # fmt: skip
BOX, OTHER = (0.0, 0.0, 10.0, 10.0), (50.0, 50.0, 60.0, 60.0)


def event(*boxes: Detection, texts: tuple[TextLine, ...] = ()) -> Event:
    changed = {"detections": boxes, "texts": texts}
    return Event(**{**{key: getattr(EVENT, key) for key in EVENT.__struct_fields__}, **changed})


def hit(score: float, box: tuple[float, float, float, float] | None, kind: int = 0) -> Detection:
    return Detection(label=str(kind), class_id=kind, score=score, box=box)


def test_boxes_are_found_again_by_class_and_place_and_others_are_new() -> None:
    exact = [event(hit(0.9, BOX), hit(0.8, OTHER), hit(0.7, OTHER, 1))]
    actual = [event(hit(0.7, BOX), hit(0.8, (30.0, 30.0, 40.0, 40.0)), hit(0.6, OTHER, 1))]
    items, matched, new, worst = judge_boxes(exact, actual)
    assert (items, matched, new) == (3, 2, 1)
    assert worst == pytest.approx(0.2)


def test_a_box_is_not_found_twice() -> None:
    assert judge_boxes([event(hit(0.9, BOX), hit(0.8, BOX))], [event(hit(0.9, BOX))])[1] == 1


def test_classes_and_texts_are_compared_by_picture() -> None:
    exact = [event(hit(0.9, None), hit(0.1, None, 1))]
    turned = [event(hit(0.6, None, 1), hit(0.4, None))]
    assert judge_classes(exact, exact)[:3] == (1, 1, 0)
    assert judge_classes(exact, turned) == (1, 0, 0, 0.5)
    lines = [event(texts=(TextLine("ab", 0.9),)), event(texts=(TextLine("cd", 0.9),))]
    read = [event(texts=(TextLine("ab", 0.8),)), event(texts=(TextLine("c", 0.9),))]
    assert judge_text(lines, read)[:2] == (2, 1)


def test_pictures_that_judge_are_not_those_that_calibrate() -> None:
    assert not set(FIRST) & set(SECOND)
    named = {*FIRST, *SECOND} - set(PICTURES)
    assert all((BACKGROUNDS / f"{name}.jpg").is_file() for name in named)
    for name in PICTURES:
        foreign_picture(name)
    for subject in SUBJECTS:
        first, second, again = (
            draw(np.random.default_rng(seed))
            for draw, seed in ((subject.calibrate, 1), (subject.judge, 2), (subject.judge, 2))
        )
        np.testing.assert_array_equal(second, again)
        assert first.shape != second.shape or (first != second).any()


def test_settings_take_the_place_of_guessed_ones() -> None:
    text = '[preprocess]\nwidth = 4\nmean = [1.0]\n\n[decode]\nkind = "x"\n'
    changed = with_settings(text, (("mean", "[2.0]"), ("color", '"bgr"')))
    assert changed.splitlines()[:4] == [
        "[preprocess]",
        'color = "bgr"',
        "mean = [2.0]",
        "width = 4",
    ]


def test_the_table_covers_40_models() -> None:
    assert len(BY_NAME) >= 40
    assert {subject.model for subject in SUBJECTS} <= set(BY_NAME)
    assert len(SUBJECTS) >= 6


def test_a_model_is_planned_for_both_boards(capsys: pytest.CaptureFixture[str]) -> None:
    foreign_model("mtcnn-pnet")
    rows = list(plan(BY_NAME["mtcnn-pnet"], PROFILES))
    assert [row.profile for row in rows] == list(PROFILES)
    assert all(row.rc == 0 and row.tracebacks == 0 for row in rows)
    assert all(row.segments and row.predicted_us > 0 for row in rows)


def test_a_plan_that_fails_is_a_row_with_its_sentence(tmp_path: Path) -> None:
    missing = replace(BY_NAME["mtcnn-pnet"], path="no.onnx")
    (row,) = plan(missing, PROFILES[:1])
    assert row.rc != 0
    assert row.tracebacks == 0
    assert "no.onnx" in row.error


def test_the_tables_have_a_row_for_each_model_and_count_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = [
        PlanRow("net", PROFILES[0], 0, 3.0, "gpu dla gpu", 0.5, 1500.0),
        PlanRow("net", PROFILES[1], 1, 1.0, error="it is damaged"),
    ]
    scores = [
        Int8Row("net", "boxes", 9, 20, 19, 1, 0.05, 60.0, True),
        Int8Row("other", "text", 0, 0, 0, 0, 0.0, 0.0, False, "no rule knows it"),
    ]
    text = "\n".join([*plan_table(plans), *int8_table(scores)])
    assert "| net | 1 DLA, 2 GPU, 50 % on the DLA; 1.50 ms; 3 s | rc 1: it is damaged |" in text
    assert "2 plans, 1 ended with an error, 0 tracebacks." in text
    assert "| net, refused | boxes | 9 | 20 | 19 (95 %) | 1 | 0.050 | 60 |" in text
    assert "not measured: no rule knows it" in text
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(asdict(row)) + "\n" for row in (*plans, *scores)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["models_of_others", "table", str(file)])
        main()
    assert capsys.readouterr().out.splitlines()[2].startswith("| net | 1 DLA")


@pytest.mark.slow
def test_text_of_lines_is_read_again_in_int8() -> None:
    foreign_model("ppocr-v6-tiny-rec")
    (subject,) = (one for one in SUBJECTS if one.model == "ppocr-v6-tiny-rec")
    row = measure(replace(subject, calibrating=8, judging=12), "minmax")
    assert row.error == ""
    assert row.items == 12
    assert 0 < row.matched <= 12
