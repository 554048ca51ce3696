"""Parts around a pipeline that is measured: a camera, a broker, a listener, and an engine's double.

The camera is a real RTSP server whose pictures carry the time at which they were made; the engine's
double takes a fixed time and finds a fixed number of objects, so that what is left is Tandem's own.
"""

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from device.engine.manifest import DimRange, TensorInfo
from pipelines.config import PipelineConfig, PreprocessConfig, SourceConfig
from pipelines.decode_config import UltralyticsDetect
from pipelines.frame import Stamp
from pipelines.sink_config import MqttSink
from pipelines.sources.live import RawFrame
from pipelines.track_config import TrackerConfig
from toolkit.fleet.brokers.local import free_port

WIDTH, HEIGHT, FPS = 640, 360, 30
CELL = 8  # pixels of a bit of the clock
BITS = 48  # of microseconds: nine years
CELLS, CLASSES, OBJECTS = 8400, 80, 58
START_S = 30.0

# Runs under the system's Python, which has GStreamer's bindings and no NumPy. The clock of
# time.monotonic() is one for all processes.
CAMERA = """
import socket, sys, threading, time
import gi
gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtspServer
Gst.init(None)
port, width, height, cell, bits, fps = (int(word) for word in sys.argv[1:])
background = bytes((x * 7 + y * 3) % 160 + 40 for y in range(height) for x in range(width))
chroma = bytes([128]) * (width * height // 2)
dark, bright = bytes([16]) * cell, bytes([235]) * cell


def picture(micros):
    row = b"".join(bright if micros >> i & 1 else dark for i in range(bits))
    row += background[len(row):width]
    return row * cell + background[width * cell:] + chroma


class Factory(GstRtspServer.RTSPMediaFactory):
    def do_configure(self, media):
        source = media.get_element().get_by_name("clock")
        threading.Thread(target=self.push, args=(source,), daemon=True).start()

    def push(self, source):
        due = time.monotonic()
        while True:
            due = max(due + 1 / fps, time.monotonic() - 1.0)
            time.sleep(max(0.0, due - time.monotonic()))
            buffer = Gst.Buffer.new_wrapped(picture(time.monotonic_ns() // 1000))
            if source.emit("push-buffer", buffer) != Gst.FlowReturn.OK:
                return


def send_at_once(server, client):
    # Nagle's algorithm holds a picture back until the one before is acknowledged: up to 40 ms.
    client.get_connection().get_write_socket().set_option(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


factory = Factory()
caps = "video/x-raw,format=I420,width=%d,height=%d,framerate=%d/1" % (width, height, fps)
factory.set_launch(
    "( appsrc name=clock is-live=true do-timestamp=true format=time caps=%s ! "
    "x264enc tune=zerolatency speed-preset=ultrafast key-int-max=30 ! rtph264pay name=pay0 pt=96 )"
    % caps
)
server = GstRtspServer.RTSPServer()
server.set_address("127.0.0.1")
server.set_service(str(port))
server.get_mount_points().add_factory("/cam", factory)
server.connect("client-connected", send_at_once)
server.attach(None)
print("ready", flush=True)
GLib.MainLoop().run()
"""

# Writes "SEQ NANOSECONDS", on the clock of time.monotonic(), of every message of detections.
LISTENER = """
import sys, time
import msgspec
import paho.mqtt.client as mqtt

class Head(msgspec.Struct):
    seq: int

decode = msgspec.json.Decoder(Head).decode

def on_message(client, data, message):
    now = time.monotonic_ns()
    print(decode(message.payload).seq, now, flush=True)

client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
client.on_message = on_message
client.on_connect = lambda *_: (client.subscribe("bench/+/detections"), client.subscribe(
    "bench/detections"), print("ready", flush=True))
client.connect("127.0.0.1", int(sys.argv[1]))
client.loop_forever()
"""


