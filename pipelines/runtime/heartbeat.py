"""The heartbeat of a pipeline, from its own loop: a loop that hangs gives none."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from statistics import median
from typing import Literal, Protocol

from msgspec import UNSET

from device.protocol.messages import ChildMessage, Heartbeat
from pipelines.frame import Away
from pipelines.runtime.load_control import LoadControl
from pipelines.sources.table import Source

HEARTBEAT_S = 0.5
LOOK_S = 0.01  # between two looks at the cameras
SLACK_S = 3.0  # a frame that is there has a result by then, or the loop has frozen
ENDING_S = 30.0  # sinks finish their files after the last frame
LONGEST_S = 86400.0
RECENT = 9  # frames of which it is known how long the loop was silent
PATIENT = 3.0  # times as long is no stall

# What the source and the sinks count that is a fault, not a limit that was asked for. A full disk
# is the board's: a release on trial is not to blame for it.
FAULTS = ("corrupt", "jsonl_error", "snapshot_error", "video_error")
# What threads of sources drop before the loop could take it.
UNTAKEN = ("busy", "damaged")


_State = Literal["starting", "running", "degraded"]


class Dropper(Protocol):
    """Counts frames and results that are lost on their way."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Losses so far by cause."""


class HeartbeatSender:
    """Emits a heartbeat at each change of state, and every HEARTBEAT_S while the loop turns."""

    def __init__(
        self, emit: Callable[[ChildMessage], None], control: LoadControl | None = None
    ) -> None:
        self._emit = emit
        self._control = control
        self._sources: Sequence[Source] = ()
        self._sinks: Sequence[Dropper] = ()
        self._filters: Sequence[Dropper] = ()
        self._frames = 0
        self._ticked_s = time.monotonic()
        self._silent_s = 0.0  # the longest of this frame
        self._silences_s: deque[float] = deque(maxlen=RECENT)
        self._reported: tuple[_State, str, str] = ("starting", "", "")
        self._since_s = time.monotonic()
        self._due_s = 0.0
        self._looked_s = -inf  # at the cameras

    def watch(
        self,
        sources: Sequence[Source],
        sinks: Sequence[Dropper],
        filters: Sequence[Dropper] = (),
    ) -> None:
        """Begin to beat, for a loop over these sources; `filters` count frames that they leave
        out."""
        self._sources, self._sinks, self._filters = sources, sinks, filters
        self._since_s = self._ticked_s = time.monotonic()
        self.tick()

    def end(self) -> None:
        """Say that the loop has ended, and that what follows may take long."""
        if self._sources:
            self._emit(self._beat(*self._reported, quiet_s=ENDING_S))

    def frame_done(self, latency_ms: float | None) -> None:
        """Count a frame with a result, which took so long; None: no engine saw it."""
        self._frames += 1
        if self._control is not None and latency_ms is not None:
            self._control.frame_done(latency_ms)
        self._note_silence(time.monotonic())
        self._silences_s.append(self._silent_s)
        self._silent_s = 0.0
        self.tick()

    def tick(self) -> None:
        """Emit what is due; the loop calls this, also while it waits for a frame."""
        if not self._sources:
            return
        now_s = time.monotonic()
        self._note_silence(now_s)
        load = ""
        if self._control is not None:
            self._control.tick()
            load = self._control.text
        # The loop turns twice for a frame. Nothing that is due is put off, nor the second frame.
        next_s = min(self._looked_s + LOOK_S, self._due_s)
        if load == self._reported[2] and now_s < next_s and self._frames > 1:
            return
        self._looked_s = now_s
        away = self._away()
        state: _State = "running"
        if away is not None:
            state = "degraded"
        elif not self._frames:
            state = "starting"
        reason = "" if away is None else away.reason
        changed = (state, reason, load) != self._reported
        if not changed and now_s < self._due_s:
            return
        if state != self._reported[0]:
            self._since_s = now_s if away is None else away.since_s
        self._reported, self._due_s = (state, reason, load), now_s + HEARTBEAT_S
        self._emit(self._beat(*self._reported, quiet_s=self._quiet_s()))

    def _note_silence(self, now_s: float) -> None:
        self._silent_s = max(self._silent_s, now_s - self._ticked_s)
        self._ticked_s = now_s

    def _quiet_s(self) -> float:
        """Return how long the loop may be silent, by what its frames took: large pictures on a
        small board take seconds each. One that the machine held up does not count."""
        return min(PATIENT * median(self._silences_s or (0.0,)), LONGEST_S)

    def _beat(self, state: _State, reason: str, load: str, *, quiet_s: float) -> Heartbeat:
        return Heartbeat(
            frames=self._frames,
            errors=self._errors(),
            state=state,
            reason=reason,
            since_s=self._since_s,
            load=load,
            gap_s=self._gap_s(),
            quiet_s=round(quiet_s, 3),
            taken=self._taken(),
        )

    def _gap_s(self) -> float:
        """Return how far apart results may be: one source at least gives frames so often, or says
        that it is away."""
        gaps_s = [
            source.gap_s + (0.0 if (hz := source.config.max_hz) is UNSET else 1.0 / hz)
            for source in self._sources
            if not source.ended
        ]
        return round(min(min(gaps_s, default=0.0) + SLACK_S, LONGEST_S), 3)

    def _taken(self) -> int:
        """Return how many frames the loop has dealt with, also those that it has left out."""
        lost = sum(
            number
            for source in self._sources
            for cause, number in source.dropped.items()
            if cause not in UNTAKEN
        )
        return self._frames + lost + sum(sum(one.dropped.values()) for one in self._filters)

    def _away(self) -> Away | None:
        """Return what is known of all cameras that are away, since the first of them went."""
        away = [source.away for source in self._sources if source.away is not None]
        if not away:
            return None
        reasons = "; ".join(one.reason for one in away)
        return Away(reasons, min(one.since_s for one in away))

    def _errors(self) -> int:
        droppers: tuple[Source | Dropper, ...] = (*self._sinks, *self._sources)
        counts = [dropper.dropped for dropper in droppers]
        return sum(count.get(cause, 0) for count in counts for cause in FAULTS)
