"""Detections as JSON in the shape of ROS 2's vision_msgs/Detection2DArray (vision_msgs 4).

The keys are the fields of the message, so a bridge such as rosbridge publishes the object as it is;
fields that are left out keep their defaults there.
"""

import msgspec

from pipelines.sinks.result import FrameResult

_ENCODER = msgspec.json.Encoder()


def encode_detection_array(result: FrameResult) -> bytes:
    """Return a frame as Detection2DArray: the stamp is the capture time, `frame_id` the camera,
    `id` the track, `class_id` the label."""
    event = result.event
    seconds, nanoseconds = divmod(event.t_capture_ns, 1_000_000_000)
    header = {
        "stamp": {"sec": seconds, "nanosec": nanoseconds},
        "frame_id": result.frame.camera or event.pipeline,
    }
    track_ids = getattr(result.decoded, "track_ids", None)
    ids = [-1] * len(event.detections) if track_ids is None else track_ids.tolist()
    detections = [
        {
            "header": header,
            "results": [{"hypothesis": {"class_id": one.label, "score": one.score}}],
            "bbox": _bbox(one.box or (0.0, 0.0, float(event.width), float(event.height))),
            "id": str(track) if track >= 0 else "",
        }
        for one, track in zip(event.detections, ids, strict=True)
    ]
    return _ENCODER.encode({"header": header, "detections": detections})


def _bbox(box: tuple[float, float, float, float]) -> dict[str, object]:
    x1, y1, x2, y2 = box
    position = {"x": round((x1 + x2) / 2, 2), "y": round((y1 + y2) / 2, 2)}
    return {
        "center": {"position": position, "theta": 0.0},
        "size_x": round(x2 - x1, 2),
        "size_y": round(y2 - y1, 2),
    }
