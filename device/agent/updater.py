"""Brings the board to the desired release: carries out what `device.update.machine` decides.

It runs in the one thread of `device.agent.agent`. What an effect gives is the next event of the
machine, and so is what a child says, or the pipeline, or whoever asks.
"""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from device.agent.config import AgentConfig
from device.agent.downloads import Downloads
from device.agent.golden_check import MISSING, GoldenCheck, GoldenEnded, golden_refusal
from device.agent.pipeline_runner import PipelineRunner
from device.agent.preparation import Preparation, PreparationEnded, Preparing, built_now, refusal
from device.agent.shadow_process import (
    ShadowEnded,
    ShadowLimits,
    ShadowProcess,
    ShadowProgress,
    shadow_refusal,
)
from device.agent.slot_state_cache import SlotStateCache, utc_now
from device.errors import BundleError, BundleReadError, StateError
from device.protocol.documents import Desired, DeviceFacts, InstallPolicy, Update
from device.protocol.messages import Shadow
from device.trust.exchange import Verdict
from device.update import events as v
from device.update.admission import NO_SERVICES, BoardState
from device.update.boot import with_whole_active
from device.update.bundle import read_folder_info
from device.update.machine import step
from device.update.slot_store import SlotStore
from device.update.slots import SlotState
from device.update.sources.reader import SourceEvent
from device.update.trial import Environment

