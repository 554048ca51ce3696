"""The ros2 sink and source: what a robot gets of a result, and what a pipeline gets of a robot."""

import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count

import cv2
import msgspec
import numpy as np
import pytest
import zenoh
from cyclonedds.qos import Policy
from cyclonedds.util import duration
from ros2_fixtures import plain, zenoh_router
from sink_fixtures import detections
from video_fixtures import LABELS, PATIENCE_S, free_port, wait_for

from device.errors import PipelineError, SourceError
from device.protocol.messages import Stats
from pipelines.config import SourceConfig, parse_pipeline
from pipelines.frame import Frame, Stamp
from pipelines.results import DepthMap, Detections, Masks, ModelResult, ModelRun, SegmentationMap
from pipelines.ros2.cdr import decode, encode
from pipelines.ros2.messages import (
    ANNOTATIONS,
    CAMERA_INFO,
    COMPRESSED_IMAGE,
    DETECTIONS_2D,
    DETECTIONS_3D,
    DIAGNOSTICS,
    IMAGE,
    LABEL_INFO,
)
from pipelines.ros2.type_hash import type_hash
from pipelines.ros2.wire import Node, open_wire
from pipelines.sink_config import FoxgloveSink, McapSink, Ros2Sink
from pipelines.sinks.controls import Controls
from pipelines.sinks.events import make_event
from pipelines.sinks.result import FrameResult, Roles, SinkContext
from pipelines.sinks.ros2 import Camera, _camera_info
from pipelines.sinks.ros2_camera_info import read_calibration
from pipelines.sinks.ros2_messages import Pinhole, detections_3d
from pipelines.sinks.ros2_parameters import Parameters
from pipelines.sinks.table import open_sink
from pipelines.sources.batching import frames_of
from pipelines.sources.live import Waiting
from pipelines.sources.ros2 import ENCODINGS, capture_stamp
from pipelines.sources.table import open_source

START_NS = 1_700_000_000_000_000_042
CALIBRATION = """
image_width: 64
image_height: 48
camera_name: left
camera_matrix:
  rows: 3
  cols: 3
  data: [50.0, 0.0, 32.0,
         0.0, 40.0, 24.0,
         0.0, 0.0, 1.0]
distortion_model: plumb_bob
distortion_coefficients: {rows: 1, cols: 5, data: [0.1, -0.2, 0.0, 0.0, 0.5]}
rectification_matrix: {rows: 3, cols: 3, data: [1, 0, 0, 0, 1, 0, 0, 0, 1]}
projection_matrix: {rows: 3, cols: 4, data: [50, 0, 32, 0, 0, 40, 24, 0, 0, 0, 1, 0]}
"""
STATS = Stats(
    frames=30, fps=30.0, latency_p50_ms=5.0, latency_p99_ms=9.0, stage_p50_ms={}, stage_p99_ms={},
    dropped={"busy": 3}, processors={"dla0": 15, "gpu": 15},
)  # fmt: skip


@pytest.fixture(scope="module")
def router():
    with zenoh_router() as (locator, _):
        yield locator


def pose_and_mask():
    """Two objects: one with a track, key points and a mask, and one turned by 30 degrees."""
    actual = detections(([8, 8, 24, 40], 0.9, 0), ([30, 10, 50, 30], 0.5, 1))
    full = np.ones((4, 4), np.float32)
    left = np.concatenate([full[:, :2], -full[:, :2]], axis=1)
    return Detections(
        actual.boxes,
        actual.scores,
        actual.class_ids,
        np.array([7, -1]),
        np.array([[[9, 9, 0.9], [20, 30, 0.1]], [[31, 11, 0.8], [40, 20, 0.8]]], np.float32),
        Masks((left, full), actual.boxes),
        np.array([[16, 24, 16, 32, 0], [40, 20, 20, 10, np.radians(30)]], np.float32),
    )


