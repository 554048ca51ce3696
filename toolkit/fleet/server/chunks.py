"""Serves the chunks of all bundles of a folder to any device.

    python -m toolkit.fleet.server.chunks --fleet DIR --broker 192.168.1.10

It remembers nothing of a device: every request says all that its answer needs. So several of them
may run, on several machines. All get the first request of a download, and the device asks the first
that answered by its name from then on. A shared subscription would give each request to one of
them, and with mosquitto to any device that joins it: that checks rights at delivery only.
"""

import argparse
import logging
import os
import queue
import secrets
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from device.errors import BrokerError, BundleError, TandemError
from device.protocol.documents import BlobGet, decode
from device.protocol.mqtt import (
    Link,
    LinkDown,
    LinkEvent,
    LinkSettings,
    LinkUp,
    Message,
    queue_putter,
)
from device.protocol.mqtt_version import probe_version
from device.protocol.topics import BLOB_GET_OF_ALL, PREFIX, Topics
from toolkit.fleet.brokers.address import BrokerAddress, parse_broker
from toolkit.fleet.bundles.blob import INDEX_PART, Blob
from toolkit.fleet.bundles.library import Library
from toolkit.fleet.server.request_gate import RequestGate, gated

LOG = logging.getLogger("tandem.chunks")
GONE_PART = "none"
TARGETS = Path("repository", "targets")
MAX_PENDING = 256 * 1024  # parts of all devices; what is dropped is asked for again
MAX_PENDING_EACH = 4096  # of one device
# Looks for bundles that are not open, of one device: each reads the folder.
LOOKS_PER_S, MAX_LOOKS = 2.0, 16.0
MAX_EVENTS = 4096
READY = "serving"


Part = tuple[str, int | str]  # the SHA-256 of a bundle, and the number of a chunk or "index"


class ChunkServer:
    """Answers requests. `send` publishes a topic and payload, and waits while too much is unsent.

    It takes messages and sends answers when it is told to; `serve` does so over a connection.
    """

    def __init__(
        self, library: Library, send: Callable[[str, bytes], bool], peer: str = ""
    ) -> None:
        """`peer`: the name by which devices ask this server again; empty: a new one."""
        self.sent_bytes = 0
        self._library = library
        self._send = send
        self._peer = peer or secrets.token_hex(4)
        # By device, in turn: what it waits for, and the bases of a difference.
        self._pending: OrderedDict[str, OrderedDict[Part, tuple[str, ...]]] = OrderedDict()
        self._parts = 0
        self._looks = RequestGate(LOOKS_PER_S, MAX_LOOKS)

    @property
    def pending(self) -> bool:
        """Whether a device waits for a part."""
        return self._parts > 0

    def on_message(self, message: Message) -> None:
        """Take a request; what is not one is dropped."""
        prefix, _, rest = message.topic.partition(f"{PREFIX}/")
        device, _, what = rest.partition("/")
        if prefix or what != "blob/get":
            return
        try:
            request = decode(message.payload, BlobGet)
        except ValueError:
            return  # of a newer agent, or not of an agent at all
        if request.peer in ("", self._peer):
            self._take(device, request)

    def forget(self) -> None:
        """The connection was lost: the devices ask again for what they lack."""
        self._pending.clear()
        self._parts = 0

    def send_next(self) -> None:
        """Send one part to the device whose turn it is."""
        device, parts = self._pending.popitem(last=False)
        (sha256, part), bases = parts.popitem(last=False)
        self._parts -= 1
        if parts:
            self._pending[device] = parts
        name, payload = self._answer(sha256, part, bases)
        if self._send(Topics(device).chunk(sha256, name, self._peer), payload):
            self.sent_bytes += len(payload)

    def _take(self, device: str, request: BlobGet) -> None:
        if not self._may_look(device, request.sha256):
            return
        blob = self._library.blob(request.sha256)
        if blob is None:
            topic = Topics(device).chunk(request.sha256, GONE_PART, self._peer)
            self._send(topic, self._gone(request.sha256))
            return
        bases = request.bases if all(self._may_look(device, b) for b in request.bases) else ()
        queued = self._pending.setdefault(device, OrderedDict())
        for part in blob.parts_of(request):
            key = request.sha256, part
            room = self._parts < MAX_PENDING and len(queued) < MAX_PENDING_EACH
            if key not in queued and room:
                queued[key] = bases
                self._parts += 1
        if not queued:
            del self._pending[device]

    def _may_look(self, device: str, sha256: str) -> bool:
        """Whether a bundle is open or known to be away, or the device may have it looked for."""
        return self._library.knows(sha256) or self._looks.admits(device, time.monotonic())

    def _answer(
        self, sha256: str, part: int | str, bases: tuple[str, ...]
    ) -> tuple[int | str, bytes]:
        """Return the name and the payload of an answer, which says so where the bundle is gone."""
        for _ in range(2):  # a file that was changed or is not read is looked for again, once
            blob = self._library.blob(sha256)
            if blob is None:
                break
            try:
                return self._read(blob, part, bases)
            except (BundleError, OSError) as error:
                if self._library.holds(sha256):
                    raise  # who has opened it is told
                LOG.error("%s", error)
                self._library.forget(sha256)
        return GONE_PART, self._gone(sha256)

    def _read(self, blob: Blob, part: int | str, bases: tuple[str, ...]) -> tuple[int | str, bytes]:
        if part != INDEX_PART and bases:
            payload = self._library.delta(blob, int(part), bases)
            if payload is not None:
                return f"d{part}", payload
        return part, blob.read(part)

    def _gone(self, sha256: str) -> bytes:
        return (
            f"the chunk server {self._peer} does not have the bundle {sha256[:12]}...: publish it "
            "again, then roll it out again"
        ).encode()


