"""Latency by stage, frames per second and drops over an interval."""

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from device.protocol.messages import Stats

RECENT = 1000  # frames
MAX_SAMPLES = 10_000  # percentiles of a longer interval are those of its last frames


class Metrics:
    """Collects the times of frames in one thread; another takes the figures once a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._frames = 0
        self._stages: dict[str, deque[float]] = {}
        self._processors: Counter[str] = Counter()
        self._totals: deque[float] = deque(maxlen=MAX_SAMPLES)
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
            self._processors.update(processors)
            for stage, value in stages_ms.items():
                self._stages.setdefault(stage, deque(maxlen=MAX_SAMPLES)).append(value)

    def take(self, dropped: Mapping[str, int]) -> Stats:
        """Return the figures since the last call and start a new interval."""
        now = time.monotonic()
        with self._lock:
            frames, self._frames = self._frames, 0
            totals, self._totals = self._totals, deque(maxlen=MAX_SAMPLES)
            stages, self._stages = self._stages, {}
            processors, self._processors = self._processors, Counter()
            recent = tuple(self._recent)
            span, self._since = now - self._since, now
        return Stats(
            frames=frames,
            fps=round(frames / span, 2) if span > 0.0 else 0.0,
            latency_p50_ms=_percentile(totals, 50),
            latency_p99_ms=_percentile(totals, 99),
            stage_p50_ms={stage: _percentile(v, 50) for stage, v in stages.items()},
            stage_p99_ms={stage: _percentile(v, 99) for stage, v in stages.items()},
            dropped=dict(dropped),
            recent_p50_ms=_percentile(recent, 50),
            recent_p95_ms=_percentile(recent, 95),
            processors=dict(processors),
        )


def _percentile(values: Iterable[float], percent: float) -> float:
    known = np.fromiter(values, np.float64)
    return round(float(np.percentile(known, percent)), 3) if known.size else 0.0
