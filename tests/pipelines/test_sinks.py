"""Results go out: a real broker, real files, real videos."""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace

import cv2
import numpy as np
import pytest
from sink_fixtures import connected, detections, result, subscriber
from video_fixtures import (
    LABELS,
    PATIENCE_S,
    free_port,
    gray_frame,
    mosquitto,
    wait_for,
)

from device.errors import PipelineError
from device.protocol.mqtt import LinkSettings, Will
from pipelines.results import ClassScores
from pipelines.sink_config import JsonlSink, MqttSink, VideoSink
from pipelines.sinks.draw import annotate
from pipelines.sinks.files import OutputFiles
from pipelines.sinks.mqtt_queue import QUEUED_WORDS, MqttPublisher, Outgoing
from pipelines.sinks.table import Broker, RateLimit, SinkContext, open_sink
from pipelines.sinks.video import VideoFileWriter


def context(port=None):
    broker = None if port is None else Broker("127.0.0.1", port, "fleet/v1/robot-1")
    return SinkContext(LABELS, broker)


# --- the event


def test_event_says_what_when_and_how_long():
    one = result(seq=7)
    event = json.loads(one.payload)
    assert event["detections"] == [
        {"label": "red", "class_id": 0, "score": 0.912, "box": [8.0, 16.0, 16.0, 24.0]}
    ]
    assert {k: event[k] for k in ("schema", "pipeline", "seq", "width", "height")} == {
        "schema": 1,
        "pipeline": "door",
        "seq": 7,
        "width": 64,
        "height": 64,
    }
    assert event["t_capture_ns"] <= event["t_recv_ns"] <= event["t_result_ns"]
    assert abs(event["t_result_ns"] - time.time_ns()) < 5e9
    assert event["time"].endswith("Z")
    assert set(event["latency_ms"]) == {"preprocess", "infer", "decode", "total"}
    assert event["latency_ms"]["preprocess"] == 1.23


def test_event_of_a_classification_has_no_boxes():
    scores = ClassScores(np.array([0.75], np.float32), np.array([1], np.int64))
    event = json.loads(result(objects=scores).payload)
    assert event["detections"] == [{"label": "green", "class_id": 1, "score": 0.75, "box": None}]


def test_hundred_detections_stay_small():
    rng = np.random.default_rng(1)
    boxes = rng.uniform(0, 1920, (100, 4))
    decoded = detections(*[(box, 0.87654, 1) for box in boxes])
    assert len(result(objects=decoded).payload) < 9000


# --- mqtt


@pytest.mark.parametrize("qos", [0, 1])
def test_broker_gets_every_payload_in_order(tmp_path, caplog, qos):
    caplog.set_level(logging.INFO)
    results = [result(seq) for seq in range(30)]
    with (
        mosquitto(tmp_path) as (port, _),
        subscriber(port) as seen,
        open_sink(MqttSink(max_hz=1000.0, qos=qos), context(port)) as sink,
    ):
        connected(sink, caplog)
        for one in results:
            sink.write(one)
            time.sleep(0.002)
        wait_for(lambda: len(seen) == 30, PATIENCE_S, "30 messages")
        assert sink.dropped == {}
    assert [message.payload for message in seen] == [one.payload for one in results]
    assert {message.qos for message in seen} == {qos}


