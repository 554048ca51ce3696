"""Which source an address means, and how each kind is opened."""

import glob
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from device.choices import list_choices
from device.errors import SourceError
from device.toml_file import user_path
from pipelines.config import SourceConfig
from pipelines.frame import Away, Frame
from pipelines.sources.cv_capture import open_camera_capture, open_rtsp_capture
from pipelines.sources.files import IMAGE_SUFFIXES, ImageFolder, VideoFile
from pipelines.sources.gst import (
    GstCapture,
    camera_pipeline,
    has_element,
    rtsp_decoders,
    rtsp_pipeline,
)
from pipelines.sources.live import Capture, Ended, LiveSource, Waiting
from pipelines.sources.uri import Camera, file_path, parse_camera, redact, scheme_of


class Source(AbstractContextManager[Any], Protocol):
    """Frames in order; used in a `with` block, which opens and closes what it reads from."""

    name: str

    @property
    def dropped(self) -> Mapping[str, int]:
        """Frames dropped so far by cause."""

    @property
    def away(self) -> Away | None:
        """Why and since when a camera gives no frames; None while it does."""

    def __iter__(self) -> Iterator[Frame]:
        """Yield frames until the end or the stop event."""


def open_source(config: SourceConfig, waiting: Waiting | None = None) -> Source:
    """Return the source that `config.uri` names; `waiting`: how frames are waited for.

    Raises SourceError here, or on entering the `with` block, if there is nothing to read. Whoever
    is patient gets it for files and addresses that cannot be right, not for cameras that are away.
    """
    if "\0" in config.uri:
        raise SourceError(f"source {redact(config.uri)!r} holds the character NUL: leave it out.")
    scheme = scheme_of(config.uri)
    if scheme not in SOURCES:
        raise SourceError(
            f"source {redact(config.uri)!r} has the unknown scheme {scheme!r}: use a path or one of"
            f" {list_choices(f'{scheme}://', (f'{known}://' for known in SOURCES))}."
        )
    return SOURCES[scheme](config, waiting or Waiting(threading.Event()))


def _open_file(config: SourceConfig, waiting: Waiting) -> Source:
    path = user_path(file_path(config.uri))
    if not path.exists():
        raise SourceError(f"no such file or folder: {redact(str(path))}; check the source address.")
    if path.is_dir() or path.suffix.lower() in IMAGE_SUFFIXES:
        return ImageFolder(path, config, waiting)
    return VideoFile(path, config, waiting)


def _open_camera(config: SourceConfig, waiting: Waiting) -> Source:
    camera = parse_camera(config.uri)
    if not waiting.patient:
        _check_camera(camera)

    def open_capture(ended: Ended) -> Capture:
        _check_camera(camera)
        if has_element("v4l2src") and has_element("gdppay"):
            return GstCapture(camera.device, camera_pipeline(camera), config.stall_s, ended)
        return open_camera_capture(camera.device, camera)

    return LiveSource(camera.device, open_capture, config.frames, waiting, config.stall_s)


def _check_camera(camera: Camera) -> None:
    """Raise SourceError if the device is not there or may not be opened."""
    if not os.path.exists(camera.device):
        cameras = ", ".join(sorted(glob.glob("/dev/video*"))) or "none"
        raise SourceError(
            f"camera {camera.device} is not there (cameras found: {cameras}): plug it in, or name"
            " another one in the source address."
        )
    if not os.access(camera.device, os.R_OK | os.W_OK):
        raise SourceError(
            f"camera {camera.device} may not be opened by this user: add the user to the group"
            " that owns it (usually `video`)."
        )


def _open_rtsp(config: SourceConfig, waiting: Waiting) -> Source:
    name = redact(config.uri)
    decoders = rtsp_decoders()

    def open_capture(ended: Ended) -> Capture:
        if decoders:
            words = rtsp_pipeline(config.uri, decoders)
            return GstCapture(name, words, config.stall_s, ended)
        return open_rtsp_capture(name, config.uri, config.stall_s)

    return LiveSource(name, open_capture, config.frames, waiting, config.stall_s)


SOURCES: dict[str, Callable[[SourceConfig, Waiting], Source]] = {
    "file": _open_file,
    "v4l2": _open_camera,
    "rtsp": _open_rtsp,
    "rtsps": _open_rtsp,
}
