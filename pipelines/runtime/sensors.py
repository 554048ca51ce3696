"""Temperatures and clocks of a board, from Linux's files."""

from pathlib import Path

from device.board_files import hottest_c
from pipelines.runtime.load import Readings

GPU_CLOCKS = ("*.gpu", "*.ga10b", "*.gv11b", "*.gp10b", "*gpu*")  # below class/devfreq


def read_board(root: Path, latency_p95_ms: float | None) -> Readings:
    """Return what the files below `root`, usually /sys, say, with a pipeline's own latency."""
    return Readings(hottest_c(root), gpu_clock(root), latency_p95_ms)


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