def result(objects=None, camera="", seq=0, models=None, wall_ns=START_NS):
    objects = pose_and_mask() if objects is None else objects
    taken = Stamp(time.monotonic_ns(), wall_ns)
    frame = Frame(np.full((48, 64, 3), 90, np.uint8), seq, taken, taken, "test", camera)
    event = make_event("door", frame, objects, LABELS, {"infer": 1.0})
    runs = (ModelRun("model", ("dla0", "gpu"), (0, 1), 0, (0, 1)),)
    return FrameResult(
        frame, objects, event, models=models or {}, runs=runs, roles=Roles(labels=LABELS)
    )


class Heard:
    """What a node hears on topics of Zenoh."""

    def __init__(self, locator, domain=0):
        self._wire = open_wire("zenoh", Node("listener", domain=domain, connect=(locator,)))
        self.close = self._wire.close
        self.messages = {}

    def hear(self, topic, kind, qos="reliable"):
        messages = self.messages[topic] = []
        self._wire.subscribe(
            topic, (kind,), qos, lambda name, data: messages.append(decode(name, data))
        )

    def next_of(self, topic):
        wait_for(lambda: self.messages[topic], PATIENCE_S, f"a message on {topic}")
        return plain(self.messages[topic].pop(0))


@contextmanager
def listener(locator, domain, **topics):
    heard = Heard(locator, domain)
    try:
        for topic, kind in topics.items():
            heard.hear("/" + topic.replace("__", "/"), kind)
        yield heard
    finally:
        heard.close()


def write_until(sink, message, heard, topic):
    """Give a sink results until a listener, which may still be joining, has heard of one."""
    end_s = time.monotonic() + PATIENCE_S
    while not heard.messages[topic]:
        assert time.monotonic() < end_s
        sink.write(message)
        time.sleep(0.05)


def test_a_robot_gets_everything_that_is_known_of_a_frame(router, tmp_path):
    (tmp_path / "left.yaml").write_text(CALIBRATION)
    config = Ros2Sink(
        topics=("detections", "detections_3d", "annotations", "overlay", "labels", "diagnostics"),
        domain=20,
        connect=(router,),
        qos="reliable",
        frame_id="{camera}_optical_frame",
        camera_info=str(tmp_path / "{camera}.yaml"),
    )
    depth = np.full((12, 16), 2.0, np.float32)
    depth[0, 0] = 0.0  # not seen
    models = {"depth": ModelResult(DepthMap(depth, (0, 0, 64, 48), metric=True), ())}
    kinds = {
        "detections": DETECTIONS_2D, "detections_3d": DETECTIONS_3D, "annotations": ANNOTATIONS,
        "overlay__compressed": COMPRESSED_IMAGE, "labels": IMAGE, "camera_info": CAMERA_INFO,
        "diagnostics": DIAGNOSTICS,
    }  # fmt: skip
    context = SinkContext(LABELS, cameras=("left",), models={"model": LABELS})
    with listener(router, 20, **kinds) as heard:
        heard.hear("/label_info", LABEL_INFO, "transient_local")
        with open_sink(config, context) as sink:
            for topic in heard.messages.keys() - {"/diagnostics", "/label_info"}:
                write_until(sink, result(camera="left", models=models), heard, topic)
            end_s = time.monotonic() + PATIENCE_S
            while not heard.messages["/diagnostics"] and time.monotonic() < end_s:
                sink.take_stats(STATS)
                time.sleep(0.05)
            heard_messages = {topic: heard.next_of(topic) for topic in heard.messages}
    header = {"stamp": {"sec": 1_700_000_000, "nanosec": 42}, "frame_id": "left_optical_frame"}
    assert all(one["header"] == header for key, one in heard_messages.items()
               if key not in ("/annotations", "/diagnostics"))  # fmt: skip

    first, second = heard_messages["/detections"]["detections"]
    assert (first["id"], second["id"]) == ("7", "")
    assert first["results"][0]["hypothesis"] == {"class_id": "red", "score": 0.9}
    assert first["bbox"]["center"] == {"position": {"x": 16.0, "y": 24.0}, "theta": 0.0}
    assert (first["bbox"]["size_x"], first["bbox"]["size_y"]) == (16.0, 32.0)
    assert second["bbox"]["center"]["theta"] == pytest.approx(np.radians(30), abs=1e-4)
    assert (second["bbox"]["size_x"], second["bbox"]["size_y"]) == (20.0, 10.0)

    box = heard_messages["/detections_3d"]["detections"][0]["bbox"]
    position, size = box["center"]["position"], box["size"]
    assert position == pytest.approx({"x": (16 - 32) * 2 / 50, "y": 0.0, "z": 2.0})
    assert size == pytest.approx({"x": 16 * 2 / 50, "y": 32 * 2 / 40, "z": 0.0})

    shapes = heard_messages["/annotations"]["points"]
    assert [shape["type"] for shape in shapes if len(shape["points"]) == 1] == [1]
    assert heard_messages["/annotations"]["texts"][0]["text"] == "red 0.90 #7"
    assert shapes[0]["points"][0] == {"x": 8.0, "y": 8.0}

    jpeg = np.frombuffer(bytes(heard_messages["/overlay/compressed"]["data"]), np.uint8)
    assert cv2.imdecode(jpeg, cv2.IMREAD_COLOR).shape == (48, 64, 3)
    labels = heard_messages["/labels"]
    assert (labels["encoding"], labels["step"]) == ("mono8", 64)
    pixels = np.array(labels["data"], np.uint8).reshape(48, 64)
    assert (pixels[20, 10], pixels[20, 40], pixels[0, 0]) == (0, 1, 255)
    assert 255 in pixels[8:40, 8:24]  # the right half of the first box
    assert [one["class_name"] for one in heard_messages["/label_info"]["class_map"]] == list(LABELS)
    info = heard_messages["/camera_info"]
    assert (info["width"], info["height"], info["d"][0], info["k"][4]) == (64, 48, 0.1, 40.0)

    status = {one["name"]: one for one in heard_messages["/diagnostics"]["status"]}
    frames = {one["key"]: one["value"] for one in status["tandem/door: frames"]["values"]}
    assert (frames["fps"], frames["dropped busy"]) == ("30.0", "3")
    ran = {one["key"]: one["value"] for one in status["tandem/door: processors"]["values"]}
    assert (ran["dla0"], ran["model model"]) == ("15 frames", "dla0, gpu")
    assert status["tandem/door: clock"]["message"] in ("synchronised", "not synchronised")


