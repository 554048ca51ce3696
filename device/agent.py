"""The agent: keeps a board running what its desired document says, and tells how it goes.

It compares the retained `desired` document with the slots and acts on the difference; there are no
commands that could be lost, repeated or queued. Everything that happens (messages, lines of the
pipeline, their ends) arrives on one queue and is handled in one thread. The decisions are pure and
live in `device.updates`, `device.slots` and `device.transfer`; this module carries them out.
"""

import argparse
import logging
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from device import slots
from device.agent_config import AgentConfig, load_agent_config
from device.bundle import BundleInfo
from device.documents import (
    Desired,
    Reported,
    Update,
    decode,
    encode,
)
from device.errors import BundleError, TandemError, TransferError
from device.fetching import Fetching
from device.messages import ChildMessage, Failure, Result, Stats, encode_message
from device.mqtt import LinkDown, LinkEvent, LinkUp, Message, queue_putter
from device.pipeline_process import (
    PIPELINE,
    PipelineEvent,
    PipelineExited,
    PipelineSaid,
    ProcessRow,
)
from device.pipeline_runner import PipelineRunner
from device.presence import Presence
from device.slot_store import SlotStore
from device.slots import Slot, SlotFailure, SlotRecord, SlotState
from device.topics import Topics
from device.updates import (
    Failed,
    FetchIt,
    Live,
    Refuse,
    TryIdle,
    decide,
    running_of,
    update_of,
    update_of_record,
    update_of_slots,
)

LOG = logging.getLogger("tandem.agent")
MAX_EVENTS = 1024
STATS_S = 1.0
DEV_WARNING = "dev = true: this agent takes unsigned releases; do not use it outside a bench"


class _Stop:
    """The event of SIGTERM or SIGINT."""


Event = LinkEvent | PipelineEvent | _Stop


