"""The probes of `tandem doctor`: each turns a `Machine` into a `Finding`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from device import board_files
from device.profile import (
    JetPack,
    PowerMode,
    Profile,
    dla_era,
    load_jetpacks,
    profile_of_parts,
)
from device.runtime.tensorrt.plans import read_records
from device.selftest import sensors
from device.start.packages import NAMES
from toolkit.machine import Machine

Status = Literal["ok", "warning", "missing"]

DISTRIBUTION = "tandem-edge"
OURS = {DISTRIBUTION, "tandem-edge-demo"}
LOW_DISK_BYTES = 2_000_000_000
FULL_DISK_BYTES = 200_000_000
DLA_COMPILERS = (
    "usr/lib/aarch64-linux-gnu/nvidia/libnvdla_compiler.so*",
    "usr/lib/aarch64-linux-gnu/tegra/libnvdla_compiler.so*",
)
CUDLA = (
    "usr/local/cuda*/targets/aarch64-linux/lib/libcudla.so*",
    "usr/lib/aarch64-linux-gnu/libcudla.so*",
)
TENSORRT_LIBRARY = "usr/lib/aarch64-linux-gnu/libnvinfer.so.*"
LOW_MEMORY_MB = 2000
_MAX_PLANS = 4  # that are named, those used last
# GStreamer element -> what it is for, Debian package, whether only a Jetson has it.
ELEMENTS: tuple[tuple[str, str, str, bool], ...] = (
    ("rtspsrc", "network cameras", "gstreamer1.0-plugins-good", False),
    ("avdec_h264", "H.264 on the CPU", "gstreamer1.0-libav", False),
    ("nvv4l2decoder", "H.264 on the video engine", "nvidia-l4t-gstreamer", True),
    ("nvarguscamerasrc", "CSI cameras", "nvidia-l4t-gstreamer", True),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a probe; a non-empty `fix` replaces the check's."""

    status: Status
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Board:
    """This Jetson; empty strings and None for what is unknown."""

    model: str
    l4t: str
    jetpack: str
    profile: Profile | None


def board_of(machine: Machine) -> Board:
    """Read which Jetson this is from the device tree and the L4T release file."""
    model = machine.text("proc/device-tree/model")
    if not re.search("jetson|tegra", model, re.IGNORECASE):
        return Board(model="", l4t="", jetpack="", profile=None)
    release = machine.text("etc/nv_tegra_release")
    match = re.search(r"# R(\d+) .*REVISION: ([\d.]+)", release)
    l4t = f"{match[1]}.{match[2]}" if match else ""
    known = (jetpack.version for jetpack in load_jetpacks() if l4t in jetpack.l4t)
    profile = profile_of_parts(machine.text("proc/device-tree/compatible"))
    return Board(model=model, l4t=l4t, jetpack=next(known, ""), profile=profile)


def python(machine: Machine) -> Finding:
    """Compare the running Python with the oldest supported one."""
    version = ".".join(map(str, machine.python))
    return Finding("ok" if machine.python >= (3, 10) else "missing", version)


def distribution(machine: Machine) -> Finding:
    """Another distribution with a folder of the same name would silently replace our files."""
    owners = {
        package: {name.lower().replace("_", "-") for name in machine.distributions.get(package, ())}
        for package in {"tandem", *NAMES}
    }
    strangers = {package: sorted(names - OURS) for package, names in owners.items()}
    clashes = [f"{', '.join(names)} also ships {p}/" for p, names in strangers.items() if names]
    if clashes:
        return Finding("missing", "; ".join(clashes))
    if not owners["tandem"]:
        return Finding("warning", "not installed", "pip install -e .")
    return Finding("ok", f"all of {DISTRIBUTION}")


def jetson(machine: Machine) -> Finding:
    """Name the board, its profile and its JetPack."""
    board = board_of(machine)
    if not board.model:
        return Finding("missing", "not a Jetson")
    profile = board.profile.name if board.profile else "no shipped profile"
    jetpack = f"JetPack {board.jetpack}" if board.jetpack else "JetPack not known"
    summary = f"{board.model}: {profile}, L4T {board.l4t or 'not known'} ({jetpack})"
    known = board.profile is not None and board.jetpack in board.profile.jetpacks
    return Finding("ok" if known else "warning", summary)


def driver(machine: Machine) -> Finding:
    """Ask the NVIDIA driver for its GPUs."""
    gpu = machine.isolated("cuda_device")
    if gpu is None or "error" in gpu:
        return Finding("missing", "driver crashed" if gpu is None else gpu["error"])
    sm = f"compute capability {gpu['capability']}"
    return Finding("ok", f"{gpu['count']} x {gpu['name']}, {sm}, CUDA {gpu['cuda']}")


def tensorrt(machine: Machine) -> Finding:
    """Look for TensorRT: the Python module, else the bare library."""
    module = machine.module("tensorrt")
    if module:
        loaded = machine.isolated("tensorrt_module")
        if loaded:
            return Finding("ok", f"{loaded['version']} at {module.origin}")
        return Finding(
            "warning",
            f"the Python module at {module.origin} does not load",
            _reinstall(machine),
        )
    library = machine.isolated("tensorrt_library")
    if library is None or "error" in library:
        return Finding("missing", "neither the Python module nor libnvinfer")
    return Finding("warning", f"libnvinfer {library['version']} without its Python module")


