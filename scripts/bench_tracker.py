"""Score and time the tracker on generated scenes: MOTA, IDF1 and milliseconds a frame.

    python -m scripts.bench_tracker
    python -m scripts.bench_tracker --objects 20 100 --frames 600 --json

Objects walk about, cross, hide each other and leave; detections are noisy, weak where an object is
hidden, missing now and then, and some are of nothing. `trackers` (PyPI: trackers) runs on the same
detections where it can be imported; it has an environment of its own best, as it brings another
OpenCV. Scores are those of motmetrics. The last scene drops two of three frames at random: there,
time counts, not frames.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec

import motmetrics
import numpy as np
from numpy.typing import NDArray

from pipelines.results import Detections
from pipelines.stages.native import new_tracker
from pipelines.stages.track import iou_matrix
from pipelines.track_config import TrackerConfig

WIDTH, HEIGHT, FPS = 1920.0, 1080.0, 30.0
SEED = 7
MATCH_IOU = 0.5

Boxes = NDArray[np.float32]
Update = Callable[[Detections, float], tuple[NDArray[np.int64], Boxes]]


@dataclass(frozen=True, slots=True, eq=False)
class SceneFrame:
    """Truth and detections of one frame: `ids` int64 [N] and `boxes` [N, 4] of what is there."""

    time_s: float
    ids: NDArray[np.int64]
    boxes: Boxes
    detections: Detections


@dataclass(frozen=True, slots=True)
class Score:
    """What one tracker reached on one scene."""

    tracker: str
    objects: int
    kept_frames: float
    mota: float
    idf1: float
    switches: int
    p50_ms: float
    p95_ms: float


def scene(
    objects: int, frames: int, *, keep: float = 1.0, seed: int = SEED
) -> Iterator[SceneFrame]:
    """Yield the frames of a scene; `keep`: the share of frames that is not dropped."""
    rng = np.random.default_rng(seed)
    heights = rng.uniform(70.0, 160.0, objects)
    sizes = np.stack([heights * rng.uniform(0.4, 0.8, objects), heights], axis=1)
    place = rng.uniform((0.0, 0.0), (WIDTH, HEIGHT), (objects, 2))
    speed = rng.normal(0.0, 3.0, (objects, 2))
    for number in range(frames):
        speed += rng.normal(0.0, 0.12, speed.shape)
        place += speed
        beyond = (place < 0.0) | (place > (WIDTH, HEIGHT))
        speed = np.where(beyond, -speed, speed)
        boxes = np.concatenate([place - sizes / 2, place + sizes / 2], axis=1).astype(np.float32)
        if rng.random() < keep:
            ids = np.arange(objects, dtype=np.int64)
            yield SceneFrame(number / FPS, ids, boxes, _detect(boxes, sizes, rng))


def _detect(boxes: Boxes, sizes: NDArray[np.float64], rng: np.random.Generator) -> Detections:
    """Return noisy detections; what stands lower in the picture hides what is behind it."""
    ious = iou_matrix(boxes, boxes)
    ahead = boxes[None, :, 3] > boxes[:, None, 3]
    hidden = np.max(ious * ahead, axis=1, initial=0.0)
    scores = np.clip(0.9 - 1.2 * hidden + rng.normal(0.0, 0.07, len(boxes)), 0.05, 0.99)
    visible = (hidden < 0.6) & (rng.random(len(boxes)) > 0.03)
    noise = rng.normal(0.0, 0.02, boxes.shape) * np.tile(sizes, 2)
    corner = rng.uniform((0.0, 0.0), (WIDTH, HEIGHT), (1, 2))
    nothing = np.concatenate([corner, corner + rng.uniform(50.0, 120.0, (1, 2))], axis=1)
    all_boxes = np.concatenate([(boxes + noise)[visible], nothing]).astype(np.float32)
    all_scores = np.append(scores[visible], rng.uniform(0.2, 0.7)).astype(np.float32)
    return Detections(all_boxes, all_scores, np.zeros(len(all_boxes), np.int64))


def ours() -> Update:
    """Return our tracker as a function from detections to ids and boxes."""
    tracker = new_tracker(TrackerConfig(), 1)

    def update(detections: Detections, time_s: float) -> tuple[NDArray[np.int64], Boxes]:
        tracked = tracker.update(detections, time_s)
        assert tracked.track_ids is not None
        known = tracked.track_ids >= 0
        return tracked.track_ids[known], tracked.boxes[known]

    return update


def theirs() -> Update:
    """Return ByteTrack of the package `trackers`, with settings as near to ours as it has."""
    import supervision
    from trackers import ByteTrackTracker

    settings = TrackerConfig()
    tracker = ByteTrackTracker(
        lost_track_buffer=round(settings.lost_s * FPS),
        frame_rate=FPS,
        track_activation_threshold=settings.new_score,
        minimum_consecutive_frames=settings.confirm_frames,
        high_conf_det_threshold=settings.high_score,
    )

    def update(detections: Detections, time_s: float) -> tuple[NDArray[np.int64], Boxes]:
        tracked = tracker.update(
            supervision.Detections(
                detections.boxes, confidence=detections.scores, class_id=detections.class_ids
            )
        )
        known = tracked.tracker_id >= 0
        return tracked.tracker_id[known], tracked.xyxy[known]

    return update


def measure(name: str, make: Callable[[], Update], objects: int, frames: int, keep: float) -> Score:
    """Return how well and how fast a tracker follows one scene."""
    update = make()
    accumulator = motmetrics.MOTAccumulator(auto_id=True)
    times_ms = []
    for frame in scene(objects, frames, keep=keep):
        begin_s = time.perf_counter()
        ids, boxes = update(frame.detections, frame.time_s)
        times_ms.append(1e3 * (time.perf_counter() - begin_s))
        distance = 1.0 - iou_matrix(frame.boxes, boxes).astype(np.float64)
        distance[distance > 1.0 - MATCH_IOU] = np.nan
        accumulator.update(frame.ids, ids, distance)
    names = ["mota", "idf1", "num_switches"]
    row = motmetrics.metrics.create().compute(accumulator, metrics=names).iloc[0]
    return Score(
        tracker=name,
        objects=objects,
        kept_frames=keep,
        mota=round(float(row["mota"]), 4),
        idf1=round(float(row["idf1"]), 4),
        switches=int(row["num_switches"]),
        p50_ms=round(float(np.percentile(times_ms, 50)), 3),
        p95_ms=round(float(np.percentile(times_ms, 95)), 3),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the scores of every tracker that is here."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--objects", type=int, nargs="+", default=[5, 20, 50, 100], metavar="N")
    parser.add_argument("--frames", type=int, default=300, metavar="N")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    options = parser.parse_args(arguments)
    trackers = {"tandem": ours, **({"trackers": theirs} if find_spec("trackers") else {})}
    scenes = [(objects, 1.0) for objects in options.objects] + [
        (options.objects[-1] // 5 or 1, 1 / 3)
    ]
    scores = [
        measure(name, make, objects, options.frames, keep)
        for objects, keep in scenes
        for name, make in trackers.items()
    ]
    if options.json:
        print(json.dumps([asdict(score) for score in scores]))
        return
    print("tracker   objects  frames kept    MOTA    IDF1  switches  p50 ms  p95 ms")
    for one in scores:
        print(
            f"{one.tracker:9} {one.objects:7} {one.kept_frames:12.0%} {one.mota:7.3f}"
            f" {one.idf1:7.3f} {one.switches:9} {one.p50_ms:7.3f} {one.p95_ms:7.3f}"
        )


if __name__ == "__main__":
    main()
