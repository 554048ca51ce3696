"""An annotated video file, by the first encoder that works on this machine."""

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from device.errors import PipelineError
from pipelines.frame import Image
from pipelines.sinks.encoders import (
    NOT_IN_BROWSERS,
    FrameWriter,
    VideoFormat,
    choose_encoder,
)
from pipelines.sinks.files import OutputFiles
from pipelines.vision import cv2

UNKNOWN_FPS = 15.0  # of a video whose source does not say its rate
HIGHEST_FPS = 240.0  # some cameras write nonsense into their streams

_log = logging.getLogger(__name__)


class VideoFileWriter:
    """Encodes annotated frames; `failed` counts those that no encoder took, `over_quota` those
    that found no room."""

    def __init__(self, path: Path, fps: float | None, files: OutputFiles | None = None) -> None:
        """Claim the file; PipelineError if it may not be written (see `OutputFiles`).

        `fps` None: the rate that the first frame is written with.
        """
        self.failed = 0
        self.over_quota = 0
        self._fps = fps
        self._files = files or OutputFiles()
        self._writer: FrameWriter | None = None
        self._full = False
        self._size = (0, 0)
        self.path, self._is_new = self._files.claim_new(path, "video")

    def write(
        self,
        image: Image,
        draw: Callable[[], Image] | None = None,
        source_fps: float | None = None,
    ) -> None:
        """Encode an image, or what `draw` makes of it; the first one gives the video its size, and
        its rate if none was given."""
        if not self._files.has_room():
            self._end_full()
        if self._full:
            self.over_quota += 1
            return
        if self._writer is None and not self.failed:
            usual_fps = source_fps if source_fps and source_fps <= HIGHEST_FPS else UNKNOWN_FPS
            fps = self._fps or usual_fps
            self._writer = self._open(image.shape[1], image.shape[0], fps)
        if self._writer is None:
            self.failed += 1
            return
        try:
            self._writer.write(_fit(image if draw is None else draw(), *self._size))
        except PipelineError as error:
            self.failed += 1
            self._give_up(error)

    def close(self) -> None:
        """Finish the file; one that this run made and that has no frames is removed."""
        if self._writer is not None:
            try:
                self._writer.close()
            except PipelineError as error:
                _log.error("%s is not complete: %s", self.path, error)
        elif self._is_new:
            self._remove_empty(self.path)

    def _open(self, width: int, height: int, fps: float) -> FrameWriter | None:
        video = VideoFormat(
            max(2, width & ~1), max(2, height & ~1), fps
        )  # colour planes are halved
        self._size = (video.width, video.height)
        requested = self.path
        encoder, refused = choose_encoder(requested.suffix.lower(), video)
        if encoder is None:
            _log.error("%s cannot be encoded here (%s); frames are dropped", requested, refused)
            return None
        if requested.suffix.lower() not in encoder.suffixes:
            try:
                self._rename(requested.with_suffix(encoder.suffixes[0]))
            except PipelineError as error:
                _log.error("%s; frames are dropped", error)
                return None
            _log.warning("%s is written as %s", requested, self.path)
        if encoder.in_browsers:
            _log.info("%s is %s", self.path, encoder.name)
        else:
            _log.warning("%s is %s, and %s", self.path, encoder.name, NOT_IN_BROWSERS)
        try:
            return encoder.open(self.path, video)
        except PipelineError as error:
            _log.error("%s: %s; frames are dropped", self.path, error)
            return None

    def _rename(self, path: Path) -> None:
        """Claim another file in place of the first."""
        requested, was_made = self.path, self._is_new
        self.path, self._is_new = self._files.claim_new(path, "video")
        if was_made:
            self._remove_empty(requested)

    @staticmethod
    def _remove_empty(path: Path) -> None:
        with suppress(OSError):
            if path.lstat().st_size == 0:
                path.unlink()

    def _end_full(self) -> None:
        """Finish the file: its folder may hold no more."""
        self._full = True
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except PipelineError as error:
                _log.error("%s is not complete: %s", self.path, error)

    def _give_up(self, error: PipelineError) -> None:
        """Drop all further frames; the pipeline goes on."""
        _log.error("%s: %s; frames are dropped", self.path, error)
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(PipelineError):  # what it says is in the log already
                writer.close()


def _fit(image: Image, width: int, height: int) -> Image:
    """Return an image scaled into width x height, with black where its shape differs."""
    if image.shape[:2] == (height, width):
        return image
    scale = min(width / image.shape[1], height / image.shape[0])
    inner_w = max(1, round(image.shape[1] * scale))
    inner_h = max(1, round(image.shape[0] * scale))
    canvas = np.zeros((height, width, 3), np.uint8)
    x, y = (width - inner_w) // 2, (height - inner_h) // 2
    canvas[y : y + inner_h, x : x + inner_w] = cv2.resize(image, (inner_w, inner_h))
    return canvas
