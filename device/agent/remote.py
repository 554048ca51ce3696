"""What an operator does with a device from afar beside releases: commands, and its log lines."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from device.agent.broker_connection import BrokerConnection
from device.agent.command_journal import CommandJournal
from device.agent.commands import CommandCheck, CommandEvent, Commands
from device.agent.config import AgentConfig
from device.agent.farm_job import FarmJob, no_job
from device.agent.log_lines import LogLines, LogStream
from device.agent.operations import Board
from device.agent.shadow_process import TAP
from device.agent.updater import Updater
from device.agent.verification import Verification
from device.protocol.documents import PipelineStatus, encode
from device.protocol.topics import Topics


class Remote:
    """The commands of one device and its log lines for whoever follows them."""

    def __init__(
        self,
        config: AgentConfig,
        topics: Topics,
        *,
        lines: LogLines,
        updater: Updater,
        connection: BrokerConnection,
        report: Callable[[], Mapping[str, Any]],
        pipeline: Callable[[], PipelineStatus],
        put: Callable[[CommandEvent], None],
    ) -> None:
        """`report`: the agent's figures of the device; `put` takes events, from other threads."""
        state_dir = Path(config.state_dir)
        self._topics = topics
        self._connection = connection
        self._stream = LogStream(lines, always=config.log.publish, max_per_s=config.log.max_per_s)

        def refusal() -> str:
            phase = "trial" if updater.on_trial else updater.update.phase
            return no_job(config.labels, phase, pipeline())

        board = Board(
            restart=partial(updater.ask, "restart"),
            set_pipeline=updater.set_pipeline,
            log=lambda count, source, most: [
                {"at": line.at, "source": line.source, "level": line.level, "text": line.text}
                for line in lines.last(count, source, most)
            ],
            follow=lambda seconds: self._stream.follow(time.monotonic(), seconds),
            report=report,
            no_job=refusal,
            tap=str(state_dir / TAP),
            state_dir=config.state_dir,
        )
        verification = Verification(
            lambda event: put(CommandCheck(event)),
            lambda get: connection.send(topics.tuf_get, encode(get)),
            device=config.device,
            trust=config.trust,
            state_dir=state_dir,
            kind="command",
        )
        self.commands = Commands(
            config.commands,
            topics,
            board,
            dev=config.dev,
            journal=CommandJournal(state_dir),
            verification=verification,
            put=put,
            send=connection.retain,
            job=FarmJob(
                state_dir,
                config.update.window_chunks,
                ask=lambda get: connection.send(topics.blob_get, encode(get)),
                put=put,
                refusal=refusal,
            ),
        )

    def due_s(self, now_s: float) -> tuple[float | None, ...]:
        """Return when `advance` has something to do without an event."""
        lines_s = self._stream.due_s(now_s) if self._connection.online else None
        return self.commands.due_s, lines_s

    def advance(self, now_s: float) -> None:
        """Go on with commands, and publish the lines that are due."""
        self.commands.advance(now_s)
        if self._connection.online:
            for source, line in self._stream.take(now_s):
                self._connection.send(self._topics.log(source), encode(line))
