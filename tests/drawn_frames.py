"""Frames with everything that is drawn on them: golden pictures (tests/golden/drawn), and a sheet.

`python tests/drawn_frames.py --sheet sheet.png` draws all on one picture, to be looked at;
`--write` replaces the golden pictures.
"""

import argparse
import sys
from pathlib import Path

import cv2
import msgspec
import numpy as np
from video_fixtures import frame_of

import configs
from pipelines.results import (
    Attribute,
    ClassScores,
    Decoded,
    DepthMap,
    Detections,
    Masks,
    ModelResult,
    SegmentationMap,
    Texts,
)
from pipelines.sinks.draw_result import draw_result
from pipelines.sinks.draw_zones import NO_PLACES, Places
from pipelines.sinks.events import encode_event, make_event
from pipelines.sinks.result import FrameResult, Roles
from pipelines.stages.zones import NO_ZONES, ZoneFrame
from pipelines.track_config import LineConfig, ZoneConfig

GOLDEN = Path(__file__).parent / "golden" / "drawn"
LABELS = ("person", "forklift", "cone", "box", "dog", "pallet", "truck", "sign")


def scene(number: int, width: int, height: int) -> np.ndarray:
    """A picture of the demo, in colours of its own."""
    path = configs.ROOT / "scenes" / "heldout" / f"{number:03d}.jpg"
    picture = cv2.imread(str(path))
    return np.asarray(cv2.resize(picture, (width, height), interpolation=cv2.INTER_AREA), np.uint8)


def plain(shade: tuple[int, int, int], width: int = 480, height: int = 320) -> np.ndarray:
    return np.full((height, width, 3), shade, np.uint8)


def boxes_of(*rows: tuple[float, ...], **more: object) -> Detections:
    """Detections of rows x1, y1, x2, y2, score, class."""
    table = np.array(rows, np.float32).reshape(-1, 6)
    return Detections(table[:, :4], table[:, 4], table[:, 5].astype(np.int64), **more)


def result(
    image: np.ndarray,
    decoded: Decoded,
    labels: tuple[str, ...] = LABELS,
    places: Places = NO_PLACES,
    counts: ZoneFrame = NO_ZONES,
    models: dict[str, ModelResult] | None = None,
) -> FrameResult:
    frame = frame_of(image)
    objects = decoded if isinstance(decoded, Detections) else boxes_of()
    event = make_event("yard", frame, objects, labels, {"total": 12.3})
    event = msgspec.structs.replace(event, latency_ms={"total": 12.3})
    roles = Roles(labels=labels)
    return FrameResult(
        frame, decoded, event, encode_event(event), zones=counts, places=places,
        models=models or {}, roles=roles,
    )  # fmt: skip


DOCK = ZoneConfig(name="dock", polygon=((0.0, 0.0), (0.5, 0.0), (0.5, 0.6), (0.0, 0.6)))
YARD = ZoneConfig(name="yard", polygon=((0.55, 0.5), (0.98, 0.5), (0.98, 0.95), (0.55, 0.95)))
GATE = LineConfig(name="gate", start=(0.02, 0.3), end=(0.95, 0.3))
EXIT = LineConfig(name="exit", start=(0.9, 0.02), end=(0.9, 0.98))
PLACES = Places(zones=(DOCK, YARD), lines=(GATE, EXIT))
COUNTS = ZoneFrame(
    inside={"dock": {"person": 2}}, crossed={"gate": {"in": 3, "out": 1}, "exit": {"out": 12}}
)
CROWD = (
    (2, 2, 90, 120, 0.93, 0), (30, 20, 130, 160, 0.87, 1), (36, 24, 150, 170, 0.81, 2),
    (300, 40, 478, 150, 0.77, 3), (430, 200, 479, 318, 0.66, 4), (180, 95, 260, 240, 0.9, 5),
    (185, 97, 270, 250, 0.58, 6), (60, 250, 200, 319, 0.71, 7),
)  # fmt: skip


def crowded(image: np.ndarray) -> FrameResult:
    objects = boxes_of(*CROWD, track_ids=np.array([1, 22, 333, 4, 5, -1, 7, 8]))
    return result(image, objects, places=PLACES, counts=COUNTS)


