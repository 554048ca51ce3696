"""The agent: brings a board to its desired state, keeps it there, and reports.

It compares the retained `desired` document with the slots and acts on the difference, so that no
order of a release can be lost, repeated or queued; `device.agent.commands` does all else that is
asked, once each. All events (messages, lines and exits of the
pipeline) arrive on one queue and are handled in one thread: releases by `device.agent.updater`, the
connection by `device.agent.broker_connection`.
"""

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from device.agent.agent_trial import AgentTrial
from device.agent.agent_update import AgentUpdate, VersionInstalled, is_agent_release
from device.agent.broker_connection import BrokerConnection
from device.agent.commands import CommandCheck, CommandEvent
from device.agent.config import AgentConfig
from device.agent.control_socket import ControlRequest, ControlSocket, slot_rows
from device.agent.facts import Facts
from device.agent.figures import Figures, Latest
from device.agent.golden_check import GoldenCheck, GoldenEnded
from device.agent.log_lines import LogHandler, LogLines
from device.agent.pipeline_process import (
    PIPELINE,
    PipelineEvent,
    PipelineExited,
    PipelineOutput,
    ProcessRow,
)
from device.agent.pipeline_runner import PipelineRunner
from device.agent.preparation import (
    Preparation,
    PreparationEnded,
    PreparationEvent,
    Preparing,
)
from device.agent.remote import Remote
from device.agent.sd_notify import READY, STOPPING, Notifier
from device.agent.shadow_process import ShadowEnded, ShadowEvent, ShadowProcess, ShadowProgress
from device.agent.smp_lines import SmpEvent, SmpInstall, SmpLines, SmpRestart
from device.agent.state_check import StateCheck
from device.agent.task_process import TaskEnded
from device.agent.updater import Updater
from device.agent.verification import (
    MetadataAsked,
    Verification,
    VerificationEnded,
    VerificationEvent,
)
from device.board_files import tandem_version
from device.protocol.control import Answer, Ask, Cancel, Commit, Install, Rollback, SwitchAgent
from device.protocol.documents import Desired, Reported, Signed, encode
from device.protocol.fitting import fit
from device.protocol.messages import ChildMessage, Failure, Stats, encode_message
from device.protocol.mqtt import LinkDown, LinkEvent, LinkUp, Message, queue_putter
from device.protocol.signed import open_desired
from device.protocol.topics import Topics
from device.trust.exchange import TRUSTED, Refused, Verdict
from device.update.agent_versions import TrialTerms
from device.update.decisions import UNSIGNED, running_of
from device.update.slot_store import SlotStore
from device.update.sources.reader import SourceEnded, SourceEvent, SourcePart
from device.update.trial import Environment

LOG = logging.getLogger("tandem.agent")
MAX_EVENTS = 128  # twice the largest window; of the largest messages they are 256 MiB
STATS_S = 1.0
# A signal that comes as a wait begins is seen when the wait ends.
MAX_WAIT_S = 0.5
IDLE_WAIT_S = 3.0  # while no pipeline is to be watched
DEV_WARNING = "dev = true: this agent takes unsigned releases; do not use it outside a bench"


class _Stop:
    """The event of SIGTERM or SIGINT."""


Event = (
    LinkEvent | PipelineEvent | PreparationEvent | GoldenEnded | ShadowEvent | CommandEvent
    | VerificationEvent | SourceEvent | SmpEvent | VersionInstalled | ControlRequest | _Stop
)  # fmt: skip


