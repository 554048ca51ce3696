"""The parts of a chaos run: broker, camera, agent and deployer as processes, wires that can be cut.

All of them carry a mark in their environment, which what they start inherits: so everything that
belongs to a run is found in the process table, whoever its parent is.
"""

import contextlib
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from device.agent import pipeline_process
from device.start import keeper
from device.start.command import module_command
from device.update.bundle import read_bundle_info, write_bundle
from pipelines.sources.gst import CHILD
from scripts.chaos_schedule import STALL_S
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.fleet.brokers.local import free_port

MARK = "TANDEM_CHAOS"
DEVICE = "chaos-board"
START_S = 30.0
SIDE = 64

# Under the system's Python, which has GStreamer's bindings.
CAMERA = """
import sys
import gi
gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtspServer
Gst.init(None)
factory = GstRtspServer.RTSPMediaFactory()
factory.set_shared(True)
factory.set_launch(
    "( videotestsrc is-live=true pattern=ball ! video/x-raw,width=64,height=64,framerate=10/1 ! "
    "x264enc tune=zerolatency speed-preset=ultrafast key-int-max=5 ! rtph264pay name=pay0 pt=96 )"
)
server = GstRtspServer.RTSPServer()
server.set_address("127.0.0.1")
server.set_service(sys.argv[1])
server.get_mount_points().add_factory("/cam", factory)
server.attach(None)
GLib.MainLoop().run()
"""

PIPELINE = """
name = "{name}"
[source]
uri = "rtsp://127.0.0.1:1/replaced-by-agent.toml"
[preprocess]
width = {side}
height = {side}
[decode]
kind = "classification"
scores = "{scores}"
"""


