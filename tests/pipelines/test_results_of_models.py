"""What is drawn, followed and given to sinks of several models: all, or what the rows say."""

import json
import os
import pty
import select
import time
from collections.abc import Mapping
from pathlib import Path

import cv2
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from several_models_fixtures import (
    DEEP,
    DETECTOR,
    GREEN,
    ON_RED,
    SHADE,
    SHADES,
    SPARE,
    ShadeClassifier,
    config_of,
    pictures,
)
from video_fixtures import LABELS, PATIENCE_S, ColourDetector

from device.errors import ConfigError, PipelineError
from pipelines.changes import changes
from pipelines.config import PipelineConfig
from pipelines.preview.server import Preview
from pipelines.results import ClassScores, Detections
from pipelines.runtime.batch import Model
from pipelines.runtime.pipeline import RunOptions, run_pipeline
from pipelines.sinks.draw import COLORS, Drawing, annotate_all
from pipelines.sinks.draw_result import draw_result
from pipelines.sinks.files import OutputFiles
from pipelines.sinks.table import FrameResult
from toolkit.cli.actions.pipeline import pipeline_schema

SECOND = DETECTOR.replace('"detector"', '"second"')
SECOND_LABELS = ("rot", "grün")
SCENE = SHADE.format(
    keys="", kind="classification", decode='scores = "p"\nsoftmax = false'
).replace('"shade"', '"scene"')
TRACKER = "[tracker]\nconfirm_frames = 1\n{}"
STANDING = [{(3, 3): DEEP}] * 6


def run(config: PipelineConfig, models: Mapping[str, Model], folder: Path | None = None):
    """Run a pipeline whose models are given by name; return its results."""
    results: list[FrameResult] = []
    first = config.first.name
    run_pipeline(
        config,
        models[first],
        RunOptions(
            files=OutputFiles(folder),
            others={name: one for name, one in models.items() if name != first},
        ),
        watch=results.append,
    )
    return results


def detectors() -> dict[str, Model]:
    return {
        "detector": Model(ColourDetector(), LABELS, ""),
        "second": Model(ColourDetector(), SECOND_LABELS, ""),
    }


def scene_model() -> Model:
    return Model(ShadeClassifier(), SHADES, "")


# -- which model is followed


@pytest.mark.parametrize(
    ("text", "followed"),
    [
        (DETECTOR + SECOND, "detector"),
        (SCENE + SECOND + DETECTOR, "second"),
        (DETECTOR + SECOND + TRACKER.format('model = "second"'), "second"),
        (SCENE, "scene"),
        (DETECTOR + ON_RED, "detector"),
    ],
)
def test_the_first_detector_is_followed_or_the_one_that_is_named(text: str, followed: str) -> None:
    assert config_of(text).followed.name == followed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TRACKER.format('model = "shad"'), "[tracker] names the model 'shad', which is none of"),
        (TRACKER.format('model = "shade"'), "'shade', which is on crops of 'detector': name 'det"),
        (TRACKER.format('model = "small"'), "'small', which replaces 'detector': name 'detector'"),
        (TRACKER.format('model = "slow"'), "'slow', which [tracker] follows, has `max_hz`"),
        ('[[sinks]]\nkind = "mqtt"\nmodels = ["x"]', "the mqtt sink names the model 'x'"),
        ('[[sinks]]\nkind = "video"\npath = "a.mp4"\nmodels = ["shade"]', "the video sink names"),
        (
            '[[sinks]]\nkind = "serial"\nport = "/dev/x"\nmodels = ["scene"]',
            "the serial sink names the model 'scene', which gives no boxes",
        ),
    ],
)
def test_names_of_no_such_model_are_refused(text: str, says: str) -> None:
    slow = SECOND.replace('"second"', '"slow"\nmax_hz = 5')
    with pytest.raises(ConfigError) as caught:
        config_of(DETECTOR + ON_RED + SPARE + SCENE + slow + text)
    assert says in str(caught.value)


def test_a_spare_is_drawn_as_what_it_replaces() -> None:
    with pytest.raises(ConfigError, match="`draw`, which it has from the model"):
        config_of(DETECTOR + SPARE + "draw = false\n")
    spare = config_of(DETECTOR.replace("engine =", "draw = false\nengine =", 1) + SPARE)
    assert [one.draw for one in spare.networks] == [False, False]


def test_tracks_zones_events_and_snapshots_are_of_the_model_that_is_followed(
    tmp_path: Path,
) -> None:
    pictures(tmp_path / "in", *STANDING)
    zone = '[[zones]]\nname = "all"\npolygon = [[0,0],[1,0],[1,1],[0,1]]\nclasses = ["rot"]\n'
    sinks = '[[sinks]]\nkind = "snapshot"\npath = "shots"\nclasses = ["rot"]\nmin_score = 0.1\n'
    text = SCENE + SECOND + TRACKER.format("") + zone + sinks
    models = {"scene": scene_model(), "second": detectors()["second"]}
    results = run(config_of(text, tmp_path / "in"), models, tmp_path)
    last = results[-1]
    assert isinstance(last.decoded, ClassScores)
    assert isinstance(last.followed, Detections)
    rows = last.event.models["second"].detections
    assert [(one.label, one.track_id) for one in rows] == [("rot", 1)]
    assert last.event.zones == {"all": {"rot": 1}}
    assert last.event.latency_ms["track"] > 0.0
    assert [one.name.endswith("-rot.jpg") for one in (tmp_path / "shots").iterdir()] == [True]
    labels_of_the_other = text.replace('classes = ["rot"]', 'classes = ["dark"]')
    with pytest.raises(PipelineError, match="dark"):
        run(config_of(labels_of_the_other, tmp_path / "in"), models, tmp_path)


