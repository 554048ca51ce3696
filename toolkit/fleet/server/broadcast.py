"""Sends a bundle to all devices at once: each part is published once, and the broker copies it.

Devices whose desired document says `cast` listen and ask for nothing; what they have missed they
request afterwards, as ever. So nothing here has to be reliable.
"""

import queue
import threading
import time
from collections.abc import Collection

from device.errors import BrokerError
from device.protocol.mqtt import Link, LinkEvent, LinkSettings, LinkUp, queue_putter
from device.protocol.topics import cast_topic
from device.update.window import RateLimit
from toolkit.fleet.brokers.address import BrokerAddress
from toolkit.fleet.bundles.blob import INDEX_PART, Blob

END_PART = "end"
CONNECT_S = 10.0


def cast_bundle(
    address: BrokerAddress,
    blob: Blob,
    *,
    rounds: int = 1,
    bytes_per_s: int | None = None,
    left_out: Collection[int] = (),
) -> int:
    """Send all parts of a bundle, `rounds` times; return the bytes that were published.

    `bytes_per_s`: the most that is published; None: as fast as the broker takes it. `left_out`:
    chunks that are not sent. Raises BrokerError if the broker cannot be reached or goes away.
    """
    events: queue.Queue[LinkEvent] = queue.Queue(64)
    ended = threading.Event()
    settings = LinkSettings(
        host=address.host,
        port=address.port,
        client_id=f"tandem-cast-{blob.spec.sha256[:12]}",
        username=address.username,
        password=address.password,
        tls=address.tls,
    )
    link = Link(settings, queue_putter(events, ended))
    link.start()
    try:
        _await_up(events, address)
        return _cast(link, blob, rounds, RateLimit(bytes_per_s), left_out)
    finally:
        ended.set()
        link.close()


def _await_up(events: "queue.Queue[LinkEvent]", address: BrokerAddress) -> None:
    try:
        event = events.get(timeout=CONNECT_S)
    except queue.Empty:
        raise BrokerError(
            f"the broker at {address.host}:{address.port} does not answer: is it running?"
        ) from None
    if not isinstance(event, LinkUp):
        raise BrokerError(f"{getattr(event, 'reason', event)}: is it running?")


def _cast(link: Link, blob: Blob, rounds: int, limit: RateLimit, left_out: Collection[int]) -> int:
    sent_bytes = 0
    sha256 = blob.spec.sha256
    chunks = [number for number in range(blob.table.count) if number not in left_out]
    parts: list[int | str] = [INDEX_PART, *chunks]
    for _ in range(rounds):
        for part in parts:
            payload = blob.read(part)
            while (free_at_s := limit.free_at_s(time.monotonic())) is not None:
                time.sleep(max(0.0, free_at_s - time.monotonic()))
            limit.spend(len(payload))
            if not link.publish_bulk(cast_topic(sha256, part), payload):
                raise BrokerError("the connection was lost: cast again")
            sent_bytes += len(payload)
    link.publish(cast_topic(sha256, END_PART), b"", qos=1, wait_s=CONNECT_S)
    return sent_bytes
