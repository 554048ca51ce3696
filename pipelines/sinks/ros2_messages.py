"""A frame's result as ROS 2 messages: mappings by the fields of `pipelines.ros2.messages`.

Fields that are left out keep their defaults. `header.stamp` is the capture time. A camera's frame
has x to the right, y down and z forward (REP 103, optical).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from device.protocol.messages import Stats
from pipelines.results import NO_TRACK, DepthMap, Detections, ModelResult, SegmentationMap
from pipelines.ros2.cdr import Message
from pipelines.sinks.draw import COLORS, MIN_POINT_SCORE, placed
from pipelines.sinks.events import Detection
from pipelines.sinks.result import FrameResult

POINTS, LINE_LOOP = 1, 2  # foxglove_msgs/PointsAnnotation
OK, WARN = 0, 1  # diagnostic_msgs/DiagnosticStatus
MIN_DEPTH_PIXELS = 4

Pixels = NDArray[np.uint8] | NDArray[np.uint16]
Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Pinhole:
    """Focal lengths and principal point of a camera in pixels."""

    fx: float
    fy: float
    cx: float
    cy: float


def time_of(wall_ns: int) -> Message:
    """Return ns since 1970 as builtin_interfaces/Time."""
    seconds, nanoseconds = divmod(wall_ns, 1_000_000_000)
    return {"sec": seconds, "nanosec": nanoseconds}


def header_of(result: FrameResult, frame_id: str = "") -> Message:
    """Return the header: the capture time, and `frame_id`, or the camera's id."""
    event = result.event
    return {
        "stamp": time_of(event.t_capture_ns),
        "frame_id": frame_id or result.frame.camera or event.pipeline,
    }


def turned_bbox(one: Detection, size: tuple[int, int]) -> Message:
    """Return an object as BoundingBox2D, with its angle; `size`: width and height of the frame."""
    if one.rotated is not UNSET:
        x, y, width, height, degrees = one.rotated
        center = {"position": {"x": x, "y": y}, "theta": float(np.radians(degrees))}
        return {"center": center, "size_x": width, "size_y": height}
    x1, y1, x2, y2 = one.box or (0.0, 0.0, *size)
    return {
        "center": {"position": {"x": (x1 + x2) / 2, "y": (y1 + y2) / 2}},
        "size_x": x2 - x1,
        "size_y": y2 - y1,
    }


def upright_bbox(one: Detection, size: tuple[int, int]) -> Message:
    """Return the upright frame of an object as BoundingBox2D, with two digits, for JSON."""
    x1, y1, x2, y2 = one.box or (0.0, 0.0, *map(float, size))
    position = {"x": round((x1 + x2) / 2, 2), "y": round((y1 + y2) / 2, 2)}
    return {
        "center": {"position": position, "theta": 0.0},
        "size_x": round(x2 - x1, 2),
        "size_y": round(y2 - y1, 2),
    }


def detections_2d(
    result: FrameResult,
    names: Sequence[str],
    frame_id: str = "",
    bbox: Callable[[Detection, tuple[int, int]], Message] = turned_bbox,
) -> Message:
    """Return Detection2DArray: `id` is the track, `class_id` the label; the objects of these models
    in turn."""
    header = header_of(result, frame_id)
    size = (result.event.width, result.event.height)
    return {
        "header": header,
        "detections": [
            {
                "header": header,
                "results": [{"hypothesis": {"class_id": one.label, "score": one.score}}],
                "bbox": bbox(one, size),
                "id": str(track) if track >= 0 else "",
            }
            for one, track in rows_with_tracks(result, names)
        ],
    }


def rows_with_tracks(
    result: FrameResult, names: Collection[str]
) -> Iterator[tuple[Detection, int]]:
    """Yield the objects of these models in turn with the number of the track of each, below 0 for
    none."""
    seen = result.by_model
    for name in names:
        if name in seen:
            rows, decoded = result.rows_of(name), seen[name].decoded
            tracks = decoded.track_ids if isinstance(decoded, Detections) else None
            ids = [NO_TRACK] * len(rows) if tracks is None else tracks.tolist()
            yield from zip(rows, ids, strict=True)


def _box_of(one: Detection, result: FrameResult) -> Box:
    return one.box or (0.0, 0.0, float(result.event.width), float(result.event.height))