def plans(machine: Machine) -> Finding:
    """Read which segments TensorRT has finished, and what plans and kernels took on the GPU."""
    records = read_records(machine.plans)
    if not records:
        missing = not machine.module("tensorrt")
        return Finding("missing" if missing else "ok", f"none in {machine.plans}")
    finished = [record for record in records if record.problem is None]
    parts = [f"{len(finished)} plans in {machine.plans}"]
    parts += [
        f"{record.segment}: TensorRT {record.compared.tensorrt_us:.0f} us, kernels "
        f"{record.compared.cuda_us:.0f} us"
        for record in finished[:_MAX_PLANS]
        if record.compared is not None
    ]
    refused = [f"{r.segment}: {r.problem}" for r in records if r.problem is not None]
    parts += refused[:_MAX_PLANS]
    return Finding("warning" if refused else "ok", "; ".join(parts))


def _reinstall(machine: Machine) -> str:
    """What to do about a module that does not load: mostly a library that it links is missing."""
    if not machine.first(TENSORRT_LIBRARY):
        return "sudo apt-get install libnvinfer-bin (it brings the libraries)"
    if not machine.first(*CUDLA):
        return f"sudo apt-get install {_cudla_package(machine)} (libnvinfer_plugin needs it)"
    return "sudo apt-get purge python3-libnvinfer; sudo apt-get install tensorrt python3-libnvinfer"


def dla(machine: Machine) -> Finding:
    """Compare the DLA cores that TensorRT sees with those that the board's profile promises."""
    profile = board_of(machine).profile
    library = machine.isolated("tensorrt_module") if machine.module("tensorrt") else None
    if profile is None:
        cores = library["dla_cores"] if library else "0"
        return Finding("missing" if cores == "0" else "ok", f"{cores} cores")
    promised = profile.dla_cores
    if library is None:
        return Finding("ok", f"{promised} by profile {profile.name}; no TensorRT here to ask")
    if int(library["dla_cores"]) == promised:
        return Finding("ok", f"{promised}, as profile {profile.name} says")
    mismatch = (
        f"TensorRT {library['version']} sees {library['dla_cores']}, {profile.name} has {promised}"
    )
    if dla_era(library["version"]) == "none":
        return Finding(
            "warning",
            mismatch,
            "TensorRT 10.8 to 11.3 know no DLA on Jetson: flash JetPack 6.2 or, on AGX Orin, 7.2.2",
        )
    return Finding("warning", mismatch)


def dla_compiler(machine: Machine) -> Finding:
    """Look for the library that TensorRT loads to compile for the DLA."""
    profile = board_of(machine).profile
    if profile and not profile.dla_cores:
        return Finding("ok", f"not needed: {profile.name} has no DLA")
    path = machine.first(*DLA_COMPILERS)
    return Finding("ok", path) if path else Finding("missing", "no libnvdla_compiler.so")


def cudla(machine: Machine) -> Finding:
    """Look for the library through which TensorRT drives the DLA."""
    profile = board_of(machine).profile
    if profile and not profile.dla_cores:
        return Finding("ok", f"not needed: {profile.name} has no DLA")
    path = machine.first(*CUDLA)
    if path:
        return Finding("ok", path)
    return Finding("missing", "no libcudla.so", f"sudo apt-get install {_cudla_package(machine)}")


def _cudla_package(machine: Machine) -> str:
    """The package is named after the CUDA of the JetPack: libcudla-12-6."""
    jetpack = _jetpack(machine)
    cuda = jetpack.cuda if jetpack else "12.6"
    return f"libcudla-{'-'.join(cuda.split('.')[:2])}"


def _jetpack(machine: Machine) -> JetPack | None:
    version = board_of(machine).jetpack
    return next((each for each in load_jetpacks() if each.version == version), None)


def power_mode(machine: Machine) -> Finding:
    """Compare nvpmodel's mode with the modes of the profile, which plans reckon with."""
    board = board_of(machine)
    number = board_files.power_mode_number(machine.root)
    if not number:
        if not board.model:
            return Finding("missing", "not a Jetson")
        return Finding("missing", "nvpmodel has not written /var/lib/nvpmodel/status",
                       "sudo nvpmodel -q, then sudo nvpmodel -m 0")  # fmt: skip
    name = board_files.power_mode_name(number, machine.root)
    modes = board.profile.power_modes if board.profile else ()
    mode = next((m for m in modes if m.name == name or (not name and m.id == int(number))), None)
    shown = f"{name or (mode.name if mode else '')} ({number})".strip()
    if board.profile is None or not modes:
        return Finding("ok", shown)
    if mode is None:
        known = ", ".join(each.name for each in modes)
        return Finding("warning", f"{shown}, which {board.profile.name} does not list ({known})")
    fastest = max(modes, key=_speed)
    if _speed(mode) >= _speed(fastest):
        return Finding("ok", f"{shown}, the fastest of {board.profile.name}")
    return Finding(
        "warning",
        f"{shown}; plans of {board.profile.name} are for {fastest.name} ({fastest.id})",
        f"sudo nvpmodel -m {fastest.id}, or plan with tandem plan --power-mode {mode.name}",
    )


