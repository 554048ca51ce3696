"""Brings the board to the desired release: download, unpack, trial, commit or rollback.

The decisions are pure functions of `device.update.decisions`, `device.update.slots` and
`device.update.transfer`; this module carries them out in the one thread of `device.agent.agent`. A
transition that an interrupted update must find again is written to the disk before it happens. One
that has happened stays in force if the disk is full: that never costs the release that runs.
"""

import logging
import time
from collections.abc import Callable

import msgspec

from device.agent.config import AgentConfig
from device.agent.pipeline_runner import PipelineRunner
from device.errors import BundleError, StateError, TandemError
from device.protocol.documents import BlobGet, Desired, Update
from device.protocol.messages import ChildMessage, Failure, Result
from device.update import slots
from device.update.bundle import BundleInfo
from device.update.decisions import (
    Failed,
    FetchIt,
    Live,
    Refuse,
    TryIdle,
    decide,
    update_of,
    update_of_record,
    update_of_slots,
)
from device.update.fetching import Fetching
from device.update.slot_store import SlotStore
from device.update.slots import Slot, SlotFailure, SlotRecord, SlotState

LOG = logging.getLogger("tandem.agent")


class Updater:
    """Decides which release runs. The agent passes it events and the time."""

    def __init__(
        self,
        config: AgentConfig,
        store: SlotStore,
        pipeline: PipelineRunner,
        report: Callable[[], None],
    ) -> None:
        """`report` publishes the reported state before something that takes long."""
        self.state = SlotState()
        self.update = Update(phase="idle")
        self._config = config
        self._store = store
        self._pipeline = pipeline
        self._report = report
        self._desired: Desired | None = None
        self._fetching = Fetching(store.downloads, config.update.window_chunks)
        self._trial_deadline_s: float | None = None

    # -- boot and shutdown

    def boot(self) -> None:
        """Start the active slot, or resume the trial that was interrupted."""
        self.state = self._store.load()
        if self.state.trial is None:
            self._store.clean(self.state)
            self._start_active()
            self.update = update_of_slots(self.state)
            return
        resumed = slots.interrupted(self.state)
        if resumed.trial is None:
            assert resumed.failure is not None
            self._roll_back(resumed.failure.reason)
            return
        try:
            self._save(resumed)  # an attempt that is not counted could go on for ever
            self._store.clean(self.state)
            self._store.verify(resumed.trial)
        except (BundleError, StateError) as error:
            self._roll_back(str(error))
        else:
            self._start_trial(resumed.trial)

    def shut_down(self) -> None:
        """Stop the pipeline; an attempt that is running does not count."""
        if self.state.trial is not None:
            self._note(slots.suspend(self.state))
        self._pipeline.stop("the agent was stopped")
        self._fetching.pause()

    # -- time

    def due_s(self, *, online: bool) -> tuple[float | None, ...]:
        """Return when `advance` or `next_request` has something to do without an event."""
        wake_at_s = self._fetching.wake_at_s if online else None
        return self._trial_deadline_s, self._pipeline.restart_at_s, wake_at_s

    def advance(self, now_s: float) -> None:
        """Do what is due: end an expired trial, restart the pipeline, try a complete download."""
        if self._trial_deadline_s is not None and now_s >= self._trial_deadline_s:
            self._roll_back(
                f"the pipeline gave no result within {self._config.update.trial_timeout_s:g} s "
                "(trial_timeout_s)"
            )
        restart_at_s = self._pipeline.restart_at_s
        if restart_at_s is not None and now_s >= restart_at_s:
            active = self.state.active
            self._start_active(fresh=False)
            if self.state.active != active:
                self._reconcile()
        self._advance_download()

    # -- desired state

    def on_desired(self, desired: Desired | None) -> None:
        """Take the desired state; None: it was cleared."""
        self._desired = desired
        self._reconcile()

    def _reconcile(self) -> None:
        """Act on the difference between the desired state and the slots."""
        if self.state.trial is not None:
            return  # called again when the trial has ended
        desired = self._desired
        if desired is None:
            self._fetching.pause()
            self.update = update_of_slots(self.state)
            return
        decision = decide(desired, self.state, profile=self._config.profile, dev=self._config.dev)
        if not isinstance(decision, FetchIt):
            self._fetching.pause()
        if isinstance(decision, Live):
            self.update = update_of(desired, "live", desired.release.blob.bytes)
        elif isinstance(decision, Refuse):
            self._refuse(desired, decision.reason)
        elif isinstance(decision, Failed):
            tried = decision.phase == "rolled_back"
            received = desired.release.blob.bytes if tried else 0
            self.update = update_of(desired, decision.phase, received, decision.reason)
        elif isinstance(decision, TryIdle):
            self._try_idle(desired)
        else:
            self._start_fetching(desired)

    def _refuse(self, desired: Desired, reason: str) -> None:
        LOG.error("refused %s: %s", desired.release.name, reason)
        self.update = update_of(desired, "refused", reason=reason)

    def _try_idle(self, desired: Desired) -> None:
        try:
            self._store.verify(self.state.idle)
        except BundleError as error:
            LOG.warning("%s; it is fetched again", error)
            self._note(slots.clear(self.state))
            self._start_fetching(desired)
            return
        self._begin_trial(desired)

    # -- download

    def _start_fetching(self, desired: Desired) -> None:
        blob = desired.release.blob
        try:
            self._fetching.begin(blob)
        except (TandemError, OSError) as error:
            self._refuse(desired, _reason(error))
            return
        LOG.info(
            "fetching %s: %d of %d bytes are there",
            desired.release.name,
            self._fetching.received_bytes,
            blob.bytes,
        )
        self.update = update_of(desired, "downloading", self._fetching.received_bytes)

    def on_part(self, sha256: str, part: str, payload: bytes, now_s: float) -> None:
        """Take a part of a blob that arrived."""
        try:
            self._fetching.take(sha256, part, payload, now_s)
        except (TandemError, OSError) as error:
            self._give_up_fetching(_reason(error))

    def on_reconnect(self) -> None:
        """Forget the requests of the old connection: they are not answered."""
        self._fetching.forget_requests()

    def next_request(self, now_s: float) -> BlobGet | None:
        """Return the request to send now, or None; its chunks count as in flight from here on."""
        return self._fetching.next_request(now_s)

    def _advance_download(self) -> None:
        """Note the progress of the download; stage a complete one."""
        desired = self._desired
        if not self._fetching.running or desired is None:
            return
        received = self._fetching.received_bytes
        self.update = msgspec.structs.replace(self.update, received_bytes=received)
        if self._fetching.complete:
            self._stage(desired)

    def _give_up_fetching(self, reason: str) -> None:
        """Refuse this request for good: another download would end the same way."""
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
        self._note(slots.refuse(self.state, failure))
        self._refuse(desired, reason)

    def _stage(self, desired: Desired) -> None:
        """Check the whole bundle, unpack it into the idle slot and begin its trial."""
        blob = desired.release.blob
        self.update = update_of(desired, "staging", blob.bytes)
        self._report()
        try:
            info = self._unpack()
            record = SlotRecord(
                sha256=blob.sha256,
                bytes=blob.bytes,
                name=info.name,
                version=info.version,
                request=desired.request,
            )
            self._save(slots.stage(self.state, record))
        except (TandemError, OSError) as error:
            self._give_up_fetching(_reason(error))
            return
        self._fetching.remove()
        self._begin_trial(desired)

    def _unpack(self) -> BundleInfo:
        path = self._fetching.finish()
        self._save(slots.clear(self.state))
        info = self._store.populate(self.state.idle, path)
        # The desired document names a profile too, but it is not what was built.
        if info.profile != self._config.profile:
            raise BundleError(
                f"the engine in the bundle is built for {info.profile}, this device is "
                f"{self._config.profile}: build an engine for {self._config.profile}"
            )
        return info

    # -- trial

    def _begin_trial(self, desired: Desired) -> None:
        # Written before the start: an agent that dies from here on counts this attempt.
        try:
            self._save(slots.begin_trial(self.state, desired.request))
        except StateError as error:
            self._refuse(desired, str(error))
            return
        self._start_trial(self.state.idle)

    def _start_trial(self, slot: Slot) -> None:
        record = self.state.record(slot)
        assert record is not None
        LOG.info("trying %s %s in slot %s", record.name, record.version, slot)
        self.update = update_of_record(record, "trial")
        self._trial_deadline_s = time.monotonic() + self._config.update.trial_timeout_s
        if not self._pipeline.start(self._store.slot_folder(slot), fresh=True):
            self._roll_back(self._pipeline.report.reason)

    def _commit_trial(self) -> None:
        self._trial_deadline_s = None
        self._note(slots.confirm(self.state))
        record = self.state.record(self.state.active)
        assert record is not None
        LOG.info("%s %s is live", record.name, record.version)
        self.update = update_of_record(record, "live")
        self._reconcile()

    def _roll_back(self, reason: str) -> None:
        self._trial_deadline_s = None
        record = self.state.record(self.state.trial)
        assert record is not None
        LOG.error("%s %s is rolled back: %s", record.name, record.version, reason)
        self._pipeline.stop("the trial failed")
        self._note(slots.roll_back(self.state, reason))
        self._store.clean(self.state)
        self.update = update_of_record(record, "rolled_back", reason[: slots.MAX_REASON])
        self._start_active()
        self._reconcile()

    # -- the pipeline

    def on_pipeline_message(self, message: ChildMessage) -> None:
        """Commit a trial at its first result, roll it back at a failure."""
        if self.state.trial is None:
            return
        if isinstance(message, Result):
            self._commit_trial()
        elif isinstance(message, Failure):
            self._roll_back(message.message)

    def on_pipeline_exit(self, reason: str) -> None:
        """Roll a trial back; any other pipeline is restarted by `advance`."""
        if self.state.trial is not None:
            self._roll_back(reason)
        else:
            LOG.error("%s", reason)

    def _start_active(self, *, fresh: bool = True) -> None:
        """Start the active slot; a damaged one is given up for the idle one, if that was good."""
        while self.state.active is not None:
            try:
                self._store.verify(self.state.active)
            except BundleError as error:
                LOG.error("%s", error)
                self._note(slots.lose_active(self.state))
                continue
            self._pipeline.start(self._store.slot_folder(self.state.active), fresh=fresh)
            return
        self._pipeline.stop("there is no release to run")

    # -- the disk

    def _save(self, state: SlotState) -> None:
        """Change the state only if the disk keeps it; StateError otherwise."""
        self.state = self._store.save(state)

    def _note(self, state: SlotState) -> None:
        """Change the state even if the disk does not keep it: it has happened already."""
        try:
            self._save(state)
        except StateError as error:
            LOG.error("%s", error)
            self.state = state


def _reason(error: Exception) -> str:
    return f"the disk failed: {error}" if isinstance(error, OSError) else str(error)
