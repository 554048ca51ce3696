"""The machine that `tandem doctor` looks at: all access to the outside in one value.

Probes take a `Machine` and ask nothing else, so that tests can hand them a Jetson.
"""

import ctypes
import functools
import importlib
import importlib.util
import json
import queue
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from device.start.command import module_command

if TYPE_CHECKING:
    from paho.mqtt.enums import MQTTProtocolVersion

CHILD_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Module:
    """An importable Python module; `version` is empty where nothing says it."""

    version: str
    origin: str  # the file that an import would load


@dataclass(frozen=True, slots=True)
class Machine:
    """How to ask this machine; replace any part to ask another.

    `command`: output of a program, None when it is absent or fails. `isolated`: what a function
    of this file returns in a child process, None when the child fails; drivers and TensorRT can
    take their process down with them. `broker`: "" when an MQTT broker accepts a connection,
    else why not. `plans`: the folder of TensorRT's plans.
    """

    root: Path
    python: tuple[int, int, int]
    distributions: Mapping[str, Sequence[str]]
    module: Callable[[str], Module | None]
    command: Callable[[Sequence[str]], str | None]
    isolated: Callable[[str], Mapping[str, str] | None]
    free_bytes: Callable[[], int]
    broker: Callable[[str, int], str]
    plans: Path = Path()

    def text(self, path: str) -> str:
        """Read a small file below the root without its trailing zeros, "" when there is none."""
        try:
            return (self.root / path).read_text(errors="replace").strip("\0\n ")
        except OSError:
            return ""

    def first(self, *patterns: str) -> str:
        """Return the first path below the root that matches a pattern, "" without a match."""
        matches = (path for pattern in patterns for path in sorted(self.root.glob(pattern)))
        return str(next(matches, ""))


def this_machine() -> Machine:
    """Describe the machine and the Python that this runs on."""
    from device.runtime.tensorrt.plans import default_folder  # numpy, which --help does not need

    distributions = _distributions()

    def module(name: str) -> Module | None:
        spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        owners = distributions.get(name, ())
        return Module(metadata.version(owners[0]) if owners else "", spec.origin or "")

    return Machine(
        root=Path("/"),
        python=sys.version_info[:3],
        distributions=distributions,
        module=module,
        command=_command,
        isolated=_isolated,
        free_bytes=lambda: shutil.disk_usage(Path.cwd()).free,
        broker=mqtt_refusal,
        plans=default_folder(),
    )


@functools.cache
def _distributions() -> Mapping[str, Sequence[str]]:
    """Return which distributions have each name that can be imported; reading them takes 0.3 s."""
    return metadata.packages_distributions()


def _command(words: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _isolated(function: str) -> Mapping[str, str] | None:
    output = _command(module_command("toolkit.machine", function))
    if output is None:
        return None
    answer: dict[str, str] = json.loads(output.splitlines()[-1])
    return answer


def cuda_device() -> dict[str, str]:
    """Ask the NVIDIA driver for itself and its first GPU; `error` says why it cannot answer."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"error": "no libcuda.so.1"}
    if status := driver.cuInit(0):
        return {"error": f"cuInit fails with CUDA error {status}"}
    version, device, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    major, minor, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    driver.cuDriverGetVersion(ctypes.byref(version))
    if driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return {"error": "the driver sees no GPU"}
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # compute capability
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    return {
        "name": name.value.decode(errors="replace"),
        "capability": f"{major.value}.{minor.value}",
        "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
        "count": str(count.value),
    }


def tensorrt_module() -> dict[str, str]:
    """Load TensorRT's Python module and ask it for the DLA cores."""
    tensorrt = importlib.import_module("tensorrt")  # in JetPack, on no package index
    builder = tensorrt.Builder(tensorrt.Logger(tensorrt.Logger.ERROR))
    return {"version": tensorrt.__version__, "dla_cores": str(builder.num_DLA_cores)}


def tensorrt_library() -> dict[str, str]:
    """Ask libnvinfer for its version, for boards without TensorRT's Python module."""
    from ctypes.util import find_library

    name = find_library("nvinfer")
    if name is None:
        return {"error": "no libnvinfer"}
    return {"version": tensorrt_version(ctypes.CDLL(name).getInferLibVersion())}


def tensorrt_version(number: int) -> str:
    """Read TensorRT's version number: 8502 is 8.5.2, and since 10.0 100300 is 10.3.0."""
    unit = 10_000 if number >= 100_000 else 1_000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"


def opencv() -> dict[str, str]:
    """Load OpenCV and say what it was built with."""
    import cv2

    build = cv2.getBuildInformation().splitlines()
    gstreamer = next((line for line in build if line.strip().startswith("GStreamer:")), "")
    return {
        "version": cv2.__version__,
        "file": cv2.__file__,
        "gstreamer": "yes" if "YES" in gstreamer else "no",
    }


def mqtt_refusal(host: str, port: int, timeout_s: float = 3.0) -> str:
    """Connect to an MQTT broker, with 3.1.1 if it knows no 5: "" when it accepts, else why not."""
    from paho.mqtt.enums import MQTTProtocolVersion

    refusal = _refusal(host, port, timeout_s, MQTTProtocolVersion.MQTTv5)
    if "Unsupported protocol version" in refusal:
        return _refusal(host, port, timeout_s, MQTTProtocolVersion.MQTTv311)
    return refusal


def _refusal(host: str, port: int, timeout_s: float, version: "MQTTProtocolVersion") -> str:
    from paho.mqtt import client as mqtt
    from paho.mqtt.enums import CallbackAPIVersion

    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=version)
    client.connect_timeout = timeout_s
    client.on_connect = lambda _client, _data, _flags, reason, _properties: answers.put(
        f"the broker refuses: {reason}" if reason.is_failure else ""
    )
    try:
        client.connect(host, port)
    except (OSError, ValueError) as error:
        return str(error)
    client.loop_start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return f"no answer to CONNECT within {timeout_s:g} s"
    finally:
        client.disconnect()
        client.loop_stop()


# What `Machine.isolated` asks for, each in a process of its own.
ISOLATED: Mapping[str, Callable[[], dict[str, str]]] = {
    "cuda_device": cuda_device,
    "opencv": opencv,
    "tensorrt_library": tensorrt_library,
    "tensorrt_module": tensorrt_module,
}

if __name__ == "__main__":
    print(json.dumps(ISOLATED[sys.argv[1]]()))
