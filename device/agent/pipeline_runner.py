"""Keeps the pipeline of a slot running: starts it for this board, restarts it with back-off."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from device.agent.config import AgentConfig
from device.agent.health import PipelineHealth
from device.agent.pipeline_process import (
    PipelineEvent,
    PipelineExited,
    PipelineOutput,
    PipelineProcess,
    ProcessRow,
    Restarts,
    command_of,
)
from device.protocol.documents import PipelineReport, PipelineStatus
from device.protocol.messages import ChildMessage, Failure, Result

LOG = logging.getLogger("tandem.pipeline")


class PipelineRunner:
    """One pipeline: its process, its report, and when it restarts."""

    def __init__(
        self,
        config: AgentConfig,
        topic_prefix: str,
        row: ProcessRow,
        put: Callable[[PipelineEvent], None],
    ) -> None:
        self.report = PipelineReport(status="stopped")
        self._config = config
        self._topic_prefix = topic_prefix
        self._row = row
        self._process = PipelineProcess(put, config.update.stop_grace_s)
        self._restarts = Restarts()
        self._health = PipelineHealth("failed", 0, 0, None, 0.0)

    @property
    def restart_at_s(self) -> float | None:
        """When the pipeline that died restarts; None: not due."""
        return self._restarts.at_s

    def start(self, folder: Path, *, fresh: bool) -> bool:
        """Run the bundle in `folder`. `fresh`: forget earlier deaths (another release).

        Return False if the system cannot start a process; it is retried like one that died.
        """
        self._restarts = Restarts() if fresh else self._restarts.started()
        try:
            self._process.start(self._command(folder), self._login())
        except OSError as error:
            self._note_death(f"the pipeline cannot be started: {error.strerror}")
            return False
        self.report = PipelineReport(status="starting")
        self._health = PipelineHealth("starting", 0, 0, None, time.monotonic())
        return True

    def health(self) -> PipelineHealth:
        """Return how the pipeline is now."""
        return self._health

    def stop(self, reason: str) -> None:
        """Stop the pipeline; it does not restart."""
        self._restarts = Restarts()
        self._process.stop()
        self.report = PipelineReport(status="stopped", reason=reason)

    def on_message(self, event: PipelineOutput) -> ChildMessage | None:
        """Take a line of the pipeline; return its message, None for one of an earlier run."""
        if event.run != self._process.run:
            return None
        if isinstance(event.message, Result):
            self._restarts = self._restarts.worked()
            self.report = PipelineReport(status="running")
            self._health = PipelineHealth("running", 1, 0, None, time.monotonic())
        elif isinstance(event.message, Failure):
            self.report = PipelineReport(status="failed", reason=event.message.message)
        return event.message

    def on_exit(self, event: PipelineExited) -> str | None:
        """Return why it exited (its own reason, if it gave one), None for an earlier run."""
        if event.run != self._process.run:
            return None
        reason = self.report.reason if self.report.status == "failed" else event.reason
        self._process.stop()  # its own children may still run
        self._note_death(reason)
        return reason

    def _note_death(self, reason: str) -> None:
        self._restarts = self._restarts.died(time.monotonic())
        status: PipelineStatus = "failed" if self._restarts.failed else "restarting"
        self.report = PipelineReport(status=status, reason=reason)

    def _command(self, folder: Path) -> tuple[str, ...]:
        config = self._config
        values = {
            "bundle": str(folder),
            "profile": config.profile,
            "mqtt_host": config.broker.host,
            "mqtt_port": str(config.broker.port),
            "topic_prefix": self._topic_prefix,
        }
        extra = () if config.source is None else ("--source", config.source.uri)
        return command_of(self._row, values, extra)

    def _login(self) -> dict[str, str]:
        """Return the credentials for the environment: all users can read a command line."""
        login = {
            "TANDEM_MQTT_USERNAME": self._config.broker.username,
            "TANDEM_MQTT_PASSWORD": self._config.broker.password,
        }
        return {name: value for name, value in login.items() if value is not None}