def pose_and_masks() -> FrameResult:
    rng = np.random.default_rng(0)
    keypoints = rng.uniform(0, 1, (2, 17, 3)).astype(np.float32)
    keypoints[0, :, :2] = keypoints[0, :, :2] * (100, 180) + (60, 60)
    keypoints[1, :, :2] = keypoints[1, :, :2] * (120, 160) + (280, 90)
    keypoints[..., 2] = 0.9
    y, x = np.mgrid[0:24, 0:24]
    round_crop = (100 - (x - 12) ** 2 - (y - 12) ** 2).astype(np.float32)
    regions = np.array([[60, 60, 160, 240], [280, 90, 400, 250]], np.float32)
    objects = boxes_of(
        (60, 60, 160, 240, 0.9, 0), (280, 90, 400, 250, 0.8, 4),
        keypoints=keypoints, masks=Masks((round_crop, round_crop), regions),
        attributes=({"helmet": Attribute("yes", 0.9)}, {"breed": Attribute("dachshund", 0.8)}),
    )  # fmt: skip
    return result(scene(3, 480, 320), objects)


def rotated() -> FrameResult:
    turned = np.array(
        [[120, 100, 140, 40, 0.5], [330, 220, 180, 60, -0.7], [420, 40, 90, 30, 0.2]], np.float32
    )
    objects = boxes_of(
        (55, 50, 185, 150, 0.9, 5), (240, 140, 420, 300, 0.8, 6), (372, 16, 468, 64, 0.7, 7),
        rotated=turned,
    )  # fmt: skip
    return result(scene(5, 480, 320), objects)


def maps_and_lines() -> FrameResult:
    classes = np.repeat(np.arange(4, dtype=np.uint8), 12)[None].repeat(32, 0)
    segmentation = SegmentationMap(classes, (0.0, 0.0, 480.0, 320.0))
    words = Texts((tuple(range(5)),), np.array([0.9], np.float32))
    scores = ClassScores(np.array([0.8, 0.1, 0.05], np.float32), np.array([0, 2, 5]))
    models = {
        "scene": ModelResult(scores, LABELS),
        "plate": ModelResult(words, tuple("AB-12")),
    }
    labels = ("background", "floor", "wall", "door")
    return result(scene(7, 480, 320), segmentation, labels, Places(zones=(DOCK,)), COUNTS, models)


def depth() -> FrameResult:
    y, x = np.mgrid[0:32, 0:48].astype(np.float32)
    near = DepthMap(y + 0.3 * x, (0.0, 0.0, 480.0, 320.0), False)
    return result(plain((90, 90, 90)), near, places=Places(lines=(GATE,)), counts=COUNTS)


def large() -> FrameResult:
    scaled = [tuple(v * 4 for v in row[:4]) + row[4:] for row in CROWD]
    return result(scene(9, 1920, 1280), boxes_of(*scaled), places=PLACES, counts=COUNTS)


def small() -> FrameResult:
    return result(
        plain((40, 40, 40), 160, 120),
        boxes_of((4, 4, 60, 60, 0.9, 0), (50, 30, 158, 118, 0.8, 1)),
        places=Places(lines=(LineConfig(name="gate", start=(0.1, 0.5), end=(0.9, 0.5)),)),
    )


FRAMES = {
    "crowded": lambda: crowded(scene(0, 480, 320)),
    "bright": lambda: crowded(plain((245, 245, 245))),
    "yellow": lambda: crowded(plain((60, 220, 240))),
    "dark": lambda: crowded(plain((15, 15, 15))),
    "pose": pose_and_masks,
    "rotated": rotated,
    "maps": maps_and_lines,
    "depth": depth,
    "large": large,
    "small": small,
}


def golden_size(image: np.ndarray) -> np.ndarray:
    """Golden pictures are small: large frames are kept at a third."""
    if image.shape[1] <= 480:
        return image
    size = (image.shape[1] // 3, image.shape[0] // 3)
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), np.uint8)


def sheet(columns: int = 2) -> np.ndarray:
    cells = []
    for name, make in FRAMES.items():
        image = golden_size(draw_result(make()))
        cell = np.full((460, 660, 3), 128, np.uint8)
        cell[24 : 24 + image.shape[0], : image.shape[1]] = image[:436, :660]
        cv2.putText(cell, name, (4, 18), cv2.FONT_HERSHEY_SIMPLEX, 0.6, (255, 255, 255), 1)
        cells.append(cell)
    rows = [np.hstack(cells[at : at + columns]) for at in range(0, len(cells), columns)]
    return np.vstack(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sheet", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.sheet:
        cv2.imwrite(str(options.sheet), sheet())
    if options.write:
        GOLDEN.mkdir(parents=True, exist_ok=True)
        for title, made in FRAMES.items():
            image = golden_size(draw_result(made()))
            cv2.imwrite(str(GOLDEN / f"{title}.jpg"), image, [cv2.IMWRITE_JPEG_QUALITY, 90])
    sys.exit(0)
