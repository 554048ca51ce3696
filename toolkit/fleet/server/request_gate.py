"""How many requests of one device a server takes: none may take it from the others.

A broker gives a server the requests of all devices in the order in which they came. What a device
sends beyond its rate is dropped before it is queued, and asked for again by an honest one.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from device.protocol.mqtt import LinkEvent, Message
from device.protocol.topics import PREFIX

LOG = logging.getLogger("tandem.fleet")
REQUESTS_PER_S = 500.0  # an agent asks at most once for each chunk: 32 MB/s of the smallest ones
BURST = 1000.0
MAX_DEVICES = 65536  # that are remembered; the one that was longest silent is forgotten
SAID_AGAIN_S = 60.0


class RequestGate:
    """A token bucket for each device. Times are of a steady clock."""

    def __init__(self, per_s: float = REQUESTS_PER_S, burst: float = BURST) -> None:
        self.per_s, self._burst = per_s, burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, as of when

    def admits(self, device: str, now_s: float) -> bool:
        """Whether a request of the device is taken; one that is costs a token."""
        tokens, at_s = self._buckets.pop(device, (self._burst, now_s))
        tokens = min(self._burst, tokens + (now_s - at_s) * self.per_s)
        admitted = tokens >= 1.0
        self._buckets[device] = (tokens - admitted, now_s)
        if len(self._buckets) > MAX_DEVICES:
            self._buckets.popitem(last=False)
        return admitted


def gated(put: Callable[[LinkEvent], None], gate: RequestGate) -> Callable[[LinkEvent], None]:
    """Return a `put` that drops the messages of a device beyond its rate, and says whose."""
    said_s: dict[str, float] = {}

    def take(event: LinkEvent) -> None:
        if isinstance(event, Message) and event.topic.startswith(f"{PREFIX}/"):
            device = event.topic.removeprefix(f"{PREFIX}/").partition("/")[0]
            now_s = time.monotonic()
            if not gate.admits(device, now_s):
                if now_s >= said_s.get(device, 0.0):
                    said_s[device] = now_s + SAID_AGAIN_S
                    LOG.error(
                        "%s sends more than %g requests a second, which are dropped: if it does "
                        "not end, shut it out with `tandem fleet identity revoke %s`",
                        device, gate.per_s, device,
                    )  # fmt: skip
                return
        put(event)

    return take
