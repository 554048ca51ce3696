"""What others read: object events and controls over a real broker, ROS 2's JSON, Prometheus."""

import json
import logging
import re
import urllib.error
import urllib.request

import jsonschema
import msgspec
import numpy as np
import paho.mqtt.client as paho
import pytest
from sink_fixtures import connected, detections, subscriber
from video_fixtures import LABELS, PATIENCE_S, gray_frame, mosquitto, wait_for

from device.errors import PipelineError
from device.protocol.messages import Stats
from pipelines.frame import Frame, Stamp
from pipelines.results import Detections
from pipelines.sink_config import JsonlSink, MqttSink, PrometheusSink, SnapshotSink
from pipelines.sinks.controls import Controls
from pipelines.sinks.events import FrameFacts, make_event
from pipelines.sinks.result import Broker, FrameResult, SinkContext
from pipelines.sinks.table import open_sink
from pipelines.sinks.track_lifecycle import BETTER_SCORE, ObjectEvent, TrackLifecycle
from pipelines.stages.zones import ZoneFrame
from scripts import results_schema

PREFIX = "fleet/v1/robot-1"
START_NS = 1_700_000_000 * 10**9
RED = ([10, 20, 30.04, 40], 0.5, 0)


def tracked(*rows, tracks):
    decoded = detections(*rows)
    return Detections(decoded.boxes, decoded.scores, decoded.class_ids, np.array(tracks, np.int64))


def result(given, *, seq=0, camera="", zones=None, time_s=0.0):
    zones = zones or ZoneFrame()
    taken = Stamp(int(time_s * 1e9), START_NS + int(time_s * 1e9))
    frame = Frame(gray_frame(0), seq, taken, taken, "test", camera)
    facts = FrameFacts(zones=zones, processors=("gpu", "dla0"))
    event = make_event("door", frame, given, LABELS, {"infer": 1.0}, facts)
    return FrameResult(frame, given, event, zones)


def context(port=None, **options):
    broker = None if port is None else Broker("127.0.0.1", port, PREFIX)
    return SinkContext(LABELS, broker, **options)


# --- the lives of objects


def live(lives, *rows, tracks, at_s, zones=None):
    return lives.update(
        tracked(*rows, tracks=tracks), zones or ZoneFrame(), START_NS + int(at_s * 1e9)
    )


def test_an_object_is_new_changes_its_zone_and_ends():
    lives = TrackLifecycle("cam", LABELS, lost_s=1.0)
    (new,) = live(lives, RED, tracks=[7], at_s=0.0)
    assert new.type == "new"
    assert new.before is msgspec.UNSET
    assert (new.after.track_id, new.after.label, new.after.camera) == (7, "red", "cam")
    assert new.after.box == (10.0, 20.0, 30.0, 40.0)
    inside = ZoneFrame(zones_of={7: ("yard",)})
    (update,) = live(lives, RED, tracks=[7], at_s=0.1, zones=inside)
    assert update.type == "update"
    assert update.before == new.after
    assert update.after.current_zones == update.after.entered_zones == ("yard",)
    assert live(lives, tracks=[], at_s=1.1) == ()
    (end,) = live(lives, tracks=[], at_s=1.2)
    assert end.type == "end"
    assert (end.after.current_zones, end.after.entered_zones) == ((), ("yard",))
    assert end.after.end_time - end.after.start_time == pytest.approx(0.1, abs=1e-6)
    assert end.after.id == new.after.id
    assert live(lives, tracks=[], at_s=9.0) == ()


@pytest.mark.parametrize(
    ("gain", "at_s", "is_published"),
    [(BETTER_SCORE, 1.0, True), (BETTER_SCORE - 0.01, 1.0, False), (0.3, 0.9, False)],
)
def test_a_better_score_is_told_at_most_once_a_second(gain, at_s, is_published):
    lives = TrackLifecycle("", LABELS, lost_s=2.0)
    live(lives, RED, tracks=[7], at_s=0.0)
    box, score, class_id = RED
    events = live(lives, (box, score + gain, class_id), tracks=[7], at_s=at_s)
    assert bool(events) is is_published


def test_objects_of_two_cameras_in_one_moment_have_two_ids():
    states = [
        live(TrackLifecycle(camera, LABELS, lost_s=1.0), RED, tracks=[7], at_s=0.0)[0].after
        for camera in ("left", "right")
    ]
    assert states[0].id != states[1].id


