"""Latency by stage, frames per second and drops over an interval."""

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from device.protocol.messages import Stats

RECENT = 1000  # frames
MAX_SAMPLES = 10_000  # percentiles of a longer interval are those of its last frames


class Metrics:
    """Collects the times of frames in one thread; another takes the figures once a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._frames = 0
        self._stages: dict[str, deque[float]] = defaultdict(_samples)
        self._processors: Counter[str] = Counter()
        self._totals = _samples()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._since = time.monotonic()

    def add(
        self, stages_ms: Mapping[str, float], total_ms: float, processors: Sequence[str] = ()
    ) -> None:
        """Add the times of one frame, in milliseconds, and what ran its inferences."""
        with self._lock:
            self._frames += 1
            self._totals.append(total_ms)
            self._recent.append(total_ms)
            for processor in processors:
                self._processors[processor] += 1
            for stage, value in stages_ms.items():
                self._stages[stage].append(value)

    def take(self, dropped: Mapping[str, int]) -> Stats:
        """Return the figures since the last call and start a new interval."""
        now = time.monotonic()
        with self._lock:
            frames, self._frames = self._frames, 0
            totals, self._totals = self._totals, _samples()
            stages, self._stages = self._stages, defaultdict(_samples)
            processors, self._processors = self._processors, Counter()
            recent = tuple(self._recent)
            span, self._since = now - self._since, now
        p50_ms, p99_ms = _percentiles(totals, 50, 99)
        recent_p50_ms, recent_p95_ms = _percentiles(recent, 50, 95)
        figures = {stage: _percentiles(values, 50, 99) for stage, values in stages.items()}
        return Stats(
            frames=frames,
            fps=round(frames / span, 2) if span > 0.0 else 0.0,
            latency_p50_ms=p50_ms,
            latency_p99_ms=p99_ms,
            stage_p50_ms={stage: both[0] for stage, both in figures.items()},
            stage_p99_ms={stage: both[1] for stage, both in figures.items()},
            dropped=dict(dropped),
            recent_p50_ms=recent_p50_ms,
            recent_p95_ms=recent_p95_ms,
            processors=dict(processors),
        )


def _samples() -> deque[float]:
    return deque(maxlen=MAX_SAMPLES)


def _percentiles(values: Iterable[float], *percents: float) -> list[float]:
    """Return the values of `numpy.percentile`, whose own way to them takes ten times as long."""
    known = np.sort(np.fromiter(values, np.float64))
    return [round(_between(known, percent / 100.0), 3) for percent in percents]


def _between(known: NDArray[np.float64], share: float) -> float:
    """Return what lies at a share of the way along sorted values, 0.0 if there are none."""
    if not known.size:
        return 0.0
    place = (known.size - 1) * share
    row = int(place)
    low, high = float(known[row]), float(known[min(row + 1, known.size - 1)])
    part = place - row
    # From the nearer end, as NumPy: the same rounding.
    return low + (high - low) * part if part < 0.5 else high - (high - low) * (1.0 - part)
