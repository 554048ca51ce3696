"""Keeps a pipeline within its limits: reads the board once a second and lets fewer frames in."""

import logging
import time
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from msgspec import UNSET

from pipelines.frame import Frame
from pipelines.load_config import LoadConfig
from pipelines.runtime.load import Load, load_text, next_load, step_of
from pipelines.runtime.sensors import read_board
from pipelines.sinks.table import RateLimit

PERIOD_S = 1.0
LATENCIES = 256  # the last of these make the p95

_LOG = logging.getLogger(__name__)


class LoadControl:
    """The load of one pipeline: which frames it takes, and why not all."""

    def __init__(self, config: LoadConfig, root: Path = Path("/sys")) -> None:
        self._config = config
        self._root = root
        self._load = Load()
        self._due_s = time.monotonic() + PERIOD_S
        self._latencies_ms: deque[float] = deque(maxlen=LATENCIES)
        self._limits: dict[str, RateLimit] = {}
        self._dropped: Counter[str] = Counter()

    @property
    def text(self) -> str:
        """The step that holds and its reason; empty if none does."""
        return load_text(self._config, self._load)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Frames left out so far; "load": by the step that held."""
        return dict(self._dropped)

    def admits(self, frame: Frame) -> bool:
        """Whether this frame is to be run."""
        step = step_of(self._config, self._load)
        takes = frame.seq % step.every_nth == 0
        if takes and step.max_hz is not UNSET:
            limit = self._limits.setdefault(frame.camera, RateLimit(step.max_hz))
            takes = limit.allows(frame.t_recv.mono_ns / 1e9)
        if not takes:
            self._dropped["load"] += 1
        return takes

    def frame_done(self, latency_ms: float) -> None:
        """Learn from the latency of one frame."""
        self._latencies_ms.append(latency_ms)

    def tick(self) -> None:
        """Read the board if it is time to, and take a step if the policy says so."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + PERIOD_S
        latencies = np.array(self._latencies_ms)
        p95_ms = float(np.percentile(latencies, 95)) if latencies.size else None
        before = self._load.step
        self._load = next_load(self._config, self._load, read_board(self._root, p95_ms), now_s)
        if self._load.step != before:
            self._latencies_ms.clear()  # those of the step before say nothing of this one
            self._limits.clear()
            _LOG.warning("%s", self.text or "all frames are run again: the board has room")
