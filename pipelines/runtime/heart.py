"""The heartbeat of a pipeline, from its own loop: a loop that hangs gives none."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from device.protocol.messages import ChildMessage, Heartbeat
from pipelines.frame import Away
from pipelines.runtime.load_control import LoadControl
from pipelines.sources.table import Source

HEARTBEAT_S = 0.5

# What the source and the sinks count that is a fault, not a limit that was asked for. A full disk
# is the board's: a release on trial is not to blame for it.
FAULTS = ("corrupt", "jsonl_error", "snapshot_error", "video_error")


class Dropper(Protocol):
    """Counts frames and results that are lost on their way."""

    @property
    def dropped(self) -> Mapping[str, int]: ...


class Heart:
    """Emits a heartbeat at each change of state, and every HEARTBEAT_S while the loop turns."""

    def __init__(
        self, emit: Callable[[ChildMessage], None], control: LoadControl | None = None
    ) -> None:
        self._emit = emit
        self._control = control
        self._sources: Sequence[Source] = ()
        self._sinks: Sequence[Dropper] = ()
        self._frames = 0
        self._said = ("", "", "")
        self._since_s = time.monotonic()
        self._due_s = 0.0

    def watch(self, sources: Sequence[Source], sinks: Sequence[Dropper]) -> None:
        """Begin to beat, for a loop over these sources."""
        self._sources, self._sinks = sources, sinks
        self.tick()

    def frame_done(self, latency_ms: float | None) -> None:
        """Count a frame with a result, which took so long; None: no engine saw it."""
        self._frames += 1
        if self._control is not None and latency_ms is not None:
            self._control.frame_done(latency_ms)
        self.tick()

    def tick(self) -> None:
        """Emit what is due; the loop calls this, also while it waits for a frame."""
        if not self._sources:
            return
        now_s = time.monotonic()
        load = ""
        if self._control is not None:
            self._control.tick()
            load = self._control.text
        away = self._away()
        state: Literal["starting", "running", "degraded"] = "running"
        if away is not None:
            state = "degraded"
        elif not self._frames:
            state = "starting"
        reason = "" if away is None else away.reason
        changed = (state, reason, load) != self._said
        if not changed and now_s < self._due_s:
            return
        if state != self._said[0]:
            self._since_s = now_s if away is None else away.since_s
        self._said, self._due_s = (state, reason, load), now_s + HEARTBEAT_S
        self._emit(
            Heartbeat(
                frames=self._frames,
                errors=self._errors(),
                state=state,
                reason=reason,
                since_s=self._since_s,
                load=load,
            )
        )

    def _away(self) -> Away | None:
        """Return what is known of all cameras that are away, since the first of them went."""
        away = [gone for source in self._sources if (gone := source.away) is not None]
        if not away:
            return None
        reasons = "; ".join(gone.reason for gone in away)
        return Away(reasons, min(gone.since_s for gone in away))

    def _errors(self) -> int:
        droppers: tuple[Source | Dropper, ...] = (*self._sinks, *self._sources)
        counts = [dropper.dropped for dropper in droppers]
        return sum(count.get(cause, 0) for count in counts for cause in FAULTS)
