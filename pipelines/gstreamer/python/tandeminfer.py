"""GStreamer's element `tandeminfer`, and `Bridge`, the same between an appsink and an appsrc.

GStreamer's Python loads this file: it imports `gi` and the standard library alone. The engine runs
in a child process of Tandem's Python: the property `python`, TANDEM_PYTHON, or that of the
environment in which this file is. A frame is copied into shared memory once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstBase", "1.0")
gi.require_version("GstVideo", "1.0")
from gi.repository import GLib, GObject, Gst, GstBase, GstVideo  # noqa: E402

try:  # GStreamer 1.24
    gi.require_version("GstAnalytics", "1.0")
    from gi.repository import GstAnalytics
except (ValueError, ImportError):
    GstAnalytics = None

if not Gst.is_initialized():  # a program of one's own, not GStreamer, loads this
    Gst.init(None)

META = "TandemResultMeta"  # a GstCustomMeta; its structure has the field `json`
ROOT = Path(__file__).parents[3]
CAPS = Gst.Caps.from_string("video/x-raw,format={BGR,RGB,NV12}")
DRAWN_CAPS = Gst.Caps.from_string("video/x-raw,format={BGR,RGB}")
CLOSE_S = 10.0
G_TYPE_STRING = 16 << 2

_GST = ctypes.CDLL("libgstreamer-1.0.so.0")
_GST.gst_meta_register_custom.argtypes = (ctypes.c_char_p, *(ctypes.c_void_p,) * 4)
_GST.gst_buffer_add_custom_meta.restype = ctypes.c_void_p
_GST.gst_buffer_add_custom_meta.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_GST.gst_custom_meta_get_structure.restype = ctypes.c_void_p
_GST.gst_custom_meta_get_structure.argtypes = (ctypes.c_void_p,)
_GST.gst_structure_set.argtypes = (
    ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p,
)  # fmt: skip
_GST.gst_structure_set.restype = None
if _GST.gst_meta_get_info(META.encode()) == 0:
    _NO_TAGS = (ctypes.c_char_p * 1)(None)
    _GST.gst_meta_register_custom(META.encode(), ctypes.addressof(_NO_TAGS), None, None, None)


class WorkerError(Exception):
    """The engine's process cannot go on; the text says why and what to do."""


def find_python(named: str = "") -> str:
    """Return the Python that has Tandem: `named`, TANDEM_PYTHON, that of the environment of this
    file, or `python3`."""
    if named or os.environ.get("TANDEM_PYTHON"):
        return named or os.environ["TANDEM_PYTHON"]
    for folder in (*ROOT.parents, ROOT / ".venv"):
        if (folder / "pyvenv.cfg").exists():
            return str(folder / "bin" / "python")
    return shutil.which("python3") or "python3"


class Worker:
    """The process with the engine. `send` and `answer` raise WorkerError."""

    def __init__(
        self,
        pipeline: str,
        engine: str = "",
        labels: str = "",
        draw: bool = False,
        python: str = "",
    ) -> None:
        if not pipeline:
            raise WorkerError("tandeminfer has no pipeline: set pipeline=FILE.toml or a bundle.")
        self.draw = draw
        self._memory_fd = os.memfd_create("tandeminfer")
        self._memory: mmap.mmap | None = None
        program = self._program = find_python(python)
        files = [str(Path(name).absolute()) if name else "" for name in (pipeline, engine, labels)]
        command = [
            program, "-I", str(ROOT / "device" / "start"), "pipelines.gstreamer.worker",
            str(self._memory_fd), *files, str(int(draw)),
        ]  # fmt: skip
        # What GStreamer's Python was told of its own packages is not for Tandem's.
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(self._memory_fd,),
                env=env,
            )
        except OSError as error:
            os.close(self._memory_fd)
            raise WorkerError(
                f"{program} cannot be started ({error.strerror}): set TANDEM_PYTHON to the Python"
                " in which Tandem is installed."
            ) from error
        try:
            self._answer()
        except WorkerError:
            self.close()
            raise

    def set_caps(self, caps: Gst.Caps, *, live: bool = True) -> None:
        """Take the layout of the frames that follow. `live`: they come when they are taken; else
        their presentation times say how far apart they were taken."""
        info = GstVideo.VideoInfo.new_from_caps(caps)
        fps = info.fps_n / info.fps_d if info.fps_n else None
        layout = {
            "format": info.finfo.name, "width": info.width, "height": info.height,
            "stride": info.stride[0], "size": info.size, "fps": fps,
            "live": live,
        }  # fmt: skip
        os.ftruncate(self._memory_fd, info.size)
        self._memory = mmap.mmap(self._memory_fd, info.size)
        self._send({"caps": layout})

    def infer(self, data: memoryview, pts_ns: int | None) -> str:
        """Return the result of a frame as JSON, empty while detection is paused; with `draw`,
        `drawn` is the picture afterwards."""
        assert self._memory is not None
        size = len(self._memory)
        if len(data) < size:
            raise WorkerError(
                f"a frame has {len(data)} bytes, fewer than the {size} of its caps: put"
                " videoconvert before tandeminfer."
            )
        self._memory[:] = data[:size]
        self._send({"pts": pts_ns})
        return self._answer()

    def drawn(self) -> bytes:
        """Return the picture of the last result."""
        assert self._memory is not None
        return self._memory[:]

    def close(self) -> None:
        """End the process; the sinks of its pipeline close their files."""
        for stream in filter(None, (self._process.stdin, self._process.stdout)):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._memory_fd)

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._answer()  # says why, if it can

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise WorkerError(
                f"the engine's process ended ({status}): its last lines are above; check that"
                f" {self._program} has Tandem, or set TANDEM_PYTHON."
            )
        text = line.decode().rstrip("\n")
        if text.startswith('{"error"'):
            raise WorkerError(json.loads(text)["error"])
        return text