def test_between_its_frames_the_tracks_of_a_model_beside_move_on(tmp_path: Path) -> None:
    pictures(tmp_path / "in", *STANDING)
    text = SCENE + SECOND + TRACKER.format("every_nth = 2")
    models = {"scene": scene_model(), "second": detectors()["second"]}
    results = run(config_of(text, tmp_path / "in"), models)
    assert [one.event.predicted is True for one in results] == [False, True] * 3
    assert all(one.event.detections[0].box is None for one in results)  # the scene, each time
    tracked = [one.event.models["second"].detections for one in results]
    assert [[row.track_id for row in rows] for rows in tracked] == [[1]] * 6


# -- what is drawn


def picture(side: int = 160) -> NDArray[np.uint8]:
    return np.zeros((side, side, 3), np.uint8)


def has(image: NDArray[np.uint8], color: tuple[int, int, int]) -> bool:
    return bool((image == np.array(color, np.uint8)).all(axis=2).any())


def test_results_of_all_models_are_drawn_unless_a_row_or_a_sink_says_otherwise(
    tmp_path: Path,
) -> None:
    pictures(tmp_path / "in", {(1, 1): GREEN, (4, 4): DEEP})
    (both,) = run(config_of(DETECTOR + SECOND, tmp_path / "in"), detectors())
    everything = draw_result(both)
    first, second = draw_result(both, ["detector"]), draw_result(both, ["second"])
    assert (everything != first).any()
    assert has(first, COLORS[0])
    assert not has(first, COLORS[3])
    assert has(second, COLORS[3])  # the same class of the second model has another colour
    assert not has(second, COLORS[0])
    hidden = DETECTOR + SECOND.replace("engine =", "draw = false\nengine =", 1)
    (without,) = run(config_of(hidden, tmp_path / "in"), detectors())
    assert (draw_result(without)[20:] == first[20:]).all()  # above, the time is written
    assert not has(draw_result(without), COLORS[3])
    with Preview(":0") as opened:
        opened.on_result(both)
        shown = cv2.imdecode(np.frombuffer(opened.picture(both), np.uint8), cv2.IMREAD_COLOR)
        assert (
            np.abs(shown.astype(int) - everything).mean() < np.abs(shown.astype(int) - first).mean()
        )
        assert opened.status().cameras[0].detections == 4


def test_what_a_cascade_says_stands_on_the_box(tmp_path: Path) -> None:
    pictures(tmp_path / "in", {(4, 4): DEEP})
    config = config_of(DETECTOR + ON_RED, tmp_path / "in")
    models = {"detector": detectors()["detector"], "shade": scene_model()}
    (result,) = run(config, models)
    described = result.decoded
    assert isinstance(described, Detections)
    wide, narrow = (
        annotate_all(picture(), (Drawing(described, LABELS, hidden=hidden),))
        for hidden in ((), ("shade",))
    )
    tag_columns = [int(np.flatnonzero(one.any(axis=(0, 2))).max()) for one in (wide, narrow)]
    assert tag_columns[0] > tag_columns[1] + 20  # " | dark" makes the tag wider
    off = ON_RED.replace("max_crops", "draw = false\nmax_crops")
    (result,) = run(config_of(DETECTOR + off, tmp_path / "in"), models)
    assert result.roles.hidden == {"shade"}
    assert result.event.detections[0].attributes["shade"].label == "dark"  # said all the same


def test_lines_of_two_models_stand_below_each_other_with_their_names(tmp_path: Path) -> None:
    pictures(tmp_path / "in", {})
    second = SCENE.replace('"scene"', '"place"')
    models = {"scene": scene_model(), "place": scene_model()}
    (result,) = run(config_of(SCENE + second, tmp_path / "in"), models)
    (alone,) = run(config_of(SCENE, tmp_path / "in"), {"scene": scene_model()})
    height = [np.flatnonzero(draw_result(one).any(axis=(1, 2))).max() for one in (result, alone)]
    assert height[0] >= height[1]
    rows = [one for one in draw_result(result)[:, 5].tolist() if tuple(one) in COLORS]
    assert len({tuple(one) for one in rows}) >= 2  # in colours of their own