def serve(
    settings: LinkSettings,
    library: Library,
    ended: threading.Event,
    *,
    qos: int = 0,
    on_up: Callable[[], None] = lambda: None,
) -> None:
    """Serve until `ended` is set; interruptions of the connection are waited out.

    `settings`: the connection, without subscriptions; `on_up` is called each time it is made.
    """
    settings = replace(settings, subscriptions=((BLOB_GET_OF_ALL, 0),))
    events: queue.Queue[LinkEvent | None] = queue.Queue(MAX_EVENTS)
    link = Link(settings, gated(queue_putter(events, ended), RequestGate()))
    server = ChunkServer(library, partial(link.publish_bulk, qos=qos))
    link.start()
    try:
        while not ended.is_set():
            try:
                event = events.get(block=not server.pending, timeout=1.0)
            except queue.Empty:
                if server.pending:
                    server.send_next()
                continue
            if isinstance(event, LinkUp):
                on_up()
            elif isinstance(event, LinkDown):
                LOG.warning("%s", event.reason)
                server.forget()
            elif event is not None:
                server.on_message(event)
    finally:
        link.close()


def reach(address: BrokerAddress) -> LinkSettings:
    """Return the connection of a chunk server; BrokerError if nothing can be reached there."""
    try:
        context = None if address.tls is None else address.tls.context()
        probe_version(address.host, address.port, context)
    except OSError as error:
        raise BrokerError(
            f"cannot reach the broker at {address.host}:{address.port}: "
            f"{error.strerror or error}; is it running, and is its address right?"
        ) from error
    return address.link_settings(f"tandem-chunks-{secrets.token_hex(4)}")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m toolkit.fleet.server.chunks", description=(__doc__ or "").splitlines()[0]
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--fleet", type=Path, help="a folder of `tandem fleet init`")
    where.add_argument("--folder", type=Path, help="any folder with bundles")
    parser.add_argument("--broker", required=True, help="host or host:port")
    parser.add_argument("--username", help="the password is taken from TANDEM_MQTT_PASSWORD")
    parser.add_argument(
        "--qos",
        type=int,
        choices=(0, 1),
        default=0,
        help="of chunks: what is lost is asked for again, so 0 is enough (default: 0)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    arguments = make_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: ended.set())
    folder = arguments.folder or arguments.fleet / TARGETS
    try:
        if not folder.is_dir():
            raise BundleError(f"{folder} is no folder: publish a bundle first, or name another")
        password = os.environ.get("TANDEM_MQTT_PASSWORD")
        address = parse_broker(arguments.broker, arguments.username, password)
        library = Library(folder)
        on_up = partial(print, READY, flush=True)
        serve(reach(address), library, ended, qos=arguments.qos, on_up=on_up)
        library.close()
    except TandemError as error:
        print(f"chunks: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
