"""Which source an address means, and how each kind is opened."""

import glob
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

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
    csi_pipeline,
    has_element,
    own_pipeline,
    rtsp_decoders,
    rtsp_pipeline,
)
from pipelines.sources.http import HttpCapture
from pipelines.sources.live import Capture, Ended, LiveSource, Waiting
from pipelines.sources.pattern import PatternCapture
from pipelines.sources.read_ahead import ReadAhead
from pipelines.sources.uri import (
    Camera,
    check_host,
    file_path,
    parse_camera,
    parse_csi,
    parse_images,
    parse_mcap,
    parse_ros2,
    parse_test,
    redact,
    scheme_of,
)

VIDEO_SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm")


class Source(AbstractContextManager[Any], Protocol):
    """Frames in order; used in a `with` block, which opens and closes what it reads from.

    `pipelines.sources.batching` iterates over one or several.
    """

    name: str
    config: SourceConfig
    ended: bool  # there will be no more frames

    @property
    def dropped(self) -> Mapping[str, int]:
        """Frames dropped so far by cause."""

    @property
    def away(self) -> Away | None:
        """Why and since when a camera gives no frames; None while it does."""

    @property
    def gap_s(self) -> float:
        """How far apart its frames may be: after longer it is away, or something is wrong."""

    @property
    def due_s(self) -> float:
        """When `poll` may give a frame, in seconds of `time.monotonic()`: -inf for now, inf for
        whenever `Waiting.arrived` is notified."""

    def poll(self) -> Frame | None:
        """Return the next frame, or None if there is none now; never waits for one."""


def open_source(config: SourceConfig, waiting: Waiting) -> Source:
    """Return the source that `config.uri` names; `waiting`: how frames are waited for.

    Raises SourceError here, or on entering the `with` block, if there is nothing to read. Whoever
    is patient gets it for files and addresses that cannot be right, not for cameras that are away.
    """
    if "\0" in config.uri:
        raise SourceError(f"source {redact(config.uri)!r} holds the character NUL: leave it out.")
    if not config.uri.strip():
        raise SourceError("the source address is empty: write a path, or one such as test://.")
    scheme = scheme_of(config.uri)
    if scheme not in SOURCES:
        raise SourceError(
            f"source {redact(config.uri)!r} has the unknown scheme {scheme!r}: use a path or one of"
            f" {list_choices(f'{scheme}://', (f'{known}://' for known in SOURCES))}."
        )
    return SOURCES[scheme](config, waiting)


def _open_file(config: SourceConfig, waiting: Waiting) -> Source:
    path = _existing(file_path(config.uri))
    if path.is_dir() or path.suffix.lower() in IMAGE_SUFFIXES:
        return ImageFolder(path, config)
    return VideoFile(str(path), config)


def _open_images(config: SourceConfig, waiting: Waiting) -> Source:
    name, fps = parse_images(config.uri)
    return ImageFolder(_existing(name), config, fps)


def _open_recording(config: SourceConfig, waiting: Waiting) -> Source:
    from pipelines.sources.recording import Recording

    name, topic = parse_mcap(config.uri)
    return Recording(_existing(name), topic, config)


def _existing(name: str) -> Path:
    path = user_path(name)
    if not path.exists():
        raise SourceError(f"no such file or folder: {redact(str(path))}; check the source address.")
    return path


def _open_pattern(config: SourceConfig, waiting: Waiting) -> Source:
    pattern = parse_test(config.uri)

    def open_capture(ended: Ended) -> Capture:
        return PatternCapture(pattern, ended)

    return LiveSource(config.uri, open_capture, config, waiting)


def _open_http(config: SourceConfig, waiting: Waiting) -> Source:
    check_host(config.uri)
    if Path(urlsplit(config.uri).path).suffix.lower() in VIDEO_SUFFIXES:
        return ReadAhead(VideoFile(config.uri, config), config, waiting)

    def open_capture(ended: Ended) -> Capture:
        return HttpCapture(config.uri, config.stall_s, ended)

    return LiveSource(redact(config.uri), open_capture, config, waiting)


def _open_csi(config: SourceConfig, waiting: Waiting) -> Source:
    camera = parse_csi(config.uri)
    name = f"csi://{camera.sensor}"

    def open_capture(ended: Ended) -> Capture:
        if not has_element("nvarguscamerasrc"):
            raise SourceError(
                f"{name} needs GStreamer's nvarguscamerasrc, which is not here: it comes with"
                " JetPack (package nvidia-l4t-gstreamer); in a container mount /tmp/argus_socket,"
                " too."
            )
        return GstCapture(name, csi_pipeline(camera), config.stall_s, ended)

    return LiveSource(name, open_capture, config, waiting)


def _open_own(config: SourceConfig, waiting: Waiting) -> Source:
    name, words = redact(config.uri), own_pipeline(config.uri)

    def open_capture(ended: Ended) -> Capture:
        if not has_element("gdppay"):
            raise SourceError(
                f"{name} needs GStreamer with its plugins bad (gdppay), which is not here: install"
                " gstreamer1.0-tools and gstreamer1.0-plugins-bad."
            )
        return GstCapture(name, words, config.stall_s, ended)

    return LiveSource(name, open_capture, config, waiting)


def _open_camera(config: SourceConfig, waiting: Waiting) -> Source:
    camera = parse_camera(config.uri)
    if not waiting.patient:
        _check_camera(camera)

    def open_capture(ended: Ended) -> Capture:
        _check_camera(camera)
        if has_element("v4l2src") and has_element("gdppay"):
            return GstCapture(camera.device, camera_pipeline(camera), config.stall_s, ended)
        return open_camera_capture(camera.device, camera)

    return LiveSource(camera.device, open_capture, config, waiting)


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
    check_host(config.uri)
    name = redact(config.uri)

    def open_capture(ended: Ended) -> Capture:
        if decoders := rtsp_decoders():
            words = rtsp_pipeline(config.uri, decoders)
            return GstCapture(name, words, config.stall_s, ended)
        return open_rtsp_capture(name, config.uri, config.stall_s)

    return LiveSource(name, open_capture, config, waiting)


def _open_ros2(config: SourceConfig, waiting: Waiting) -> Source:
    topic = parse_ros2(config.uri)
    name = f"ros2:/{topic.topic}"

    def open_capture(ended: Ended) -> Capture:
        from pipelines.sources.ros2 import Ros2Capture

        return Ros2Capture(name, topic, config.stall_s, ended)

    return LiveSource(name, open_capture, config, waiting)


SOURCES: dict[str, Callable[[SourceConfig, Waiting], Source]] = {
    "file": _open_file,
    "images": _open_images,
    "mcap": _open_recording,
    "test": _open_pattern,
    "v4l2": _open_camera,
    "csi": _open_csi,
    "rtsp": _open_rtsp,
    "rtsps": _open_rtsp,
    "http": _open_http,
    "https": _open_http,
    "gst": _open_own,
    "ros2": _open_ros2,
}
