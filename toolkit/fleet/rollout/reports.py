"""What a device's report means to the rollout that it is in. Pure functions."""

from device.protocol.documents import Measured, Phase, Reported
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.machine import DEVICE_STEPS, DeviceWord

# Phase of an update that is final -> whether the release is live.
FINAL: dict[Phase, bool] = {"live": True, "rolled_back": False, "refused": False}


def request_of(spec: v.RolloutSpec, number: int, *, undo: bool) -> str:
    """Return the request of the desired documents of a rollout, which reports repeat."""
    return f"{spec.key}-{number}{'-undo' if undo else ''}"


def event_of(
    spec: v.RolloutSpec, state: v.RolloutState, number: int, device: str, *, reported: Reported,
    at_s: float,
) -> v.Event | None:  # fmt: skip
    """Return what a report tells the rollout that owns the device; None: nothing new."""
    row = state.devices.get(device)
    if row is None:
        return None
    measured = _measured_of(spec, reported)
    live = FINAL.get(reported.update.phase)
    for undo in (False, True):
        if live is None or reported.update.request != request_of(spec, number, undo=undo):
            continue
        words: dict[tuple[bool, bool], DeviceWord] = {
            (False, True): "live", (False, False): "failed",
            (True, True): "undone", (True, False): "undo_failed",
        }  # fmt: skip
        if (row.phase, words[undo, live]) in DEVICE_STEPS:
            return v.Answered(
                at_s=at_s, device=device, live=live, reason=reported.update.reason, undo=undo,
                measured=None if undo else measured,
            )  # fmt: skip
    if measured is not None and measured != row.measured and _are_waited_for(spec, state, row):
        return v.Figures(at_s=at_s, device=device, measured=measured)
    return None


def _measured_of(spec: v.RolloutSpec, reported: Reported) -> Measured | None:
    """Return what was measured of this release, and not of the one before; of an agent what its
    pipeline measured since that started."""
    measured = reported.measured
    if spec.agent is not None:
        return measured
    return measured if measured and measured.sha256 == spec.release.blob.sha256 else None


def _are_waited_for(spec: v.RolloutSpec, state: v.RolloutState, row: v.DeviceState) -> bool:
    """Whether figures decide something: others would fill the log."""
    return (
        bool(spec.gates)
        and row.phase == "live"
        and row.group == state.group
        and state.status == "running"
    )
