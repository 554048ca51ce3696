"""Results for robots: messages of ROS 2 over Zenoh or DDS. docs/ros2.md has the topics."""

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from device.errors import PipelineError
from device.protocol.messages import Stats
from pipelines.rate import RateLimit
from pipelines.ros2 import messages as kinds
from pipelines.ros2.cdr import Message, encode
from pipelines.ros2.wire import Node, Publisher, open_wire
from pipelines.sink_config import Ros2Qos, Ros2Sink, Ros2Topic
from pipelines.sinks import ros2_messages as convert
from pipelines.sinks.draw_result import draw_result
from pipelines.sinks.result import FrameResult, SinkContext
from pipelines.sinks.ros2_camera_info import Calibration, read_calibration
from pipelines.sinks.ros2_parameters import PACKAGE, Parameters
from pipelines.sinks.ros2_queue import QueuedSink, check_names, topic_prefix
from pipelines.vision import cv2

QUEUED = 4  # frames; with a slow network the oldest are dropped
CLOSE_S = 1.0
JPEG_QUALITY = 80


@dataclass(frozen=True, slots=True)
class Camera:
    """What is known of one camera, and the topics that it publishes on."""

    frame_id: str
    calibration: Calibration | None
    names: Sequence[str]  # of the models; empty: the sink does not say
    publishers: Mapping[str, Publisher]

    def calibration_of(self, result: FrameResult) -> Calibration | None:
        """Return the calibration in pixels of a frame, whatever size it was made with."""
        event = result.event
        return self.calibration and self.calibration.scaled_to(event.width, event.height)

    def names_in(self, result: FrameResult) -> Sequence[str]:
        """Return the models whose objects are told."""
        return self.names or (result.roles.followed,)


Make = Callable[[Camera, FrameResult], Message | None]


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic of each camera: its name, type, what makes a message, and its profile where that is
    not the sink's."""

    name: str
    kind: str
    make: Make
    qos: Ros2Qos | None = None


def _header(camera: Camera, result: FrameResult) -> Message:
    return convert.header_of(result, camera.frame_id)


def _detections_2d(camera: Camera, result: FrameResult) -> Message:
    return convert.detections_2d(result, camera.names_in(result), camera.frame_id)


def _detections_3d(camera: Camera, result: FrameResult) -> Message | None:
    calibration = camera.calibration_of(result)
    if calibration is None:
        return None
    names = camera.names_in(result)
    return convert.detections_3d(result, names, calibration.pinhole, camera.frame_id)


def _annotations(camera: Camera, result: FrameResult) -> Message:
    return convert.annotations(result, camera.names_in(result))


def _overlay(camera: Camera, result: FrameResult) -> Message | None:
    picture = draw_result(result, camera.names)
    done, data = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    return convert.compressed_image(_header(camera, result), data.tobytes()) if done else None


def _labels(camera: Camera, result: FrameResult) -> Message | None:
    model = convert.mask_model(result, camera.names)
    if model is None:
        return None
    image = convert.label_image(result.frame.size, model)
    return convert.raw_image(_header(camera, result), image)


def _label_info(camera: Camera, result: FrameResult) -> Message | None:
    model = convert.mask_model(result, camera.names)
    return None if model is None else convert.label_info(_header(camera, result), model.labels)


def _camera_info(camera: Camera, result: FrameResult) -> Message | None:
    calibration = camera.calibration_of(result)
    return None if calibration is None else calibration.message(_header(camera, result))


# What `topics` names -> the topics of each camera; diagnostics are of the whole pipeline.
TOPICS: dict[Ros2Topic, tuple[Topic, ...]] = {
    "detections": (Topic("detections", kinds.DETECTIONS_2D, _detections_2d),),
    "detections_3d": (Topic("detections_3d", kinds.DETECTIONS_3D, _detections_3d),),
    "annotations": (Topic("annotations", kinds.ANNOTATIONS, _annotations),),
    "overlay": (Topic("overlay/compressed", kinds.COMPRESSED_IMAGE, _overlay),),
    "labels": (
        Topic("labels", kinds.IMAGE, _labels),
        Topic("label_info", kinds.LABEL_INFO, _label_info, "transient_local"),
    ),
    "diagnostics": (),
}
CAMERA_INFO = Topic("camera_info", kinds.CAMERA_INFO, _camera_info)


