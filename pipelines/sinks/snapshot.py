"""A picture of each object: the best sight of it, written when it has gone."""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from device.errors import PipelineError
from pipelines.frame import Image
from pipelines.results import Detections
from pipelines.sink_config import SnapshotSink
from pipelines.sinks.result import FrameResult, SinkContext
from pipelines.sinks.track_lifecycle import ObjectEvent, TrackLifecycle
from pipelines.stages.crops import crop
from pipelines.vision import cv2

MAX_OBJECTS = 64  # whose pictures are kept in memory at once
BETTER = 1.02  # a picture is taken anew for a score higher by this factor

_log = logging.getLogger(__name__)

Key = tuple[int, str]  # track, label


@dataclass(slots=True)
class _BestPicture:
    """The best picture of an object so far."""

    id: str
    score: float = 0.0
    image: Image | None = None


class SnapshotOut(AbstractContextManager["SnapshotOut"]):
    """Keeps the best picture of each tracked object and writes it as ID-LABEL.jpg."""

    def __init__(self, config: SnapshotSink, context: SinkContext) -> None:
        unknown = [name for name in config.classes if name not in context.labels]
        if unknown:
            raise PipelineError(
                f"the snapshot sink names the class {unknown[0]!r}, which is none of the labels"
                f" ({', '.join(context.labels)}): correct `classes` in pipeline.toml."
            )
        self._config = config
        self._files = context.files
        self._folder = context.files.place(config.path, "snapshot")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PipelineError(
                f"the snapshot sink cannot make the folder {self._folder} ({error.strerror}):"
                " correct its path or the permissions."
            ) from error
        self._tracks = {
            camera: TrackLifecycle(camera, context.labels, context.lost_s)
            for camera in context.cameras
        }
        self._sights: dict[str, dict[Key, _BestPicture]] = {
            camera: {} for camera in context.cameras
        }
        self._dropped: Counter[str] = Counter()

    @property
    def dropped(self) -> Mapping[str, int]:
        """snapshot_many: more than 64 objects at once; snapshot_quota: the folder may hold no more;
        snapshot_error: the file could not be written."""
        return dict(self._dropped)

    def __exit__(self, *_: object) -> None:
        """Write the pictures of all objects that are still there."""
        for camera, lifecycle in self._tracks.items():
            self._follow(camera, lifecycle.close())

    def write(self, result: FrameResult) -> None:
        """Keep better pictures, and write those of objects that have gone."""
        seen = result.followed
        if not isinstance(seen, Detections) or seen.track_ids is None:
            return
        camera = result.frame.camera
        taken_ns = result.frame.t_capture.wall_ns
        self._follow(camera, self._tracks[camera].update(seen, result.zones, taken_ns))
        sights = self._sights[camera]
        objects = result.rows_of(result.roles.followed)
        rows = zip(seen.track_ids.tolist(), objects, seen.boxes.tolist(), strict=True)
        for track, one, box in rows:
            sight = sights.get((track, one.label))
            if sight is None or result.event.predicted is True:
                continue
            if one.score >= self._config.min_score and one.score > sight.score * BETTER:
                sight.score = one.score
                sight.image = crop(result.frame.image, box, self._config.margin).copy()

    def tick(self) -> None:
        """Write the pictures of objects whose camera gives no frames."""
        for camera, lifecycle in self._tracks.items():
            self._follow(camera, lifecycle.expire(time.monotonic()))

    def _follow(self, camera: str, events: tuple[ObjectEvent, ...]) -> None:
        sights = self._sights[camera]
        for event in events:
            key = (event.after.track_id, event.after.label)
            if event.type == "end":
                sight = sights.pop(key, None)
                if sight is not None and sight.image is not None:
                    self._save(sight.image, f"{sight.id}-{_file_name(event.after.label)}.jpg")
            elif event.type == "new" and self._takes(event.after.label):
                if len(sights) >= MAX_OBJECTS:
                    self._dropped["snapshot_many"] += 1
                else:
                    sights[key] = _BestPicture(event.after.id)

    def _takes(self, label: str) -> bool:
        return not self._config.classes or label in self._config.classes

    def _save(self, image: Image, name: str) -> None:
        done, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, self._config.quality])
        if not done or not self._files.has_room(len(data)):
            self._dropped["snapshot_quota" if done else "snapshot_error"] += 1
            return
        try:
            path, _ = self._files.claim_new(self._folder / name, "snapshot")
            Path(path).write_bytes(data.tobytes())
        except (OSError, PipelineError) as error:
            if not self._dropped["snapshot_error"]:
                _log.error("a snapshot cannot be written: %s", error)
            self._dropped["snapshot_error"] += 1


def _file_name(label: str) -> str:
    return "".join(c if c.isalnum() or c in "_-" else "_" for c in label)