class Agent:
    """One device. `run` returns after SIGTERM (see `serve`) or `stop`."""

    def __init__(self, config: AgentConfig, row: ProcessRow = PIPELINE) -> None:
        self._config = config
        self._topics = Topics(config.device)
        self._store = SlotStore(Path(config.state_dir))
        self._state = SlotState()
        self._events: queue.Queue[Event] = queue.Queue(MAX_EVENTS)
        self._ended = threading.Event()
        self._put: Callable[[Event], None] = queue_putter(self._events, self._ended)
        self._pipeline = PipelineRunner(config, self._topics.root, row, self._put)
        self._presence = Presence(config, self._topics, self._put)
        self._version = _version()
        self._desired: Desired | None = None
        self._fetching = Fetching(self._store.downloads, config.update.window_chunks)
        self._update = Update(phase="idle")
        self._trial_until_s: float | None = None
        self._stats_due_s = 0.0

    def stop(self) -> None:
        """End `run`. Safe in a signal handler: the queue is touched by another thread."""
        threading.Thread(target=self._put, args=(_Stop(),), daemon=True).start()

    def run(self) -> None:
        """Run until `stop`."""
        if self._config.dev:
            LOG.warning(DEV_WARNING)
        self._presence.start()
        try:
            self._boot()
            while True:
                event = self._next_event()
                if isinstance(event, _Stop):
                    break
                self._handle(event)
                self._on_time(time.monotonic())
        finally:
            self._shut_down()

    # -- start and end

    def _boot(self) -> None:
        loaded = self._store.load()
        self._state = slots.interrupted(loaded)
        if self._state != loaded:
            self._save(self._state)
        self._store.clean(self._state)
        if self._state.trial is None:
            self._start_active()
            self._update = update_of_slots(self._state)
            return
        try:
            self._store.verify(self._state.trial)
        except BundleError as error:
            self._end_trial_badly(str(error))
        else:
            self._start_trial(self._state.trial)

    def _shut_down(self) -> None:
        LOG.info("stopping")
        if self._state.trial is not None:
            self._save(slots.suspend(self._state))
        self._pipeline.stop("the agent was stopped")
        self._fetching.pause()
        self._report(time.monotonic())
        self._presence.say_goodbye()
        self._ended.set()
        self._presence.close()
        self._store.close()

    # -- the loop

    def _next_event(self) -> Event | None:
        due = [self._trial_until_s, self._pipeline.restart_at_s]
        due.append(self._presence.report_due_s(self._reported()))
        if self._presence.online:
            due.append(self._fetching.wake_at_s)
        due_s = min((moment for moment in due if moment is not None), default=None)
        timeout_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _handle(self, event: Event | None) -> None:
        if isinstance(event, Message):
            self._on_message(event)
        elif isinstance(event, PipelineSaid):
            self._on_pipeline_said(event)
        elif isinstance(event, PipelineExited):
            self._on_pipeline_exited(event)
        elif isinstance(event, LinkUp):
            self._presence.went_up(event)
            self._fetching.forget_flight()
        elif isinstance(event, LinkDown):
            self._presence.went_down(event)

    def _on_time(self, now_s: float) -> None:
        if self._trial_until_s is not None and now_s >= self._trial_until_s:
            self._end_trial_badly(
                f"the pipeline gave no result within {self._config.update.trial_timeout_s:g} s "
                "(trial_timeout_s)"
            )
        restart_at_s = self._pipeline.restart_at_s
        if restart_at_s is not None and now_s >= restart_at_s:
            active = self._state.active
            self._start_active(fresh=False)
            if self._state.active != active:
                self._reconcile()
        self._go_on_fetching(now_s)
        self._report(now_s)

    def _on_message(self, message: Message) -> None:
        if message.topic == self._topics.desired:
            self._on_desired(message.payload)
        elif message.topic == self._topics.state:
            self._presence.heard_own_state(message.payload)
        else:
            self._on_part(message)

    # -- what is desired

    def _on_desired(self, payload: bytes) -> None:
        if not payload:
            self._desired = None
        else:
            try:
                self._desired = decode(payload, Desired)
            except ValueError as error:
                LOG.error("the desired document is not understood and changes nothing: %s", error)
                return
        self._reconcile()

    def _reconcile(self) -> None:
        """Act on the difference between what is desired and what is there."""
        if self._state.trial is not None:
            return  # comes back here when the trial has ended
        desired = self._desired
        if desired is None:
            self._fetching.pause()
            self._update = update_of_slots(self._state)
            return
        decision = decide(desired, self._state, profile=self._config.profile, dev=self._config.dev)
        if not isinstance(decision, FetchIt):
            self._fetching.pause()
        if isinstance(decision, Live):
            self._update = update_of(desired, "live", desired.release.blob.bytes)
        elif isinstance(decision, Refuse):
            self._refuse(desired, decision.reason)
        elif isinstance(decision, Failed):
            tried = decision.phase == "rolled_back"
            received = desired.release.blob.bytes if tried else 0
            self._update = update_of(desired, decision.phase, received, decision.reason)
        elif isinstance(decision, TryIdle):
            self._try_idle(desired)
        else:
            self._start_fetching(desired)

    def _refuse(self, desired: Desired, reason: str) -> None:
        LOG.error("refused %s: %s", desired.release.name, reason)
        self._update = update_of(desired, "refused", reason=reason)

    def _try_idle(self, desired: Desired) -> None:
        try:
            self._store.verify(self._state.idle)
        except BundleError as error:
            LOG.warning("%s; it is fetched again", error)
            self._save(slots.clear(self._state))
            self._start_fetching(desired)
            return
        self._begin_trial(desired.request)

    # -- fetching

    def _start_fetching(self, desired: Desired) -> None:
        blob = desired.release.blob
        try:
            self._fetching.begin(blob)
        except (TransferError, OSError) as error:
            self._refuse(desired, _reason(error))
            return
        LOG.info(
            "fetching %s: %d of %d bytes are there",
            desired.release.name,
            self._fetching.received_bytes,
            blob.bytes,
        )
        self._update = update_of(desired, "downloading", self._fetching.received_bytes)

    def _on_part(self, message: Message) -> None:
        sha256, _, part = message.topic.removeprefix(f"{self._topics.root}/blob/").partition("/")
        try:
            self._fetching.take(sha256, part, message.payload, time.monotonic())
        except (TransferError, OSError) as error:
            self._give_up_fetching(_reason(error))

    def _go_on_fetching(self, now_s: float) -> None:
        desired = self._desired
        if not self._fetching.running or desired is None:
            return
        received = self._fetching.received_bytes
        self._update = msgspec.structs.replace(self._update, received_bytes=received)
        if self._fetching.complete:
            self._stage(desired)
        elif self._presence.online:
            request = self._fetching.next_request(now_s)
            if request is not None:
                self._presence.send(self._topics.blob_get, encode(request))

    def _give_up_fetching(self, reason: str) -> None:
        """Refuse the release for good: fetching it again would end the same way."""
        desired = self._desired
        if not self._fetching.running or desired is None:
            return
        self._fetching.remove()
        failure = SlotFailure(
            sha256=desired.release.blob.sha256,
            request=desired.request,
            phase="refused",
            reason=reason,
        )
        self._save(slots.refuse(self._state, failure))
        self._refuse(desired, reason)

    def _stage(self, desired: Desired) -> None:
        """Check the whole bundle, unpack it into the idle slot and try it."""
        blob = desired.release.blob
        self._update = update_of(desired, "staging", blob.bytes)
        self._report(time.monotonic())
        try:
            info = self._unpack()
        except (BundleError, TransferError, OSError) as error:
            self._give_up_fetching(_reason(error))
            return
        record = SlotRecord(
            sha256=blob.sha256,
            bytes=blob.bytes,
            name=info.name,
            version=info.version,
            request=desired.request,
        )
        self._save(slots.stage(self._state, record))
        self._fetching.remove()
        self._begin_trial(desired.request)

    def _unpack(self) -> BundleInfo:
        path = self._fetching.finish()
        self._save(slots.clear(self._state))
        info = self._store.populate(self._state.idle, path)
        # The desired document said so too, but it is not what was built.
        if info.profile != self._config.profile:
            raise BundleError(
                f"the engine in the bundle is built for {info.profile}, this device is "
                f"{self._config.profile}: build an engine for {self._config.profile}"
            )
        return info

    # -- trial

    def _begin_trial(self, request: str) -> None:
        # Written before the start: an agent that dies from here on knows that it tried.
        self._save(slots.begin_trial(self._state, request))
        self._start_trial(self._state.idle)

    def _start_trial(self, slot: Slot) -> None:
        record = self._state.record(slot)
        assert record is not None
        LOG.info("trying %s %s in slot %s", record.name, record.version, slot)
        self._update = update_of_record(record, "trial")
        self._pipeline.start(self._store.slot_folder(slot), fresh=True)
        self._trial_until_s = time.monotonic() + self._config.update.trial_timeout_s

    def _end_trial_well(self) -> None:
        self._trial_until_s = None
        self._save(slots.confirm(self._state))
        record = self._state.record(self._state.active)
        assert record is not None
        LOG.info("%s %s is live", record.name, record.version)
        self._update = update_of_record(record, "live")
        self._reconcile()

    def _end_trial_badly(self, reason: str) -> None:
        self._trial_until_s = None
        record = self._state.record(self._state.trial)
        assert record is not None
        LOG.error("%s %s is rolled back: %s", record.name, record.version, reason)
        self._pipeline.stop("the trial failed")
        self._save(slots.roll_back(self._state, reason))
        self._update = update_of_record(record, "rolled_back", reason[: slots.MAX_REASON])
        self._start_active()
        self._reconcile()

    # -- the pipeline

    def _start_active(self, *, fresh: bool = True) -> None:
        """Start the active slot; a damaged one is left for the other, if that was good."""
        while self._state.active is not None:
            try:
                self._store.verify(self._state.active)
            except BundleError as error:
                LOG.error("%s", error)
                self._save(slots.lose_active(self._state))
                continue
            self._pipeline.start(self._store.slot_folder(self._state.active), fresh=fresh)
            return
        self._pipeline.stop("there is no release to run")

    def _on_pipeline_said(self, event: PipelineSaid) -> None:
        message = self._pipeline.heard(event)
        if message is None:
            return
        self._forward(message)
        if self._state.trial is None:
            return
        if isinstance(message, Result):
            self._end_trial_well()
        elif isinstance(message, Failure):
            self._end_trial_badly(message.message)

    def _on_pipeline_exited(self, event: PipelineExited) -> None:
        reason = self._pipeline.ended(event)
        if reason is None:
            return
        if self._state.trial is not None:
            self._end_trial_badly(reason)
        else:
            LOG.error("%s", reason)

    def _forward(self, message: ChildMessage) -> None:
        """Pass the pipeline's words on; figures at most once a second."""
        if isinstance(message, Stats):
            now_s = time.monotonic()
            if now_s < self._stats_due_s:
                return
            self._stats_due_s = now_s + STATS_S
        self._presence.send(self._topics.stats, encode_message(message).rstrip())

    # -- reports

    def _save(self, state: SlotState) -> None:
        self._state = self._store.save(state)

    def _reported(self) -> Reported:
        return Reported(
            agent=self._version,
            profile=self._config.profile,
            dev=self._config.dev,
            warning=DEV_WARNING if self._config.dev else "",
            session=self._presence.session,
            running=running_of(self._state),
            pipeline=self._pipeline.report,
            update=self._update,
        )

    def _report(self, now_s: float) -> None:
        self._presence.report(self._reported(), now_s)


def _reason(error: Exception) -> str:
    return f"the disk failed: {error}" if isinstance(error, OSError) else str(error)


def _version() -> str:
    try:
        return metadata.version("tandem-edge")
    except metadata.PackageNotFoundError:
        return "unknown"


def serve(config: AgentConfig, row: ProcessRow = PIPELINE) -> None:
    """Run an agent in this process until SIGTERM or SIGINT."""
    agent = Agent(config, row)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: agent.stop())
    agent.run()


def main(argv: Sequence[str] | None = None) -> int:
    """The command `tandem-agent`."""
    parser = argparse.ArgumentParser(
        prog="tandem-agent",
        description="Runs the board's pipeline, reports over MQTT and takes releases from "
        "`tandem deploy`. Runs until SIGTERM.",
        epilog="example: tandem-agent --config /etc/tandem/agent.toml",
    )
    parser.add_argument("--config", required=True, type=Path, help="agent.toml of this board")
    parser.add_argument(
        "--log-level",
        default="INFO",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        help="what goes to stderr (default: INFO)",
    )
    arguments = parser.parse_args(argv)
    logging.basicConfig(
        level=arguments.log_level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        serve(load_agent_config(arguments.config))
    except TandemError as error:
        print(f"tandem-agent: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