def test_two_cameras_and_two_namespaces_have_topics_of_their_own(router):
    sinks = [
        Ros2Sink(domain=21, connect=(router,), namespace=name, qos="reliable")
        for name in ("/robot1", "/robot2")
    ]
    topics = {
        f"{robot}__{camera}__detections": DETECTIONS_2D
        for robot in ("robot1", "robot2")
        for camera in ("left", "_2_back")
    }
    context = SinkContext(LABELS, cameras=("left", "2-back"))
    with listener(router, 21, **topics) as heard, ExitStack() as stack:
        for number, config in enumerate(sinks):
            sink = stack.enter_context(open_sink(config, context))
            for camera, name in (("left", "left"), ("2-back", "_2_back")):
                topic = f"/robot{number + 1}/{name}/detections"
                write_until(sink, result(camera=camera), heard, topic)
                assert heard.next_of(topic)["header"]["frame_id"] == camera
        assert len(heard.messages) == 4


def test_semantic_maps_of_many_classes_have_16_bits(router):
    names = [f"class {number}" for number in range(300)]
    classes = np.full((2, 2), 299)
    models = {"scene": ModelResult(SegmentationMap(classes, (0, 0, 32, 48)), names)}
    config = Ros2Sink(domain=22, connect=(router,), topics=("labels",), models=("scene",))
    with listener(router, 22, labels=IMAGE) as heard, open_sink(config, SinkContext(())) as sink:
        write_until(sink, result(models=models), heard, "/labels")
        image = heard.next_of("/labels")
    pixels = np.frombuffer(bytes(image["data"]), np.uint16).reshape(48, 64)
    assert (image["encoding"], image["step"]) == ("mono16", 128)
    assert (pixels[10, 10], pixels[10, 40]) == (299, 65535)


