"""When a silent pipeline is ended: pure decisions on what it said and on what its processes do.

Silence has three meanings. The loop has frozen: it is ended soon. It still loads: it may take long,
as long as it gets on. Or the machine gave it no processor, or no disk: that time does not count.

A start may wait without a processor or a disk: for a driver, a name server, a lock. A thread of the
pipeline beats meanwhile (`pipelines.message_channel`), so it is not ended. What is: one that does
not even beat, as it has not begun or C code holds the interpreter, and of which no process works,
for IDLE_S. A driver that sleeps so long in that state would be started again, and then has its
module loaded; start_s bounds all else. Times are seconds of a steady clock.
"""

from dataclasses import dataclass, replace

from device.agent.process_activity import Activity

STOPPED_S = 1.0  # one that a signal has stopped does not go on by itself
IDLE_S = 3.0  # a pipeline that starts, says nothing and does nothing
FIRST_FRAME_S = 10.0  # its first frame opens what the later ones use
HARD = 5.0  # times the limit: then it is ended, however loaded the machine is
STARVED = 0.5  # of a time without a processor: so much is the machine's fault


@dataclass(frozen=True, slots=True)
class Heard:
    """What was heard of a process. `alive_s`: the last heartbeat, and before the first any line;
    infinity: there is no process. `beating`: its loop has begun. `flood_s`: for so long it has
    written more than is read."""

    alive_s: float
    beating: bool
    started_s: float
    flood_s: float = 0.0


NOBODY = Heard(float("inf"), beating=False, started_s=float("inf"))


@dataclass(frozen=True, slots=True)
class Patience:
    """How long it may be silent: `stall_s` while it runs, `start_s` until its loop begins;
    `first`: it has given no frame yet."""

    stall_s: float
    start_s: float
    first: bool = False


@dataclass(frozen=True, slots=True)
class ActivityWatch:
    """Looks at the processes of a pipeline that is silent.

    `active_s`: when they last did something, as far as is known. `excused_s`: so long the machine
    held its loop up.
    """

    activity: Activity | None = None
    looked_s: float = 0.0
    active_s: float = float("inf")
    excused_s: float = 0.0

    def looked(self, activity: Activity | None, now_s: float) -> "ActivityWatch":
        """Return the value after a look."""
        before = self.activity
        if activity is None or before is None:
            return replace(self, activity=activity, looked_s=now_s, active_s=now_s)
        since_s = now_s - self.looked_s
        waited_s = (activity.waited_ns - before.waited_ns) / 1e9
        held_up = activity.state == "D" or waited_s > STARVED * since_s
        active = held_up or activity.state == "R" or not _same_work(activity, before)
        return ActivityWatch(
            activity=activity,
            looked_s=now_s,
            active_s=now_s if active else self.active_s,
            excused_s=self.excused_s + (since_s if held_up else 0.0),
        )

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return self.activity is not None and self.activity.state == "T"

    def idle_s(self, now_s: float) -> float:
        """Return for how long its processes are known to have done nothing."""
        return now_s - self.active_s if self.activity is not None else 0.0


def _same_work(now: Activity, before: Activity) -> bool:
    return (now.cpu_ticks, now.io_bytes) == (before.cpu_ticks, before.io_bytes)


def why_ended(
    heard: Heard, looks: ActivityWatch, patience: Patience, now_s: float, fair_s: float
) -> str | None:
    """Return why a pipeline is to be ended, None if it may go on.

    `fair_s`: silence before that does not count, as the agent itself was held up.
    """
    silent_s = now_s - max(heard.alive_s, fair_s)
    if looks.is_stopped and silent_s > STOPPED_S:
        return f"no sign of life for {STOPPED_S:g} s, as a signal has stopped it (SIGSTOP)"
    if heard.flood_s > patience.stall_s and silent_s > patience.stall_s:
        return f"no sign of life for {patience.stall_s:g} s, but a flood of other output (stall_s)"
    starts = not heard.beating or patience.first
    if starts and silent_s > IDLE_S and looks.idle_s(now_s) > IDLE_S:
        return f"no output, and used no processor and no disk, for {IDLE_S:g} s as it started"
    if not heard.beating:
        late = now_s - max(heard.started_s, fair_s) > patience.start_s
        return f"no first heartbeat for {patience.start_s:g} s (start_s)" if late else None
    limit_s = max(patience.stall_s, FIRST_FRAME_S if patience.first else 0.0)
    if silent_s > limit_s + min(looks.excused_s, (HARD - 1.0) * limit_s):
        return f"no sign of life for {limit_s:g} s (stall_s)"
    return None
