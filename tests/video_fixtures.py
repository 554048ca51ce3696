"""Real videos, a real RTSP server and a small detector for the pipeline tests."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from device.engine.manifest import DimRange, TensorInfo
from pipelines.config import PipelineConfig, PreprocessConfig, SourceConfig
from pipelines.decode_config import LtrbGrid
from pipelines.frame import Frame, Stamp
from toolkit.fleet.brokers.local import free_port

SIZE = 64
PATIENCE_S = 30.0  # for what must happen, on a machine that does much else; waits end when it does
LABELS = ("red", "green")

# Runs under the system's Python, which has GStreamer's bindings.
RTSP_SERVER = """
import sys
import gi
gi.require_version("Gst", "1.0")
gi.require_version("GstRtsp", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtsp, GstRtspServer
Gst.init(None)
port, width, height, user, password, method = sys.argv[1:7]
video = "videotestsrc is-live=true pattern=ball ! video/x-raw,width=%s,height=%s,framerate=30/1 ! "
video = video % (width, height)
h264 = "x264enc tune=zerolatency speed-preset=ultrafast key-int-max=15 ! rtph264pay name=pay0 pt=96"
h265 = "x265enc tune=zerolatency speed-preset=ultrafast ! rtph265pay name=pay0 pt=96"
sound = "audiotestsrc is-live=true ! alawenc ! rtppcmapay pt=8 name="
# Streams of network cameras as they are set at delivery: path -> what is encoded. They send key
# frames at their interval, and not when they are asked.
at_15 = "videotestsrc is-live=true pattern=ball ! video/x-raw,width=%s,height=%s,framerate=15/1 ! "
main, sub = at_15 % (width, height), at_15 % (int(width) // 2, int(height) // 2)
x264 = "x264enc name=enc tune=zerolatency speed-preset=ultrafast %s ! video/x-h264,profile=%s ! "
x264 += "rtph264pay name=pay0 pt=96 config-interval=-1"
high = "cabac=true dct8x8=true b-adapt=false bframes=%d key-int-max=%d"
base = x264 % ("key-int-max=30", "constrained-baseline")
x265 = "x265enc name=enc tune=zerolatency speed-preset=ultrafast "
x265 += "option-string=bframes=%d:rc-lookahead=4:keyint=30"
x265 += " ! video/x-h265,profile=main ! rtph265pay name=pay0 pt=97"
metadata = "audiotestsrc is-live=true ! alawenc ! rtppcmapay pt=107 name=pay2 "  # nothing reads it
cameras = {
    "/Streaming/Channels/101": sound + "pay1 " + metadata + main + x264 % (high % (2, 50), "high"),
    "/Streaming/Channels/102": sub + base,
    "/axis-media/media.amp": main + x264 % (high % (0, 32), "high"),
    "/h264Preview_01_main": main + x264 % (high % (0, 60), "high"),
    "/h264Preview_01_sub": sub + base,
    "/h265Preview_01_main": main + x265 % 0,
    "/cam/realmonitor": sound + "pay1 " + main + x265 % 2,
}

def drop_requests(pad, info):
    wanted = info.get_event().get_structure()
    is_request = wanted is not None and wanted.get_name() == "GstForceKeyUnit"
    return Gst.PadProbeReturn.DROP if is_request else Gst.PadProbeReturn.OK

def as_camera(factory, media):
    encoder = media.get_element().get_by_name("enc")
    pad = encoder.get_static_pad("src")
    pad.add_probe(Gst.PadProbeType.EVENT_UPSTREAM, drop_requests)

server = GstRtspServer.RTSPServer()
server.set_address("127.0.0.1")
server.set_service(port)
for path, launch in {
    "/cam": video + h264,
    "/h265": video + h265,
    "/sound": sound + "pay1 " + video + h264,
    "/only-sound": sound + "pay0",
    **cameras,
}.items():
    factory = GstRtspServer.RTSPMediaFactory()
    if path in cameras:
        factory.connect("media-configure", as_camera)
    factory.set_shared(True)
    factory.set_launch("( %s )" % launch)
    if user:
        allowed = GstRtspServer.RTSPPermissions()
        allowed.add_permission_for_role("viewer", "media.factory.access", True)
        allowed.add_permission_for_role("viewer", "media.factory.construct", True)
        factory.set_permissions(allowed)
    server.get_mount_points().add_factory(path, factory)
if user:
    token = GstRtspServer.RTSPToken()
    token.set_string("media.factory.role", "viewer")
    auth = GstRtspServer.RTSPAuth()
    if method == "digest":
        auth.set_supported_methods(GstRtsp.RTSPAuthMethod.DIGEST)
        auth.add_digest(user, password, token)
    else:
        auth.add_basic(GstRtspServer.RTSPAuth.make_basic(user, password), token)
    server.set_auth(auth)
server.attach(None)
print("ready", flush=True)
GLib.MainLoop().run()
"""


def require_program(name):
    """Return the path of a program that a test cannot do without."""
    path = shutil.which(name)
    assert path is not None, f"{name} is not installed: scripts/test.sh lists the packages"
    return path


class RtspServer:
    """gst-rtsp-server in a process of its own, to be killed and frozen by tests."""

    def __init__(self, width, height, path, login, method):
        require_program("gst-inspect-1.0")
        self.port = free_port()
        self.url = f"rtsp://127.0.0.1:{self.port}{path}"
        self._arguments = (str(self.port), str(width), str(height), *login, method)
        self._process = None

    def start(self):
        self._process = subprocess.Popen(
            ["/usr/bin/python3", "-c", RTSP_SERVER, *self._arguments],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout.readline() == b"ready\n", "the RTSP server did not start"

    def kill(self):
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._process = None

    def freeze(self):
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self):
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def rtsp_server(width=320, height=180, path="/cam", login=("", ""), method="basic"):
    """`method`: how `login`, a user and a password, is asked for: "basic" or "digest"."""
    server = RtspServer(width, height, path, login, method)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def mosquitto(tmp_path, port=None):
    """A real broker; yields its port and its process."""
    port = port or free_port()
    config = tmp_path / f"mosquitto-{port}.conf"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\n")
    program = shutil.which("mosquitto") or require_program("/usr/sbin/mosquitto")
    process = subprocess.Popen([program, "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: _listens(port), PATIENCE_S, "mosquitto listens")
        yield port, process
    finally:
        process.kill()  # works on a stopped process too
        process.wait()


def _listens(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def wait_for(condition, seconds, what):
    """Wait until a condition holds; fail, saying what was waited for."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(f"not within {seconds} s: {what}")


def gray_frame(value, width=SIZE, height=SIZE):
    return np.full((height, width, 3), value, np.uint8)


def write_video(path, frames, fps=25.0, fourcc="mp4v"):
    """Encode pictures into a video file."""
    height, width = frames[0].shape[:2]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*fourcc), fps, (width, height))
    assert writer.isOpened(), f"OpenCV cannot write {fourcc} here"
    for frame in frames:
        writer.write(frame)
    writer.release()
    return path


