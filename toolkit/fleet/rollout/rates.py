"""How many devices a rollout sends to in a minute: constant, or faster with each success.

100/min                    one hundred a minute
10/min,x2/50,max=1000      ten a minute, twice as many after each 50 devices that are live

Without a rate it is what a server carries by `python -m scripts.bench_fleet` (docs/fleet_scale.md).
"""

import re

import msgspec

from toolkit.errors import RolloutError

MOST_PER_MINUTE = 1_000_000.0
# What a server was measured to take for the check of a device, and to send over mutual TLS on a
# machine with other work, in the middle of the runs; of that the share that a rollout takes by
# default: machines are slower, other rollouts run, and 1 Gbit/s carries 125 MB/s.
CHECK_S = 0.0033
BYTES_PER_S = 353e6
DEFAULT_SHARE = 0.25
_RATE = re.compile(
    r"(?P<start>\d+(\.\d+)?)/min(,x(?P<factor>\d+(\.\d+)?)/(?P<each>\d+)(,max=(?P<most>\d+))?)?\Z"
)


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Devices a minute: `start`, times `factor` after each `each` successes, at most `most`."""

    start: float
    factor: float = 1.0
    each: int = 0
    most: float = MOST_PER_MINUTE

    def per_minute(self, succeeded: int) -> float:
        """Return the rate after a number of devices have become live."""
        if self.each == 0:
            return self.start
        # The power is bounded before it is taken: 2 ** 5000 is no float.
        steps = min(succeeded // self.each, 64)
        return min(self.start * self.factor**steps, self.most)

    def burst(self, succeeded: int) -> float:
        """Return the most devices at once: those of a second, and one at least."""
        return max(1.0, self.per_minute(succeeded) / 60.0)


def default_rate(bundle_bytes: int) -> Rate:
    """Return the rate of a rollout that names none: each device fetches so many bytes."""
    device_s = CHECK_S + bundle_bytes / BYTES_PER_S
    return Rate(start=round(60.0 * DEFAULT_SHARE / device_s, 1))


def parse_rate(text: str) -> Rate:
    """Return the rate in a text such as 100/min; RolloutError says what one looks like."""
    match = _RATE.match(text.replace(" ", ""))
    if match is None:
        raise RolloutError(
            f"{text!r} is no rate: write 100/min, or 10/min,x2/50,max=1000 for ten devices a "
            "minute, twice as many after each 50 that are live, and at most 1000"
        )
    rate = Rate(
        start=float(match["start"]),
        factor=float(match["factor"] or 1.0),
        each=int(match["each"] or 0),
        most=float(match["most"] or MOST_PER_MINUTE),
    )
    if not 0.0 < rate.start <= rate.most <= MOST_PER_MINUTE:
        raise RolloutError(
            f"the rate {text!r} is out of range: it begins above 0 and ends at no more than "
            f"{rate.most:g} devices a minute"
        )
    if match["factor"] and not (1.0 <= rate.factor <= 10.0 and rate.each >= 1):
        raise RolloutError(
            f"the rate {text!r} cannot grow: its factor is 1 to 10, and the devices that each "
            "step takes are at least 1"
        )
    return rate
