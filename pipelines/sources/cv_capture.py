"""Frames from OpenCV, where GStreamer's tools are not installed.

Measured over RTSP this is one frame later than GStreamer (35 against 2 ms): FFmpeg's parser waits
for the start of the next frame.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from device.errors import SourceError
from pipelines.frame import Stamp
from pipelines.sources.live import RawFrame
from pipelines.sources.uri import Camera
from pipelines.vision import cv2

OPEN_S = 8.0
FIRST_FRAME_S = 8.0  # a stream shows nothing before its next key frame
READ_TRIES = 3  # OpenCV waits out its read time-out three times before it gives up
FFMPEG_OPTIONS = "OPENCV_FFMPEG_CAPTURE_OPTIONS"
RTSP_OPTIONS = "rtsp_transport;tcp|fflags;nobuffer|flags;low_delay"


class CvCapture:
    """One opened cv2.VideoCapture; a failed read means that the camera is lost."""

    def __init__(
        self, name: str, capture: "cv2.VideoCapture", what_to_do: str, first_frame_s: float = 0.0
    ) -> None:
        """`first_frame_s`: how long the first frame may take; OpenCV's own limit is for all."""
        self._name = name
        self._capture = capture
        self._first_until = time.monotonic() + first_frame_s
        if not capture.isOpened():
            capture.release()
            raise SourceError(f"{name} cannot be opened: {what_to_do}.")

    def read(self) -> RawFrame:
        """Wait for a frame; raise SourceError when none comes in time."""
        ok, image = self._capture.read()
        while not ok and time.monotonic() < self._first_until:
            if self._capture.grab():  # after a time-out the first picture is black
                ok, image = self._capture.read()
        self._first_until = 0.0
        now = Stamp.now()
        if not ok:
            raise SourceError(
                f"{self._name} gives no frames any more: it is opened again until it does; check"
                " the camera and its network."
            )
        pixels = np.asarray(image, np.uint8)
        return RawFrame(pixels, "bgr", pixels.shape[1], pixels.shape[0], now, now)

    def close(self) -> None:
        """Close the camera."""
        self._capture.release()


def open_rtsp_capture(name: str, uri: str, stall_s: float) -> CvCapture:
    """Open an RTSP stream with OpenCV's FFmpeg; a stall is noticed after about `stall_s`."""
    options = [
        cv2.CAP_PROP_OPEN_TIMEOUT_MSEC,
        int(OPEN_S * 1000),
        cv2.CAP_PROP_READ_TIMEOUT_MSEC,
        max(1, int(stall_s * 1000 / READ_TRIES)),
        cv2.CAP_PROP_N_THREADS,
        1,  # a thread per frame delays every frame by the number of threads
    ]
    with _ffmpeg_options(RTSP_OPTIONS):
        capture = cv2.VideoCapture(uri, cv2.CAP_FFMPEG, options)
    todo = "check address, credentials and path, and that it is on"
    return CvCapture(name, capture, todo, max(FIRST_FRAME_S, stall_s))


@contextmanager
def _ffmpeg_options(text: str) -> Iterator[None]:
    """Set what OpenCV reads from the environment at each open, and only for that.

    It would hold for files and child processes too, where nobuffer loses the first key frame. What
    a user has set stays.
    """
    if FFMPEG_OPTIONS in os.environ:
        yield
        return
    os.environ[FFMPEG_OPTIONS] = text
    try:
        yield
    finally:
        del os.environ[FFMPEG_OPTIONS]


def open_camera_capture(name: str, camera: Camera) -> CvCapture:
    """Open a V4L2 camera with OpenCV."""
    capture = cv2.VideoCapture(camera.device, cv2.CAP_V4L2)
    if camera.format == "mjpg":
        capture.set(cv2.CAP_PROP_FOURCC, cv2.VideoWriter.fourcc(*"MJPG"))
    for key, value in (
        (cv2.CAP_PROP_FRAME_WIDTH, camera.width),
        (cv2.CAP_PROP_FRAME_HEIGHT, camera.height),
        (cv2.CAP_PROP_FPS, camera.fps),
    ):
        if value is not None:
            capture.set(key, value)
    return CvCapture(name, capture, "check that it is a camera and no other program uses it")
