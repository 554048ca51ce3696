"""The same work as the stages of a pipeline, in the way of other libraries, timed here.

`supervision` and `trackers` are used where they can be imported; a row says so where not. The
chains of Ultralytics are written out: its package would bring PyTorch.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.vision import cv2
from scripts.bench_tracker import scene, theirs

SIDE = 640


@dataclass(frozen=True, slots=True)
class Peer:
    """One way of others; `ms` None: it cannot run here, and `note` says why."""

    goal: str
    what: str
    ms: float | None
    note: str = ""


def time_ms(work: Callable[[], object], runs: int) -> float:
    """Return the median time of a call, after five that are not counted."""
    times = []
    for _ in range(runs + 5):
        begin_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin_s)
    return median(times[5:]) * 1e3


def letterbox_chain(runs: int) -> Peer:
    """Time resize, border, stack, transpose, contiguous copy, float and division, as Ultralytics'
    LetterBox and predictor do one after the other."""
    image = np.random.default_rng(0).integers(0, 256, (1080, 1920, 3), np.uint8)

    def run() -> NDArray[Any]:
        resized = cv2.resize(image, (SIDE, 360), interpolation=cv2.INTER_LINEAR)
        border = (114, 114, 114)
        padded = cv2.copyMakeBorder(resized, 140, 140, 0, 0, cv2.BORDER_CONSTANT, value=border)
        planes = np.ascontiguousarray(np.stack([padded])[..., ::-1].transpose(0, 3, 1, 2))
        blob: NDArray[Any] = planes.astype(np.float32)
        blob /= 255
        return blob

    return Peer("G3", "1080p to 640, the chain of Ultralytics", time_ms(run, runs))


def blob_from_image(runs: int) -> Peer:
    """Time OpenCV's own function."""
    image = np.random.default_rng(0).integers(0, 256, (1080, 1920, 3), np.uint8)

    def run() -> object:
        resized = cv2.resize(image, (SIDE, 360), interpolation=cv2.INTER_LINEAR)
        return cv2.dnn.blobFromImage(resized, 1 / 255, swapRB=True)

    return Peer("G3", "1080p to 640, resize and blobFromImage, no border", time_ms(run, runs))


def suppression(runs: int) -> Peer:
    """Time supervision's NMS of 300 boxes."""
    what = "NMS of 300 boxes, supervision"
    try:
        import supervision
    except ImportError as error:
        return Peer("G4", what, None, f"supervision cannot be imported: {error}")
    rng = np.random.default_rng(0)
    corners = rng.uniform(0, 600, (300, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(20, 80, (300, 2))], 1)
    detections = supervision.Detections(
        boxes.astype(np.float32),
        confidence=rng.uniform(0.2, 1, 300).astype(np.float32),
        class_id=rng.integers(0, 3, 300),
    )
    return Peer("G4", what, time_ms(lambda: detections.with_nms(0.5), runs))


def tracking(runs: int) -> Peer:
    """Time ByteTrack of `trackers` on the frames that ours gets."""
    what = "tracker, 100 objects, trackers' ByteTrack"
    try:
        update = theirs()
    except ImportError as error:
        return Peer("G5", what, None, f"trackers cannot be imported: {error}")
    times = []
    for frame in scene(100, max(60, runs // 2)):
        begin_s = time.perf_counter()
        update(frame.detections, frame.time_s)
        times.append(time.perf_counter() - begin_s)
    return Peer("G5", what, median(times) * 1e3)


PEERS: tuple[tuple[str, Callable[[int], Peer]], ...] = (
    ("G3", letterbox_chain),
    ("G3", blob_from_image),
    ("G4", suppression),
    ("G5", tracking),
)
