"""Maintenance windows: from when to when a device may install, in its own local time.

The device holds to its window (`InstallPolicy`). The server does not know its clock, so it gives
each device the longest wait that the window can mean on top of its time-out.
"""

import re

import msgspec

from device.protocol.documents import InstallPolicy
from toolkit.errors import RolloutError

DAY_S = 86400.0
_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)\Z")


def with_window(policy: InstallPolicy, text: str) -> InstallPolicy:
    """Return a policy with the window in a text such as 22:00-04:30 (over midnight if it ends
    before it begins)."""
    begin, dash, end = text.replace(" ", "").partition("-")
    if not (dash and _TIME.match(begin) and _TIME.match(end)) or begin == end:
        raise RolloutError(
            f"{text!r} is no maintenance window: write two different times of the device's day, "
            "for example 22:00-04:30"
        )
    return msgspec.structs.replace(policy, not_before=begin, not_after=end)


def longest_wait_s(policy: InstallPolicy) -> float:
    """Return the longest that a device may wait for its window, in seconds; 0: it has none."""
    if not (policy.not_before and policy.not_after):
        return 0.0
    length_s = (_second_of_day(policy.not_after) - _second_of_day(policy.not_before)) % DAY_S
    return DAY_S - length_s


def _second_of_day(text: str) -> float:
    match = _TIME.match(text)
    if match is None:
        raise RolloutError(f"{text!r} is no time of day: write HH:MM, for example 04:30")
    return int(match[1]) * 3600.0 + int(match[2]) * 60.0