class Ros2Out(QueuedSink):
    """A node that publishes results, at most `max_hz` frames a second of each camera."""

    def __init__(self, config: Ros2Sink, context: SinkContext) -> None:
        super().__init__("ros2", QUEUED, "oldest", CLOSE_S)
        if "detections_3d" in config.topics and not config.camera_info:
            raise PipelineError(
                "detections_3d of the ros2 sink needs the camera's calibration: give the file as"
                " `camera_info`."
            )
        cameras = context.cameras
        check_names(cameras)
        calibrations = {
            camera: read_calibration(_of_camera(config.camera_info, camera))
            for camera in cameras
            if config.camera_info
        }
        self._config = config
        self._context = context
        self._topics = [one for name in config.topics for one in TOPICS[name]]
        self._topics += [CAMERA_INFO] if config.camera_info else []
        node = Node(config.node, config.namespace, config.domain, config.distro, config.connect)
        self._wire = open_wire(config.wire, node)
        try:
            self._cameras = {
                camera: self._open_camera(camera, calibrations.get(camera)) for camera in cameras
            }
            self._health = (
                self._wire.publish("/diagnostics", kinds.DIAGNOSTICS, "reliable")
                if "diagnostics" in config.topics
                else None
            )
            if config.controls:
                for name, answer in Parameters(context.controls, cameras).services().items():
                    service = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
                    self._wire.serve(f"{config.node}/{service}", f"{PACKAGE}/{name}", answer)
        except BaseException:
            self._wire.close()
            raise
        self._limits = {camera: RateLimit(config.max_hz) for camera in cameras}

    def __exit__(self, *_: object) -> None:
        """Send the queue for a short time, then leave the network."""
        super().__exit__()
        # A network that does not answer must not hold the end of the pipeline.
        goodbye = threading.Thread(target=self._wire.close, name="ros2-goodbye", daemon=True)
        goodbye.start()
        goodbye.join(CLOSE_S)

    def write(self, result: FrameResult) -> None:
        """Queue a result, but over `max_hz`: ros2_rate."""
        if self._limits[result.frame.camera].allows(time.monotonic()):
            super().write(result)
        else:
            self._dropped["ros2_rate"] += 1

    def take_stats(self, stats: Stats) -> None:
        """Queue the figures of the last second."""
        if self._health is not None:
            super().take_stats(stats)

    def _open_camera(self, camera: str, calibration: Calibration | None) -> Camera:
        prefix = topic_prefix(camera, self._context.cameras)[1:]  # in the namespace
        publishers = {
            topic.name: self._wire.publish(
                prefix + topic.name, topic.kind, topic.qos or self._config.qos
            )
            for topic in self._topics
        }
        return Camera(
            _of_camera(self._config.frame_id, camera),
            calibration,
            self._config.models,
            publishers,
        )

    def send(self, result: FrameResult) -> None:
        """Send the topics of a frame."""
        camera = self._cameras[result.frame.camera]
        for topic in self._topics:
            message = topic.make(camera, result)
            if message is not None:
                data = encode(topic.kind, message)
                camera.publishers[topic.name].put(data, time.time_ns())

    def send_stats(self, stats: Stats) -> None:
        """Send /diagnostics."""
        now_ns = time.time_ns()
        if self._health is not None:
            self._health.put(encode(kinds.DIAGNOSTICS, self.diagnostics(stats, now_ns)), now_ns)


def _of_camera(text: str, camera: str) -> str:
    return text.replace("{camera}", camera)