def ramp(count):
    """Pictures whose grey value tells their number: 8 apart, more than a codec blurs."""
    return [gray_frame(20 + 8 * i) for i in range(count)]


def ramp_index(image):
    """Return the number of a picture of `ramp` after encoding and decoding."""
    return round((float(image.mean()) - 20) / 8)


def scene(column, row, colour="red"):
    """A dark picture with one 8x8 square of colour in the cell (column, row)."""
    image = gray_frame(30)
    bgr = {"red": (20, 20, 230), "green": (20, 230, 20)}[colour]
    image[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = bgr
    return image


def frame_of(image, seq=0):
    now = Stamp.now()
    return Frame(image, seq, now, now, "test")


class Blocks(NamedTuple):
    """How one segment runs."""

    segment: str = "all"
    processor: str = "cpu"
    implementation: str = "numpy"
    reason: str = "numpy: it is the reference of the detector"
    degraded: str = ""
    runs_on: tuple[str, ...] = ("cpu",)


class ColourDetector:
    """The detector of `colour_model` in NumPy, with the protocol of a session."""

    inputs = (TensorInfo(name="images", dtype="float32", shape=(1, 3, SIZE, SIZE)),)
    outputs = (
        TensorInfo(name="boxes", dtype="float32", shape=(1, 4, 64)),
        TensorInfo(name="scores", dtype="float32", shape=(1, 2, 64)),
    )
    dims: tuple[DimRange, ...] = ()
    reports = (Blocks(),)

    def __init__(self, delay_s=0.0):
        self.delay_s = delay_s

    def infer(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(self.delay_s)
        images = feeds["images"]
        count = len(images)
        cells = images.reshape(count, 3, 8, 8, 8, 8).mean(axis=(3, 5))
        red, green, blue = cells.transpose(1, 0, 2, 3)
        logits = np.stack([red - green - blue, green - red - blue], axis=1) * 16 - 4
        scores = 1.0 / (1.0 + np.exp(-logits))
        return {
            "boxes": np.full((count, 4, 64), 0.5, np.float32),
            "scores": scores.reshape(count, 2, 64).astype(np.float32),
        }


def colour_model(path: Path) -> Path:
    """Write an ONNX detector of red and green 8x8 squares: one stride, one box a cell."""
    weights = {
        "look": np.array([[1, -1, -1], [-1, 1, -1]], np.float32).reshape(2, 3, 1, 1) * 16,
        "look_bias": np.full(2, -4.0, np.float32),
        "sides": np.zeros((4, 3, 1, 1), np.float32),
        "sides_bias": np.full(4, 0.5, np.float32),
        "boxes_shape": np.array([1, 4, 64], np.int64),
        "scores_shape": np.array([1, 2, 64], np.int64),
    }
    nodes = [
        helper.make_node("AveragePool", ["images"], ["cells"], kernel_shape=[8, 8], strides=[8, 8]),
        helper.make_node("Conv", ["cells", "look", "look_bias"], ["logits"]),
        helper.make_node("Sigmoid", ["logits"], ["probabilities"]),
        helper.make_node("Reshape", ["probabilities", "scores_shape"], ["scores"]),
        helper.make_node("Conv", ["cells", "sides", "sides_bias"], ["distances"]),
        helper.make_node("Reshape", ["distances", "boxes_shape"], ["boxes"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "colours",
        [value("images", TensorProto.FLOAT, [1, 3, SIZE, SIZE])],
        [
            value("boxes", TensorProto.FLOAT, [1, 4, 64]),
            value("scores", TensorProto.FLOAT, [1, 2, 64]),
        ],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def colour_pipeline(uri, **source) -> PipelineConfig:
    """A pipeline for the detector of `colour_model`."""
    return PipelineConfig(
        name="colours",
        source=SourceConfig(uri=str(uri), **source),
        preprocess=PreprocessConfig(width=SIZE, height=SIZE),
        decode=LtrbGrid(boxes="boxes", scores="scores", strides=(8,), score_threshold=0.5),
    )


COLOUR_TOML = """
name = "colours"
[source]
uri = "{uri}"
{source}
[preprocess]
width = 64
height = 64
[decode]
kind = "ltrb_grid"
boxes = "boxes"
scores = "scores"
strides = [8]
score_threshold = 0.5
{sinks}
"""


def python_m_pipelines(*arguments, **options):
    """Start `python -m pipelines` with pipes on its outputs."""
    return subprocess.Popen(
        [sys.executable, "-m", "pipelines", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
        env={**os.environ, **options},
    )
