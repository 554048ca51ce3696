"""Frames from a GStreamer child process over a pipe.

A child process needs neither cv2's GStreamer nor PyGObject, has no TLS-block trouble with other
libraries and can be killed when a camera hangs. Frames come as NV12 in GDP packets. The child,
`pipelines.sources.gst_process`, gets its pipeline over a pipe too: the address of a camera, with
its password, is on no command line.
"""

import contextlib
import fcntl
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from device.errors import SourceError
from device.start.command import module_command
from pipelines.frame import Stamp
from pipelines.sources.clock import CaptureClock
from pipelines.sources.gdp import HEADER_BYTES, Nv12Layout, parse_caps, parse_header
from pipelines.sources.live import Ended, RawFrame
from pipelines.sources.uri import Camera, CsiCamera, redact

INSPECT_S = 30.0  # the first time it reads all plugins
FIRST_FRAME_S = 8.0  # real cameras start with the next key frame
PIPE_BYTES = 1 << 20  # 1080p NV12: 1.3 ms to read, against 2.2 ms with the default 64 KiB
STDERR_BYTES = 8192
GRACE_S = 0.5

CHILD = "pipelines.sources.gst_process"
NV12 = "video/x-raw,format=NV12"
TO_PIPE = ("gdppay", "!", "fdsink", "fd=1", "sync=false")

# Encoding -> elements that unpack and parse it, and decoders, the board's hardware first.
CODECS: dict[str, tuple[tuple[str, str], tuple[str, ...]]] = {
    "H264": (("rtph264depay", "h264parse"), ("nvv4l2decoder", "avdec_h264")),
    "H265": (("rtph265depay", "h265parse"), ("nvv4l2decoder", "avdec_h265")),
}

# Element -> properties that every release of it has. Threads add latency.
ALWAYS: dict[str, dict[str, str]] = {
    "avdec_h264": {"max-threads": "1"},
    "avdec_h265": {"max-threads": "1"},
}

# Element -> properties that come and go by release: to ask takes time before the first frame. A
# stream that is joined between two key frames shows nothing until the next one, which some cameras
# send only when they are asked.
OPTIONS: dict[str, dict[str, str]] = {
    "rtph264depay": {"request-keyframe": "true", "wait-for-keyframe": "true"},
    "rtph265depay": {"request-keyframe": "true", "wait-for-keyframe": "true"},
    "nvv4l2decoder": {"enable-max-performance": "true"},  # gone in JetPack 7
}

# What GStreamer writes -> what it means and what to do.
CAUSES: tuple[tuple[str, str], ...] = (
    ("(401)", "the camera refused the credentials: check the user and password in the address"),
    ("(404)", "the camera has no such stream: check the path in the address"),
    ("Failed to connect", "nothing answers there: check host and port, and that it is switched on"),
    ("Could not receive message", "the connection broke off: check the network to the camera"),
    ("not-linked", "the stream carries no H.264 or H.265 video: choose one of them in the camera"),
    ("is busy", "another program uses the camera: close that program"),
    ("Cannot identify device", "no camera is there: check that it is plugged in"),
    ("not-negotiated", "the camera cannot give that size, rate or format: change them"),
    (
        "CaptureSession",
        "a crash left its session open: run `systemctl restart nvargus-daemon`",
    ),
    ("No cameras available", "no CSI camera is known: check its cable and `jetson-io`"),
    (
        "/tmp/argus_socket",
        "the camera service is not reachable: mount that socket into a container",
    ),
    ("no element", "a GStreamer plugin is missing: install the plugins good, bad and libav"),
)


def has_element(name: str) -> bool:
    """Whether GStreamer is installed here with this element. Raises SourceError: it fails."""
    return name in _elements()


@cache
def _elements() -> frozenset[str]:
    """Return all elements of GStreamer here: one process lists them as fast as it finds one."""
    return frozenset(re.findall(r"^\S+:\s+(\S+): ", _inspect(), re.M))


def has_property(element: str, name: str) -> bool:
    """Whether the element that is installed here has a property: they come and go by release."""
    # Names of 20 characters and more have no space before the colon.
    pattern = rf"^\s+{re.escape(name)}\s*:"
    return has_element(element) and re.search(pattern, _inspect(element), re.M) is not None


