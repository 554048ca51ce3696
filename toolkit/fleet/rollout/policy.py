"""What a rollout tells each device to hold to: a maintenance window, and the limits of its gates.

The device holds to its window (`InstallPolicy`). The server does not know its clock, so it gives
each device the longest wait that the window can mean on top of its time-out.
"""

import re
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from device.protocol.documents import InstallPolicy
from toolkit.errors import RolloutError
from toolkit.fleet.rollout.gates import Gate

DAY_S = 86400.0
_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)\Z")

# Gate -> the limits of the policy that mean the same on one device. Pooled figures have none.
LIMITS: Mapping[str, tuple[str, ...]] = {
    "p95_latency_ms": ("max_latency_p95_ms",),
    "temperature_c": ("max_temperature_c",),
    "golden_agreement": ("min_golden_agreement",),
    "shadow_agreement": ("min_shadow_agreement",),
    "score_agreement": ("min_golden_agreement",),
}
# With `shadow_s` live frames are what is judged: a bundle then needs no golden inputs for it.
SHADOW_LIMITS: Mapping[str, tuple[str, ...]] = {
    **LIMITS,
    "score_agreement": ("min_shadow_agreement",),
}
SHADOW_GATES = ("shadow_agreement", "shadow_frames")


def with_gates(policy: InstallPolicy, gates: Sequence[Gate]) -> InstallPolicy:
    """Return a policy with the limits of gates: a device that breaks one goes back by itself.

    Raises RolloutError: a gate is on live frames, which are compared only with `shadow_s`.
    """
    limits = SHADOW_LIMITS if policy.shadow_s else LIMITS
    for gate in gates:
        if gate.name in SHADOW_GATES and not policy.shadow_s:
            raise RolloutError(
                f"the gate {gate} is on live frames, which both engines see only with "
                "`tandem fleet rollout start --shadow`: add for example --shadow 60"
            )
        for limit in limits.get(gate.name, ()):
            side = "max_" if gate.compare in ("<", "<=") else "min_"
            if limit.startswith(side):
                tighter = min if side == "max_" else max
                known = getattr(policy, limit)
                value = gate.limit if known is None else tighter(known, gate.limit)
                policy = replace(policy, **{limit: value})
    return policy


def with_window(policy: InstallPolicy, text: str) -> InstallPolicy:
    """Return a policy with the window in a text such as 22:00-04:30 (over midnight if it ends
    before it begins)."""
    begin, dash, end = text.replace(" ", "").partition("-")
    if not (dash and _TIME.match(begin) and _TIME.match(end)) or begin == end:
        raise RolloutError(
            f"{text!r} is no maintenance window: write two different times of the device's day, "
            "for example 22:00-04:30"
        )
    return replace(policy, not_before=begin, not_after=end)


def going_back(policy: InstallPolicy) -> InstallPolicy:
    """Return the policy of a rollback: at once, and without the limits of the release that is
    left, which the one before need not hold."""
    return InstallPolicy(
        confirm_after_s=policy.confirm_after_s, max_bytes_per_s=policy.max_bytes_per_s
    )


def longest_wait_s(policy: InstallPolicy) -> float:
    """Return the longest that a device may wait for its window and compare live frames, in
    seconds."""
    if not (policy.not_before and policy.not_after):
        return policy.shadow_s
    length_s = (_second_of_day(policy.not_after) - _second_of_day(policy.not_before)) % DAY_S
    return DAY_S - length_s + policy.shadow_s


def _second_of_day(text: str) -> float:
    match = _TIME.match(text)
    if match is None:
        raise RolloutError(f"{text!r} is no time of day: write HH:MM, for example 04:30")
    return int(match[1]) * 3600.0 + int(match[2]) * 60.0
