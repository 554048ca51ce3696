"""Shadow mode: before its trial a release sees the frames of the one that is live.

What decides is `shadow_refusal`; the attempt is written to the disk before the child starts, as
that of a trial is, so that a release that takes the board down is not run for ever.
"""

import logging
from collections.abc import Callable

from device.agent.shadow_process import ShadowEnded, ShadowLimits, ShadowProcess, ShadowSaid
from device.agent.slot_state_cache import SlotStateCache
from device.agent.update_status import UpdateStatus
from device.errors import StateError
from device.protocol.documents import Desired, InstallPolicy
from device.protocol.messages import Shadow
from device.update import slots
from device.update.decisions import update_of
from device.update.slot_store import SlotStore
from device.update.slots import MAX_ATTEMPTS
from device.update.update_table import UpdateTable

LOG = logging.getLogger("tandem.agent")
NO_RELEASE = (
    "the policy asks how well live frames agree with the running release (min_shadow_agreement), "
    "and none runs on this board: roll it out here without that limit"
)
DIED = (
    f"the agent died in {MAX_ATTEMPTS} of {MAX_ATTEMPTS} attempts to run this release beside the "
    "live one (shadow_s); see the log of the board for the cause"
)


def shadow_refusal(event: ShadowEnded, policy: InstallPolicy, min_frames: int) -> str | None:
    """Return why the release must not be tried, None if it may."""
    result = event.result
    if result is None:
        return f"it cannot run beside the live release: {event.problem}"
    if result.frames < min_frames:
        return (
            f"{result.frames} live frames were compared with the live release in "
            f"{policy.shadow_s:g} s (shadow_s), at least {min_frames} must be (shadow_frames): "
            "look whether the pipeline has frames"
        )
    least = policy.min_shadow_agreement
    if least is not None and not result.counted:
        return (
            f"on {result.frames} live frames neither release saw anything, so that nothing shows "
            f"whether {least:.2%} agree (min_shadow_agreement): deploy it again while the camera "
            "has something to see"
        )
    if least is not None and result.agreement < least:
        return (
            f"on {result.frames} live frames {result.agreement:.2%} of {result.counted} results "
            f"agree with the live release, at least {least:.2%} must (min_shadow_agreement)"
        )
    return None


class ShadowRun:
    """The comparison of the release in the idle slot with the active one."""

    def __init__(
        self,
        config: UpdateTable,
        *,
        store: SlotStore,
        kept: SlotStateCache,
        order: UpdateStatus,
        process: ShadowProcess | None,
        begin: Callable[[Desired], None],
    ) -> None:
        """`process` None: none can run here. `begin` goes on with the trial."""
        self._config = config
        self._store = store
        self._kept = kept
        self._order = order
        self._process = process
        self._begin = begin
        self._request = ""  # that of the child that runs

    def waits(self, desired: Desired) -> bool:
        """Begin a comparison that is due; return whether the trial waits for it, or is refused."""
        policy, process = desired.policy, self._process
        if not policy.shadow_s or process is None:
            return False
        if self._kept.state.active is None:
            if policy.min_shadow_agreement is None:
                return False  # there is nothing to compare with
            self._refuse(desired, NO_RELEASE)
            return True
        record = self._kept.record(self._kept.state.idle)
        if record.shadow_request == desired.request and record.shadow_agreement is not None:
            return False
        if process.running and self._request == desired.request:
            return True
        self._start(desired, process)
        return True

    def _start(self, desired: Desired, process: ShadowProcess) -> None:
        try:
            self._kept.save(slots.begin_shadow(self._kept.state, desired.request))
        except StateError as error:
            self._order.refuse(desired, str(error))
            return
        if self._kept.record(self._kept.state.idle).shadow_attempts > MAX_ATTEMPTS:
            self._refuse(desired, DIED)
            return
        self._request = desired.request
        self._tell(desired, "it starts beside the live release")
        LOG.info("%s %s runs in shadow", desired.release.name, desired.release.version)
        process.start(self._store.slot_folder(self._kept.state.idle), self._limits(desired.policy))

    def keep_for(self, desired: Desired | None) -> None:
        """End a comparison that is not for this desired state, or whose release does not wait any
        more: the live one crashed in a loop, and the board went back to it."""
        if self._process is None or not self._process.running:
            return
        if desired is None or desired.request != self._request or not self._is_idle(desired):
            self.stop()

    def stop(self) -> None:
        """End the child in good order: its attempt does not count."""
        if self._process is not None and self._process.running:
            self._process.stop()
            record = self._kept.state.record(self._kept.state.idle)
            if record is not None and record.shadow_request == self._request:
                self._kept.note(slots.suspend_shadow(self._kept.state))
            self._request = ""

    def on_said(self, event: ShadowSaid) -> Shadow | None:
        """Report how far the comparison is; return the message of a child that is current."""
        desired = self._order.desired
        if self._process is None or not self._process.is_current(event):
            return None
        if desired is not None and desired.request == self._request:
            said = event.message
            self._tell(
                desired,
                f"{said.frames} live frames compared with the live release, {said.agreement:.2%} "
                f"of {said.counted} results agree",
            )
        return event.message

    def on_ended(self, event: ShadowEnded) -> None:
        """Try a release that agrees, or refuse it."""
        if self._process is None or not self._process.ended(event):
            return
        desired, request = self._order.desired, self._request
        self._request = ""
        if desired is None or desired.request != request or not self._is_idle(desired):
            return
        reason = shadow_refusal(event, desired.policy, self._config.shadow_frames)
        if reason is not None:
            if event.passing:
                self._kept.note(slots.suspend_shadow(self._kept.state))
                self._order.refuse(desired, reason)
            else:
                self._refuse(desired, reason)
            return
        result = event.result
        assert result is not None
        LOG.info("on %d live frames %.2f %% agree", result.frames, 100.0 * result.agreement)
        self._kept.note(slots.end_shadow(self._kept.state, result.agreement, result.frames))
        if self._order.trusted is not None:  # else once its signatures are checked again
            self._begin(desired)

    def _is_idle(self, desired: Desired) -> bool:
        """Whether the desired release is in the idle slot, and not on trial."""
        state = self._kept.state
        record = state.record(state.idle)
        return (
            state.trial is None
            and record is not None
            and record.sha256 == desired.release.blob.sha256
        )

    def _limits(self, policy: InstallPolicy) -> ShadowLimits:
        config = self._config
        return ShadowLimits(
            policy.shadow_s, config.shadow_frames, config.trial_timeout_s, config.shadow_max_hz
        )

    def _tell(self, desired: Desired, reason: str) -> None:
        total_bytes = desired.release.blob.bytes
        self._order.update = update_of(desired, "staging", total_bytes, reason)

    def _refuse(self, desired: Desired, reason: str) -> None:
        self._kept.refuse(desired, reason)
        self._order.refuse(desired, reason)
