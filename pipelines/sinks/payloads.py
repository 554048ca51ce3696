"""What sinks write of a frame: the results of all models, or of those that they name, as JSON.

`ros2`: in the shape of ROS 2's vision_msgs/Detection2DArray (vision_msgs 4). The keys are the
fields of the message, so a bridge such as rosbridge publishes the object as it is; fields that are
left out keep their defaults there.
"""

from collections.abc import Collection, Sequence

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from pipelines.results import NO_TRACK, Decoded, Detections
from pipelines.sink_config import JsonlSink, MqttSink
from pipelines.sinks.events import Detection, Event, encode_event
from pipelines.sinks.result import FrameResult

_ENCODER = msgspec.json.Encoder()


def payload_of(result: FrameResult, config: JsonlSink | MqttSink) -> bytes:
    """Return a frame as the sink writes it, JSON without a line feed."""
    if config.format == "ros2":
        return encode_detection_array(result, config.models or (result.roles.followed,))
    if not config.models:
        return result.payload
    return encode_event(only(result.event, result.roles.first, config.models))


def only(event: Event, first: str, names: Collection[str]) -> Event:
    """Return an event without the results of models that are not named; `first`: the first one."""
    models = {name: rows for name, rows in (event.models or {}).items() if name in names}
    event = replace(event, models=models or UNSET)
    if first in names:
        return event
    return replace(event, detections=(), classes=UNSET, depth=UNSET, texts=UNSET)


def encode_detection_array(result: FrameResult, names: Sequence[str]) -> bytes:
    """Return a frame as Detection2DArray: the stamp is the capture time, `frame_id` the camera,
    `id` the track, `class_id` the label; the objects of these models in turn."""
    event = result.event
    seconds, nanoseconds = divmod(event.t_capture_ns, 1_000_000_000)
    header = {
        "stamp": {"sec": seconds, "nanosec": nanoseconds},
        "frame_id": result.frame.camera or event.pipeline,
    }
    seen = result.by_model
    detections = [
        {
            "header": header,
            "results": [{"hypothesis": {"class_id": one.label, "score": one.score}}],
            "bbox": _bbox(one.box or (0.0, 0.0, float(event.width), float(event.height))),
            "id": str(track) if track >= 0 else "",
        }
        for name in names
        if name in seen
        for one, track in _with_tracks(result.rows_of(name), seen[name].decoded)
    ]
    return _ENCODER.encode({"header": header, "detections": detections})


def _with_tracks(rows: Sequence[Detection], decoded: Decoded) -> list[tuple[Detection, int]]:
    """Return rows with the number of the track of each, below 0 for none."""
    track_ids = decoded.track_ids if isinstance(decoded, Detections) else None
    ids = [NO_TRACK] * len(rows) if track_ids is None else track_ids.tolist()
    return list(zip(rows, ids, strict=True))


def _bbox(box: tuple[float, float, float, float]) -> dict[str, object]:
    x1, y1, x2, y2 = box
    position = {"x": round((x1 + x2) / 2, 2), "y": round((y1 + y2) / 2, 2)}
    return {
        "center": {"position": position, "theta": 0.0},
        "size_x": round(x2 - x1, 2),
        "size_y": round(y2 - y1, 2),
    }