def test_objects_without_a_number_have_no_life():
    lives = TrackLifecycle("", LABELS, lost_s=1.0)
    assert live(lives, RED, tracks=[-1], at_s=0.0) == ()
    assert lives.update(detections(RED), ZoneFrame(), START_NS) == ()


def test_all_lives_end_with_the_pipeline():
    lives = TrackLifecycle("", LABELS, lost_s=1.0)
    live(lives, RED, RED, tracks=[1, 2], at_s=0.0)
    assert [event.type for event in lives.close()] == ["end", "end"]
    assert lives.close() == ()


# --- over a real broker


def by_topic(seen):
    grouped = {}
    for message in list(seen):
        grouped.setdefault(message.topic.removeprefix(PREFIX + "/"), []).append(message)
    return grouped


def texts(seen, topic):
    return [message.payload.decode() for message in by_topic(seen).get(topic, [])]


def test_status_events_and_controls_of_two_cameras(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    controls = Controls()
    config = MqttSink(max_hz=1e6, controls=True, stats_s=0.001)
    cameras = {"cameras": ("left", "right"), "controls": controls}
    with mosquitto(tmp_path) as (port, _), subscriber(port, PREFIX + "/#") as seen:
        speaker = paho.Client(paho.CallbackAPIVersion.VERSION2)
        speaker.connect("127.0.0.1", port)
        speaker.loop_start()
        with open_sink(config, context(port, **cameras)) as sink:
            connected(sink, caplog)
            sink.write(result(tracked(RED, tracks=[7]), camera="left"))
            sink.write(result(tracked(tracks=[]), camera="right"))
            sink.take_stats(stats())
            speaker.publish(f"{PREFIX}/left/detect/set", "OFF", qos=1)
            speaker.publish(f"{PREFIX}/right/threshold/set", "0.75", qos=1)
            for _ in range(20):
                speaker.publish(f"{PREFIX}/right/threshold/set", "much", qos=1)
            wait_for(lambda: not controls.is_on("left"), PATIENCE_S, "OFF")
            wait_for(lambda: controls.least_score("right") == 0.75, PATIENCE_S, "0.75")
            wait_for(lambda: "takes 0 to 1" in caplog.text, PATIENCE_S, "a refusal")
            wait_for(lambda: "OFF" in texts(seen, "left/detect/state"), PATIENCE_S, "its echo")
            wait_for(lambda: texts(seen, "left/detections"), PATIENCE_S, "detections")
        wait_for(lambda: "stopped" in texts(seen, "status"), PATIENCE_S, "stopped")
        speaker.disconnect()
        speaker.loop_stop()
    assert caplog.text.count("takes 0 to 1") < 20  # a flood is not logged word for word
    assert texts(seen, "status")[0] == "online"
    new, end = (msgspec.json.decode(text, type=ObjectEvent) for text in texts(seen, "left/events"))
    assert (new.type, end.type) == ("new", "end")
    assert json.loads(texts(seen, "left/detections")[0])["camera"] == "left"
    assert json.loads(texts(seen, "stats")[0])["fps"] == 30.0
    assert controls.is_on("right")
    assert texts(seen, "right/threshold/state")[-1] == "0.75"


def test_the_broker_says_that_a_pipeline_is_offline(tmp_path, caplog):
    """A connection that breaks without a goodbye; the status is retained."""
    caplog.set_level(logging.INFO)
    with mosquitto(tmp_path) as (port, _), subscriber(port, PREFIX + "/status") as seen:
        sink = open_sink(MqttSink(), context(port))
        sink.__enter__()
        connected(sink, caplog)
        wait_for(lambda: texts(seen, "status") == ["online"], PATIENCE_S, "online")
        connection = sink._publisher._link._current
        connection._client.socket().shutdown(2)
        wait_for(lambda: "offline" in texts(seen, "status"), PATIENCE_S, "offline")
        wait_for(lambda: texts(seen, "status")[-1] == "online", PATIENCE_S, "online again")
        sink.__exit__(None, None, None)
        with subscriber(port, PREFIX + "/status") as later:
            wait_for(lambda: texts(later, "status"), PATIENCE_S, "a retained status")
            assert texts(later, "status") == ["stopped"]


def test_without_leave_nothing_listens(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    controls = Controls()
    with mosquitto(tmp_path) as (port, _), subscriber(port, PREFIX + "/#") as seen:
        with open_sink(MqttSink(), context(port, controls=controls)) as sink:
            connected(sink, caplog)
            wait_for(lambda: texts(seen, "status"), PATIENCE_S, "online")
        assert set(by_topic(seen)) == {"status"}
    assert controls.is_on("")


# --- controls


def test_objects_end_when_their_camera_gives_no_frame_any_more(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    seen_once = result(tracked(RED, tracks=[7]), camera="left")
    options = {"cameras": ("left",), "lost_s": 0.3}
    with open_sink(SnapshotSink(path=str(tmp_path / "seen")), context(**options)) as sink:
        sink.write(seen_once)
        sink.tick()
        assert not list((tmp_path / "seen").iterdir())
        wait_for(
            lambda: sink.tick() or list((tmp_path / "seen").iterdir()), PATIENCE_S, "its picture"
        )
    with mosquitto(tmp_path) as (port, _), subscriber(port, PREFIX + "/left/events") as seen:
        with open_sink(MqttSink(), context(port, **options)) as sink:
            connected(sink, caplog)
            sink.write(seen_once)
            wait_for(lambda: texts(seen, "left/events"), PATIENCE_S, "new")
            wait_for(lambda: sink.tick() or len(seen) == 2, PATIENCE_S, "end, without a frame")
            sink.tick()
        new, end = (
            msgspec.json.decode(one, type=ObjectEvent) for one in texts(seen, "left/events")
        )
    assert (new.type, end.type) == ("new", "end")
    assert end.after.end_time == new.after.frame_time


def test_paused_frames_are_counted_and_weak_detections_dropped():
    controls = Controls()
    controls.switch("a", on=False)
    assert [controls.admits("a"), controls.admits("b"), controls.admits("a")] == [
        False,
        True,
        False,
    ]
    assert controls.dropped == {"paused": 2}
    controls.set_least_score("b", 0.5)
    decoded = detections(([0, 0, 1, 1], 0.5, 0), ([0, 0, 1, 1], 0.49, 0))
    assert len(controls.filtered(decoded, "b")) == 1
    assert controls.filtered(decoded, "a") is decoded


# --- ROS 2

# vision_msgs 4 (ros-perception/vision_msgs, ros2 branch) and std_msgs: fields of each message.
ROS_FIELDS = {
    "Detection2DArray": {"header": "Header", "detections": ["Detection2D"]},
    "Header": {"stamp": "Time", "frame_id": str},
    "Time": {"sec": int, "nanosec": int},
    "Detection2D": {
        "header": "Header",
        "results": ["ObjectHypothesisWithPose"],
        "bbox": "BoundingBox2D",
        "id": str,
    },
    "ObjectHypothesisWithPose": {"hypothesis": "ObjectHypothesis", "pose": "PoseWithCovariance"},
    "ObjectHypothesis": {"class_id": str, "score": float},
    "BoundingBox2D": {"center": "Pose2D", "size_x": float, "size_y": float},
    "Pose2D": {"position": "Point2D", "theta": float},
    "Point2D": {"x": float, "y": float},
}


def conforms(value, kind):
    """Every key is a field of the message, with a value of its type; fields may be missing."""
    if isinstance(kind, list):
        return all(conforms(one, kind[0]) for one in value)
    if isinstance(kind, type):
        return isinstance(value, kind)
    fields = ROS_FIELDS[kind]
    return all(key in fields and conforms(one, fields[key]) for key, one in value.items())


def test_ros2_json_has_the_fields_of_detection2darray(tmp_path):
    path = tmp_path / "ros.jsonl"
    with open_sink(JsonlSink(path=str(path), format="ros2"), context()) as sink:
        sink.write(result(tracked(RED, ([0, 0, 4, 8], 0.25, 1), tracks=[7, -1]), camera="left"))
    message = json.loads(path.read_text())
    assert conforms(message, "Detection2DArray")
    assert message["header"] == {"stamp": {"sec": 1_700_000_000, "nanosec": 0}, "frame_id": "left"}
    assert [one["id"] for one in message["detections"]] == ["7", ""]
    second = message["detections"][1]
    assert second["results"] == [{"hypothesis": {"class_id": "green", "score": 0.25}}]
    assert second["bbox"] == {
        "center": {"position": {"x": 2.0, "y": 4.0}, "theta": 0.0},
        "size_x": 4.0,
        "size_y": 8.0,
    }


# --- Prometheus


def stats():
    return Stats(
        frames=30,
        fps=30.0,
        latency_p50_ms=5.0,
        latency_p99_ms=9.0,
        stage_p50_ms={"infer": 4.0},
        stage_p99_ms={"infer": 6.0},
        dropped={"busy": 3},
        processors={"dla0": 15, "dla1": 15},
    )


SAMPLE = re.compile(r'(tandem_[a-z0-9_]+)\{((?:[a-z]+="(?:[^"\\]|\\.)*",?)*)\} (\S+)')


def scrape(port):
    """Read the page as Prometheus does: HELP and TYPE before the samples of a family."""
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    assert text.endswith("\n")
    samples, family = {}, ""
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            family = line.split()[2]
            assert line.split()[3] in ("counter", "gauge")
        elif not line.startswith("# HELP "):
            name, labels, value = SAMPLE.fullmatch(line).groups()
            assert name == family
            samples[name, labels] = float(value)
    return samples


def test_prometheus_reads_frames_zones_and_stages():
    zones = ZoneFrame(inside={'the "yard"': {"red": 2}}, crossed={"gate": {"in": 3, "out": 0}})
    with open_sink(PrometheusSink(port=0), context()) as sink:
        for seq in range(2):
            sink.write(result(detections(RED, RED), seq=seq, zones=zones))
        sink.take_stats(stats())
        samples = scrape(sink.port)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/", timeout=PATIENCE_S)
    label = 'pipeline="door"'
    assert samples["tandem_frames_total", label] == 2
    assert samples["tandem_detections_total", label + ',label="red"'] == 4
    assert samples["tandem_objects", label + ',label="red"'] == 2
    assert samples["tandem_zone_objects", label + r',zone="the \"yard\"",label="red"'] == 2
    assert samples["tandem_line_crossings_total", label + ',line="gate",direction="in"'] == 3
    assert samples["tandem_stage_seconds", label + ',stage="infer",quantile="0.99"'] == 0.006
    assert samples["tandem_dropped_total", label + ',cause="busy"'] == 3
    assert samples["tandem_processor_frames", label + ',processor="dla1"'] == 15


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", ""])
def test_a_page_whose_name_points_here_reads_no_figures(host):
    with open_sink(PrometheusSink(port=0), context()) as sink:
        url = f"http://127.0.0.1:{sink.port}/metrics"
        request = urllib.request.Request(url, headers={"Host": host})
        with pytest.raises(urllib.error.HTTPError, match="421"):
            urllib.request.urlopen(request, timeout=PATIENCE_S)


def test_prometheus_says_zero_for_what_has_gone():
    full, empty = ZoneFrame(inside={"yard": {"red": 2}}), ZoneFrame(inside={"yard": {}})
    with open_sink(PrometheusSink(port=0), context()) as sink:
        sink.write(result(detections(RED, RED), zones=full))
        sink.write(result(detections(), seq=1, zones=empty))
        samples = scrape(sink.port)
    label = 'pipeline="door"'
    assert samples["tandem_objects", label + ',label="red"'] == 0
    assert samples["tandem_zone_objects", label + ',zone="yard",label="red"'] == 0


def test_a_port_that_is_taken_is_named():
    with open_sink(PrometheusSink(port=0), context()) as sink:
        config = PrometheusSink(port=sink.port)
        with pytest.raises(PipelineError, match=f"cannot listen on 127.0.0.1:{sink.port}"):
            open_sink(config, context())


def test_hundred_tracked_detections_stay_small():
    rng = np.random.default_rng()
    boxes = rng.uniform(0, 1920, (100, 4))
    actual = tracked(*[(box, 0.87654, 1) for box in boxes], tracks=range(100))
    assert len(result(actual).payload) < 10_000


# --- the schema of payloads


def validate(payload, name):
    schema = json.loads(results_schema.PATH.read_text())
    jsonschema.validate(json.loads(payload), {**schema, "$ref": f"#/$defs/{name}"})


def test_payloads_are_what_the_published_schema_says():
    zones = ZoneFrame(inside={"a": {"red": 1}}, crossed={"g": {"in": 1, "out": 0}})
    validate(result(tracked(RED, tracks=[7]), zones=zones).payload, "Event")
    (new,) = TrackLifecycle("", LABELS, 1.0).update(tracked(RED, tracks=[7]), zones, START_NS)
    validate(msgspec.json.encode(new), "ObjectEvent")
    validate(msgspec.json.encode(stats()), "Stats")
    with pytest.raises(jsonschema.ValidationError):
        validate(b'{"pipeline": 3}', "Event")


def test_the_published_schema_is_that_of_the_code():
    written = results_schema.PATH.read_text()
    assert written == results_schema.schema(), "run python -m scripts.results_schema --write"
