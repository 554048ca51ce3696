"""An annotated video file, with the first codec that this machine's OpenCV can write."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from device.errors import PipelineError
from pipelines.frame import Image
from pipelines.sinks.draw import annotate
from pipelines.stages.decode import Decoded
from pipelines.vision import cv2

# Tried in this order: four-character code and file suffix.
CODECS = (("mp4v", ".mp4"), ("avc1", ".mp4"), ("MJPG", ".avi"))

_log = logging.getLogger(__name__)


class VideoFileWriter:
    """Encodes annotated frames; `failed` counts those that no codec took."""

    def __init__(self, path: Path, fps: float) -> None:
        self.path = path
        self.failed = 0
        self._fps = fps
        self._writer: cv2.VideoWriter | None = None
        self._size = (0, 0)
        try:
            path.open("ab").close()
        except OSError as error:
            raise PipelineError(
                f"the video sink cannot write {path} ({error.strerror}): correct its path or the"
                " permissions of the folder."
            ) from error

    def write(
        self, image: Image, decoded: Decoded, labels: Sequence[str], latency_ms: float
    ) -> None:
        """Draw on a copy of the picture and encode it; the first one gives the video its size."""
        if self._writer is None and not self.failed:
            self._writer = self._open(image.shape[1], image.shape[0])
        if self._writer is None:
            self.failed += 1
            return
        picture = annotate(image, decoded, labels, latency_ms)
        self._writer.write(_fit(picture, *self._size))

    def close(self) -> None:
        """Finish the file; one without frames is removed."""
        if self._writer is not None:
            self._writer.release()
        elif self.path.exists() and self.path.stat().st_size == 0:
            self.path.unlink()

    def _open(self, width: int, height: int) -> "cv2.VideoWriter | None":
        self._size = (width & ~1, height & ~1)  # the codecs halve the colour planes
        requested = self.path
        codecs = [c for c in CODECS if c[1] == requested.suffix] or list(CODECS)
        for code, suffix in (*codecs, CODECS[-1]):
            path = requested.with_suffix(suffix)
            fourcc = cv2.VideoWriter.fourcc(*code)
            writer = cv2.VideoWriter(str(path), fourcc, self._fps, self._size)
            if writer.isOpened():
                if path != requested:
                    _log.warning("%s is written as %s (%s)", requested, path, code)
                    requested.unlink(missing_ok=True)
                self.path = path
                return writer
        tried = ", ".join(code for code, _ in CODECS)
        _log.error("%s: OpenCV can write none of %s here; frames are dropped", requested, tried)
        return None


def _fit(picture: Image, width: int, height: int) -> Image:
    """Return a picture scaled into width x height, with black where its shape differs."""
    if picture.shape[:2] == (height, width):
        return picture
    scale = min(width / picture.shape[1], height / picture.shape[0])
    inner_w = max(1, round(picture.shape[1] * scale))
    inner_h = max(1, round(picture.shape[0] * scale))
    canvas = np.zeros((height, width, 3), np.uint8)
    x, y = (width - inner_w) // 2, (height - inner_h) // 2
    canvas[y : y + inner_h, x : x + inner_w] = cv2.resize(picture, (inner_w, inner_h))
    return canvas