LOG = logging.getLogger("tandem.agent")
LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Updater:
    """Decides which release runs. The agent passes it events and the time."""

    def __init__(
        self,
        config: AgentConfig,
        store: SlotStore,
        pipeline: PipelineRunner,
        report: Callable[[], None],
        preparation: Preparation | None = None,
        *,
        golden: GoldenCheck | None = None,
        shadow: ShadowProcess | None = None,
        put: Callable[[SourceEvent], None] = lambda _event: None,
        environment: Callable[[float], Environment] = lambda _now_s: Environment(),
        facts: Callable[[], DeviceFacts] = DeviceFacts,
        local_time: Callable[[], time.struct_time] = time.localtime,
    ) -> None:
        """`report` publishes the reported state before something that takes long.

        `preparation` finishes the segments of a slot with TensorRT; None: nothing does. `golden`
        runs golden inputs before a trial, `shadow` a release beside the live one; None: nothing
        does. `environment`: what is beside the pipeline; `facts`: what the board is;
        `local_time`: of the device.
        """
        self._config = config.update
        self._services = config.pipeline.services
        self._setup = v.Setup(config.profile, config.update)
        self._state = v.State()
        self._store = store
        self._slots = SlotStateCache(store)
        self._pipeline = pipeline
        self._report = report
        self._preparation = preparation
        self._golden = golden
        self._shadow = shadow
        self._environment = environment
        self._facts = facts
        self._local_time = local_time
        self.downloads = Downloads(config, store, self._slots, put)

    @property
    def update(self) -> Update:
        """The report on the desired release."""
        return self._state.update

    @property
    def state(self) -> SlotState:
        """The state of the slots."""
        return self._slots.state

    @property
    def on_trial(self) -> bool:
        """Whether the pipeline that runs is that of a trial."""
        return self._state.on_trial

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences on the slots that an operator should know."""
        return self._slots.problems

    # -- what happens

    def boot(self) -> None:
        """Start the active slot, or resume the trial that was interrupted."""
        self._slots.boot()
        self.ask("boot")

    def shut_down(self) -> None:
        """Stop the pipeline; an attempt that is running does not count."""
        self.ask("shut_down")
        for child in (self._preparation, self._golden):
            if child is not None:
                child.stop()

    def due_s(self, *, online: bool) -> tuple[float | None, ...]:
        """Return when `advance` or a request has something to do without an event."""
        fetching = self.downloads
        wake_s = fetching.wake_at_s if online else fetching.wake_offline_at_s
        return self._state.judge_at_s, self._pipeline.restart_at_s, self._slots.retry_at_s, wake_s

    def advance(self, now_s: float) -> None:
        """Do what is due: judge a trial, restart the pipeline, try a complete download."""
        self._take(v.Observed(self._pipeline.health()), now_s)
        restart_at_s = self._pipeline.restart_at_s
        if restart_at_s is not None and now_s >= restart_at_s:
            self.ask("restart_due")
        self._slots.retry(now_s)
        event = self.downloads.look()
        if event is not None:
            self._take(event)

    def on_desired(
        self, desired: Desired | None, verdict: Verdict, *, sideloaded: bool = False
    ) -> None:
        """Take the desired state, None: it was cleared, and what its signatures say.

        `sideloaded`: somebody brought the release to the board.
        """
        self._take(v.DesiredSet(desired, verdict, sideloaded))

    def ask(self, word: v.NoticeWord, text: str = "") -> str:
        """Do what somebody asks for; return why it cannot be."""
        return self._take(v.Notice(word, text))

    def set_pipeline(self, status: str) -> str:
        """Start or stop the pipeline of the live release; return why it cannot be."""
        if status != "running":
            return self.ask("stop", "it was stopped by a command")
        return self.ask("restart") if self._pipeline.report.status == "stopped" else ""

    def on_preparing(self, event: Preparing) -> None:
        """Take the progress of a build."""
        if self._preparation is not None and self._preparation.is_current(event.run):
            text = f"TensorRT builds segment {event.segment}, {event.seconds:.0f} s so far"
            self.ask("preparing", text)

    def on_prepared(self, event: PreparationEnded) -> None:
        """Take the end of a preparation."""
        if self._preparation is None or not self._preparation.ended(event.run):
            return
        if event.rows is None:
            LOG.error("the segments were not prepared: %s", event.problem)
        rows = event.rows or ()
        for row in rows:
            if row.problem is not None:
                LOG.warning("segment %s is not TensorRT's: %s", row.segment, row.problem)
        self._take(v.Checked("preparation", refusal(rows), built=built_now(rows)))

    def on_golden(self, event: GoldenEnded) -> None:
        """Take the end of golden inputs."""
        if self._golden is not None and self._golden.ended(event.run):
            problem = golden_refusal(event, self._policy)
            agreement = 0.0 if event.result is None else event.result.agreement
            self._take(v.Checked("golden", problem, event.passing, agreement))

    def on_shadow(self, event: ShadowProgress | ShadowEnded) -> Shadow | None:
        """Take what a release says that runs in shadow; return the message of a current one."""
        if self._shadow is None:
            return None
        if isinstance(event, ShadowEnded):
            if self._shadow.ended(event.run):
                problem = shadow_refusal(event, self._policy, self._config.shadow_frames)
                result = event.result or Shadow(frames=0, agreement=0.0, counted=0)
                agreement, frames = result.agreement, result.frames
                self._take(v.Checked("shadow", problem, event.passing, agreement, frames))
            return None
        if not self._shadow.is_current(event.run):
            return None
        comparison = event.message
        share = f"{comparison.agreement:.2%} of {comparison.counted} results agree"
        text = f"{comparison.frames} live frames compared with the live release, {share}"
        self.ask("shadowing", text)
        return comparison

    # -- the machine

    def _take(self, event: v.Event, now_s: float | None = None) -> str:
        """Take an event, and those that come of it; return why what was asked for cannot be."""
        events, answer = deque([event]), ""
        while events:
            state = dataclasses.replace(self._state, slots=self._slots.state)
            at = self._moment(time.monotonic() if now_s is None else now_s)
            self._state, effects = step(self._setup, state, events.popleft(), at)
            for effect in effects:
                outcome = self._carry_out(effect)
                if isinstance(outcome, str):
                    answer = outcome
                elif outcome == v.Notice("active_changed"):  # the others were about other slots
                    events.appendleft(outcome)
                elif outcome is not None:
                    events.append(outcome)
        return answer

    def _moment(self, now_s: float) -> v.Moment:
        local, pipeline = self._local_time(), self._pipeline
        return v.Moment(
            now_s=now_s, utc=utc_now(), hour=local.tm_hour, minute=local.tm_min,
            environment=self._environment(now_s), unread=frozenset(self._store.unread),
            stopped=pipeline.report.status == "stopped" and pipeline.restart_at_s is None,
        )  # fmt: skip

    def _carry_out(self, effect: v.Effect) -> v.Event | str | None:
        if isinstance(effect, v.Save):
            return self._save(effect)
        if effect.word in LEVELS:
            LOG.log(LEVELS[effect.word], "%s", effect.text)
            return None
        return EFFECTS[effect.word](self, effect)

    def _save(self, effect: v.Save) -> v.Event | None:
        if not effect.first:
            self._slots.note(effect.slots)
            return None
        try:
            if effect.reserve:
                self._store.reserve()
            self._slots.save(effect.slots)
        except StateError as error:
            return v.Notice("not_recorded", str(error))
        return v.Notice("recorded")

    @property
    def _policy(self) -> InstallPolicy:
        desired = self._state.desired
        return InstallPolicy() if desired is None else desired.policy

    @property
    def _desired(self) -> Desired:
        assert self._state.desired is not None
        return self._state.desired

    def _folder(self, effect: v.Do) -> Path:
        assert effect.slot is not None
        return self._store.slot_folder(effect.slot)

    def _compare(self, _effect: v.Do) -> v.Event:
        """Tell what the board has; a bundle that was brought is there, and not copied."""
        room, blob = self._store.room(self.state), self._desired.release.blob
        if room is not None and self._store.sideloaded(blob.sha256, blob.bytes):
            room = dataclasses.replace(room, free_bytes=room.free_bytes + blob.bytes)
        return v.Compared(BoardState(self._facts(), room, self.state.floors))

    def _verify(self, effect: v.Do) -> v.Event | str:
        try:
            self._store.verify(self.state.idle)
        except BundleError as error:
            if effect.word == "fall_back":
                return str(error)
            return v.Notice(
                "unread" if isinstance(error, BundleReadError) else "damaged", str(error)
            )
        return v.Notice("whole") if effect.word == "verify" else v.Notice("fall_back", effect.text)

    def _prepare(self, effect: v.Do) -> v.Event:
        """Prepare a release; a service has nothing to prepare, and is refused here if this board
        runs none: what is live goes on."""
        service = self._service(effect)
        if service is not None:
            refused = None if self._services else NO_SERVICES.format(name=service)
            return v.Checked("preparation", refused)
        runs = self._preparation is not None and self._preparation.start(self._folder(effect))
        return v.Notice("preparation_runs") if runs else v.Checked("preparation")

    def _service(self, effect: v.Do) -> str | None:
        """Return the name of the release in a slot if it is a service."""
        try:
            info = read_folder_info(self._folder(effect))
        except BundleError:  # the slot is verified before each trial
            return None
        return info.name if info.is_service else None

    def _run_golden(self, effect: v.Do) -> v.Event | None:
        least = self._policy.min_golden_agreement
        if least is not None and (service := self._service(effect)) is not None:
            LOG.warning("min_golden_agreement is left out: %s is a service", service)
            return v.Checked("golden", skipped=True)
        try:
            if self._golden is not None and self._golden.start(self._folder(effect), least):
                return None
        except BundleError as error:  # the slot is verified before each trial
            LOG.error("%s", error)
            return v.Checked("golden", None if least is None else str(error), passing=True)
        return v.Checked("golden", None if least is None else MISSING)

    def _run_shadow(self, effect: v.Do) -> None:
        assert self._shadow is not None
        config = self._config
        limits = ShadowLimits(
            self._policy.shadow_s, config.shadow_frames, config.trial_timeout_s,
            config.shadow_max_hz,
        )  # fmt: skip
        self._shadow.start(self._folder(effect), limits)

    def _stop_shadow(self, _effect: v.Do) -> None:
        if self._shadow is not None:
            self._shadow.stop()

    def _run_trial(self, effect: v.Do) -> v.Event | None:
        if self._pipeline.start(self._folder(effect), fresh=effect.word == "trial"):
            return None
        return v.Notice("not_started", self._pipeline.report.reason)

    def _run_active(self, effect: v.Do) -> v.Event | None:
        """Run the active slot; a damaged one is given up for the idle one, if that was good."""
        state = with_whole_active(self._store, self.state)
        is_whole = state == self.state
        if not is_whole:
            self._slots.note(state)
        elif effect.word == "check_active":
            return None
        if state.active is None:
            self._pipeline.stop("there is no release to run")
        else:
            folder = self._store.slot_folder(state.active)
            self._pipeline.start(folder, fresh=effect.word != "active_again")
        return None if is_whole else v.Notice("active_changed")


EFFECTS: Mapping[v.DoWord, Callable[[Updater, v.Do], v.Event | str | None]] = {
    "answer": lambda _updater, effect: effect.text,
    "report": lambda updater, _effect: updater._report(),
    "compare": Updater._compare,
    "fetch": lambda updater, _effect: updater.downloads.fetch(updater._desired),
    "pause_fetch": lambda updater, _effect: updater.downloads.pause(),
    "unpack": lambda updater, _effect: updater.downloads.unpack(updater._desired),
    "verify": Updater._verify, "fall_back": Updater._verify, "prepare": Updater._prepare,
    "golden": Updater._run_golden,
    "shadow": Updater._run_shadow, "stop_shadow": Updater._stop_shadow,
    "trial": Updater._run_trial, "trial_again": Updater._run_trial,
    "active": Updater._run_active, "active_again": Updater._run_active,
    "check_active": Updater._run_active,
    "stop": lambda updater, effect: updater._pipeline.stop(effect.text),
}  # fmt: skip
