"""Keeps the pipeline of a slot running: starts it as the board wants it, and again when it dies."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from device.agent.config import AgentConfig
from device.agent.pipeline_process import (
    PipelineEvent,
    PipelineExited,
    PipelineProcess,
    PipelineSaid,
    ProcessRow,
    Restarts,
    command_of,
)
from device.protocol.documents import PipelineReport, PipelineStatus
from device.protocol.messages import ChildMessage, Failure, Result

LOG = logging.getLogger("tandem.pipeline")


class PipelineRunner:
    """One pipeline: what it runs, how it is doing, when it is started again."""

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

    @property
    def restart_at_s(self) -> float | None:
        """When the pipeline that died is due to start again."""
        return self._restarts.at_s

    def start(self, folder: Path, *, fresh: bool) -> bool:
        """Run the bundle in `folder`. `fresh`: earlier deaths do not count (another release).

        False: the system has no room for a process; it is tried again like one that died.
        """
        self._restarts = Restarts() if fresh else self._restarts.started()
        try:
            self._process.start(self._command(folder), self._login())
        except OSError as error:
            self._note_death(f"the pipeline cannot be started: {error.strerror}")
            return False
        self.report = PipelineReport(status="starting")
        return True

    def stop(self, reason: str) -> None:
        """End it for good."""
        self._restarts = Restarts()
        self._process.stop()
        self.report = PipelineReport(status="stopped", reason=reason)

    def heard(self, event: PipelineSaid) -> ChildMessage | None:
        """Return the message, None for one of a former run, and note how the pipeline is doing."""
        if event.run != self._process.run:
            return None
        if isinstance(event.message, Result):
            self._restarts = self._restarts.worked()
            self.report = PipelineReport(status="running")
        elif isinstance(event.message, Failure):
            self.report = PipelineReport(status="failed", reason=event.message.message)
        return event.message

    def ended(self, event: PipelineExited) -> str | None:
        """Return why it ended (its own sentence, if it gave one), None for a former run."""
        if event.run != self._process.run:
            return None
        reason = self.report.reason if self.report.status == "failed" else event.reason
        self._process.stop()  # what it started may still run
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
        """Credentials go by the environment: a command line is there for all users to read."""
        login = {
            "TANDEM_MQTT_USERNAME": self._config.broker.username,
            "TANDEM_MQTT_PASSWORD": self._config.broker.password,
        }
        return {name: value for name, value in login.items() if value is not None}