def test_a_network_that_takes_nothing_costs_frames_and_never_the_loop(router, monkeypatch):
    config = Ros2Sink(domain=23, connect=(router,), max_hz=1e6)
    held = threading.Event()
    with open_sink(config, SinkContext(LABELS)) as sink:
        for camera in sink._cameras.values():
            for publisher in camera.publishers.values():
                monkeypatch.setattr(publisher, "_put", lambda *_, **__: held.wait(PATIENCE_S))
        begin_s = time.monotonic()
        for seq in range(50):
            sink.write(result(seq=seq))
        assert time.monotonic() - begin_s < 5.0
        assert 40 <= sink.dropped["ros2_queue"] <= 46
        held.set()


@contextmanager
def zenoh_client(locator, domain):
    """Yields what sends a request of a service and returns the answer, as rmw_zenoh does."""
    config = zenoh.Config()
    config.insert_json5("mode", '"client"')
    config.insert_json5("connect/endpoints", f'["{locator}"]')
    with zenoh.open(config) as session:

        def send(service, kind, request):
            attachment = (7).to_bytes(8, "little") + bytes(8) + b"\x10" + b"0123456789abcdef"
            name = kind.rpartition("/")[2]
            key = f"{domain}{service}/rcl_interfaces::srv::dds_::{name}_/{type_hash(kind)}"
            (reply,) = session.get(key, payload=request, attachment=attachment, timeout=10)
            head = reply.ok.attachment.to_bytes()
            assert head[:8] == attachment[:8]
            assert head[16:] == attachment[16:]
            return reply.ok.payload.to_bytes()

        yield send


@contextmanager
def dds_client(locator, domain):
    """The same, as rmw_cyclonedds does."""
    client = open_wire("dds", Node("rqt", domain=domain, connect=(locator,)))
    ids = count(1)

    def send(service, kind, request):
        user_data = f"clientid={next(ids)};"
        replies = client._reader(f"rr{service}Reply", f"{kind}_Response", "reliable", user_data)
        requests = client._writer(f"rq{service}Request", f"{kind}_Request", "reliable", user_data)
        writer = requests._writer
        wait_for(writer.get_matched_subscriptions, PATIENCE_S, "the service")
        wait_for(replies.get_matched_publications, PATIENCE_S, "its answers")
        service_data = [writer.get_matched_subscription_data(one).qos[Policy.Userdata].data
                        for one in writer.get_matched_subscriptions()]  # fmt: skip
        service_data += [replies.get_matched_publication_data(one).qos[Policy.Userdata].data
                         for one in replies.get_matched_publications()]  # fmt: skip
        assert service_data[0].split(b";")[0] == service_data[1].split(b";")[0] != b""
        head = bytes(range(16))
        requests.put(request[:4] + head + request[4:], 1)
        reply = next(replies.take_iter(timeout=duration(seconds=PATIENCE_S))).cdr
        assert reply[4:20] == head
        return reply[:4] + reply[20:]

    try:
        yield send
    finally:
        client.close()