def is_live(pad: Gst.Pad) -> bool:
    """Return whether what comes to a pad is from a live source, or from one that does not say."""
    query = Gst.Query.new_latency()
    return not pad.peer_query(query) or query.parse_latency()[0]


def attach(buffer: Gst.Buffer, text: str) -> None:
    """Attach a result, JSON, to a writable buffer, and where GStreamer has it, its boxes as
    GstAnalytics."""
    meta = _GST.gst_buffer_add_custom_meta(hash(buffer), META.encode())
    structure = _GST.gst_custom_meta_get_structure(meta)
    _GST.gst_structure_set(structure, b"json", G_TYPE_STRING, text.encode(), None)
    if GstAnalytics is not None:
        attach_boxes(buffer, json.loads(text)["detections"], GstAnalytics)


def attach_boxes(
    buffer: Gst.Buffer,
    detections: list[dict[str, Any]],
    analytics: Any,  # noqa: ANN401
) -> None:
    """Attach an object-detection entry for each box; `analytics`: the module GstAnalytics."""
    relations = analytics.buffer_add_analytics_relation_meta(buffer)
    for detection in detections:
        if detection.get("box"):
            x1, y1, x2, y2 = map(round, detection["box"])
            label = GLib.quark_from_string(detection["label"])
            relations.add_od_mtd(label, x1, y1, x2 - x1, y2 - y1, detection["score"])


def result_of(buffer: Gst.Buffer) -> dict[str, Any] | None:
    """Return the result that `tandeminfer` attached to a buffer, a dict, or None."""
    meta = buffer.get_custom_meta(META)
    return None if meta is None else json.loads(meta.get_structure().get_string("json"))