def test_rate_is_limited_and_counted(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with mosquitto(tmp_path) as (port, _), subscriber(port) as seen:
        with open_sink(MqttSink(max_hz=10.0), context(port)) as sink:
            connected(sink, caplog)
            start = time.monotonic()
            for seq in range(50):
                sink.write(result(seq))
                time.sleep(0.01)
            allowed = 2 + 10.0 * (time.monotonic() - start)
            dropped = sink.dropped["mqtt_rate"]
        wait_for(lambda: len(seen) == 50 - dropped, PATIENCE_S, "the rest arrives")
    assert 4 <= len(seen) <= allowed


def test_rate_limit_keeps_the_average_and_forgives_jitter():
    limit = RateLimit(30.0)
    rng = np.random.default_rng(5)
    times = np.arange(300) / 30.0 + rng.uniform(0.0, 0.02, 300)
    assert sum(limit.allows(float(t)) for t in times) >= 299
    assert [limit.allows(60.0) for _ in range(4)] == [True, True, False, False]  # after a pause
    fast = RateLimit(30.0)
    assert sum(fast.allows(i / 1000.0) for i in range(3000)) == pytest.approx(91, abs=2)


def test_unreachable_broker_costs_drops_not_time(caplog):
    with open_sink(MqttSink(max_hz=1e6), context(free_port())) as sink:
        start = time.monotonic()
        for seq in range(200):
            sink.write(result(seq))
        assert time.monotonic() - start < 1.0
        wait_for(lambda: sum(sink.dropped.values()) == 200, PATIENCE_S, "all are counted")
        wait_for(lambda: "cannot reach the broker" in caplog.text, PATIENCE_S, "the log says so")
    assert set(sink.dropped) <= {"mqtt_offline", "mqtt_queue"}


def test_only_a_lost_event_counts_as_one():
    """Status and figures are said again."""
    settings = LinkSettings("127.0.0.1", free_port(), "test", ())
    publisher = MqttPublisher(
        settings, on_up=lambda: None, on_message=lambda _: None, will=Will("status", b"")
    )
    publisher.say(Outgoing("status", b"online"))
    for _ in range(QUEUED_WORDS):
        publisher.say(Outgoing("event", b"", lost_as="mqtt_events"))
    assert publisher.dropped == {}
    publisher.say(Outgoing("status", b"online"))
    assert publisher.dropped == {"mqtt_events": 1}


def test_sink_comes_back_after_the_broker_did(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    port = free_port()
    with open_sink(MqttSink(max_hz=1e6), context(port)) as sink:
        with mosquitto(tmp_path, port):
            connected(sink, caplog)
            caplog.clear()
        wait_for(lambda: "lost" in caplog.text, PATIENCE_S, "the loss is noticed")
        sink.write(result(1))
        # Before the restart: a sender that is late would find the new broker, and rightly use it.
        wait_for(lambda: sink.dropped == {"mqtt_offline": 1}, PATIENCE_S, "the drop is counted")
        with mosquitto(tmp_path, port), subscriber(port) as seen:
            connected(sink, caplog)
            sink.write(result(2))
            wait_for(lambda: seen, PATIENCE_S, "a message after the restart")
        assert [json.loads(message.payload)["seq"] for message in seen] == [2]
        assert sink.dropped == {"mqtt_offline": 1}


def test_frozen_broker_costs_the_oldest_results_and_no_memory(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    one = result(0, gray_frame(0), detections(*[([1, 2, 3, 4], 0.5, 0)] * 1000))
    with mosquitto(tmp_path) as (port, broker):
        with open_sink(MqttSink(max_hz=1e9), context(port)) as sink:
            connected(sink, caplog)
            broker.send_signal(signal.SIGSTOP)
            longest = 0.0
            for _ in range(1000):
                start = time.monotonic()
                sink.write(one)
                longest = max(longest, time.monotonic() - start)
                if sink.dropped.get("mqtt_queue", 0) > 100:
                    break
                time.sleep(0.001)
            assert sink.dropped["mqtt_queue"] > 100
            assert longest < 0.9  # what waits for this broker waits for a second or more
            closing = time.monotonic()
        assert time.monotonic() - closing < 4.0


AMQTT = """
import asyncio, sys
from amqtt.broker import Broker
async def main():
    plugins = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}}
    bind = "127.0.0.1:" + sys.argv[1]
    listeners = {"default": {"type": "tcp", "bind": bind}}
    await Broker({"listeners": listeners, "plugins": plugins}).start()
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_broker_that_knows_only_mqtt_311_is_spoken_to_in_311(caplog):
    caplog.set_level(logging.INFO)
    port = free_port()
    broker = subprocess.Popen([sys.executable, "-c", AMQTT, str(port)], stderr=subprocess.DEVNULL)
    try:
        with open_sink(MqttSink(), context(port)) as sink:
            wait_for(
                lambda: "connected (MQTT 3.1.1)" in caplog.text, PATIENCE_S, "3.1.1 is agreed on"
            )
            sink.write(result())
            time.sleep(0.2)
            assert sink.dropped == {}
    finally:
        broker.kill()
        broker.wait()


def test_mqtt_sink_without_a_broker_is_an_error_at_start():
    with pytest.raises(PipelineError, match=r"no broker was named: .* --mqtt-host"):
        open_sink(MqttSink(), context())


# --- jsonl


def test_jsonl_of_a_release_has_a_line_a_frame_and_goes_on_after_a_restart(tmp_path):
    path = tmp_path / "out.jsonl"
    for seq in (1, 2):
        files = OutputFiles(tmp_path)
        with open_sink(JsonlSink(path="out.jsonl"), SinkContext(LABELS, files=files)) as sink:
            sink.write(result(seq))
            assert path.read_text().endswith("\n")  # visible before it is closed
    assert [json.loads(line)["seq"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("kind", [JsonlSink, VideoSink])
def test_path_that_cannot_be_written_is_an_error_at_start(tmp_path, kind):
    for path in (tmp_path / "no" / "out.mp4", tmp_path):
        with pytest.raises(PipelineError, match=f"cannot write {path}"):
            open_sink(kind(path=str(path)), context())


def test_full_disk_is_counted_and_said_once(caplog):
    with open_sink(JsonlSink(path="/dev/full"), context()) as sink:
        for seq in range(3):
            sink.write(result(seq))
        assert sink.dropped == {"jsonl_full": 3}
    assert caplog.text.count("No space left on device") == 1


def test_disk_that_fills_up_within_a_line_leaves_whole_lines(tmp_path):
    path, size = tmp_path / "out.jsonl", len(result(1).payload)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_sink(JsonlSink(path=str(path)), context()) as sink:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size * 3 // 2, hard))
        try:
            for seq in (1, 2):
                sink.write(result(seq))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sink.write(result(3))
        assert sink.dropped == {"jsonl_full": 1}
    assert [json.loads(line)["seq"] for line in path.read_text().splitlines()] == [1, 3]


# --- video


def read_video(path):
    capture = cv2.VideoCapture(str(path))
    frames = []
    while (grabbed := capture.read())[0]:
        frames.append(grabbed[1])
    return frames, capture.get(cv2.CAP_PROP_FPS)


@pytest.mark.parametrize("name", ["out.mp4", "out.avi"])
def test_video_has_every_frame_with_its_boxes(tmp_path, name):
    path = tmp_path / name
    decoded = detections(([40, 60, 120, 100], 0.9, 0))
    with open_sink(VideoSink(path=str(path), fps=12.0), context()) as sink:
        for seq in range(6):
            sink.write(result(seq, gray_frame(30, 160, 120), decoded))
    frames, fps = read_video(path)
    assert (len(frames), round(fps)) == (6, 12)
    assert frames[0].shape == (120, 160, 3)
    edge, inside = frames[3][60:100, 40].astype(int), frames[3][80, 80].astype(int)
    assert edge[:, 2].mean() > 150  # drawn in the colour of class 0
    assert inside.max() < 60
    assert sink.dropped == {}


@pytest.mark.parametrize(("source_fps", "fps"), [(25.0, 25), (None, 15), (90_000.0, 15)])
def test_a_video_has_the_rate_of_its_source(tmp_path, source_fps, fps):
    path = tmp_path / "out.avi"
    with open_sink(VideoSink(path=str(path)), context()) as sink:
        one = result(0, gray_frame(30, 160, 120), detections())
        sink.write(replace(one, frame=replace(one.frame, fps=source_fps)))
    assert round(read_video(path)[1]) == fps


def test_each_of_several_cameras_has_a_video_of_its_own(tmp_path):
    cameras = replace(context(), cameras=("left", "right"))
    with open_sink(VideoSink(path=str(tmp_path / "out.avi")), cameras) as sink:
        for seq, camera in enumerate(("left", "right", "left")):
            one = result(seq, gray_frame(30, 160, 120), detections())
            sink.write(replace(one, frame=replace(one.frame, camera=camera)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-left.avi", "out-right.avi"]
    assert len(read_video(tmp_path / "out-left.avi")[0]) == 2
    assert len(read_video(tmp_path / "out-right.avi")[0]) == 1


def test_unknown_suffix_becomes_a_video_that_plays(tmp_path, caplog):
    writer = VideoFileWriter(tmp_path / "out.xyz", 10.0)
    for _ in range(3):
        writer.write(gray_frame(80))
    writer.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [writer.path.name]
    assert len(read_video(writer.path)[0]) == 3
    assert "is written as" in caplog.text


def test_images_of_other_sizes_are_fitted_in(tmp_path):
    path = tmp_path / "out.avi"
    with open_sink(VideoSink(path=str(path)), context()) as sink:
        sink.write(result(0, gray_frame(100, 160, 120), detections()))
        sink.write(result(1, gray_frame(200, 50, 100), detections()))
    frames, _ = read_video(path)
    assert len(frames) == 2
    columns = frames[1][100].mean(axis=1)
    assert columns[80] > 180
    assert columns[10] < 20
    assert columns[150] < 20


def test_video_without_frames_leaves_no_file(tmp_path):
    path = tmp_path / "out.mp4"
    with open_sink(VideoSink(path=str(path)), context()):
        pass
    assert os.listdir(tmp_path) == []
    with open_sink(VideoSink(path=str(path)), context()):
        path.unlink()  # by somebody else


# --- drawing


def test_annotation_draws_on_a_copy():
    image = gray_frame(50, 200, 150)
    before = image.copy()
    drawn = annotate(image, detections(([20, 40, 80, 90], 0.5, 1)), LABELS, 12.3)
    np.testing.assert_array_equal(image, before)
    assert (drawn[65, 20] != 50).any()
    assert (drawn[0:16, 0:60] == 255).any()  # the latency, in white
    np.testing.assert_array_equal(drawn[60:85, 100:], 50)


def test_annotation_takes_cropped_images_and_boxes_at_the_edges():
    image = np.zeros((100, 120, 3), np.uint8)[:90, :101]
    boxes = detections(([0, 0, 101, 90], 0.5, 7), ([-5, 80, 300, 400], 0.4, 123))
    assert annotate(image, boxes, LABELS).shape == (90, 101, 3)


def test_classes_are_written_as_lines():
    scores = ClassScores(np.array([0.9, 0.1], np.float32), np.array([1, 0], np.int64))
    drawn = annotate(gray_frame(0, 200, 100), scores, LABELS)
    assert (drawn[20:34] != 0).any()
    assert (drawn[38:52] != 0).any()
    assert not (drawn[60:] != 0).any()