@pytest.mark.parametrize("wire", ["zenoh", "dds"])
def test_parameters_change_a_running_pipeline(router, wire):
    controls = Controls()
    connect, domain, client = {
        "zenoh": (router, 24, zenoh_client), "dds": ("localhost", 92, dds_client)
    }[wire]  # fmt: skip
    config = Ros2Sink(
        wire=wire, domain=domain, connect=(connect,), controls=True, namespace="/robot1", node="eye"
    )
    context = SinkContext(LABELS, controls=controls)
    with open_sink(config, context), client(connect, domain) as send:

        def call(name, service, request):
            kind = f"rcl_interfaces/srv/{name}"
            data = send(f"/robot1/eye/{service}", kind, encode(f"{kind}_Request", request))
            return plain(decode(f"{kind}_Response", data))

        def put(name, **value):
            request = {"parameters": [{"name": name, "value": value}]}
            return call("SetParameters", "set_parameters", request)["results"][0]

        listed = call("ListParameters", "list_parameters", {})["result"]["names"]
        assert listed == ["min_score", "detect"]
        assert put("min_score", type=3, double_value=0.6) == {"successful": True, "reason": ""}
        assert controls.least_score("") == 0.6
        assert put("detect", type=1, bool_value=False)["successful"]
        assert not controls.is_on("")
        both = [
            {"name": "detect", "value": {"type": 1, "bool_value": True}},
            {"name": "min_score", "value": {"type": 3, "double_value": 7.0}},
        ]
        atomic = call("SetParametersAtomically", "set_parameters_atomically", {"parameters": both})
        assert atomic["result"]["reason"] == "min_score is 0 to 1, not 7"
        assert not controls.is_on("")  # all or none
        values = call("GetParameters", "get_parameters", {"names": ["min_score", "none"]})["values"]
        assert [one["type"] for one in values] == [3, 0]
        assert values[0]["double_value"] == 0.6
        assert (
            put("min_score", type=3, double_value=1.5)["reason"] == "min_score is 0 to 1, not 1.5"
        )
        assert put("min_score", type=4)["reason"] == "min_score is a double"
        assert "use one of min_score, detect" in put("score", type=3)["reason"]
        names = {"names": ["min_score", "detect"]}
        types = call("GetParameterTypes", "get_parameter_types", names)
        assert types == {"types": [3, 1]}
        rows = call("DescribeParameters", "describe_parameters", names)["descriptors"]
        assert rows[0]["floating_point_range"] == [
            {"from_value": 0.0, "to_value": 1.0, "step": 0.0}
        ]


def test_parameters_of_several_cameras_name_them():
    controls = Controls()
    answer = Parameters(controls, ("left", "right")).services()["SetParameters"]
    value = {"type": 3, "double_value": 0.4}
    request = {"parameters": [{"name": "right.min_score", "value": value}]}
    answer(encode("rcl_interfaces/srv/SetParameters_Request", request))
    assert (controls.least_score("left"), controls.least_score("right")) == (0.0, 0.4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"topics": ("detections_3d",)}, "needs the camera's calibration"),
        ({"camera_info": "none.yaml"}, "camera_info none.yaml cannot be read"),
    ],
)
def test_what_a_sink_cannot_do_is_an_error_at_start(options, says):
    with pytest.raises(PipelineError) as caught:
        open_sink(Ros2Sink(**options), SinkContext(LABELS))
    assert says in str(caught.value)


@pytest.mark.parametrize("config", [Ros2Sink(), McapSink(path="a.mcap"), FoxgloveSink()])
def test_cameras_with_the_same_topics_are_refused(config):
    with pytest.raises(PipelineError, match=r"'a-b' and 'a_b' have the same topics .* /a_b: give"):
        open_sink(config, SinkContext(LABELS, cameras=("a-b", "c", "a_b")))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("50.0, 0.0, 32.0,", "0.0, 0.0, 32.0,", "a focal length of 0"),
        ("image_width: 64", "image_width: 0", "is no calibration of ROS 2"),
        ("         0.0, 0.0, 1.0]", "         0.0]", "is no calibration of ROS 2"),
    ],
)
def test_a_calibration_that_is_none_is_refused(tmp_path, old, new, says):
    (tmp_path / "a.yaml").write_text(CALIBRATION.replace(old, new))
    with pytest.raises(PipelineError, match=says):
        read_calibration(str(tmp_path / "a.yaml"))