class Part:
    """A process that can be killed, frozen and started again."""

    def __init__(self, command: Sequence[str], log: Path, mark: str) -> None:
        self._command = list(command)
        self._log = log
        self._mark = mark
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        """Whether the process runs, frozen or not."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """The process id, 0 where none runs."""
        return self.process.pid if self.process is not None and self.alive else 0

    def start(self) -> None:
        """Start it unless it runs."""
        if self.alive:
            return
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, MARK: self._mark},
            )

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self.process is not None and self.alive:
            self.process.send_signal(number)

    def kill(self) -> None:
        """End it by SIGKILL and wait."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(START_S)

    def end(self) -> None:
        """End it by SIGTERM, after START_S by SIGKILL."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        if self.process is not None:
            try:
                self.process.wait(START_S)
            except subprocess.TimeoutExpired:
                self.kill()


def listens(port: int) -> bool:
    """Whether a server accepts connections."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Wire:
    """Forwards a port to another one until it is cut: then it resets and refuses connections."""

    def __init__(self, target: int) -> None:
        self.port = free_port()
        self._target = target
        self._is_cut = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Reset all connections, and refuse new ones."""
        self._is_cut.set()

    def mend(self) -> None:
        """Take connections again."""
        self._is_cut.clear()

    def close(self) -> None:
        """End the thread and all connections."""
        self._ended.set()
        self._thread.join(START_S)

    def _run(self) -> None:
        while not self._ended.is_set():
            if self._is_cut.is_set():
                time.sleep(0.02)
                continue
            with socket.create_server(("127.0.0.1", self.port)) as server:
                self._forward(server)

    def _forward(self, server: socket.socket) -> None:
        peers: dict[socket.socket, socket.socket] = {}
        while not self._ended.is_set() and not self._is_cut.is_set():
            readable, _, _ = select.select([server, *peers], [], [], 0.05)
            for sock in readable:
                if sock is server:
                    self._accept(server, peers)
                elif sock in peers and not _pump(sock, peers[sock]):
                    for end in (sock, peers[sock]):
                        peers.pop(end)
                        end.close()
        for sock in peers:
            reset = (1).to_bytes(4, sys.byteorder) + (0).to_bytes(4, sys.byteorder)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            sock.close()

    def _accept(self, server: socket.socket, peers: dict[socket.socket, socket.socket]) -> None:
        inner, _ = server.accept()
        try:
            outer = socket.create_connection(("127.0.0.1", self._target), 1.0)
        except OSError:
            inner.close()
            return
        for sock in (inner, outer):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(2.0)  # a frozen reader holds up the wire, as a full network would
        peers[inner], peers[outer] = outer, inner


def _pump(source: socket.socket, target: socket.socket) -> bool:
    try:
        data = source.recv(65536)
        if data:
            target.sendall(data)
    except OSError:
        return False
    return bool(data)


def broker_part(folder: Path, port: int, mark: str) -> Part:
    """Return mosquitto. It keeps nothing: after a kill all retained messages are gone."""
    program = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if program is None:
        raise FileNotFoundError("mosquitto is not installed: scripts/test.sh lists the packages")
    config = folder / "mosquitto.conf"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\n")
    return Part([program, "-c", str(config)], folder / "broker.log", mark)


def camera_part(folder: Path, port: int, mark: str) -> Part:
    """Return an RTSP camera: H.264, 64 x 64, 10 frames a second."""
    return Part(["/usr/bin/python3", "-c", CAMERA, str(port)], folder / "camera.log", mark)


def agent_part(folder: Path, broker_port: int, camera: str, mark: str) -> Part:
    """Return the agent with its state in `folder / "state"`; `camera`: its address."""
    config = folder / "agent.toml"
    config.write_text(
        f'device = "{DEVICE}"\nprofile = "laptop"\nstate_dir = "state"\ndev = true\n'
        f'[broker]\nhost = "127.0.0.1"\nport = {broker_port}\nkeepalive_s = 5\n'
        f"[update]\ntrial_timeout_s = 20.0\nconfirm_after_s = 3.0\nstop_grace_s = 1.0\n"
        f"[pipeline]\nstall_s = {STALL_S}\n"
        f'[source]\nuri = "{camera}"\n'
    )
    command = module_command("device.agent", "--config", str(config))
    return Part(command, folder / "agent.log", mark)


def deployer_part(folder: Path, bundle: Path, broker_port: int, mark: str, *options: str) -> Part:
    """Return `tandem deploy` of a bundle."""
    where = ("--device", DEVICE, "--broker", f"127.0.0.1:{broker_port}", "--timeout", "60")
    command = module_command("toolkit.cli", "deploy", str(bundle), *where, *options)
    return Part(command, folder / "deployer.log", mark)


def make_releases(folder: Path) -> Mapping[str, Path]:
    """Build two good releases and one whose pipeline cannot start; return the bundles by name."""
    model, engine, labels = folder / "m.onnx", folder / "m.engine", folder / "labels.txt"
    weights = {"w": np.full((2, 3, 8, 8), 0.01, np.float32), "shape": np.array([1, 2])}
    nodes = [
        helper.make_node("Conv", ["images", "w"], ["c"], strides=[8, 8]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Reshape", ["p", "shape"], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes,
        "chaos",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, 2])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), model)
    build_engine(model, "laptop", engine, BuildOptions(precision="fp32"))
    labels.write_text("left\nright\n")
    bundles = {}
    for name, scores in (("one", "scores"), ("two", "scores"), ("broken", "nowhere")):
        pipeline = folder / f"{name}.toml"
        pipeline.write_text(PIPELINE.format(name=name, scores=scores, side=SIDE))
        bundles[name] = folder / f"{name}.bundle"
        write_bundle(
            bundles[name],
            engine=engine,
            pipeline=pipeline,
            labels=labels,
            name=name,
            version="1",
            profile="laptop",
        )
        read_bundle_info(bundles[name])
    return bundles


@dataclass(frozen=True, slots=True)
class Process:
    """A row of the process table. `threads_state`: R, S, D, T (stopped) or Z (ended)."""

    pid: int
    parent: int
    command: tuple[str, ...]
    state: str
    resident_bytes: int

    @property
    def is_pipeline(self) -> bool:
        """Whether it runs a release."""
        is_child = (
            pipeline_process.PIPELINE.prefix[-1] in self.command and "--bundle" in self.command
        )
        return is_child and not self.is_guard

    @property
    def is_guard(self) -> bool:
        """Whether it is about to become its command, or keeps it."""
        return "device.start.child" in self.command or keeper.MODULE in self.command

    @property
    def is_camera_reader(self) -> bool:
        """Whether it reads the camera for a pipeline."""
        return CHILD in self.command

    @property
    def is_frozen(self) -> bool:
        """Whether it is stopped by SIGSTOP."""
        return self.state == "T"

    @property
    def release(self) -> str:
        """The name of the release that it runs, "" where its slot is gone."""
        folder = Path(self.command[self.command.index("--bundle") + 1])
        try:
            text = (folder / "pipeline.toml").read_text()
        except OSError:
            return ""
        return next((line.split('"')[1] for line in text.splitlines() if "name" in line), "")


def processes(mark: str) -> dict[int, Process]:
    """Return the living processes that carry a mark, by id."""
    needle = f"{MARK}={mark}".encode()
    rows = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    row = _process(entry)
                    if row.state != "Z":
                        rows[row.pid] = row
    return rows


def _process(entry: Path) -> Process:
    stat = (entry / "stat").read_text()
    fields = stat[stat.rindex(")") + 2 :].split()
    command = (entry / "cmdline").read_bytes().split(b"\0")[:-1]
    return Process(
        pid=int(entry.name),
        parent=int(fields[1]),
        command=tuple(part.decode(errors="replace") for part in command),
        state=fields[0],
        resident_bytes=int(fields[21]) * resource.getpagesize(),
    )


def fill_disk(pid: int, *, full: bool) -> None:
    """Let a process and what it starts write no byte to files, or all again."""
    limit = 0 if full else resource.RLIM_INFINITY
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