class Agent:
    """The agent of one device. `run` returns after SIGTERM (see `serve`) or `stop`."""

    def __init__(self, config: AgentConfig, row: ProcessRow = PIPELINE) -> None:
        self._config = config
        self._topics = Topics(config.device)
        self._store = SlotStore(Path(config.state_dir))
        self._check = StateCheck(self._store)
        self._events: queue.Queue[Event] = queue.Queue(MAX_EVENTS)
        self._stops: queue.SimpleQueue[_Stop] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._put: Callable[[Event], None] = queue_putter(self._events, self._ended)
        self._lines = LogLines((config.broker.password,))
        self._pipeline = PipelineRunner(
            config, self._topics.root, row, self._put, partial(self._lines.add, "pipeline")
        )
        self._connection = BrokerConnection(config, self._topics, self._put)
        self._smp = None if config.smp is None else SmpLines(config, config.smp, self._put)
        if self._smp is not None:
            config = _with_source(config, self._smp.folder)
        self._restarts = False
        self._agent_trial = AgentTrial(Path(config.state_dir))
        self._agent_update = AgentUpdate(config, self._agent_trial, self._put)
        self._updater = self._new_updater(config)
        self._verification = Verification(
            self._put,
            lambda get: self._connection.send(self._topics.tuf_get, encode(get)),
            device=config.device,
            trust=config.trust,
            state_dir=Path(config.state_dir),
        )
        self._remote = Remote(
            config,
            self._topics,
            lines=self._lines,
            updater=self._updater,
            connection=self._connection,
            report=lambda: {"reported": self._reported(), "slots": slot_rows(self._updater.state)},
            pipeline=lambda: self._pipeline.report.status,
            put=self._put,
        )
        self._notifier = Notifier()
        self._control_socket = ControlSocket(Path(config.state_dir), self._put)
        self._version = tandem_version() or "unknown"
        self._facts = Facts(config)
        self._figures = Figures()
        self._desired: Desired | None = None
        self._sideloaded = False  # somebody brought the desired release to the board
        self._retained = b""  # what MQTT gave last
        self._handed_over = False  # the desired release came over the control socket
        self._desired_problem = ""
        self._stats_due_s = 0.0
        self._dev_warning = DEV_WARNING if config.dev else ""
        self._unfitted: Reported | None = None  # as it was gathered last
        self._fitted: Reported  # within its limits
        self._newest = self._reported()

    def _new_updater(self, config: AgentConfig) -> Updater:
        preparation = Preparation(
            self._put,
            Path(config.state_dir),
            timeout_s=config.prepare.timeout_s,
            memory_mb=config.prepare.memory_mb,
            total_timeout_s=config.prepare.total_timeout_s,
        )
        return Updater(
            config,
            self._store,
            self._pipeline,
            self._report,
            preparation,
            put=self._put,
            golden=GoldenCheck(self._put, plans=preparation.plans),
            shadow=ShadowProcess(
                self._put, Path(config.state_dir), config.profile, plans=preparation.plans
            ),
            environment=self._environment,
            facts=lambda: self._facts.of(self._updater.state, time.monotonic()),
        )

    def stop(self) -> None:
        """End `run`. Safe in a signal handler: only this queue takes events there."""
        self._stops.put(_Stop())

    def run(self) -> bool:
        """Run until `stop`, or until a client asks for a new start: then return True."""
        handler = LogHandler(self._lines)
        logging.getLogger().addHandler(handler)
        try:
            return self._run()
        finally:
            logging.getLogger().removeHandler(handler)

    def _run(self) -> bool:
        if self._dev_warning:
            LOG.warning(self._dev_warning)
        threading.Thread(target=lambda: self._put(self._stops.get()), daemon=True).start()
        self._connection.start()
        try:
            self._updater.boot()
            self._start_smp()
            self._control_socket.open()
            self._notifier.send(READY)
            while not self._restarts:
                event = self._next_event()
                if isinstance(event, _Stop):
                    break
                if event is not None:
                    HANDLERS[type(event)](self, event)
                self._advance(time.monotonic())
        finally:
            self._shut_down()
        return self._restarts

    def _start_smp(self) -> None:
        if self._smp is None:
            return
        earlier = self._smp.start(self._updater.state, self._updater.update)
        if earlier is not None and self._desired is None:
            self._on_desired(earlier.document, earlier.repository, sideloaded=True)

    def _shut_down(self) -> None:
        LOG.info("stopping")
        self._notifier.send(STOPPING)
        self._control_socket.close()
        self._check.stop()
        self._verification.stop()
        self._remote.commands.stop()
        self._agent_update.stop()
        self._updater.shut_down()
        self._report()
        self._connection.publish_stopped()
        self._ended.set()  # puts of other threads end, too
        if self._smp is not None:
            self._smp.stop()
        self._connection.close()
        self._store.close()

    # -- the loop

    def _next_event(self) -> Event | None:
        online = self._connection.online
        due = [*self._updater.due_s(online=online), self._agent_update.due_s(online=online)]
        due += (self._connection.report_due_s(self._newest), self._verification.due_s)
        due += self._remote.due_s(time.monotonic())
        due_s = min((moment for moment in due if moment is not None), default=float("inf"))
        idle = self._pipeline.report.status == "stopped"
        most_s = IDLE_WAIT_S if idle else MAX_WAIT_S
        timeout_s = min(max(0.0, due_s - time.monotonic()), most_s)
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _on_output(self, event: PipelineOutput) -> None:
        message = self._pipeline.on_message(event)
        if message is not None:
            self._forward(message)
            self._figures.on_message(message)
            if isinstance(message, Failure):
                self._updater.ask("failure", message.message)

    def _on_exited(self, event: PipelineExited) -> None:
        reason = self._pipeline.on_exit(event)
        if reason is not None:
            problem = self._updater.ask("crashed" if event.crashed else "exited", reason)
            if problem:
                running = running_of(self._updater.state)
                name = "the release" if running is None else running.name
                LOG.error("%s crashes in a loop and stays: %s", name, problem)

    def _on_link_up(self, event: LinkUp) -> None:
        self._connection.on_link_up(event)
        self._remote.commands.on_link_up()
        self._updater.downloads.forget_requests()
        self._agent_update.forget_requests()
        self._verification.look_again(time.monotonic())

    def _on_shadow(self, event: ShadowEvent) -> None:
        message = self._updater.on_shadow(event)
        if message:
            self._forward(message)

    def _on_command(self, event: CommandEvent) -> None:
        self._remote.commands.on_event(event, time.monotonic())

    def _on_source(self, event: SourceEvent) -> None:
        if not self._agent_update.on_source(event, time.monotonic()):
            self._updater.downloads.on_source(event, time.monotonic())

    def _on_smp_install(self, event: SmpInstall) -> None:
        self._on_desired(event.document, event.repository, sideloaded=True)

    def _on_verification(self, event: VerificationEvent) -> None:
        self._on_verdict(self._verification.on_event(event, time.monotonic()))

    def _on_smp_restart(self, _event: SmpRestart) -> None:
        self._restarts = True

    def _advance(self, now_s: float) -> None:
        """Do what is due at this time, after each event and each wait."""
        self._notifier.alive(now_s)
        self._pipeline.watch(now_s)
        self._on_verdict(self._verification.advance(now_s))
        self._updater.advance(now_s)
        self._check.advance(now_s, self._updater.state)
        self._remote.advance(now_s)
        works = {"mqtt": self._connection.online, "pipeline": self._works()}
        self._agent_trial.advance(now_s, **works)
        if self._agent_update.advance(now_s, busy=self._updater.on_trial, **works):
            self.stop()
        for downloads in (self._updater.downloads, self._agent_update):
            # `advance` may take long
            request = downloads.next_request(time.monotonic(), online=self._connection.online)
            if request is not None:
                self._connection.send(self._topics.blob_get, encode(request))
        self._report()

    def _on_message(self, message: Message) -> None:
        if message.topic == self._topics.desired:
            is_same = message.payload == self._retained
            if is_same:
                self._connection.on_desired_again()
            repeated = self._handed_over and is_same
            self._retained = message.payload
            if not repeated:  # each connection brings the retained document again
                self._handed_over = False
                if self._smp is not None:
                    self._smp.overtaken()
                self._on_desired(message.payload)
        elif message.topic == self._topics.state:
            self._connection.on_own_state(message.payload)
        elif message.topic.startswith(f"{self._topics.root}/tuf/reply/"):
            request, number = message.topic.split("/")[-2:]
            self._verification.on_reply(request, number, message.payload)
            self._remote.commands.on_reply(request, number, message.payload)
        elif message.topic.startswith(f"{self._topics.root}/cmd/"):
            self._remote.commands.on_message(message.topic, message.payload, time.monotonic())
        else:
            path = message.topic.removeprefix(f"{self._topics.root}/blob/")
            sha256, _, part = path.partition("/")
            self._updater.downloads.take(sha256, part, message.payload, time.monotonic())
            self._agent_update.take(sha256, part, message.payload, time.monotonic())
            self._remote.commands.job.take(sha256, part, message.payload, time.monotonic())

    def _on_desired(
        self, payload: bytes, repository: str = "", *, sideloaded: bool = False
    ) -> None:
        """Take a desired document that nobody waits for: what is wrong with it is reported."""
        self._desired_problem = self._take(payload, repository, sideloaded=sideloaded)
        if self._desired_problem:
            LOG.error("%s", self._desired_problem)

    def _take(self, payload: bytes, repository: str, bundle: str = "", *, sideloaded: bool) -> str:
        """Follow a desired document; return what is wrong with it. `repository`: where its metadata
        are, `bundle`: its file, if elsewhere; `sideloaded`: somebody brought it to the board."""
        try:  # an empty one on the broker withdraws it
            desired, signed = open_desired(payload) if payload or sideloaded else (None, None)
        except ValueError as error:
            return f"the desired document is not understood and changes nothing: {error}"
        if bundle and desired is not None:
            sources = (bundle, *desired.release.sources)
            release = msgspec.structs.replace(desired.release, sources=sources)
            desired = msgspec.structs.replace(desired, release=release)
        self._desired_problem, self._desired, self._sideloaded = "", desired, sideloaded
        self._follow(self._verdict(payload, signed, repository))
        return ""

    def _follow(self, verdict: Verdict) -> None:
        """Follow the desired document; one about the agent leaves the pipeline as it is."""
        desired = self._desired
        is_agent = is_agent_release(desired)
        self._agent_update.on_desired(desired if is_agent else None, verdict)
        if is_agent:
            self._updater.on_desired(None, TRUSTED)
        else:
            self._updater.on_desired(desired, verdict, sideloaded=self._sideloaded)

    def _verdict(self, payload: bytes, signed: Signed | None, repository: str) -> Verdict:
        """Return what is known of a desired document by now."""
        if signed is not None:
            return self._verification.take(payload, time.monotonic(), repository)
        self._verification.forget()
        return TRUSTED if self._config.dev or not payload else Refused(reason=UNSIGNED)

    def _on_verdict(self, verdict: Verdict | None) -> None:
        if verdict is not None:
            self._follow(verdict)

    def _environment(self, now_s: float) -> Environment:
        """Return what a trial is judged by beside its pipeline; figures only while one runs, as
        each look at them reads the sensors."""
        latest = self._figures.latest(now_s) if self._updater.on_trial else Latest()
        return Environment(self._connection.online, latest.latency_p95_ms, latest.temperature_c)

    # -- the control socket

    def _on_control(self, event: ControlRequest) -> None:
        """Do what a program on this board asks for."""
        ask = event.ask
        error = ASKS[type(ask)](self, ask) if type(ask) in ASKS else ""
        answer = Answer(
            error=error,
            device=self._config.device,
            min_version=self._config.update.min_version,
            slots=slot_rows(self._updater.state),
            reported=self._reported(),
        )
        event.reply(answer)

    def _cancel(self, ask: Cancel) -> str:
        """End the update of this request; return why that is not done."""
        if self._desired is None or self._desired.request != ask.request:
            return ""
        update = self._agent_update.update or self._updater.update
        if update.phase == "live" and update.request == ask.request:
            return "the release is live and cannot be cancelled: go back to the one before"
        self._updater.ask("cancel", ask.request)
        self._verification.forget()
        self._agent_update.on_desired(None, TRUSTED)
        self._desired = None
        return ""

    def _install(self, ask: Install) -> str:
        """Follow a desired document whose bundle is on this disk; return what is wrong with it."""
        problem = self._take(ask.desired.encode(), ask.repository, ask.bundle, sideloaded=True)
        self._handed_over |= not problem
        return problem

    def _switch(self, ask: SwitchAgent) -> str:
        """End, so that another version of the agent is tried; return why that is not done."""
        if self._updater.on_trial:
            return "a release is on trial: wait for its end"
        terms = TrialTerms(self._connection.online, self._works(), ask.limit_s)
        problem = self._agent_trial.begin(ask.environment, terms)
        if not problem:
            self.stop()
        return problem

    def _works(self) -> bool:
        return self._pipeline.health().working

    # -- reports

    def _forward(self, message: ChildMessage) -> None:
        """Publish a message of the pipeline; figures at most once a second."""
        if isinstance(message, Stats):
            now_s = time.monotonic()
            if now_s < self._stats_due_s:
                return
            self._stats_due_s = now_s + STATS_S
        self._connection.send(self._topics.stats, encode_message(message).rstrip())

    def _reported(self) -> Reported:
        state, now_s = self._updater.state, time.monotonic()
        record = state.record(state.trial if self._updater.on_trial else state.active)
        phase, health = self._updater.update.phase, self._pipeline.health()
        reported = Reported(
            agent=self._version,
            profile=self._config.profile,
            dev=self._config.dev,
            warning="; ".join(filter(None, (self._dev_warning, self._connection.warning))),
            session=self._connection.session,
            running=running_of(state),
            pipeline=self._pipeline.report,
            update=self._agent_update.update or self._updater.update,
            problems=self._problems(),
            facts=self._facts.of(state, now_s),
            measured=self._figures.measured(record, phase, health, now_s),
            versions=self._agent_update.report,
        )
        if reported != self._unfitted:  # most wakes find nothing new
            self._unfitted, self._fitted = reported, fit(reported)
        return self._fitted

    def _problems(self) -> tuple[str, ...]:
        desired = (self._desired_problem,) if self._desired_problem else ()
        check = self._check.problems(self._updater.state)
        return (*self._updater.problems, *check, *desired)

    def _report(self) -> None:
        if self._smp is not None:
            self._smp.note(self._updater.state, self._updater.update)
        self._newest = self._reported()
        self._connection.report(self._newest, time.monotonic())


