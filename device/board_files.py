"""What Linux, JetPack and nvpmodel say of a board in files, read without loading anything."""

import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

# A zone that reports 100 C for ever on Tegra boards: it has no sensor.
NOT_A_SENSOR = ("PMIC-Die", "PMIC")
PLAUSIBLE_C = (-40.0, 150.0)  # a zone that is powered down reads -256
# The GPU below /sys/class/devfreq by SoC and JetPack: an address before the name on all but Thor,
# whose second device, gpu-nvd-0, is the video engines (jetson_stats reads the same).
GPU_DEVFREQ = ("*.gpu", "*.ga10b", "*.gv11b", "*.gp10b", "gpu-gpc-0", "gpu")
_MODES = re.compile(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+?)\s*>")
_RELEASE = re.compile(r"# R(\d+) \(release\), REVISION: ([\d.]+)")
_VERSION = re.compile(r"^__version__\s*=\s*[\"']([\w.]+)[\"']", re.MULTILINE)


def hottest_c(root: Path) -> float | None:
    """Return the temperature of the hottest zone in degrees Celsius; None if none can be read."""
    zones = (root / "class/thermal").glob("thermal_zone*")
    readings = [
        value / 1000.0
        for zone in zones
        if read_text(zone / "type") not in NOT_A_SENSOR
        and (value := _integer(zone / "temp")) is not None
    ]
    least, most = PLAUSIBLE_C
    return max((value for value in readings if least < value < most), default=None)


def gpu_devfreq(sys: Path = Path("/sys")) -> Path | None:
    """Return the folder with `cur_freq`, `min_freq` and `max_freq` (Hz) of the GPU, if any."""
    folders = (f for name in GPU_DEVFREQ for f in sorted((sys / "class/devfreq").glob(name)))
    return next((folder for folder in folders if read_text(folder / "cur_freq")), None)


def memory_mb(root: Path = Path("/")) -> tuple[int, int]:
    """Return the memory of the board and what is free of it, in MB; 0 where it is not known."""
    text = read_text(root / "proc/meminfo")
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE))
    total, free = (int(sizes.get(key, 0)) for key in ("MemTotal", "MemAvailable"))
    return total * 1024 // 10**6, free * 1024 // 10**6


def power_mode_name(number: str, root: Path = Path("/")) -> str:
    """Return the name of a power mode in /etc/nvpmodel.conf, "" if it is not there."""
    return power_modes(read_text(root / "etc/nvpmodel.conf")).get(number, "")


def power_modes(text: str) -> dict[str, str]:
    """Return the names of the power modes in the text of nvpmodel.conf by their numbers."""
    return dict(_MODES.findall(text))


def power_mode_number(root: Path = Path("/")) -> str:
    """Return the number of the power mode, as nvpmodel wrote it: "pmode:0002", "" if it did not."""
    match = re.search(r"pmode:(\d+)", read_text(root / "var/lib/nvpmodel/status"))
    return str(int(match[1])) if match else ""


def tensorrt_version() -> str:
    """Return the version of the installed TensorRT without importing it, "" if there is none."""
    try:
        return metadata.version("tensorrt")
    except metadata.PackageNotFoundError:
        spec = find_spec("tensorrt")  # JetPack's package, where it has no metadata
    if spec is None or spec.origin is None:
        return ""
    match = _VERSION.search(read_text(Path(spec.origin)))
    return match[1] if match else ""


def l4t_of(text: str) -> str:
    """Return the L4T release in /etc/nv_tegra_release, "36.4.3"; "" if it is not understood."""
    match = _RELEASE.match(text)
    return f"{match[1]}.{match[2]}" if match else ""


def read_text(path: Path) -> str:
    """Return a small file without spaces and zeros around it, "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip("\0\n ")
    except OSError:
        return ""


def dla_cores(root: Path = Path("/")) -> int:
    """Return how many DLA cores the kernel has."""
    return len(list(root.glob("sys/bus/platform/devices/*.nvdla[0-9]*")))


def _integer(path: Path) -> int | None:
    text = read_text(path)
    return int(text) if text.removeprefix("-").isdecimal() else None


def tandem_version() -> str:
    """Return the version of this package."""
    try:
        return metadata.version("tandem-edge")
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return ""
