"""Keeps the pipeline of a slot running: starts it for this board, watches it, restarts it with
back-off."""

import json
import logging
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import msgspec

from device.agent.config import AgentConfig
from device.agent.pipeline_process import (
    KILL_WAIT_S,
    PipelineEvent,
    PipelineExited,
    PipelineOutput,
    PipelineProcess,
    ProcessRow,
    Restarts,
)
from device.agent.preparation import PLANS
from device.agent.shadow_process import TAP
from device.agent.silence import ActivityWatch, Patience, why_ended
from device.protocol.documents import PipelineReport, PipelineStatus
from device.protocol.messages import ChildMessage, Failure, Heartbeat, Ready, Result
from device.start.child_process import NO_PROCESS
from device.start.keeper import mark_of
from device.start.memory_watch import default_limit_bytes
from device.update.liveness import MAX_LATE_S, Liveness, PipelineHealth

LOG = logging.getLogger("tandem.pipeline")
DATA = "data"  # folder of the state folder: what releases write
QUIET_S = 1.0  # two heartbeats; after longer its processes are looked at, as while it loads,
LOOK_S = 0.25  # no more often: a look reads much of /proc
INFERENCES = 3  # a loop is silent for one at a time; a slow one is not a stall

# The report's status -> the state of the health.
_STATES: dict[PipelineStatus, str] = {
    "stopped": "failed",
    "restarting": "failed",
}
# While a process runs frames, the report carries its load.
_AT_WORK = ("running", "degraded")
# What the report dates: a pipeline that is there and does not work.
_DATED = ("degraded", "stalled")