def test_a_calibration_of_another_size_is_scaled(tmp_path):
    (tmp_path / "a.yaml").write_text(CALIBRATION)
    camera = Camera("", read_calibration(str(tmp_path / "a.yaml")), (), {})
    half = result()
    half = replace(half, event=msgspec.structs.replace(half.event, width=32, height=12))
    info = _camera_info(camera, half)
    assert (info["width"], info["height"]) == (32, 12)
    assert info["k"] == (25.0, 0.0, 16.0, 0.0, 10.0, 6.0, 0.0, 0.0, 1.0)
    assert info["p"] == (25.0, 0.0, 16.0, 0.0, 0.0, 10.0, 6.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    assert camera.calibration_of(half).pinhole == Pinhole(25.0, 10.0, 16.0, 6.0)
    assert camera.calibration_of(result()) is camera.calibration


@pytest.mark.parametrize("box", [[-40, 8, -10, 40], [8, -40, 40, -10], [-40, -40, -10, -10]])
def test_a_box_beside_the_depth_map_has_no_depth(box):
    actual = detections((box, 0.9, 0))
    depth = DepthMap(np.full((48, 64), 2.0, np.float32), (0, 0, 64, 48), metric=True)
    seen = result(actual, models={"depth": ModelResult(depth, ())})
    message = detections_3d(seen, ("model",), Pinhole(50, 50, 32, 24))
    assert message["detections"] == []


def test_two_sinks_are_not_one_node():
    text = 'name = "a"\n[source]\nuri = "test://"\n[preprocess]\nwidth = 64\nheight = 64\n'
    text += '[decode]\nkind = "ltrb_grid"\nboxes = "b"\nscores = "s"\nstrides = [8]\n'
    text += '[[sinks]]\nkind = "ros2"\n[[sinks]]\nkind = "ros2"\n'
    with pytest.raises(Exception, match=r"two .* have the ROS 2 node"):
        parse_pipeline(text, "a.toml")


def test_nothing_of_ros_2_is_loaded_without_such_a_sink():
    code = """
import sys
import pipelines.__main__, pipelines.run, pipelines.sinks.table, pipelines.sources.table
loaded = [one for one in sys.modules if one.split(".")[0] in ("zenoh", "cyclonedds", "yaml")]
loaded += [one for one in sys.modules if "ros2" in one]
print(loaded)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("wire", "package", "says"),
    [
        ("zenoh", "zenoh", r"pip install 'tandem-edge\[ros2\]'\.$"),
        ("dds", "cyclonedds", r"tandem-edge\[dds\]'\. .* on a Jetson take wire = \"zenoh\""),
    ],
)
def test_a_package_that_is_missing_is_named(monkeypatch, wire, package, says):
    for module in [one for one in sys.modules if one.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"pipelines.ros2.{wire}_wire", raising=False)
    with pytest.raises(PipelineError, match=says):
        open_wire(wire, Node("tandem"))


# --- sources

PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def image_message(encoding="bgr8", pixels=PIXELS, **more):
    size = ENCODINGS[encoding][0]
    rows = pixels.reshape(pixels.shape[0], -1)
    step = rows.shape[1] + 5  # drivers align rows
    padded = np.zeros((len(rows), step), np.uint8)
    padded[:, : rows.shape[1]] = rows
    seconds, rest = divmod(time.time_ns() - 20_000_000, 10**9)
    return {
        "header": {"stamp": {"sec": seconds, "nanosec": rest}},
        "height": len(rows), "width": rows.shape[1] // size, "encoding": encoding,
        "step": step, "data": padded.tobytes(), **more,
    }  # fmt: skip


@contextmanager
def camera_node(wire, connect, domain):
    node = open_wire(wire, Node("camera", domain=domain, connect=connect))
    try:
        yield node
    finally:
        node.close()


def frame_from(uri, publisher, data):
    """Return the first frame of a source whose topic gets a message all the while."""
    stop = threading.Event()

    def publish():
        while not stop.wait(0.05):
            publisher.put(data() if callable(data) else data, time.time_ns())

    thread = threading.Thread(target=publish)
    thread.start()
    waiting = Waiting(threading.Event())
    try:
        with open_source(SourceConfig(uri=uri, stall_s=10.0), waiting) as source:
            return next(frames_of(source, waiting))
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("wire", ["zenoh", "dds"])
def test_a_source_reads_pictures_with_their_capture_time(router, wire):
    connect, domain = (router, 30) if wire == "zenoh" else ("localhost", 91)
    with camera_node(wire, (connect,), domain) as node:
        uri = f"ros2://camera/image_raw?wire={wire}&domain={domain}&connect={connect}"
        raw = node.publish("camera/image_raw", IMAGE, "sensor_data")
        frame = frame_from(uri, raw, lambda: encode(IMAGE, image_message()))
        assert np.array_equal(frame.image, PIXELS)
        age_ns = frame.t_recv.wall_ns - frame.t_capture.wall_ns
        assert age_ns >= 20_000_000
        assert age_ns == frame.t_recv.mono_ns - frame.t_capture.mono_ns
        done, jpeg = cv2.imencode(".jpg", np.full((16, 24, 3), 200, np.uint8))
        assert done
        message = {"format": "jpeg", "data": jpeg.tobytes()}
        second = node.publish("camera/small", COMPRESSED_IMAGE, "reliable")
        uri = uri.replace("image_raw", "small")
        frame = frame_from(uri, second, encode(COMPRESSED_IMAGE, message))
        assert frame.image.shape == (16, 24, 3)
        assert abs(int(frame.image.mean()) - 200) < 3
        assert frame.t_capture == frame.t_recv  # its stamp is 0


def test_encodings_become_bgr():
    from pipelines.sources.ros2 import _from_image

    flags = _from_image(image_message()).flags
    assert flags.c_contiguous
    assert flags.writeable
    rgb = image_message("rgb8", PIXELS[..., ::-1].copy())
    assert np.array_equal(_from_image(rgb), PIXELS)
    alpha = np.concatenate([PIXELS, PIXELS[..., :1]], axis=2)
    assert np.array_equal(_from_image(image_message("bgra8", alpha)), PIXELS)
    grey = _from_image(image_message("mono8", PIXELS[..., 0].copy()))
    assert np.array_equal(grey, np.repeat(PIXELS[..., :1], 3, axis=2))
    for name, (size, _) in ENCODINGS.items():
        pixels = np.full((4, 6, size), 128, np.uint8)
        assert _from_image(image_message(name, pixels)).shape == (4, 6, 3)
    red = np.zeros((8, 8, 1), np.uint8)
    red[::2, ::2] = 255  # where RGGB has red
    assert _from_image(image_message("bayer_rggb8", red))[4, 4].tolist()[2] == 255


@pytest.mark.parametrize(
    "more",
    [
        {"encoding": "16UC1"}, {"data": b"short"}, {"width": 1 << 31, "height": 1 << 31},
        {"step": 3}, {"height": 0},
    ],
)  # fmt: skip
def test_damaged_images_are_refused(more):
    from pipelines.sources.ros2 import _from_image

    with pytest.raises(SourceError, match="an Image"):
        _from_image({**image_message(), **more})


def test_a_stamp_of_a_simulation_is_no_capture_time():
    received = Stamp(5 * 10**9, START_NS)
    assert capture_stamp({"sec": 12, "nanosec": 0}, received) == received
    later = {"sec": 1_700_000_001, "nanosec": 0}
    assert capture_stamp(later, received) == received
    earlier = capture_stamp({"sec": 1_699_999_999, "nanosec": 42}, received)
    assert earlier == Stamp(4 * 10**9, START_NS - 10**9)


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("ros2://", "names no topic"),
        ("ros2://camera/7up", "names no topic"),
        ("ros2://camera?wire=mqtt", "Invalid enum value 'mqtt'"),
        ("ros2://camera?domain=233", "<= 232"),
        ("ros2://camera?hz=3", "unknown option 'hz'"),
    ],
)
def test_addresses_that_are_none_are_refused(uri, says):
    with pytest.raises(SourceError) as caught:
        open_source(SourceConfig(uri=uri), Waiting(threading.Event()))
    assert says in str(caught.value)


def test_a_silent_topic_is_an_error_that_says_what_to_check():
    uri = f"ros2://camera?connect=tcp/127.0.0.1:{free_port()}"
    waiting = Waiting(threading.Event())
    with (
        pytest.raises(SourceError, match=r"gave no picture for 0.3 s: check that a node publishes"),
        open_source(SourceConfig(uri=uri, stall_s=0.3), waiting),
    ):
        pass
