"""pipeline.toml changes while its pipeline runs."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import cv2
import msgspec
import pytest
from several_models_fixtures import DETECTOR, HEAD, ON_RED, SHADES, ShadeClassifier, config_of
from sink_fixtures import subscriber
from video_fixtures import (
    LABELS,
    PATIENCE_S,
    ColourDetector,
    free_port,
    mosquitto,
    scene,
    wait_for,
)

from device.errors import ConfigError, PipelineError
from device.protocol.messages import ChildMessage, Reload
from pipelines.changes import changes
from pipelines.config import parse_pipeline
from pipelines.runtime.batch import Model
from pipelines.runtime.pipeline import RunOptions, run_pipeline
from pipelines.runtime.reload import FileWatch, ReloadFile, hangups
from pipelines.sink_config import JsonlSink, MqttSink, PrometheusSink, VideoSink
from pipelines.sinks.opened import OpenSinks
from pipelines.sinks.result import SinkContext
from pipelines.sinks.table import SINKS, Broker, FrameResult

PLAIN = """
[preprocess]
width = 64
height = 64
[decode]
kind = "ltrb_grid"
boxes = "boxes"
scores = "scores"
strides = [8]
score_threshold = 0.5
"""
TRACKED = PLAIN + "[tracker]\nconfirm_frames = 1\n"
ZONE = '[[zones]]\nname = "yard"\npolygon = [[0, 0], [1, 0], [1, 1], [0, 1]]\n'
JSONL = '[[sinks]]\nkind = "jsonl"\npath = "{}"\n'


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.runtime.reload.POLL_S", 0.03)


# --- which changes are taken, and how they are said


@pytest.mark.parametrize(
    ("before", "after", "messages"),
    [
        (PLAIN, PLAIN, ()),
        (PLAIN, PLAIN.replace("0.5", "0.6"), ("decode.score_threshold: 0.5 -> 0.6",)),
        (TRACKED, TRACKED + "every_nth = 3\n", ("tracker.every_nth: 1 -> 3",)),
        (PLAIN, TRACKED, ("tracker: none -> a table",)),
        (TRACKED, TRACKED + ZONE, ("zones: yard new",)),
        (TRACKED + ZONE, TRACKED + ZONE.replace("[1, 1]", "[1, 0.5]"), ("zones: yard changed",)),
        (TRACKED + ZONE, TRACKED, ("zones: yard gone",)),
        (
            PLAIN + JSONL.format("a") + JSONL.format("b"),
            PLAIN + JSONL.format("b") + '[[sinks]]\nkind = "mqtt"',
            ("sinks: jsonl gone, mqtt new",),
        ),
        (PLAIN, PLAIN + "[load]\nhot_c = 80\nsteps = [{max_hz = 5}]", ("load: none -> a table",)),
        (
            DETECTOR + ON_RED,
            DETECTOR + ON_RED.replace("max_crops = 2", "margin = 0.5"),
            ("models[1].margin: 0.0 -> 0.5", "models[1].max_crops: 2 -> 8"),
        ),
    ],
)
def test_what_changes_is_said(before: str, after: str, messages: tuple[str, ...]) -> None:
    assert changes(config_of(before), config_of(after)) == messages


def test_the_rate_of_a_source_may_change_and_its_address_not() -> None:
    before = config_of(PLAIN)
    assert before.source is not msgspec.UNSET
    slower = msgspec.structs.replace(before.source, max_hz=5.0)
    assert changes(before, msgspec.structs.replace(before, source=slower)) == (
        "source.max_hz: none -> 5.0",
    )
    moved = msgspec.structs.replace(before.source, uri="rtsp://user:secret@cam/1")
    with pytest.raises(
        ConfigError, match=r"source\.uri cannot change .*cameras stay open"
    ) as error:
        changes(before, msgspec.structs.replace(before, source=moved))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (PLAIN.replace("width = 64", "width = 32"), "preprocess.width cannot change"),
        (PLAIN.replace("[8]", "[16]"), "decode.strides cannot change .*only thresholds"),
        (TRACKED + "lost_s = 3\n", "tracker.lost_s cannot change"),
        (DETECTOR, "preprocess, decode, models cannot change .*engines are loaded at the start"),
    ],
)
def test_what_cannot_change_is_named_with_its_reason(after: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        changes(config_of(PLAIN), config_of(after))
    with pytest.raises(ConfigError, match="name cannot change"):
        changes(config_of(PLAIN), msgspec.structs.replace(config_of(PLAIN), name="b"))
    with pytest.raises(ConfigError, match="models cannot change"):
        changes(config_of(DETECTOR), config_of(DETECTOR + ON_RED))


# --- sinks


def result_of(tmp_path: Path) -> FrameResult:
    """A result of a real run."""
    results: list[FrameResult] = []
    cv2.imwrite(str(tmp_path / "one.png"), scene(1, 1))
    run_pipeline(
        config_of(PLAIN, tmp_path / "one.png"),
        Model(ColourDetector(), LABELS, ""),
        RunOptions(),
        watch=results.append,
    )
    return results[0]


def test_sinks_that_stay_go_on_and_others_begin_and_end(tmp_path: Path) -> None:
    result = result_of(tmp_path)
    first, second = (JsonlSink(path=str(tmp_path / name)) for name in ("a.jsonl", "b.jsonl"))
    with OpenSinks([first], SinkContext(LABELS)) as sinks:
        (before,) = sinks.sinks
        before.write(result)
        sinks.change([second, first])
        assert sinks.sinks[1] is before
        for sink in sinks.sinks:
            sink.write(result)
        ros2 = JsonlSink(path=first.path, format="ros2")
        sinks.change([ros2])  # the same file, opened again by the run that made it
        sinks.sinks[0].write(result)
    lines = Path(first.path).read_text().splitlines()
    assert ["header" in json.loads(line) for line in lines] == [False, False, True]
    assert len(Path(second.path).read_text().splitlines()) == 1


def test_a_sink_that_cannot_be_opened_leaves_those_of_before(tmp_path: Path) -> None:
    result = result_of(tmp_path)
    first = JsonlSink(path=str(tmp_path / "a.jsonl"))
    ros2 = JsonlSink(path=first.path, format="ros2")
    video = VideoSink(path=str(tmp_path / "seen.mp4"))
    with OpenSinks([first, video], SinkContext(LABELS)) as sinks:
        with pytest.raises(PipelineError, match="cannot write"):
            sinks.change([ros2, video, JsonlSink(path=str(tmp_path / "no" / "c.jsonl"))])
        with pytest.raises(PipelineError, match="written already"):
            sinks.change([first, VideoSink(path=video.path, fps=3.0)])
        for sink in sinks.sinks:
            sink.write(result)
        assert len(sinks.sinks) == 2
    assert "detections" in json.loads(Path(first.path).read_text())
    assert Path(video.path).stat().st_size > 0


class Adjustable:
    """A sink that takes any configuration, and may fail to close."""

    def __init__(self, config: object, context: object = None, fails: bool = False) -> None:
        self.config, self.closed, self.fails = config, False, fails
        self.dropped: dict[str, int] = {}

    def adjust(self, config: object) -> bool:
        self.config = config
        return True

    def __enter__(self) -> "Adjustable":
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True
        if self.fails:
            raise PipelineError("the disk is full")


def test_a_sink_that_was_adjusted_is_as_before_where_another_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SINKS, MqttSink, Adjustable)
    before, after = MqttSink(max_hz=1.0), MqttSink(max_hz=2.0)
    with OpenSinks([before], SinkContext(LABELS)) as sinks:
        with pytest.raises(PipelineError, match="cannot write"):
            sinks.change([after, JsonlSink(path=str(tmp_path / "no" / "c.jsonl"))])
        (sink,) = sinks.sinks
        assert sink.config == before


def test_a_sink_that_fails_to_close_leaves_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def open_one(config: object, context: object) -> Adjustable:
        opened.append(Adjustable(config, fails=len(opened) == 1))
        return opened[-1]

    monkeypatch.setitem(SINKS, MqttSink, open_one)
    with (
        pytest.raises(PipelineError, match="disk is full"),
        OpenSinks([MqttSink(), MqttSink()], SinkContext(LABELS)),
    ):
        pass
    assert [one.closed for one in opened] == [True, True]


def test_a_port_changes_hands() -> None:
    port = free_port()
    one, second = PrometheusSink(port=port), PrometheusSink(port=port, host="0.0.0.0")
    with OpenSinks([one], SinkContext(LABELS)) as sinks:
        sinks.change([second])
        assert sinks.dropped == {}


# --- the file


def test_a_file_is_read_once_it_has_settled_or_when_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text("a")
    file = ReloadFile(path)
    with FileWatch(file) as watch:
        taken: list[str] = []

        def take() -> bool:
            taken.extend(text for text in [watch.take()] if text is not None)
            return bool(taken)

        wait_for(take, PATIENCE_S, "the first look")
        time.sleep(0.15)
        assert watch.take() is None
        path.write_text("b")
        wait_for(lambda: take() and taken[-1] == "b", PATIENCE_S, "the change")
        path.unlink()
        time.sleep(0.15)
        assert watch.take() is None
        path.with_suffix(".new").write_text("c")
        path.with_suffix(".new").rename(path)
        taken.clear()
        wait_for(take, PATIENCE_S, "the file is back")
        taken.clear()
        file.now.set()
        wait_for(take, PATIENCE_S, "it was asked for")
        assert taken == ["c"]


def test_an_edit_while_engines_were_loaded_is_taken(tmp_path: Path) -> None:
    moving(tmp_path / "in")
    base = HEAD.format(uri=f"images://{tmp_path}/in?fps=300") + "loop = true\n" + TRACKED
    path = tmp_path / "p.toml"
    path.write_text(base + ZONE)  # after `base` was read
    messages: list[ChildMessage] = []
    stop = threading.Event()

    def watch(result: FrameResult) -> None:
        if result.places.zones or result.frame.seq > 3000:
            stop.set()

    run_pipeline(
        parse_pipeline(base, path),
        Model(ColourDetector(), LABELS, ""),
        RunOptions(emit=messages.append, stop=stop, reload=ReloadFile(path)),
        watch=watch,
    )
    assert [one for one in messages if isinstance(one, Reload)] == [
        Reload(changes=("zones: yard new",))
    ]


def test_a_hangup_asks_for_the_file_and_ends_a_run_whose_terminal_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, stop = threading.Event(), threading.Event()
    terminal = tmp_path / "tty"
    terminal.write_text("")
    monkeypatch.setattr("pipelines.runtime.reload.TERMINAL", str(terminal))
    with hangups(now, stop):
        os.kill(os.getpid(), signal.SIGHUP)
        wait_for(now.is_set, PATIENCE_S, "the signal")
        assert not stop.is_set()
        terminal.unlink()
        os.kill(os.getpid(), signal.SIGHUP)
        wait_for(stop.is_set, PATIENCE_S, "the signal")


# --- whole runs


class Editor:
    """Writes the file, one version after the other, each once the pipeline spoke of the one before
    and gave some frames."""

    def __init__(self, path: Path, versions: list[str], stop: threading.Event) -> None:
        self.messages: list[ChildMessage] = []
        self.results: list[FrameResult] = []
        self._path = path
        self._versions = iter(versions)
        self._stop = stop
        self._heard = 0
        self._due = 10

    def reloads(self) -> list[Reload]:
        return [one for one in self.messages if isinstance(one, Reload)]

    def on_result(self, result: FrameResult) -> None:
        self.results.append(result)
        if len(self.reloads()) == self._heard and len(self.results) >= self._due:
            text = next(self._versions, None)
            if text is None:
                self._stop.set()
                return
            self._heard += 1
            self._due = sys.maxsize
            self._path.write_text(text)
        elif len(self.reloads()) == self._heard and self._due == sys.maxsize:
            self._due = len(self.results) + 10


def moving(folder: Path) -> Path:
    folder.mkdir()
    for i in range(8):
        cv2.imwrite(str(folder / f"{i}.png"), scene(i, 3))
    return folder


def test_a_file_that_is_edited_again_and_again_loses_no_frame(tmp_path: Path) -> None:
    moving(tmp_path / "in")
    head = HEAD.format(uri=f"images://{tmp_path}/in?fps=300") + "loop = true\n"
    seen, more = tmp_path / "seen.jsonl", tmp_path / "more.jsonl"
    base = head + TRACKED + JSONL.format(seen)
    versions = [
        base.replace("score_threshold = 0.5", "score_threshold = 0.999999"),
        "this is [[ not toml",
        base.replace("width = 64", "width = 32"),
        base + ZONE + JSONL.format(more),
        base.replace("[tracker]", "[roi]\nunits = 'px'\n"
                     "polygon = [[900, 900], [990, 900], [990, 990]]\n[tracker]"),
        base + "[load]\nhot_c = 999\nsteps = [{every_nth = 2}]\n",
        base,
    ]  # fmt: skip
    path = tmp_path / "p.toml"
    path.write_text(base)
    stop = threading.Event()
    editor = Editor(path, versions, stop)
    run_pipeline(
        parse_pipeline(base, path),
        Model(ColourDetector(), LABELS, ""),
        RunOptions(emit=editor.messages.append, stop=stop, reload=ReloadFile(path)),
        watch=editor.on_result,
    )
    messages = [one.refused or "; ".join(one.changes) for one in editor.reloads()]
    assert messages[0] == "decode.score_threshold: 0.5 -> 0.999999"
    assert "is not valid TOML" in messages[1]
    assert "preprocess.width cannot change" in messages[2]
    assert (
        messages[3] == "decode.score_threshold: 0.999999 -> 0.5; zones: yard new; sinks: jsonl new"
    )
    assert "[roi] leaves 0 x 0 pixels" in messages[4]
    assert messages[5] == "load: none -> a table; zones: yard gone; sinks: jsonl gone"
    assert messages[6] == "load: a table -> none"
    numbers = [one.frame.seq for one in editor.results]
    assert numbers == list(range(len(numbers)))
    rows = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [row["seq"] for row in rows] == numbers  # the sink that stayed has every frame once
    counts = [len(row["detections"]) for row in rows]
    assert counts[0] == counts[-1] == 1
    assert 0 in counts  # while the threshold was high
    others = [json.loads(line) for line in more.read_text().splitlines()]
    first, last = others[0]["seq"], others[-1]["seq"]
    assert [row["seq"] for row in others] == list(range(first, last + 1))
    assert all("zones" in row for row in others)
    drawn = {one.frame.seq: bool(one.places.zones) for one in editor.results}
    assert [number for number in numbers if drawn[number]] == [row["seq"] for row in others]


def test_a_classifier_takes_other_classes_while_it_runs(tmp_path: Path) -> None:
    moving(tmp_path / "in")
    head = HEAD.format(uri=f"images://{tmp_path}/in?fps=300") + "loop = true\n"
    base = head + DETECTOR + ON_RED
    path = tmp_path / "p.toml"
    path.write_text(base)
    stop = threading.Event()
    green, blue = (base.replace('["red"]', f'["{name}"]') for name in ("green", "blue"))
    editor = Editor(path, [green, blue], stop)
    run_pipeline(
        parse_pipeline(base, path),
        Model(ColourDetector(), LABELS, ""),
        RunOptions(
            emit=editor.messages.append,
            stop=stop,
            others={"shade": Model(ShadeClassifier(), SHADES, "")},
            reload=ReloadFile(path),
        ),
        watch=editor.on_result,
    )
    taken, refused = editor.reloads()
    assert taken.changes == ("models[1].classes: ['red'] -> ['green']",)
    assert "the class 'blue', which is none of the labels" in refused.refused
    described = [one.event.detections[0].attributes is not msgspec.UNSET for one in editor.results]
    assert described[0]
    assert not described[-1]


def test_a_change_is_published_without_a_new_connection(tmp_path: Path) -> None:
    moving(tmp_path / "in")
    head = HEAD.format(uri=f"images://{tmp_path}/in?fps=50") + "loop = true\n"
    base = head + TRACKED + '[[sinks]]\nkind = "mqtt"\n'
    path = tmp_path / "p.toml"
    path.write_text(base)
    stop = threading.Event()
    editor = Editor(path, [base + "max_hz = 10\n", base + "max_hz = 0\n"], stop)
    with mosquitto(tmp_path) as (port, _), subscriber(port, "fleet/v1/robot-1/reload") as seen:
        run_pipeline(
            parse_pipeline(base, path),
            Model(ColourDetector(), LABELS, ""),
            RunOptions(
                emit=editor.messages.append,
                stop=stop,
                broker=Broker("127.0.0.1", port, "fleet/v1/robot-1"),
                reload=ReloadFile(path),
            ),
            watch=editor.on_result,
        )
        wait_for(lambda: len(seen) == 2, PATIENCE_S, "both messages")
    taken, refused = (json.loads(one.payload) for one in seen)
    assert taken == {"kind": "reload", "changes": ["sinks: mqtt changed"], "refused": ""}
    assert "max_hz is wrong" in refused["refused"]


def test_the_loop_lets_objects_end_while_it_waits_for_a_frame(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for i in range(2):
        cv2.imwrite(str(tmp_path / "in" / f"{i}.png"), scene(i, 3))
    text = TRACKED + f'lost_s = 0.1\n[[sinks]]\nkind = "snapshot"\npath = "{tmp_path}/seen"\n'
    results: list[FrameResult] = []
    run_pipeline(
        config_of(text, f"images://{tmp_path}/in?fps=2"),
        Model(ColourDetector(), LABELS, ""),
        RunOptions(),
        watch=results.append,
    )
    first = min(one.stat().st_mtime_ns for one in (tmp_path / "seen").iterdir())
    assert results[0].frame.t_recv.wall_ns < first < results[1].frame.t_recv.wall_ns
