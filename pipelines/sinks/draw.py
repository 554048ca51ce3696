"""Draw results on an image: boxes, masks, poses, maps and texts."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.frame import Image
from pipelines.results import (
    NO_TRACK,
    ClassScores,
    Decoded,
    DepthMap,
    Detections,
    Region,
    SegmentationMap,
    Texts,
    label_of,
    text_of,
)
from pipelines.sinks.draw_zones import NO_PLACES, Places, outline
from pipelines.sinks.labels import Label, scale_of, write_labels
from pipelines.stages.decoders.rotated import corners_of_rotated
from pipelines.stages.mask_pixels import mask_on
from pipelines.stages.zones import NO_ZONES, ZoneFrame
from pipelines.vision import cv2

# BGR, told apart on bright and dark images; classes take them in turn.
COLORS = (
    (72, 174, 255),
    (90, 200, 90),
    (235, 130, 60),
    (180, 105, 255),
    (60, 220, 230),
    (230, 200, 70),
    (110, 110, 240),
    (200, 160, 160),
)
_TINTS = np.array(COLORS, np.uint8)
MIN_POINT_SCORE = 0.3
COCO_POINTS = 17
BONES = (  # between points of COCO's 17
    (15, 13), (13, 11), (16, 14), (14, 12), (11, 12), (5, 11), (6, 12), (5, 6), (5, 7), (6, 8),
    (7, 9), (8, 10), (0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6),
)  # fmt: skip
BLACK = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Drawing:
    """What is drawn of one model, with its labels.

    `title`: stands before the lines of classes and texts, where several models have some.
    `first_color`: of its first class. `hidden`: models on its crops that are not shown.
    """

    decoded: Decoded
    labels: Sequence[str]
    title: str = ""
    first_color: int = 0
    hidden: Collection[str] = ()


def annotate(
    image: Image, decoded: Decoded, labels: Sequence[str], latency_ms: float | None = None
) -> Image:
    """Return a copy of an image, uint8 [H, W, 3] BGR, with what was found in it."""
    return annotate_all(image, (Drawing(decoded, labels),), latency_ms)


def annotate_all(
    image: Image,
    drawings: Sequence[Drawing],
    latency_ms: float | None = None,
    places: Places = NO_PLACES,
    counts: ZoneFrame = NO_ZONES,
) -> Image:
    """Return a copy of an image, uint8 [H, W, 3] BGR, with what several models found in it: maps
    below, then boxes, zones and lines, and all labels above them."""
    canvas: Image = np.array(image, order="C")
    for drawing in drawings:
        if isinstance(drawing.decoded, SegmentationMap):
            _draw_classes(canvas, drawing.decoded, drawing.labels)
        elif isinstance(drawing.decoded, DepthMap):
            _draw_depth(canvas, drawing.decoded)
    objects: list[Label] = []
    for drawing in drawings:
        if isinstance(drawing.decoded, Detections):
            objects += _draw_detections(canvas, drawing.decoded, drawing)
    zones = places.draw(canvas, counts)
    corner = (4, 4, 4, 4)
    lines = [
        Label(text, corner, _color(color))
        for drawing in drawings
        for text, color in _lines(drawing)
    ]
    if latency_ms is not None:
        lines.insert(0, Label(f"{latency_ms:.1f} ms", corner, BLACK, fixed=True))
    write_labels(canvas, [*lines, *zones, *objects])
    return canvas


def _lines(drawing: Drawing) -> list[tuple[str, int]]:
    """Return the classes or texts of a whole frame, each with its colour."""
    decoded, labels = drawing.decoded, drawing.labels
    rows: list[tuple[str, int]] = []
    if isinstance(decoded, ClassScores):
        scored = zip(decoded.scores.tolist(), decoded.class_ids.tolist(), strict=True)
        rows = [(f"{label_of(labels, number)} {score:.2f}", number) for score, number in scored]
    elif isinstance(decoded, Texts):
        rows = [(text_of(line, labels), row) for row, line in enumerate(decoded.lines)]
    title = f"{drawing.title}: " if drawing.title else ""
    return [(title + text, color + drawing.first_color) for text, color in rows]


def _draw_detections(canvas: Image, detections: Detections, drawing: Drawing) -> list[Label]:
    """Draw objects; return their labels."""
    written = []
    class_ids = detections.class_ids.tolist()
    colors = [class_id + drawing.first_color for class_id in class_ids]
    if detections.masks is not None:
        for row, color in enumerate(colors):
            part, inside = mask_on(canvas, detections, row)
            part[inside] = (part[inside] + np.array(_color(color))) // 2
    tracks = [NO_TRACK] * len(class_ids)
    if detections.track_ids is not None:
        tracks = detections.track_ids.tolist()
    for row, (box, score, class_id, track) in enumerate(
        zip(detections.boxes.tolist(), detections.scores.tolist(), class_ids, tracks, strict=True)
    ):
        x1, y1, x2, y2 = (round(value) for value in box)
        color = colors[row]
        if detections.rotated is None:
            corners = np.array([(x1, y1), (x2, y1), (x2, y2), (x1, y2)])
        else:
            corners = corners_of_rotated(detections.rotated[row : row + 1])[0]
        outline(canvas, corners, _color(color))
        name = label_of(drawing.labels, class_id) + (f" #{track}" if track != NO_TRACK else "")
        attributes = {} if detections.attributes is None else detections.attributes[row]
        more = [
            f" | {one.label}" for model, one in attributes.items() if model not in drawing.hidden
        ]
        text = f"{name} {score:.2f}{''.join(more)}"
        written.append(Label(text, (x1, y1, x2, y2), _color(color)))
    if detections.keypoints is not None:
        _draw_keypoints(canvas, detections.keypoints)
    return written


def _draw_keypoints(canvas: Image, keypoints: NDArray[np.float32]) -> None:
    scale = scale_of(canvas)
    thickness, radius = round(2 * scale), round(3 * scale)
    bones = BONES if keypoints.shape[1] == COCO_POINTS else ()
    for person in keypoints.tolist():
        points = [(round(x), round(y)) for x, y, _ in person]
        shown = [score >= MIN_POINT_SCORE for _, _, score in person]
        for start, end in bones:
            if shown[start] and shown[end]:
                cv2.line(canvas, points[start], points[end], COLORS[start % len(COLORS)], thickness)
        for number, point in enumerate(points):
            if shown[number]:
                cv2.circle(canvas, point, radius, COLORS[number % len(COLORS)], cv2.FILLED)


def _draw_classes(canvas: Image, segmentation: SegmentationMap, labels: Sequence[str]) -> None:
    """Tint each class with its colour; a first class called background stays as it is."""
    part, classes = placed(canvas, segmentation.class_ids.astype(np.uint16), segmentation.region)
    tinted = (part // 2 + _TINTS[classes % len(COLORS)] // 2).astype(np.uint8)
    if labels and labels[0].strip("_ ").casefold() == "background":
        tinted = np.where((classes == 0)[..., None], part, tinted)
    part[:] = tinted


def _draw_depth(canvas: Image, depth_map: DepthMap) -> None:
    """Show near as bright and far as dark."""
    low, high = depth_map.depth.min(), depth_map.depth.max()
    near = (depth_map.depth - low) / max(float(high - low), 1e-12)
    near = 1.0 - near if depth_map.metric else near
    part, levels = placed(canvas, (near * 255.0).astype(np.uint8), depth_map.region)
    part[:] = cv2.applyColorMap(levels, cv2.COLORMAP_INFERNO)


def placed(
    canvas: NDArray[Any], values: NDArray[Any], region: Region
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the part of the image that a map covers, and the map in its pixels."""
    height, width = canvas.shape[:2]
    x1, y1 = max(round(region[0]), 0), max(round(region[1]), 0)
    x2, y2 = min(round(region[2]), width), min(round(region[3]), height)
    part = canvas[y1 : max(y2, y1 + 1), x1 : max(x2, x1 + 1)]
    size = (part.shape[1], part.shape[0])
    return part, np.asarray(cv2.resize(values, size, interpolation=cv2.INTER_NEAREST))


def _color(class_id: int) -> tuple[int, int, int]:
    return COLORS[class_id % len(COLORS)]