def detections_3d(
    result: FrameResult, names: Sequence[str], camera: Pinhole, frame_id: str = ""
) -> Message | None:
    """Return Detection3DArray in metres in the frame of the camera; None: no model gives a metric
    depth. Objects that the depth map does not show are left out.

    The centre is at the median depth of the middle half of the box; the size along z is between 10
    and 90 percent of the depths there.
    """
    maps = [one.decoded for one in result.by_model.values() if isinstance(one.decoded, DepthMap)]
    depth = next((one for one in maps if one.metric), None)
    if depth is None:
        return None
    header = header_of(result, frame_id)
    detections = []
    for one, track in rows_with_tracks(result, names):
        x1, y1, x2, y2 = _box_of(one, result)
        values = _depths(depth, (x1, y1, x2, y2))
        if values.size < MIN_DEPTH_PIXELS:
            continue
        near, z, far = np.percentile(values, [10, 50, 90]).tolist()
        center = {
            "x": ((x1 + x2) / 2 - camera.cx) * z / camera.fx,
            "y": ((y1 + y2) / 2 - camera.cy) * z / camera.fy,
            "z": z,
        }
        size = {"x": (x2 - x1) * z / camera.fx, "y": (y2 - y1) * z / camera.fy, "z": far - near}
        hypothesis = {"class_id": one.label, "score": one.score}
        detections.append(
            {
                "header": header,
                "results": [{"hypothesis": hypothesis, "pose": {"pose": {"position": center}}}],
                "bbox": {"center": {"position": center}, "size": size},
                "id": str(track) if track >= 0 else "",
            }
        )
    return {"header": header, "detections": detections}


def _depths(depth: DepthMap, box: Box) -> NDArray[np.float32]:
    """Return the finite depths above 0 in the middle half of a box."""
    left, top, right, bottom = depth.region
    rows, columns = depth.depth.shape
    x1, y1, x2, y2 = box
    x1, x2 = x1 + (x2 - x1) / 4, x2 - (x2 - x1) / 4
    y1, y2 = y1 + (y2 - y1) / 4, y2 - (y2 - y1) / 4
    scale_x, scale_y = columns / (right - left), rows / (bottom - top)
    first_x, last_x = (round((x - left) * scale_x) for x in (x1, x2))
    first_y, last_y = (round((y - top) * scale_y) for y in (y1, y2))
    # An end before the map is no index from its other side.
    part = depth.depth[max(0, first_y) : max(0, last_y + 1), max(0, first_x) : max(0, last_x + 1)]
    return part[np.isfinite(part) & (part > 0)]


def annotations(result: FrameResult, names: Sequence[str]) -> Message:
    """Return foxglove_msgs/ImageAnnotations: outlines, labels, masks and key points."""
    stamp = time_of(result.event.t_capture_ns)
    points: list[Message] = []
    texts: list[Message] = []
    for one, track in rows_with_tracks(result, names):
        color = _rgba(one.class_id)
        shapes = [_corners(one, result)]
        if one.mask is not UNSET:
            shapes += [list(zip(line[::2], line[1::2], strict=True)) for line in one.mask]
        points += [_shape(stamp, LINE_LOOP, shape, color) for shape in shapes]
        if one.keypoints is not UNSET:
            seen = [(x, y) for x, y, score in one.keypoints if score >= MIN_POINT_SCORE]
            points.append(_shape(stamp, POINTS, seen, color))
        text = f"{one.label} {one.score:.2f}" + (f" #{track}" if track >= 0 else "")
        texts.append(
            {
                "timestamp": stamp,
                "position": {"x": shapes[0][0][0], "y": shapes[0][0][1]},
                "text": text,
                "font_size": 12.0,
                "text_color": _rgba(one.class_id),
                "background_color": {"a": 0.6},
            }
        )
    return {"timestamp": stamp, "points": points, "texts": texts}


def _shape(
    stamp: Message, kind: int, points: Sequence[tuple[float, float]], color: Message
) -> Message:
    return {
        "timestamp": stamp,
        "type": kind,
        "points": [{"x": x, "y": y} for x, y in points],
        "outline_color": color,
        "thickness": 2.0 if kind == LINE_LOOP else 5.0,
    }


def _corners(one: Detection, result: FrameResult) -> list[tuple[float, float]]:
    if one.rotated is not UNSET:
        x, y, width, height, degrees = one.rotated
        turn = np.exp(1j * np.radians(degrees)) / 2
        ends = [
            complex(x, y) + turn * complex(a * width, b * height)
            for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))
        ]
        return [(float(end.real), float(end.imag)) for end in ends]
    x1, y1, x2, y2 = _box_of(one, result)
    return [(x1, y1), (x2, y1), (x2, y2), (x1, y2)]


