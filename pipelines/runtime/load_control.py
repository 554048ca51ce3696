"""Keeps a pipeline within its limits: reads the board once a second and lets fewer frames in."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec import UNSET

from device.board_files import gpu_devfreq, hottest_c, read_text
from pipelines.frame import Frame
from pipelines.load_config import LoadConfig
from pipelines.runtime.load import Load, Readings, load_text, next_load, step_of
from pipelines.sinks.table import RateLimit

PERIOD_S = 1.0
LATENCIES = 65_536  # the most that are kept of `window_s`

_LOG = logging.getLogger(__name__)


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


class LoadControl:
    """The load of one pipeline: which frames it takes and with which engines, and why."""

    def __init__(
        self,
        config: LoadConfig | None,
        root: Path = Path("/sys"),
        use: Callable[[Sequence[str]], None] = lambda names: None,
    ) -> None:
        """`config` None: nothing is limited. `use` is told which models with `replaces` run from
        now on."""
        self._config = config
        self._root = root
        self._use = use
        self._load = Load()
        self._due_s = time.monotonic() + PERIOD_S
        self._latencies_ms: deque[tuple[float, float]] = deque(maxlen=LATENCIES)
        self._limits: dict[str, RateLimit] = {}
        self._dropped: Counter[str] = Counter()
        self._are_sensors_checked = False

    @property
    def text(self) -> str:
        """The step that holds and its reason; empty if none does."""
        return "" if self._config is None else load_text(self._config, self._load)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Frames left out so far; "load": by the step that held."""
        return dict(self._dropped)

    def admits(self, frame: Frame) -> bool:
        """Whether this frame is to be run."""
        if self._config is None:
            return True
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
        if self._config is not None:
            self._latencies_ms.append((time.monotonic(), latency_ms))

    def tick(self) -> None:
        """Read the board if it is time to, and take a step if the policy says so."""
        now_s = time.monotonic()
        if self._config is None or now_s < self._due_s:
            return
        self._due_s = now_s + PERIOD_S
        p95_ms = self._p95_ms(now_s - self._config.window_s)
        before, readings = self._load.step, read_board(self._root, p95_ms)
        if not self._are_sensors_checked:
            self._are_sensors_checked = True
            _warn_of_missing(self._config, readings)
        self._load = next_load(self._config, self._load, readings, now_s)
        if self._load.step != before:
            self._latencies_ms.clear()  # those of the step before say nothing of this one
            self._limits.clear()
            self._use(step_of(self._config, self._load).use)
            _LOG.warning("%s", self.text or "all frames are run again: the board has room")

    def change(self, config: LoadConfig | None) -> None:
        """Go on with another policy, in the step that holds, or in its last one."""
        if config == self._config:
            return
        step = 0 if config is None else min(self._load.step, len(config.steps))
        reason = self._load.reason if step else ""
        self._config, self._load = config, Load(step, reason, taken_s=time.monotonic())
        self._limits.clear()
        self._are_sensors_checked = False
        self._use(() if config is None else step_of(config, self._load).use)

    def _p95_ms(self, since_s: float) -> float | None:
        """Return the p95 of the latencies since a time; None if there are none."""
        while self._latencies_ms and self._latencies_ms[0][0] < since_s:
            self._latencies_ms.popleft()
        if not self._latencies_ms:
            return None
        return float(np.percentile([latency_ms for _, latency_ms in self._latencies_ms], 95))


def _warn_of_missing(config: LoadConfig, readings: Readings) -> None:
    """Say which limits can have no effect, as the board has no such sensor."""
    for key, limit, reading, sensor in (
        ("hot_c", config.hot_c, readings.temperature_c, "thermal zone"),
        ("low_clock", config.low_clock, readings.clock, "clock of a GPU"),
    ):
        if limit is not UNSET and reading is None:
            _LOG.warning(
                "[load] has %s = %g, and this machine shows no %s: no step is taken for it",
                key,
                limit,
                sensor,
            )
