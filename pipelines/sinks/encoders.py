"""The ways to encode a video, best first, and the choice among them by trial.

Programs encode in a process of their own, beside the pipeline. They get raw frames on standard
input and finish the file at its end, also when the pipeline was killed.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np

from device.errors import PipelineError
from device.start.command import module_command
from pipelines.frame import Image
from pipelines.vision import cv2

FINISH_S = 60.0  # an encoder has so long to write what it holds
STDERR_BYTES = 2048
TRIAL_FRAMES = 2


@dataclass(frozen=True, slots=True)
class VideoFormat:
    """The frames of a video: uint8 [height, width, 3] BGR; both sizes are even."""

    width: int
    height: int
    fps: float


class FrameWriter(Protocol):
    """A video file that is being written; both raise PipelineError if the encoder fails."""

    def write(self, image: Image) -> None:
        """Encode a frame: uint8 [height, width, 3] BGR of the format's sizes."""

    def close(self) -> None:
        """Finish the file; it can be played after that."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """A way to encode: `suffixes` that it writes, and whether browsers play the result."""

    name: str
    suffixes: tuple[str, ...]
    in_browsers: bool
    open: Callable[[Path, VideoFormat], FrameWriter]
    why_not: Callable[[Path, VideoFormat], str | None]


class _ProcessWriter:
    """Writes raw frames to the standard input of an encoder."""

    def __init__(self, command: Sequence[str]) -> None:
        self._program = command[0]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed in `close`)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C ends the pipeline, which ends the video
            )
        except OSError as error:
            self._errors.close()
            raise PipelineError(f"{self._program} cannot be started: {error.strerror}") from error

    def write(self, image: Image) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(np.ascontiguousarray(image).data)
        except OSError as error:
            raise PipelineError(f"{self._program} ended: {self._stderr()}") from error

    def close(self) -> None:
        with self._errors:
            try:
                self._process.communicate(timeout=FINISH_S)
            except (OSError, subprocess.TimeoutExpired) as error:
                self._process.kill()
                self._process.wait()
                raise PipelineError(f"{self._program} did not finish: {self._stderr()}") from error
            if self._process.returncode != 0:
                raise PipelineError(f"{self._program} failed: {self._stderr()}")

    def _stderr(self) -> str:
        self._errors.seek(0)
        text = self._errors.read(STDERR_BYTES).decode(errors="replace")
        return " ".join(text.split()) or "it gave no reason"


class _OpenCvWriter:
    """Encodes in this process."""

    def __init__(self, path: Path, code: str, video: VideoFormat) -> None:
        fourcc, size = cv2.VideoWriter.fourcc(*code), (video.width, video.height)
        self._writer = cv2.VideoWriter(str(path), fourcc, video.fps, size)
        if not self._writer.isOpened():
            raise PipelineError(f"OpenCV cannot write {code} to {path}")

    def write(self, image: Image) -> None:
        self._writer.write(image)

    def close(self) -> None:
        self._writer.release()


def _ffmpeg(name: str, codec: str, suffixes: tuple[str, ...], *options: str) -> Encoder:
    def open_writer(path: Path, video: VideoFormat) -> FrameWriter:
        size = f"{video.width}x{video.height}"
        frames = ("-f", "rawvideo", "-pix_fmt", "bgr24", "-s", size, "-r", f"{video.fps:g}")
        encode = ("-c:v", codec, *options, "-pix_fmt", "yuv420p")
        start = ("-movflags", "+faststart") if path.suffix == ".mp4" else ()
        quiet = ("-hide_banner", "-loglevel", "error", "-y")
        return _ProcessWriter(
            ("ffmpeg", *quiet, *frames, "-i", "pipe:0", *encode, *start, f"file:{path}")
        )

    return _by_process(f"{name} (ffmpeg {codec})", "ffmpeg", suffixes, open_writer)


def _gstreamer(name: str, element: str, *options: str) -> Encoder:
    def open_writer(path: Path, video: VideoFormat) -> FrameWriter:
        rate = Fraction(video.fps).limit_denominator(1001)
        location, part = (
            str(name).replace("\\", "\\\\").replace('"', '\\"')
            for name in (path, path.with_name(f".{path.name}.{os.getpid()}.part"))
        )
        parse = (f"width={video.width}", f"height={video.height}", f"framerate={rate}")
        return _ProcessWriter(
            (
                *("gst-launch-1.0", "-q", "fdsrc", "fd=0", "!"),
                *("rawvideoparse", "format=bgr", *parse, "!", "videoconvert", "!"),
                *("video/x-raw,format=I420", "!", element, *options, "!", "h264parse", "!"),
                # Beside the file: by default it is in a folder for all users, which may be small.
                *("mp4mux", "faststart=true", f'faststart-file="{part}"', "!"),
                *("filesink", f'location="{location}"'),
            )
        )

    return _by_process(f"{name} (GStreamer {element})", "gst-launch-1.0", (".mp4",), open_writer)


def _by_process(
    name: str,
    program: str,
    suffixes: tuple[str, ...],
    open_writer: Callable[[Path, VideoFormat], FrameWriter],
) -> Encoder:
    def why_not(path: Path, video: VideoFormat) -> str | None:
        if shutil.which(program) is None:
            return f"{program} is not installed"
        try:
            writer = open_writer(path, video)
            try:
                for _ in range(TRIAL_FRAMES):
                    writer.write(np.zeros((video.height, video.width, 3), np.uint8))
            finally:
                writer.close()
        except PipelineError as error:
            return str(error)
        return None

    return Encoder(name, suffixes, True, open_writer, why_not)


def _opencv(name: str, code: str, suffixes: tuple[str, ...], *, in_browsers: bool) -> Encoder:
    def why_not(path: Path, video: VideoFormat) -> str | None:
        values = (path, code, video.fps, video.width, video.height)
        done = subprocess.run(
            module_command("pipelines.sinks.opencv_trial", *map(str, values)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        return None if done.returncode == 0 else f"OpenCV failed with status {done.returncode}"

    def open_writer(path: Path, video: VideoFormat) -> FrameWriter:
        return _OpenCvWriter(path, code, video)

    return Encoder(f"{name} (OpenCV {code})", suffixes, in_browsers, open_writer, why_not)


MP4, WEBM = (".mp4",), (".webm",)
BOTH = (".mp4", ".webm")
REALTIME = ("-deadline", "realtime", "-cpu-used", "8", "-row-mt", "1", "-b:v", "0", "-crf", "34")

# Best first. A frame of 640x480 holds the pipeline up for 4 to 8 ms; with OpenCV's own VP9 for
# 15 ms, at times for 300.
ENCODERS: tuple[Encoder, ...] = (
    _ffmpeg("H.264", "libx264", MP4, "-preset", "veryfast"),
    _gstreamer("H.264", "x264enc", "speed-preset=veryfast", "pass=qual", "quantizer=23"),
    _gstreamer("H.264", "openh264enc", "complexity=low", "bitrate=6000000"),
    _opencv("H.264", "avc1", MP4, in_browsers=True),
    _ffmpeg("VP9", "libvpx-vp9", BOTH, *REALTIME),
    _ffmpeg("AV1", "libsvtav1", BOTH, "-preset", "10"),
    _opencv("VP9", "vp09", MP4, in_browsers=True),
    _opencv("VP9", "VP90", WEBM, in_browsers=True),
    _opencv("MPEG-4 part 2", "mp4v", MP4, in_browsers=False),
    _opencv("Motion JPEG", "MJPG", (".avi",), in_browsers=False),
)
NOT_IN_BROWSERS = (
    "browsers do not play it: give the file the suffix .mp4 and install ffmpeg, or GStreamer with"
    " x264enc (gstreamer1.0-plugins-ugly)"
)


def choose_encoder(suffix: str, video: VideoFormat) -> tuple[Encoder | None, tuple[str, ...]]:
    """Return the first of ENCODERS that writes such a file here, and why those before do not.

    Those of the suffix come first; a file with any other suffix gets a known one.
    """
    fitting = [row for row in ENCODERS if suffix in row.suffixes]
    others = [row for row in ENCODERS if row not in fitting]
    refused: list[str] = []
    for encoder in (*fitting, *others):
        kind = suffix if suffix in encoder.suffixes else encoder.suffixes[0]
        reason = _trial(encoder, kind, video)
        if reason is None:
            return encoder, tuple(refused)
        refused.append(f"{encoder.name}: {reason}")
    return None, tuple(refused)


@cache
def _trial(encoder: Encoder, suffix: str, video: VideoFormat) -> str | None:
    """Encode a few frames; return why that does not work, or None."""
    with tempfile.TemporaryDirectory(prefix="tandem-video-") as folder:
        path = Path(folder) / f"trial{suffix}"
        reason = encoder.why_not(path, video)
        if reason is None and not (path.exists() and path.stat().st_size > 0):
            return "it wrote nothing"
        return reason