def _rgba(class_id: int) -> Message:
    blue, green, red = (value / 255 for value in COLORS[class_id % len(COLORS)])
    return {"r": red, "g": green, "b": blue, "a": 1.0}


def compressed_image(header: Message, jpeg: bytes) -> Message:
    """Return a JPEG as CompressedImage."""
    return {"header": header, "format": "jpeg", "data": jpeg}


def raw_image(header: Message, pixels: Pixels) -> Message:
    """Return pixels as Image, without a copy: [H, W, 3] BGR, or [H, W] of 8 or 16 bits."""
    return {
        "header": header,
        "height": pixels.shape[0],
        "width": pixels.shape[1],
        "encoding": "bgr8" if pixels.ndim == 3 else f"mono{8 * pixels.itemsize}",
        "step": pixels[0].nbytes,
        "data": memoryview(np.ascontiguousarray(pixels).data).cast("B"),
    }


def mask_model(result: FrameResult, names: Collection[str]) -> ModelResult | None:
    """Return the first of these models, or of all, that gives a class of each pixel."""
    for name, one in result.by_model.items():
        masks = isinstance(one.decoded, Detections) and one.decoded.masks is not None
        if (not names or name in names) and (masks or isinstance(one.decoded, SegmentationMap)):
            return one
    return None


def label_image(size: tuple[int, int], model: ModelResult) -> Pixels:
    """Return the class of each pixel of a frame of `size`, [H, W]: uint8, or uint16 for more than
    255 classes; the highest number stands for pixels without one, as vision_msgs/LabelInfo says."""
    from pipelines.stages.mask_pixels import mask_on

    decoded = model.decoded
    kind = np.uint8 if len(model.labels) <= np.iinfo(np.uint8).max else np.uint16
    canvas: Pixels = np.full(size, np.iinfo(kind).max, kind)
    if isinstance(decoded, SegmentationMap):
        part, classes = placed(canvas, decoded.class_ids.astype(np.uint16), decoded.region)
        part[:] = classes
    elif isinstance(decoded, Detections):
        class_ids = decoded.class_ids.tolist()
        for row in reversed(range(len(class_ids))):  # the best score is above
            part, inside = mask_on(canvas, decoded, row)
            part[inside] = class_ids[row]
    return canvas


def label_info(header: Message, labels: Sequence[str]) -> Message:
    """Return the names of the classes as vision_msgs/LabelInfo."""
    classes = [{"class_id": number, "class_name": name} for number, name in enumerate(labels)]
    return {"header": header, "class_map": classes}


def diagnostics(
    wall_ns: int,
    name: str,
    stats: Stats,
    *,
    ages_ms: Mapping[str, float],
    runs: Mapping[str, str],
    heat_c: float | None,
    clock: str,
) -> Message:
    """Return DiagnosticArray with the figures of the last second.

    `ages_ms`: from capture to result of each camera's last frame; `runs`: the processors of each
    model; `clock`: the state of the system clock.
    """
    idle = stats.fps <= 0
    rows: list[tuple[str, int, str, dict[str, str]]] = [
        (
            "frames",
            WARN if idle else OK,
            "no frames in the last second" if idle else "running",
            {
                "fps": f"{stats.fps:.1f}",
                "frames": str(stats.frames),
                "latency_p50_ms": f"{stats.latency_p50_ms:.2f}",
                "latency_p99_ms": f"{stats.latency_p99_ms:.2f}",
                **{f"age_ms {key}".strip(): f"{value:.1f}" for key, value in ages_ms.items()},
                **{f"dropped {cause}": str(count) for cause, count in stats.dropped.items()},
            },
        ),
        (
            "processors",
            OK,
            ", ".join(stats.processors) or "nothing ran",
            {
                **{key: f"{count} frames" for key, count in stats.processors.items()},
                **{f"model {model}": processors for model, processors in runs.items()},
            },
        ),
        ("clock", OK if clock == "synchronised" else WARN, clock, {"source": "system clock"}),
    ]
    if heat_c is not None:
        rows.append(("temperature", OK, f"{heat_c:.1f} C", {"hottest_c": f"{heat_c:.1f}"}))
    return {
        "header": {"stamp": time_of(wall_ns)},
        "status": [
            {
                "level": level,
                "name": f"tandem/{name}: {part}",
                "message": text,
                "hardware_id": name,
                "values": [{"key": key, "value": value} for key, value in values.items()],
            }
            for part, level, text, values in rows
        ],
    }
