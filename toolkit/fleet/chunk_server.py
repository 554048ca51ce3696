"""Serves the chunks of all bundles of a folder to any device.

    python -m toolkit.fleet.chunk_server --fleet DIR --broker 192.168.1.10

It remembers nothing of a device: every request says all that its answer needs. So several of them
may run, on several machines. The broker gives each request to one of them by a shared subscription;
with a broker of MQTT 3.1.1, which may have none, all get it, and the device asks the first that
answered by its name from then on.
"""

import argparse
import logging
import os
import queue
import secrets
import signal
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paho.mqtt.enums import MQTTProtocolVersion

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
from device.protocol.topics import BLOB_GET_OF_ALL, PREFIX, SHARED_BLOB_GET, Topics
from toolkit.fleet.blob import INDEX_PART, Blob
from toolkit.fleet.deploy import BrokerAddress, parse_broker
from toolkit.fleet.library import Library

LOG = logging.getLogger("tandem.chunks")
SHARED_PEER = "fleet"  # the name of all servers of a shared subscription: any of them may answer
GONE_PART = "none"
TARGETS = Path("repository", "targets")
MAX_PENDING = 256 * 1024  # parts of all devices; what is dropped is asked for again
MAX_EVENTS = 4096
READY = "serving"


@dataclass(frozen=True, slots=True)
class _Part:
    """One answer that a device waits for."""

    sha256: str
    part: int | str
    bases: tuple[str, ...]


class ChunkServer:
    """Answers requests. `send` publishes a topic and payload, and waits while too much is unsent.

    It takes messages and sends answers when it is told to; `serve` does so over a connection.
    """

    def __init__(
        self, library: Library, send: Callable[[str, bytes], bool], peer: str = SHARED_PEER
    ) -> None:
        """`peer`: the name by which devices ask this server again."""
        self.sent_bytes = 0
        self._library = library
        self._send = send
        self._peer = peer
        self._pending: OrderedDict[str, deque[_Part]] = OrderedDict()  # by device, in turn
        self._parts = 0

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
        part = parts.popleft()
        self._parts -= 1
        if parts:
            self._pending[device] = parts
        name, payload = self._answer(part)
        if self._send(Topics(device).chunk(part.sha256, name, self._peer), payload):
            self.sent_bytes += len(payload)

    def _take(self, device: str, request: BlobGet) -> None:
        blob = self._library.blob(request.sha256)
        if blob is None:
            topic = Topics(device).chunk(request.sha256, GONE_PART, self._peer)
            self._send(topic, self._gone(request.sha256))
            return
        queued = self._pending.setdefault(device, deque())
        known = {(row.sha256, row.part) for row in queued}
        for part in blob.parts_of(request):
            if (request.sha256, part) not in known and self._parts < MAX_PENDING:
                known.add((request.sha256, part))
                queued.append(_Part(request.sha256, part, request.bases))
                self._parts += 1
        if not queued:
            del self._pending[device]

    def _answer(self, part: _Part) -> tuple[int | str, bytes]:
        """Return the name and the payload of an answer, which says so where the bundle is gone."""
        for _ in range(2):  # a file that was changed or is not read is looked for again, once
            blob = self._library.blob(part.sha256)
            if blob is None:
                break
            try:
                return self._read(blob, part)
            except (BundleError, OSError) as error:
                LOG.error("%s", error)
                self._library.forget(part.sha256)
        return GONE_PART, self._gone(part.sha256)

    def _read(self, blob: Blob, part: _Part) -> tuple[int | str, bytes]:
        if part.part != INDEX_PART and part.bases:
            payload = self._library.delta(blob, int(part.part), part.bases)
            if payload is not None:
                return f"d{part.part}", payload
        return part.part, blob.read(part.part)

    def _gone(self, sha256: str) -> bytes:
        return (
            f"the chunk server {self._peer} does not have the bundle {sha256[:12]}...: publish it "
            "again, then roll it out again"
        ).encode()


def serve(
    address: BrokerAddress,
    library: Library,
    ended: threading.Event,
    *,
    shared: bool | None = None,
    qos: int = 0,
    on_up: Callable[[], None] = lambda: None,
) -> None:
    """Serve until `ended` is set. `shared`: by a shared subscription; None: if it has MQTT 5.

    `on_up` is called at each connection. Raises BrokerError if the broker cannot be reached at the
    start; later interruptions are waited out.
    """
    if shared is None:
        try:
            context = None if address.tls is None else address.tls.context()
            version = probe_version(address.host, address.port, context)
            shared = version == MQTTProtocolVersion.MQTTv5
        except OSError as error:
            raise BrokerError(
                f"cannot reach the broker at {address.host}:{address.port}: "
                f"{error.strerror or error}; is it running, and is --broker right?"
            ) from error
    name = secrets.token_hex(4)
    settings = LinkSettings(
        host=address.host,
        port=address.port,
        client_id=f"tandem-chunks-{name}",
        subscriptions=((SHARED_BLOB_GET if shared else BLOB_GET_OF_ALL, 0),),
        username=address.username,
        password=address.password,
        tls=address.tls,
    )
    events: queue.Queue[LinkEvent | None] = queue.Queue(MAX_EVENTS)
    link = Link(settings, queue_putter(events, ended))
    server = ChunkServer(
        library, partial(link.publish_bulk, qos=qos), SHARED_PEER if shared else name
    )
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
        ended.set()
        link.close()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m toolkit.fleet.chunk_server", description=(__doc__ or "").splitlines()[0]
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--fleet", type=Path, help="a folder of `tandem fleet init`")
    where.add_argument("--folder", type=Path, help="any folder with bundles")
    parser.add_argument("--broker", required=True, help="host or host:port")
    parser.add_argument("--username", help="the password is taken from TANDEM_MQTT_PASSWORD")
    parser.add_argument(
        "--share",
        choices=("auto", "yes", "no"),
        default="auto",
        help="whether the broker gives each request to one server only (default: with MQTT 5)",
    )
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
        shared = {"auto": None, "yes": True, "no": False}[arguments.share]
        library = Library(folder)
        serve(
            address,
            library,
            ended,
            shared=shared,
            qos=arguments.qos,
            on_up=lambda: print(READY, flush=True),
        )
        library.close()
    except TandemError as error:
        print(f"chunk_server: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