class Camera:
    """An RTSP server in a process of its own, which can be frozen."""

    def __init__(self, width: int = WIDTH, height: int = HEIGHT) -> None:
        self.port = free_port()
        self.url = f"rtsp://127.0.0.1:{self.port}/cam"
        words = (self.port, width, height, CELL, BITS, FPS)
        self._process = subprocess.Popen(
            ("/usr/bin/python3", "-c", CAMERA, *map(str, words)), stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            self.close()
            raise RuntimeError("the RTSP server did not start: scripts/test.sh installs its parts")

    def freeze(self) -> None:
        """Stop the server without closing its connections."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it."""
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def camera(width: int = WIDTH, height: int = HEIGHT) -> Iterator[Camera]:
    """Yield a running camera."""
    server = Camera(width, height)
    try:
        yield server
    finally:
        server.close()


@dataclass(slots=True)
class BurstyCamera:
    """A capture of 15 FPS that pauses 450 ms every two seconds, then gives what it held back."""

    start_s: float
    seq: int = 0

    def read(self) -> RawFrame:
        """Wait for the next frame."""
        nominal_s = self.start_s + self.seq / 15
        phase_s = self.seq % 30 / 15
        due_s = nominal_s + max(0.0, 0.45 - phase_s)
        self.seq += 1
        time.sleep(max(0.0, due_s - time.monotonic()))
        return _small_frame()

    def close(self) -> None:
        """There is nothing to close."""


class TickingCamera:
    """A capture that gives a frame every 10 ms."""

    def read(self) -> RawFrame:
        """Wait for the next frame."""
        time.sleep(0.01)
        return _small_frame()

    def close(self) -> None:
        """There is nothing to close."""


def _small_frame() -> RawFrame:
    now = Stamp.now()
    return RawFrame(_PICTURE, "bgr", 320, 180, now, now)


_PICTURE = np.zeros((180, 320, 3), np.uint8)


class BrokerProcess:
    """A mosquitto of its own, which can be killed and frozen; it keeps its port."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._config = folder / "mosquitto.conf"
        self._config.write_text(
            f"listener {self.port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it listens."""
        program = shutil.which("mosquitto") or "/usr/sbin/mosquitto"
        command = [program, "-c", str(self._config)]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        end_s = time.monotonic() + START_S
        while not _listens(self.port):
            if time.monotonic() > end_s or self._process.poll() is not None:
                raise RuntimeError("mosquitto does not listen")
            time.sleep(0.02)

    def freeze(self) -> None:
        """Stop it without closing its connections."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it; a frozen one, too."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextmanager
def broker(folder: Path) -> Iterator[int]:
    """Yield the port of a running broker."""
    process = BrokerProcess(folder)
    process.start()
    try:
        yield process.port
    finally:
        process.kill()


@contextmanager
def listener(port: int, out: Path) -> Iterator[None]:
    """Write the arrivals of detections to a file, one a line; see `arrivals`."""
    with out.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", LISTENER, str(port)], stdout=file)
        try:
            end_s = time.monotonic() + START_S
            while b"ready" not in out.read_bytes():
                if time.monotonic() > end_s or process.poll() is not None:
                    raise RuntimeError("the listener did not connect to the broker")
                time.sleep(0.02)
            yield
        finally:
            process.kill()
            process.wait()


def arrivals(path: Path) -> dict[int, int]:
    """Return when each frame's message arrived: seq -> ns of time.monotonic()."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {int(row[0]): int(row[1]) for row in rows if len(row) == 2}


def made_ns(image: NDArray[np.uint8]) -> int:
    """Read when a picture was made, in ns of time.monotonic(), from the clock in it."""
    return read_clock(clock_of(image))


def clock_of(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a copy of the pixels that `read_clock` needs of a picture, BGR or a plane of luma."""
    middle = CELL // 2
    return np.array(image[middle - 1 : middle + 1, middle : BITS * CELL : CELL], np.uint8)


def read_clock(cells: NDArray[np.uint8]) -> int:
    """Return the time in a picture's clock, in ns of time.monotonic()."""
    levels = cells.reshape(*cells.shape[:2], -1).mean(axis=(0, 2))
    return sum(1 << i for i, level in enumerate(levels.tolist()) if level > 128) * 1000


class _Report(NamedTuple):
    segment: str = "all"
    processor: str = "gpu"
    implementation: str = "double"
    reason: str = "double: it takes a fixed time"
    degraded: str = ""
    runs_on: tuple[str, ...] = ("gpu",)


class EngineDouble:
    """A detector's head [N, 84, 8400] after a fixed time: `fixed_s`, and `each_s` an image."""

    reports = (_Report(),)

    def __init__(self, fixed_s: float, each_s: float = 0.0, *, batch: int = 1) -> None:
        size: int | str = "n" if batch > 1 else 1
        self.inputs = (TensorInfo(name="images", dtype="float32", shape=(size, 3, 640, 640)),)
        self.outputs = (
            TensorInfo(name="output0", dtype="float32", shape=(size, 4 + CLASSES, CELLS)),
        )
        self.dims: tuple[DimRange, ...] = ()
        if batch > 1:
            self.dims = (DimRange(name="n", min=1, opt=batch, max=batch),)
        self._times_s = fixed_s, each_s
        self._head = np.repeat(head(OBJECTS), batch, axis=0)

    def infer(self, feeds: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
        """Sleep, then return the same objects for every image."""
        count = len(feeds["images"])
        fixed_s, each_s = self._times_s
        time.sleep(fixed_s + count * each_s)
        return {"output0": self._head[:count]}


def head(objects: int, seed: int = 0) -> NDArray[np.float32]:
    """Return a head [1, 84, 8400] with so many objects apart from each other, others below 0.2."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((1, 4 + CLASSES, CELLS), np.float32)
    rows[0, 4:] = rng.uniform(0.0, 0.2, (CLASSES, CELLS))
    side = 10  # places of a grid, none nearer to another than an object is wide
    places = rng.permutation(side * side)[:objects]
    cells = rng.choice(CELLS, objects, replace=False)
    rows[0, 0, cells] = 40 + places % side * 60
    rows[0, 1, cells] = 160 + places // side * 34
    rows[0, 2, cells], rows[0, 3, cells] = 40, 28
    rows[0, 4 + rng.integers(0, CLASSES, objects), cells] = rng.uniform(0.5, 0.95, objects)
    return rows


LABELS = tuple(f"class {number}" for number in range(CLASSES))


def detector_pipeline(*cameras: SourceConfig, sinks: tuple[MqttSink, ...] = ()) -> PipelineConfig:
    """Return a pipeline for `EngineDouble`, with a tracker."""
    return PipelineConfig(
        name="bench",
        sources=cameras,
        preprocess=PreprocessConfig(width=640, height=640),
        decode=UltralyticsDetect(),
        tracker=TrackerConfig(),
        sinks=sinks,
    )


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
