"""Temperatures and clocks of a board, from Linux's files."""

from pathlib import Path

from device.board_files import gpu_devfreq, hottest_c, read_text
from pipelines.runtime.load import Readings


def read_board(root: Path, latency_p95_ms: float | None) -> Readings:
    """Return what the files below `root`, usually /sys, say, with a pipeline's own latency."""
    return Readings(hottest_c(root), gpu_clock(root), latency_p95_ms)


def gpu_clock(root: Path) -> float | None:
    """Return the clock of the GPU as a fraction of its highest; None if it cannot be read."""
    device = gpu_devfreq(root)
    if device is None:
        return None
    current, highest = (read_text(device / name) for name in ("cur_freq", "max_freq"))
    readable = current.isdecimal() and highest.isdecimal() and int(highest) > 0
    return int(current) / int(highest) if readable else None