HANDLERS: Mapping[type[Event], Callable[[Agent, Any], None]] = {
    Message: Agent._on_message,
    LinkUp: Agent._on_link_up,
    LinkDown: lambda agent, event: agent._connection.on_link_down(event),
    PipelineOutput: Agent._on_output,
    PipelineExited: Agent._on_exited,
    Preparing: lambda agent, event: agent._updater.on_preparing(event),
    PreparationEnded: lambda agent, event: agent._updater.on_prepared(event),
    GoldenEnded: lambda agent, event: agent._updater.on_golden(event),
    ShadowProgress: Agent._on_shadow, ShadowEnded: Agent._on_shadow,
    CommandCheck: Agent._on_command, TaskEnded: Agent._on_command,
    MetadataAsked: Agent._on_verification, VerificationEnded: Agent._on_verification,
    SourcePart: Agent._on_source, SourceEnded: Agent._on_source,
    SmpInstall: Agent._on_smp_install, SmpRestart: Agent._on_smp_restart,
    VersionInstalled: lambda agent, event: agent._agent_update.on_installed(event),
    ControlRequest: Agent._on_control,
}  # fmt: skip
ASKS: Mapping[type[Ask], Callable[[Agent, Any], str]] = {
    Install: Agent._install,
    Cancel: Agent._cancel,
    Rollback: lambda agent, _ask: agent._updater.ask("go_back", "it was asked for on the board"),
    Commit: lambda agent, _ask: agent._updater.ask("accept"),
    SwitchAgent: Agent._switch,
}


def _with_source(config: AgentConfig, folder: str) -> AgentConfig:
    """Return the config with a folder as the first source of releases."""
    update = msgspec.structs.replace(config.update, sources=(folder, *config.update.sources))
    return msgspec.structs.replace(config, update=update)


def serve(config: AgentConfig, row: ProcessRow = PIPELINE) -> None:
    """Run an agent in this process until SIGTERM or SIGINT."""
    stopped = threading.Event()
    while not stopped.is_set():
        agent = Agent(config, row)

        def stop(_number: int, _frame: object, agent: Agent = agent) -> None:
            stopped.set()
            agent.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        if not agent.run():
            break
