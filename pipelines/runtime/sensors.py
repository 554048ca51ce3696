"""Temperatures and clocks of a board, from Linux's files."""

from pathlib import Path

from pipelines.runtime.load import Readings

# A zone that reports 100 C for ever on Tegra boards: it has no sensor.
NOT_A_SENSOR = ("PMIC-Die", "PMIC")
PLAUSIBLE_C = (-40.0, 150.0)  # a zone that is powered down reads -256
GPU_CLOCKS = ("*.gpu", "*.ga10b", "*.gv11b", "*.gp10b", "*gpu*")  # below class/devfreq


def read_board(root: Path, latency_p95_ms: float | None) -> Readings:
    """Return what the files below `root`, usually /sys, say, with a pipeline's own latency."""
    return Readings(hottest_c(root), gpu_clock(root), latency_p95_ms)


def hottest_c(root: Path) -> float | None:
    """Return the temperature of the hottest zone in degrees Celsius; None if none can be read."""
    zones = (root / "class/thermal").glob("thermal_zone*")
    readings = [
        value / 1000.0
        for zone in zones
        if _text(zone / "type") not in NOT_A_SENSOR
        and (value := _number(zone / "temp")) is not None
    ]
    least, most = PLAUSIBLE_C
    return max((value for value in readings if least < value < most), default=None)


def gpu_clock(root: Path) -> float | None:
    """Return the clock of the GPU as a fraction of its highest; None if it cannot be read."""
    for pattern in GPU_CLOCKS:
        for device in sorted((root / "class/devfreq").glob(pattern)):
            current, highest = _number(device / "cur_freq"), _number(device / "max_freq")
            if current is not None and highest:
                return current / highest
    return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.removeprefix("-").isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # a zone that is powered down answers EAGAIN, an old kernel lacks the file
        return ""
