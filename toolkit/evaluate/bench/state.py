"""The state of a machine that decides how fast it is: processors, clocks, power, versions.

Readings are names with values in the words of the system, as its own tools print them; what this
machine does not say is left out. A table says where each stands.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from device.board_files import GPU_DEVFREQ
from toolkit.machine import Machine

# nvidia-smi's names of what it is asked, with ours.
_NVIDIA_SMI: tuple[tuple[str, str], ...] = (
    ("clocks.sm", "GPU clock"),
    ("clocks.max.sm", "GPU clock, highest"),
    ("clocks.mem", "GPU memory clock"),
    ("power.draw", "GPU power"),
    ("power.limit", "GPU power limit"),
    ("temperature.gpu", "GPU temperature"),
    ("pstate", "GPU performance state"),
)
_DEGREES = {"GPU temperature"}  # nvidia-smi prints no unit with it


@dataclass(frozen=True, slots=True)
class _File:
    """A reading in a file below the root, found by patterns; its number times `factor`."""

    name: str
    patterns: tuple[str, ...]
    factor: float = 1.0
    unit: str = ""


# On a Jetson (jetson_stats reads the same files), and for the CPU on any Linux.
_FILES: tuple[_File, ...] = (
    _File("board", ("proc/device-tree/model",)),
    _File(
        "GPU clock",
        tuple(f"sys/class/devfreq/{name}/cur_freq" for name in GPU_DEVFREQ),
        1e-6,
        "MHz",
    ),
    _File(
        "GPU clock, highest",
        tuple(f"sys/class/devfreq/{name}/max_freq" for name in GPU_DEVFREQ),
        1e-6,
        "MHz",
    ),
    _File(
        "memory clock",
        ("sys/kernel/debug/bpmp/debug/clk/emc/rate", "sys/class/devfreq/bwmgr/cur_freq"),
        1e-6,
        "MHz",
    ),
    _File("CPU clock", ("sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq",), 1e-3, "MHz"),
    _File("CPU governor", ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",)),
)
_PACKAGES = ("tandem-edge", "onnxruntime", "numpy")


def readings(machine: Machine) -> Mapping[str, str]:
    """Return the current state of the machine; call it while the engine runs."""
    values = {**_cpu(machine), **_files(machine), **_nvpmodel(machine), **_nvidia_smi(machine)}
    return {name: value for name, value in values.items() if value}


def versions(machine: Machine) -> Mapping[str, str]:
    """Return the versions of Python and of the packages that run engines."""
    installed = {"Python": ".".join(map(str, machine.python))}
    for name in _PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def _cpu(machine: Machine) -> dict[str, str]:
    text = machine.text("proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    count = len(re.findall(r"^processor\s*:", text, re.MULTILINE))
    return {"CPU": name[1] if name else "", "CPU cores": str(count) if count else ""}


def _files(machine: Machine) -> dict[str, str]:
    values = {}
    for file in _FILES:
        path = machine.first(*file.patterns)
        text = machine.text(path.removeprefix(str(machine.root)).lstrip("/")) if path else ""
        if text and file.unit:
            text = f"{float(text) * file.factor:.0f} {file.unit}" if text.isdecimal() else ""
        values[file.name] = text
    return values


def _nvpmodel(machine: Machine) -> dict[str, str]:
    mode = re.search(r"NV Power Mode:\s*(\S+)", machine.command(("nvpmodel", "-q")) or "")
    return {"power mode": mode[1] if mode else ""}


def _nvidia_smi(machine: Machine) -> dict[str, str]:
    query = ",".join(key for key, _ in _NVIDIA_SMI)
    words = ("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0")
    values = (machine.command(words) or "").strip().split(", ")
    if len(values) != len(_NVIDIA_SMI):
        return {}
    names = (name for _, name in _NVIDIA_SMI)
    return {
        name: f"{value} C" if name in _DEGREES else value
        for name, value in zip(names, values, strict=True)
        if "N/A" not in value and "Not Supported" not in value
    }
