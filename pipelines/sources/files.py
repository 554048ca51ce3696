"""Frames from a video file or from images on disk."""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from device.errors import SourceError
from pipelines.config import SourceConfig
from pipelines.frame import Frame, Image, Stamp
from pipelines.sources.live import Waiting
from pipelines.vision import cv2

TICK_S = 0.4
IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

_log = logging.getLogger(__name__)


class VideoFile:
    """Frames of a video file, at its own pace if `realtime`.

    With frames = "latest" and a slow consumer, frames whose time has passed are dropped ("late").
    """

    away = None  # a file is there or it is an error

    def __init__(self, path: Path, config: SourceConfig, waiting: Waiting) -> None:
        self.name = str(path)
        self._config = config
        self._waiting = waiting
        self._stop = waiting.stop
        self._dropped: Counter[str] = Counter()
        self._capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
        if not self._capture.isOpened():
            raise SourceError(
                f"{path} is not a video that OpenCV's FFmpeg can read: check that the file is"
                " whole, or convert it to H.264 in MP4."
            )
        self._fps = self._capture.get(cv2.CAP_PROP_FPS) or 30.0

    @property
    def dropped(self) -> Mapping[str, int]:
        """Frames dropped so far by cause."""
        return dict(self._dropped)

    def __enter__(self) -> "VideoFile":
        """The file is open already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self._capture.release()

    def __iter__(self) -> Iterator[Frame]:
        """Yield frames to the end of the file, for ever if `loop`."""
        seq = 0
        while True:
            first, start = seq, time.monotonic()
            while not self._stop.is_set() and self._capture.grab():
                due = start + (seq - first) / self._fps
                seq += 1
                if self._pace(due) and (image := self._retrieve()) is not None:
                    now = Stamp.now()
                    yield Frame(image, seq - 1, now, now, self.name)
            if self._stop.is_set():
                return
            if seq == first:
                raise SourceError(
                    f"{self.name} holds no frame that can be decoded: convert it to H.264 in MP4."
                )
            if not self._config.loop:
                return
            self._capture.set(cv2.CAP_PROP_POS_FRAMES, 0)

    def _pace(self, due: float) -> bool:
        """Wait until a frame is due; False if it is so late that the next one is due too."""
        if not self._config.realtime:
            return True
        late = time.monotonic() - due
        if late < 0:
            self._wait_until(due)
        elif self._config.frames == "latest" and late > 1.0 / self._fps:
            self._dropped["late"] += 1
            return False
        return not self._stop.is_set()

    def _wait_until(self, due: float) -> None:
        while (remaining_s := due - time.monotonic()) > 0 and not self._stop.is_set():
            self._stop.wait(min(remaining_s, TICK_S))
            self._waiting.tick()

    def _retrieve(self) -> Image | None:
        ok, image = self._capture.retrieve()
        if not ok:
            self._dropped["corrupt"] += 1
        return np.asarray(image, np.uint8) if ok else None


class ImageFolder:
    """Images in the order of their names; one that cannot be read is named, counted, skipped."""

    away = None

    def __init__(self, path: Path, config: SourceConfig, waiting: Waiting) -> None:
        self.name = str(path)
        self._loop = config.loop
        self._stop = waiting.stop
        self._dropped: Counter[str] = Counter()
        self._paths = list_images(path) if path.is_dir() else [path]

    @property
    def dropped(self) -> Mapping[str, int]:
        """Images skipped so far; "corrupt": cannot be decoded."""
        return dict(self._dropped)

    def __enter__(self) -> "ImageFolder":
        """Nothing stays open between images."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is open."""

    def __iter__(self) -> Iterator[Frame]:
        """Yield each image once, for ever if `loop`."""
        good = list(self._paths)
        seq = 0
        while good:
            for path in tuple(good):
                if self._stop.is_set():
                    return
                image = read_image(path)
                if image is None:
                    _log.warning("%s is not an image that can be read: it is skipped", path)
                    self._dropped["corrupt"] += 1
                    good.remove(path)
                else:
                    now = Stamp.now()
                    yield Frame(image, seq, now, now, str(path))
                seq += 1
            if good and not self._loop:
                return
        raise SourceError(
            f"none of the {len(self._paths)} images in {self.name} can be read: save them again"
            " as JPEG or PNG."
        )


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


def read_image(path: Path) -> Image | None:
    """Return an image, uint8 [H, W, 3] BGR, or None if it cannot be decoded."""
    image = cv2.imread(str(path), cv2.IMREAD_COLOR)
    return None if image is None else np.asarray(image, np.uint8)
