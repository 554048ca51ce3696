"""What a rollout waits for by the clock: times and durations as they are written and shown."""

import datetime as dt
import re

from device.protocol.documents import InstallPolicy
from toolkit.errors import RolloutError

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])\Z")
MAX_SOAK_S = 30 * 86400.0
MAX_AHEAD_S = 366 * 86400.0


def parse_duration(text: str) -> float:
    """Return the seconds in a text such as 90s, 30m, 2h or 1d."""
    match = _DURATION.match(text.strip())
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else -1.0
    if not 0.0 <= seconds <= MAX_SOAK_S:
        raise RolloutError(f"{text!r} is no time to wait: write 30m, 2h or 1d, at most 30d")
    return seconds


def parse_start(text: str, now_s: float) -> float:
    """Return a time (RFC 3339, without a zone that of this machine) in seconds since 1970.

    RolloutError: it is none, is over, or is more than a year ahead.
    """
    try:
        at_s = dt.datetime.fromisoformat(text.strip().replace("Z", "+00:00")).timestamp()
        shown = utc_minute(at_s)
    except (ValueError, OverflowError) as error:
        raise RolloutError(
            f"{text!r} is no time: write 2026-12-01T02:00, or 2026-12-01T02:00+01:00 for another "
            "zone than this machine's"
        ) from error
    if not now_s < at_s <= now_s + MAX_AHEAD_S:
        raise RolloutError(
            f"{text!r} is {shown}: a rollout begins later than now and within a year"
        )
    return at_s


def utc_minute(at_s: float) -> str:
    """Return a time for people, in minutes."""
    time = dt.datetime.fromtimestamp(at_s, dt.timezone.utc)
    return time.strftime("%Y-%m-%d %H:%M UTC")


def window_text(policy: InstallPolicy) -> str:
    """Return the maintenance window of a policy as HH:MM-HH:MM, empty without one."""
    if not (policy.not_before and policy.not_after):
        return ""
    return f"{policy.not_before}-{policy.not_after}"