@cache
def _inspect(*words: str) -> str:
    """Return what GStreamer says of an element, or which there are; "" without GStreamer.

    Raises SourceError, which is not cached.
    """
    program = shutil.which("gst-inspect-1.0")
    if program is None:
        return ""
    try:
        shown = subprocess.run(
            [program, *words], check=True, capture_output=True, timeout=INSPECT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SourceError(
            f"GStreamer does not answer ({error}): run gst-inspect-1.0 to see why."
        ) from error
    return shown.stdout.decode("utf-8", "replace")


def rtsp_decoders() -> dict[str, str]:
    """Return the decoder for each encoding that RTSP video can have here; empty: use OpenCV."""
    if not (has_element("rtspsrc") and has_element("gdppay")):
        return {}
    usable = {
        encoding: next((name for name in decoders if has_element(name)), None)
        for encoding, (parts, decoders) in CODECS.items()
        if all(has_element(part) for part in parts)
    }
    return {encoding: name for encoding, name in usable.items() if name is not None}


def rtsp_pipeline(uri: str, decoders: Mapping[str, str]) -> list[str]:
    """Return the words of the pipeline that writes the video of an RTSP stream as GDP to stdout.

    `decoders`: see `rtsp_decoders`; each gets a branch, and the stream takes the one that fits.
    Every element is named: with uridecodebin, a camera that also sends audio never settles.
    """
    source = ["rtspsrc", "name=in", f"location={_quoted(uri)}", "protocols=tcp", "latency=0"]
    # The camera's own times: other modes move them to where packets arrive (see `CaptureClock`).
    source.append("buffer-mode=none")
    branches: list[str] = []
    for encoding, decoder in decoders.items():
        depay, parse = CODECS[encoding][0]
        converter = "nvvidconv" if decoder == "nvv4l2decoder" else "videoconvert"
        caps = f"application/x-rtp,media=video,encoding-name={encoding}"
        unpack = [depay, *_options(depay), "!", parse, "!", decoder, *_options(decoder)]
        decode = [*unpack, "!", converter, "!", NV12]
        branches += ["in.", "!", caps, "!", *decode, "!", "out."]
    return [*source, *branches, "funnel", "name=out", "!", *TO_PIPE]


def camera_pipeline(camera: Camera) -> list[str]:
    """Return the words of the pipeline that writes a V4L2 camera's frames as GDP to stdout."""
    sizes = [("width", camera.width), ("height", camera.height), ("framerate", camera.fps)]
    kind = "image/jpeg" if camera.format == "mjpg" else "video/x-raw"
    fields = [f"{key}={value}" for key, value in sizes if value is not None]
    caps = ",".join([kind, *(f"{f}/1" if f.startswith("framerate") else f for f in fields)])
    decode = ["jpegdec", "!"] if camera.format == "mjpg" else []
    source = ["v4l2src", f"device={_quoted(camera.device)}", "do-timestamp=true"]
    return [*source, "!", caps, "!", *decode, "videoconvert", "!", NV12, "!", *TO_PIPE]


def csi_pipeline(camera: CsiCamera) -> list[str]:
    """Return the words of the pipeline that writes a CSI camera's frames as GDP to stdout."""
    size = f"width={camera.width},height={camera.height},framerate={camera.fps}/1"
    caps = f"video/x-raw(memory:NVMM),format=NV12,{size}"
    source = ["nvarguscamerasrc", f"sensor-id={camera.sensor}", "!", caps]
    # The board's image processor copies the frame out of the camera's memory and turns it.
    converter = ["nvvidconv", f"flip-method={camera.flip}"]
    return [*source, "!", *converter, "!", NV12, "!", *TO_PIPE]


def own_pipeline(uri: str) -> list[str]:
    """Return the words of `gst://ELEMENT ... ! ELEMENT ...`, which ends in raw video, with what
    writes it as GDP to stdout."""
    try:
        words = shlex.split(uri.partition("://")[2])
    except ValueError as error:
        raise SourceError(
            f"the pipeline of {redact(uri)!r} cannot be read ({error}): close its quotes."
        ) from error
    if not words:
        raise SourceError("gst:// names no element: write gst://videotestsrc is-live=true.")
    return [*words, "!", "videoconvert", "!", NV12, "!", *TO_PIPE]


def _options(element: str) -> list[str]:
    """Return the properties of an element that lower latency or mend streams, where it has them."""
    always = [f"{name}={value}" for name, value in ALWAYS.get(element, {}).items()]
    rows = OPTIONS.get(element, {})
    known = [f"{name}={value}" for name, value in rows.items() if has_property(element, name)]
    return always + known


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _start(name: str, words: Sequence[str]) -> "subprocess.Popen[bytes]":
    try:
        process = subprocess.Popen(
            module_command(CHILD, str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # its own process group, to be killed as one
        )
    except OSError as error:
        raise SourceError(
            f"{name}: the GStreamer process cannot be started ({error.strerror}): check that"
            " processes and memory are left."
        ) from error
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # its stderr says why
        pipe.write(json.dumps(list(words)).encode())
    return process


class GstCapture:
    """One running GStreamer process; a wait ends when `ended` returns true."""

    def __init__(self, name: str, words: Sequence[str], stall_s: float, ended: Ended) -> None:
        """`words`: the pipeline, see `rtsp_pipeline` and `camera_pipeline`."""
        self._name = name
        self._stall_s = stall_s
        self._ended = ended
        self._clock = CaptureClock()
        self._layout: Nv12Layout | None = None
        self._patience_s = max(FIRST_FRAME_S, stall_s)
        self._stderr = b""
        self._process = _start(name, words)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._out = self._process.stdout.fileno()
        self._err = self._process.stderr.fileno()
        with contextlib.suppress(OSError):  # a lower limit only costs speed
            fcntl.fcntl(self._out, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)
        self._poll.register(self._err, select.POLLIN)

    def read(self) -> RawFrame:
        """Wait for a frame; raise SourceError at the end, an error or a stall."""
        deadline = time.monotonic() + self._patience_s
        while True:
            header = bytearray(HEADER_BYTES)
            self._fill(memoryview(header), deadline)
            arrival = Stamp.now()
            packet = parse_header(header)
            payload = np.empty(packet.length, np.uint8)
            self._fill(payload.data, deadline)
            if packet.kind == "caps":
                self._layout = parse_caps(payload.tobytes())
            if packet.kind == "buffer":
                self._patience_s = self._stall_s
                return self._frame(payload, packet.pts_ns, arrival)

    def close(self) -> None:
        """End the process group: politely first, so that the camera learns of it."""
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        if self._process.poll() is not None:
            return  # reaped: its number may belong to another group now
        for number in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
                return
        self._process.wait()

    def _frame(self, payload: NDArray[np.uint8], pts_ns: int | None, arrival: Stamp) -> RawFrame:
        layout = self._layout
        if layout is None or payload.size != layout.size:
            size = "an unknown size" if layout is None else f"{layout.size} bytes"
            raise SourceError(
                f"{self._name} sent a frame of {payload.size} bytes where {size} was announced:"
                " set a frame width and height that are multiples of four."
            )
        return RawFrame(
            pixels=payload.reshape(-1, layout.stride),
            layout="nv12",
            width=layout.width,
            height=layout.height,
            t_capture=self._clock.stamp(pts_ns, arrival),
            t_recv=Stamp.now(),
            fps=layout.fps,
        )

    def _fill(self, target: memoryview, deadline: float) -> None:
        filled = 0
        while filled < len(target):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or self._ended():
                raise SourceError(self._stalled())
            ready = {fd for fd, _ in self._poll.poll(min(remaining_s, 0.1) * 1000)}
            if self._err in ready:
                self._drain_stderr()
            if self._out in ready:
                count = os.readv(self._out, [target[filled:]])
                if count == 0:
                    raise SourceError(self._why_ended())
                filled += count

    def _stalled(self) -> str:
        hint = ""
        if self._layout is None and not self._ended():
            hint = (
                "; a stream shows nothing before its next key frame, so set their interval in the"
                f" camera below {self._patience_s:g} s, or `stall_s` above it"
            )
        return (
            f"{self._name} gave no frame for {self._patience_s:.1f} s: it is opened again until it"
            f" does; check the camera and its network{hint}."
        )

    def _drain_stderr(self) -> None:
        text = os.read(self._err, STDERR_BYTES)
        self._stderr = (self._stderr + text)[-STDERR_BYTES:]
        if not text:
            self._poll.unregister(self._err)

    def _why_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)  # its stderr is complete when it has exited
        while self._err in {fd for fd, _ in self._poll.poll(0)}:
            self._drain_stderr()
        text = redact(self._stderr.decode("utf-8", "replace"))
        for pattern, meaning in CAUSES:
            if pattern in text:
                return f"{self._name}: {meaning}."
        last = " ".join(text.split())[-300:] or "the stream ended"
        return f"{self._name} gives no frames: {last}."