# -- what sinks take


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_sinks_take_the_models_that_they_name(tmp_path: Path) -> None:
    pictures(tmp_path / "in", {(1, 1): GREEN})
    sinks = "".join(
        f'[[sinks]]\nkind = "jsonl"\npath = "{name}"\n{keys}\n'
        for name, keys in (
            ("all", ""),
            ("first", 'models = ["detector"]'),
            ("second", 'models = ["second"]'),
            ("ros", 'format = "ros2"'),
            ("ros-both", 'format = "ros2"\nmodels = ["second", "detector"]'),
        )
    )
    run(config_of(DETECTOR + SECOND + sinks, tmp_path / "in"), detectors(), tmp_path)
    (both,), (first,), (second,) = (lines(tmp_path / one) for one in ("all", "first", "second"))
    assert both["detections"]
    assert set(both["models"]) == {"second"}
    assert first["detections"] == both["detections"]
    assert "models" not in first
    assert second["detections"] == []
    assert second["models"] == both["models"]
    labels = [
        [
            one["results"][0]["hypothesis"]["class_id"]
            for one in lines(tmp_path / name)[0]["detections"]
        ]
        for name in ("ros", "ros-both")
    ]
    assert labels == [["green"], ["grün", "green"]]


@pytest.mark.parametrize(
    ("keys", "labels", "classes"),
    [
        ("", {"green"}, [1]),
        ('models = ["second"]', {"gr_n"}, [1]),
        ('models = ["detector", "second"]', {"green", "gr_n"}, [1, 3]),
        ('models = ["detector", "second"]\nclasses = ["grün"]', {"gr_n"}, [3]),
    ],
)
def test_a_serial_line_has_the_objects_of_the_models_that_it_names(
    keys: str, labels: set[str], classes: list[int], tmp_path: Path
) -> None:
    from pipelines.sink_config import SerialSink
    from pipelines.sinks.result import SinkContext
    from pipelines.sinks.serial_port import SerialOut

    pytest.importorskip("serial")
    pictures(tmp_path / "in", {(1, 1): GREEN})
    master, slave = pty.openpty()
    text = f'[[sinks]]\nkind = "serial"\nport = "{os.ttyname(slave)}"\n{keys}\n'
    config = config_of(DETECTOR + SECOND + text, tmp_path / "in")
    (result,) = run(config_of(DETECTOR + SECOND, tmp_path / "in"), detectors())
    (sink,) = config.sinks
    assert isinstance(sink, SerialSink)
    context = SinkContext(LABELS, models={"detector": LABELS, "second": SECOND_LABELS})
    out = SerialOut(sink, context)
    assert sorted(one.class_id for one in out._targets(result)) == classes
    out = SerialOut(msgspec.structs.replace(sink, max_hz=1000.0), context)
    with out:
        heard, end_s = b"", time.monotonic() + PATIENCE_S
        while b"DET" not in heard or not heard.endswith(b"\r\n"):
            assert time.monotonic() < end_s
            out.write(result)
            if select.select([master], [], [], 0.05)[0]:
                heard += os.read(master, 4096)
    kinds = {row.split(",")[3] for row in heard.decode().split("\r\n") if row.startswith("$DET")}
    assert kinds == labels
    os.close(master)
    os.close(slave)
    with pytest.raises(PipelineError, match="names the class 'blue', which is none of the labels"):
        SerialOut(msgspec.structs.replace(sink, classes=("blue",)), context)


def test_drawing_changes_while_it_runs_and_the_model_that_is_followed_does_not() -> None:
    before = config_of(DETECTOR + SECOND + TRACKER.format(""))
    hidden = config_of(
        DETECTOR + SECOND.replace("engine =", "draw = false\nengine =", 1) + TRACKER.format("")
    )
    assert changes(before, hidden) == ("models[1].draw: True -> False",)
    second = config_of(DETECTOR + SECOND + TRACKER.format('model = "second"'))
    with pytest.raises(ConfigError, match=r"tracker\.model cannot change while"):
        changes(before, second)
    with pytest.raises(ConfigError, match=r"tracker\.model cannot change while"):
        changes(config_of(DETECTOR + SECOND), second)


def test_the_schema_knows_the_keys() -> None:
    schema = json.loads(pipeline_schema())["$defs"]
    assert "draw" in schema["PipelineModel"]["properties"]
    assert "model" in schema["TrackerConfig"]["properties"]
    for sink in ("MqttSink", "JsonlSink", "VideoSink", "SerialSink"):
        assert "models" in schema[sink]["properties"]


def test_a_video_shows_what_its_sink_names(tmp_path: Path) -> None:
    pictures(tmp_path / "in", *[{(4, 4): DEEP}] * 4)
    sinks = "".join(
        f'[[sinks]]\nkind = "video"\npath = "{name}.mp4"\n{keys}\n'
        for name, keys in (("all", ""), ("first", 'models = ["detector"]'))
    )
    run(config_of(DETECTOR + SECOND + sinks, tmp_path / "in"), detectors(), tmp_path)
    means = {}
    for name in ("all", "first"):
        video = cv2.VideoCapture(str(tmp_path / f"{name}.mp4"))
        image = video.read()[1]
        video.release()
        # The second model draws last, in a colour with more red than blue.
        blue, _, red = (image[30:42, 30:42, channel].astype(int).mean() for channel in range(3))
        means[name] = (blue, red)
    assert means["all"][0] > means["first"][0] + 10