class TandemInfer(GstBase.BaseTransform):
    """Runs a pipeline of Tandem on each frame, which goes on with its result attached."""

    __gstmetadata__ = (
        "Tandem inference",
        "Filter/Analyzer/Video",
        "Run an engine; results are metadata and messages"
        + ("" if GstAnalytics else " (this GStreamer has no GstAnalytics, which came with 1.24)"),
        "The Tandem authors",
    )
    __gsttemplates__ = tuple(
        Gst.PadTemplate.new(name, direction, Gst.PadPresence.ALWAYS, CAPS)
        for name, direction in (("sink", Gst.PadDirection.SINK), ("src", Gst.PadDirection.SRC))
    )

    pipeline = GObject.Property(type=str, default="", nick="pipeline.toml, or a bundle")
    engine = GObject.Property(type=str, default="", nick="engine in place of the pipeline's")
    labels = GObject.Property(type=str, default="", nick="labels in place of the pipeline's")
    python = GObject.Property(type=str, default="", nick="the Python that has Tandem")
    draw = GObject.Property(type=bool, default=False, nick="draw the results on the picture")
    messages = GObject.Property(type=bool, default=True, nick="post results on the bus")

    def __init__(self) -> None:
        super().__init__()
        self._worker: Worker | None = None
        self.set_in_place(True)

    def do_start(self) -> bool:
        """Start the engine; the frames wait until it is warm."""
        try:
            self._worker = Worker(self.pipeline, self.engine, self.labels, self.draw, self.python)
        except WorkerError as error:
            return self._fail(error)
        return True

    def do_stop(self) -> bool:
        """End the engine."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        return True

    def do_transform_caps(
        self, direction: Gst.PadDirection, caps: Gst.Caps, filter_caps: Gst.Caps | None
    ) -> Gst.Caps:
        """Frames leave as they come; those that are drawn on are no NV12."""
        caps = caps.intersect(DRAWN_CAPS if self.draw else CAPS)
        return caps if filter_caps is None else filter_caps.intersect(caps)

    def do_set_caps(self, incaps: Gst.Caps, outcaps: Gst.Caps) -> bool:
        """Take the layout of frames."""
        assert self._worker is not None
        try:
            self._worker.set_caps(incaps, live=is_live(self.get_static_pad("sink")))
        except WorkerError as error:
            return self._fail(error)
        return True

    def do_transform_ip(self, buffer: Gst.Buffer) -> Gst.FlowReturn:
        """Infer one frame."""
        assert self._worker is not None
        try:
            text = run_on(buffer, self._worker)
        except WorkerError as error:
            self._fail(error)
            return Gst.FlowReturn.ERROR
        if not text:
            return Gst.FlowReturn.OK
        attach(buffer, text)
        if self.messages:
            structure = Gst.Structure.new_empty("tandem-result")
            structure.set_value("json", text)
            self.post_message(Gst.Message.new_element(self, structure))
        return Gst.FlowReturn.OK

    def _fail(self, error: WorkerError | str) -> bool:
        gerror = GLib.Error.new_literal(Gst.resource_error_quark(), str(error), 1)
        self.post_message(Gst.Message.new_error(self, gerror, ""))
        return False


def run_on(buffer: Gst.Buffer, worker: Worker) -> str:
    """Return the result of a buffer as JSON; a worker that draws changes its picture."""
    pts_ns = None if buffer.pts == Gst.CLOCK_TIME_NONE else buffer.pts
    flags = Gst.MapFlags.READ | (Gst.MapFlags.WRITE if worker.draw else 0)
    ok, info = buffer.map(flags)
    if not ok:
        raise WorkerError("a frame cannot be read: put videoconvert before tandeminfer.")
    try:
        text = worker.infer(info.data, pts_ns)
        if worker.draw:
            picture = worker.drawn()
            info.data[: len(picture)] = picture  # a buffer may be padded
    finally:
        buffer.unmap(info)
    return text


class Bridge:
    """Takes frames from an `appsink`, and pushes them with their results into an `appsrc`, whose
    caps are those that the appsink negotiated; either may be None.

    `on_result` is called for each frame in the streaming thread. `push` takes
    frames without an appsink, such as those of a program of one's own.
    """

    def __init__(
        self,
        worker: Worker,
        appsink: Gst.Element = None,
        appsrc: Gst.Element = None,
        on_result: Callable[[dict[str, Any], Gst.Buffer], None] | None = None,
    ) -> None:
        self._worker = worker
        self._appsink = appsink
        self._appsrc = appsrc
        self._on_result = on_result
        self._caps: Gst.Caps | None = None
        self._lock = threading.Lock()
        self.error: WorkerError | None = None
        if appsrc is not None:
            appsrc.set_property("block", True)  # a slow output holds the frames back
        if appsink is not None:
            appsink.set_property("caps", DRAWN_CAPS if worker.draw else CAPS)
            appsink.set_property("emit-signals", True)
            appsink.connect("new-sample", self._on_sample)
            appsink.connect("eos", lambda _: self.end())

    def push(self, buffer: Gst.Buffer, caps: Gst.Caps) -> dict[str, Any]:
        """Infer a buffer of these caps, a copy of it; return the result, and pass it on. While
        detection is paused, the result is empty, and `on_result` is not called."""
        with self._lock:
            if self._caps is None or not self._caps.is_equal(caps):
                pad = self._appsink and self._appsink.get_static_pad("sink")
                self._worker.set_caps(caps, live=pad is None or is_live(pad))
                self._caps = caps
                if self._appsrc is not None:
                    self._appsrc.set_property("caps", caps)
            buffer = buffer.copy_deep()
            text = run_on(buffer, self._worker)
            if text:
                attach(buffer, text)
        result: dict[str, Any] = json.loads(text or "{}")
        if text and self._on_result is not None:
            self._on_result(result, buffer)
        if self._appsrc is not None:
            self._appsrc.emit("push-buffer", buffer)
        return result

    def end(self) -> None:
        """Pass on the end of the stream."""
        if self._appsrc is not None:
            self._appsrc.emit("end-of-stream")

    def _on_sample(self, appsink: Gst.Element) -> Gst.FlowReturn:
        sample = appsink.emit("pull-sample")
        try:
            self.push(sample.get_buffer(), sample.get_caps())
        except WorkerError as error:
            self.error = error
            self.end()
            return Gst.FlowReturn.ERROR
        return Gst.FlowReturn.OK


GObject.type_register(TandemInfer)
__gstelementfactory__ = ("tandeminfer", Gst.Rank.NONE, TandemInfer)
