"""Frames from a video file or from images on disk."""

import logging
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from math import inf
from pathlib import Path

import numpy as np
from msgspec import UNSET

from device.errors import SourceError
from pipelines.config import SourceConfig
from pipelines.frame import Frame, Image, Stamp
from pipelines.pictures import PictureError, read_picture
from pipelines.sources.uri import redact, scheme_of
from pipelines.vision import cv2

IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

_log = logging.getLogger(__name__)


class VideoFile(AbstractContextManager["VideoFile"]):
    """Frames of a video file or of one at an address, at its own pace if `realtime`.

    Each frame is given. With frames = "latest" and a slow consumer, frames whose time has passed
    are dropped ("late"); with "bounded" those that are later than `max_age_ms`.
    """

    away = None  # a file is there or it is an error

    def __init__(self, place: str, config: SourceConfig) -> None:
        self.name = redact(place)
        self.config = config
        self.ended = False
        self._dropped: Counter[str] = Counter()
        self._capture = cv2.VideoCapture(place, cv2.CAP_FFMPEG)
        if not self._capture.isOpened():
            raise SourceError(
                f"{self.name} is not a video that OpenCV's FFmpeg can read: check that the file is"
                " whole, or convert it to H.264 in MP4."
                if scheme_of(place) == "file"
                else f"{self.name} gives no video: check the address, its user and password, and"
                " that the server is reached and has the file."
            )
        self._fps = self._capture.get(cv2.CAP_PROP_FPS) or 30.0
        late_s = {"latest": 1.0 / self._fps, "bounded": config.max_age_ms / 1000.0, "every": inf}
        self._late_s = late_s["every" if config.frames is UNSET else config.frames]
        self._start_s: float | None = None
        self._first = 0  # the number of the frame at `_start_s`
        self._seq = 0

    @property
    def dropped(self) -> Mapping[str, int]:
        """Frames dropped so far by cause."""
        return dict(self._dropped)

    @property
    def gap_s(self) -> float:
        """How far apart its frames are."""
        return 1.0 / self._fps if self.config.realtime else 0.0

    @property
    def due_s(self) -> float:
        """When the next frame is due, in seconds of `time.monotonic()`."""
        if not self.config.realtime or self._start_s is None:
            return -inf
        return self._start_s + (self._seq - self._first) / self._fps

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._capture.release()

    def poll(self) -> Frame | None:
        """Return the next frame if it is due; `ended` is set after the last one."""
        now_s = time.monotonic()
        if self._start_s is None:
            self._start_s = now_s
        late_s = now_s - self.due_s
        if late_s < 0:
            return None
        if not self._capture.grab():
            self._wind_back()
            return None
        seq, self._seq = self._seq, self._seq + 1
        if self.config.realtime and late_s > self._late_s:
            self._dropped["late"] += 1
            return None
        try:
            ok, image = self._capture.retrieve()
        except cv2.error as error:  # a picture of another size that does not fit in memory
            ok, image = False, None
            _log.warning("frame %d of %s cannot be decoded: %s", seq, self.name, error.err)
        if not ok:
            self._dropped["corrupt"] += 1
            return None
        now = Stamp.now()
        pixels = np.asarray(image, np.uint8)
        return Frame(pixels, seq, now, now, self.name, self.config.id, fps=self._fps)

    def _wind_back(self) -> None:
        """Begin again if `loop`, or end."""
        if self._seq == self._first:
            raise SourceError(
                f"{self.name} holds no frame that can be decoded: convert it to H.264 in MP4."
            )
        self.ended = not self.config.loop
        self._first, self._start_s = self._seq, None
        self._capture.set(cv2.CAP_PROP_POS_FRAMES, 0)


class ImageFolder(AbstractContextManager["ImageFolder"]):
    """Images in the order of their names, `fps` a second or as fast as they are taken; one that
    cannot be read is named, counted, skipped."""

    away = None

    def __init__(self, path: Path, config: SourceConfig, fps: float | None = None) -> None:
        self.name = str(path)
        self.config = config
        self.ended = False
        self._fps = fps
        self._period_s = 0.0 if fps is None else 1.0 / fps
        self._due_s = -inf
        self._dropped: Counter[str] = Counter()
        self._good = list_images(path) if path.is_dir() else [path]
        self._count = len(self._good)
        self._rest = deque(self._good)
        self._seq = 0

    @property
    def dropped(self) -> Mapping[str, int]:
        """Images skipped so far; "corrupt": cannot be decoded."""
        return dict(self._dropped)

    @property
    def gap_s(self) -> float:
        """How far apart its images are."""
        return self._period_s

    @property
    def due_s(self) -> float:
        """When the next image is due, in seconds of `time.monotonic()`."""
        return self._due_s

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def poll(self) -> Frame | None:
        """Return the next image if it is due; `ended` is set after the last one."""
        if time.monotonic() < self._due_s:
            return None
        if not self._rest:
            self._begin_again()
            return None
        path = self._rest.popleft()
        seq, self._seq = self._seq, self._seq + 1
        try:
            image = read_picture(path)
        except (PictureError, OSError) as error:
            _log.warning("%s is not an image that can be read (%s): it is skipped", path, error)
            self._dropped["corrupt"] += 1
            self._good.remove(path)
            return None
        now = Stamp.now()
        self._due_s = now.mono_ns / 1e9 + self._period_s
        return Frame(image, seq, now, now, str(path), self.config.id, fps=self._fps)

    def _begin_again(self) -> None:
        """Begin again if `loop`, or end."""
        if not self._good:
            raise SourceError(
                f"none of the {self._count} images in {self.name} can be read: save them again"
                " as JPEG or PNG."
            )
        self.ended = not self.config.loop
        self._rest = deque(self._good)


def list_images(folder: Path) -> list[Path]:
    """Return the images of a folder by name; raise SourceError if it has none."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise SourceError(
            f"{folder} cannot be listed ({error.strerror}): check its permissions."
        ) from error
    paths = [path for path in entries if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()]
    if not paths:
        raise SourceError(
            f"{folder} holds no images: put files there that end in {', '.join(IMAGE_SUFFIXES)}."
        )
    return paths


def read_image(path: str | Path) -> Image | None:
    """Return an image, uint8 [H, W, 3] BGR, or None if it cannot be decoded."""
    try:
        return read_picture(Path(path))
    except (PictureError, OSError):
        return None