def _speed(mode: PowerMode) -> tuple[float, float]:
    return mode.gpu_max_mhz or 0.0, mode.dla_max_mhz or 0.0


def clocks(machine: Machine) -> Finding:
    """Read the clocks of GPU and CPU, and whether they are held at their highest."""
    if not board_of(machine).model:
        return Finding("missing", "not a Jetson")
    mhz = sensors.clocks_mhz(machine.root)
    if not any(name.startswith("gpu") for name in mhz):
        return Finding("warning", "no GPU below /sys/class/devfreq", "reboot the board")
    shown = ", ".join(
        f"{name} {mhz.get(f'{name} now', 0):.0f} of {mhz.get(f'{name} max', 0):.0f} MHz"
        for name in ("gpu", "cpu0")
        if f"{name} max" in mhz
    )
    if sensors.clocks_locked(mhz):
        return Finding("ok", f"{shown}, held there")
    return Finding("warning", f"{shown}, by load")


def memory(machine: Machine) -> Finding:
    """Compare the memory that is free with what a build on the board takes."""
    total, free = board_files.memory_mb(machine.root)
    if not total:
        return Finding("warning", "/proc/meminfo tells nothing")
    shown = f"{free / 1000:.1f} of {total / 1000:.1f} GB free"
    return Finding("ok" if free >= LOW_MEMORY_MB else "warning", shown)


def opencv(machine: Machine) -> Finding:
    """Look at OpenCV, and whether a pip wheel hides the one of JetPack or Debian."""
    loaded = machine.isolated("opencv") if machine.module("cv2") else None
    if loaded is None:
        state = "does not load" if machine.module("cv2") else "not installed"
        return Finding("missing", state)
    summary = f"{loaded['version']}, GStreamer: {loaded['gstreamer']}"
    system = machine.first("usr/lib/python3*/dist-packages/cv2*")
    if system and "/dist-packages/" not in loaded["file"]:
        return Finding(
            "warning",
            f"{summary}; the pip wheel at {loaded['file']} hides {system}",
            "pip uninstall opencv-python opencv-python-headless "
            "(and a venv with --system-site-packages)",
        )
    return Finding("ok", summary)


def gstreamer(machine: Machine) -> Finding:
    """Look for the GStreamer command line tools."""
    output = machine.command(("gst-launch-1.0", "--version"))
    return Finding("ok", output.splitlines()[0]) if output else Finding("missing", "none")


def elements(machine: Machine) -> Finding:
    """Look for the GStreamer elements that pipelines use."""
    jetson = bool(board_of(machine).model)
    expected = [row for row in ELEMENTS if jetson or not row[3]]
    absent = [
        row for row in expected if machine.command(("gst-inspect-1.0", "--exists", row[0])) is None
    ]
    if not absent:
        return Finding("ok", ", ".join(row[0] for row in expected))
    missing = ", ".join(f"no {name} ({purpose})" for name, purpose, _, _ in absent)
    packages = " ".join(dict.fromkeys(row[2] for row in absent))
    return Finding("warning", missing, f"sudo apt-get install {packages}")


def module(*names: str) -> Callable[[Machine], Finding]:
    """Build a probe that requires all of these Python modules."""

    def probe(machine: Machine) -> Finding:
        modules = {name: machine.module(name) for name in names}
        present = [
            f"{name} {module.version}".rstrip() for name, module in modules.items() if module
        ]
        absent = [f"no {name}" for name, module in modules.items() if not module]
        return Finding("missing" if absent else "ok", ", ".join(present + absent))

    return probe


def triton(machine: Machine) -> Finding:
    """Require Triton in a version whose kernels take what ours need."""
    from toolkit.gpu.codegen.triton_version import check_compiler
    from toolkit.gpu.errors import CompileError

    module = machine.module("triton")
    if not module:
        return Finding("missing", "no triton")
    try:
        check_compiler(module.version or "")
    except CompileError as error:
        return Finding("missing", str(error))
    return Finding("ok", f"triton {module.version}".rstrip())


def cameras(machine: Machine) -> Finding:
    """List the video devices."""
    devices = sorted(path.name for path in (machine.root / "dev").glob("video*"))
    return Finding("ok", ", ".join(devices)) if devices else Finding("missing", "no /dev/video*")


def disk(machine: Machine) -> Finding:
    """Compare the free space of the working directory with what builds and slots take."""
    free = machine.free_bytes()
    status: Status = "ok" if free >= LOW_DISK_BYTES else "warning"
    return Finding("missing" if free < FULL_DISK_BYTES else status, f"{free / 1e9:.1f} GB free")


def broker(machine: Machine, host: str, port: int) -> Finding:
    """Try to connect to an MQTT broker."""
    refusal = machine.broker(host, port)
    return Finding("missing", refusal) if refusal else Finding("ok", "accepts MQTT clients")