class PipelineRunner:
    """One pipeline: its process, its health and report, and when it restarts."""

    def __init__(
        self,
        config: AgentConfig,
        topic_prefix: str,
        row: ProcessRow,
        put: Callable[[PipelineEvent], None],
        on_line: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """`on_line` takes what the pipeline prints to stderr, in another thread."""
        self.report = PipelineReport(status="stopped")
        self._config = config
        self._topic_prefix = topic_prefix
        self._row = row
        memory_mb = config.pipeline.memory_mb
        self._process = PipelineProcess(
            put,
            config.update.stop_grace_s,
            mark_of(Path(config.state_dir)),
            default_limit_bytes() if memory_mb is None else memory_mb * 2**20,
            on_line,
        )
        self._restarts = Restarts()
        self._signs = Liveness()  # of the running process, as the two below
        self._errors = 0
        self._since_s = time.monotonic()
        self._slow_s = 0.0  # so long an inference may take
        self._degraded: tuple[str, ...] = ()
        self._looked_s: float | None = None
        self._fair_s = 0.0  # silence before this moment does not count
        self._looks = ActivityWatch()  # at its processes, while it is silent
        self._killed_s = 0.0

    @property
    def restart_at_s(self) -> float | None:
        """When the pipeline that died restarts; None: not due."""
        return self._restarts.at_s

    def health(self) -> PipelineHealth:
        """Return how the pipeline is, by the last that is known of it."""
        state = _STATES.get(self.report.status, self.report.status)
        return PipelineHealth(
            state,
            self._signs.frames,
            self._errors,
            self.report.reason or None,
            self._since_s,
            self._signs,
        )

    def start(self, folder: Path, *, fresh: bool) -> bool:
        """Run the bundle in `folder`. `fresh`: forget earlier deaths (another release).

        Return False if the system cannot start a process; it is retried like one that died.
        """
        self._restarts = Restarts() if fresh else self._restarts.started()
        self._signs = Liveness()
        self._errors = 0
        self._degraded = ()
        self._slow_s = 0.0
        self._looks = ActivityWatch()
        try:
            self._process.start(self._command(folder), self._environment())
        except OSError as error:
            why = str(error.strerror).removeprefix(NO_PROCESS)
            self._note_death(f"the pipeline cannot be started: {why}")
            return False
        self._set("starting")
        return True

    def stop(self, reason: str) -> None:
        """Stop the pipeline; it does not restart."""
        self._restarts = Restarts()
        self._degraded = ()
        self._process.stop()
        self._set("stopped", reason)

    def on_message(self, event: PipelineOutput) -> ChildMessage | None:
        """Take a line of the pipeline; return its message, None for a heartbeat and for one of an
        earlier run."""
        if event.run != self._process.run:
            return None
        message = event.message
        if isinstance(message, Heartbeat):
            if message.state != "loading":
                self._on_heartbeat(message, event.at_s)
            return None
        if isinstance(message, Ready):
            self._slow_s = INFERENCES * message.warm_up_s
            self._degraded = message.degraded
            self.report = msgspec.structs.replace(self.report, degraded=self._degraded)
        elif isinstance(message, Result):
            self._restarts = self._restarts.worked()
            self._signs = self._signs.resulted(event.at_s)
            if not self._ending:
                self._set("running")
        elif isinstance(message, Failure):
            self._set("failed", message.message)
        return message

    def on_exit(self, event: PipelineExited) -> str | None:
        """Return why it exited (its own reason, if it gave one), None for an earlier run."""
        if event.run != self._process.run:
            return None
        known = self.report.status in ("failed", "stalled")
        reason = self.report.reason if known else event.reason
        self._process.stop()  # its own children may still run
        self._note_death(reason)
        return reason

    def watch(self, now_s: float) -> None:
        """Kill a pipeline that gives no heartbeat, or no frames: its exit is an event.

        Call it often. What was missed while the agent itself was held up does not count.
        """
        if self._looked_s is not None and now_s - self._looked_s > MAX_LATE_S:
            self._fair_s = now_s
            self._signs = self._signs.held_up(now_s)
            self._looks = ActivityWatch()
        self._looked_s = now_s
        if self.report.status == "stalled":
            if now_s - max(self._killed_s, self._fair_s) >= KILL_WAIT_S:
                self._give_up_stalled()
            return
        heard = self._process.heard
        since_s = max(heard.alive_s, self._fair_s)
        if now_s - since_s <= (QUIET_S if heard.beating else 0.0):
            self._looks = ActivityWatch()
        elif now_s - self._looks.looked_s >= LOOK_S:
            self._looks = self._looks.looked(self._process.activity(), now_s)
        why = why_ended(heard, self._looks, self._patience(), now_s, self._fair_s)
        if why is not None:
            self._end_stalled(why, since_s, now_s)
        elif self._owes and self._signs.idle_s >= (most_s := max(self._signs.most_s, self._slow_s)):
            why = f"no frame for {most_s:g} s (its source is there)"
            self._end_stalled(why, self._signs.turn_s, now_s)

    def _patience(self) -> Patience:
        limits = self._config.pipeline
        stall_s = max(limits.stall_s, self._slow_s, self._signs.quiet_s)
        return Patience(stall_s, limits.start_s, first=not self._signs.frames)

    def _end_stalled(self, why: str, since_s: float, now_s: float) -> None:
        reason = f"the pipeline gave {why}: it was killed"
        LOG.error("%s", reason)
        self._killed_s = now_s
        self._set("stalled", reason, since_s)
        self._process.kill()

    def _give_up_stalled(self) -> None:
        """Go on without the exit of a killed process: it is stuck in a driver."""
        reason = self.report.reason
        self._process.stop()
        self._note_death(reason)

    def _on_heartbeat(self, beat: Heartbeat, at_s: float) -> None:
        self._signs = self._signs.beaten(beat, at_s, owes=self._owes)
        self._errors = beat.errors
        if self._ending:
            return
        if beat.load != self.report.load:
            self.report = msgspec.structs.replace(self.report, load=beat.load)
        if beat.state == "degraded":
            if self.report.status != "degraded":
                LOG.warning("the pipeline has no frames: %s", beat.reason)
            since_s = min(max(0.0, beat.since_s), at_s)  # since the board runs, whatever it says
            self._set("degraded", beat.reason, since_s)
        elif beat.state == "running" or self.report.status == "degraded":
            self._set("running" if beat.state == "running" else "starting")

    @property
    def _owes(self) -> bool:
        """Whether it has to give frames once its loop has begun: its source is there, or a camera
        that has just been opened, for which it says a longer gap."""
        return self.report.status in ("running", "starting")

    @property
    def _ending(self) -> bool:
        """Whether the process is being killed, or has said why it ends: what it says is late."""
        return self.report.status in ("stalled", "failed")

    def _note_death(self, reason: str) -> None:
        self._restarts = self._restarts.died(time.monotonic())
        if self._restarts.failed:
            self._set("failed", reason)
        elif self.report.status == "stalled":
            self._set("stalled", reason, self._since_s)  # until it starts again
        else:
            self._set("restarting", reason)

    def _set(self, status: PipelineStatus, reason: str = "", since_s: float | None = None) -> None:
        """Note the state; `since_s` only counts as it begins."""
        if status != self.report.status:
            self._since_s = time.monotonic() if since_s is None else since_s
        since = _moment(self._since_s) if status in _DATED else ""
        if status == self.report.status and self.report.since:
            since = self.report.since
        self.report = PipelineReport(
            status=status,
            reason=reason,
            since=since,
            load=self.report.load if status in _AT_WORK else "",
            degraded=self._degraded,
        )

    def _command(self, folder: Path) -> tuple[str, ...]:
        config = self._config
        values = {
            "bundle": str(folder),
            "profile": config.profile,
            "mqtt_host": config.broker.host,
            "mqtt_port": str(config.broker.port),
            "topic_prefix": self._topic_prefix,
            "data": str(Path(config.state_dir) / DATA),
            "data_mb": str(config.pipeline.data_mb),
            "services": "true" if config.pipeline.services else "false",
            "tap": str(Path(config.state_dir) / TAP),
        }
        row = self._row
        return (*row.prefix, *(argument.format_map(values) for argument in row.arguments))

    def _environment(self) -> dict[str, str]:
        """Return what holds credentials: all users can read a command line, only this one an
        environment."""
        config = self._config
        tls = config.broker.tls
        values = {
            "TANDEM_MQTT_USERNAME": config.broker.username,
            "TANDEM_MQTT_PASSWORD": config.broker.password,
            "TANDEM_MQTT_CA": None if tls is None else tls.ca,
            "TANDEM_MQTT_CERTIFICATE": None if tls is None else tls.certificate,
            "TANDEM_MQTT_KEY": None if tls is None else tls.key,
            "TANDEM_PLANS": str(Path(config.state_dir) / PLANS),
            "TANDEM_SOURCE": None if config.source is None else config.source.uri,
            "TANDEM_SOURCES": json.dumps({name: one.uri for name, one in config.sources.items()}),
        }
        return {name: value for name, value in values.items() if value is not None}


def _moment(mono_s: float) -> str:
    """Return a moment of the monotonic clock as ISO 8601 in UTC."""
    ago_s = time.monotonic() - mono_s
    moment = datetime.now(timezone.utc) - timedelta(seconds=ago_s)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
