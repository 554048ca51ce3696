"""A device whose certificate was stolen, beside an honest one, at a broker with a fleet's files."""

import queue
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from device.protocol.documents import BlobGet, TufGet, encode
from device.protocol.mqtt import Link, LinkDown, LinkEvent, LinkSettings, LinkUp, Message
from device.protocol.tls import TlsFiles
from device.protocol.topics import BLOB_GET_OF_ALL, TUF_GET_OF_ALL, Topics
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.server.answers import Answers

GROUPS = ("fleet", "tandem", "chunks", "tuf", "+")
STOLEN = tuple(
    f"$share/{group}/{topic}" for group in GROUPS for topic in (BLOB_GET_OF_ALL, TUF_GET_OF_ALL)
)
CONNECTIONS = 4
FILES, BLOBS = 40, 12
WAIT_S = 60.0


class HostileDevice:
    """Joins each shared subscription that a server might have, over and over."""

    def __init__(self, port: int, device: str, tls: TlsFiles) -> None:
        """`device`: whose certificate it is; RabbitMQ lets that connect by its agent's name alone,
        so one of the connections has it, and what ends that one are the rights."""
        self.events: queue.Queue[LinkEvent] = queue.Queue()
        names = [f"tandem-agent-{device}", *(f"thief-{number}" for number in range(1, CONNECTIONS))]
        subscriptions = tuple((topic, 1) for topic in (*STOLEN, BLOB_GET_OF_ALL, TUF_GET_OF_ALL))
        rows = [LinkSettings("127.0.0.1", port, name, subscriptions, tls=tls) for name in names]
        self._links = [Link(row, self.events.put) for row in rows]
        for link in self._links:
            link.start()
        for _ in rows:
            self.wait(LinkUp, LinkDown)  # RabbitMQ refuses who asks for too much

    def wait(self, *kinds: type) -> None:
        """Wait for an event of one of these kinds."""
        until_s = time.monotonic() + WAIT_S
        while not isinstance(self.events.get(timeout=WAIT_S), kinds):
            assert time.monotonic() < until_s

    def stolen(self) -> list[str]:
        """Return the topics of what it was given."""
        return [one.topic for one in list(self.events.queue) if isinstance(one, Message)]

    def close(self) -> None:
        """End its connections."""
        for link in self._links:
            link.close()


def unanswered(folder: Path, port: int, device: str, tls: TlsFiles) -> set[str]:
    """Let a device ask the servers of a fleet for files and bundles, each once; return what was
    not answered."""
    topics, events = Topics(device), queue.Queue[LinkEvent]()
    subscriptions = ((topics.chunks, 1), (topics.tuf_replies, 1))
    name = f"tandem-agent-{device}"  # RabbitMQ gives a device queues of such names alone
    link = Link(LinkSettings("127.0.0.1", port, name, subscriptions, tls=tls), events.put)
    ids = [f"{number:x}" for number in range(FILES)]
    blobs = [f"{number:064x}" for number in range(BLOBS)]
    asks = [(topics.tuf_get, TufGet(id=one, path="metadata/9.root.json")) for one in ids]
    asks += [(topics.blob_get, BlobGet(sha256=one, index=True)) for one in blobs]
    waiting = {*ids, *blobs}
    with ExitStack() as stack:
        answers = Answers(load_fleet(folder))
        answers.start()
        stack.callback(answers.close)
        stack.enter_context(closing(link))
        link.start()
        _take(events, lambda event: isinstance(event, LinkUp))
        _until_served(link, topics, events)
        for topic, document in asks:
            link.publish(topic, encode(document), qos=1, wait_s=WAIT_S)
        until_s = time.monotonic() + 10.0
        while waiting and time.monotonic() < until_s:
            try:
                event = events.get(timeout=0.5)
            except queue.Empty:
                continue
            assert not isinstance(event, LinkDown), event
            waiting -= set(event.topic.split("/")) if isinstance(event, Message) else set()
    return waiting


def _until_served(link: Link, topics: Topics, events: "queue.Queue[LinkEvent]") -> None:
    """Ask until both servers have subscribed."""
    asks = {
        "/tuf/reply/f0f0": (topics.tuf_get, TufGet(id="f0f0", path="metadata/9.root.json")),
        "f" * 64: (topics.blob_get, BlobGet(sha256="f" * 64, index=True)),
    }
    until_s = time.monotonic() + WAIT_S
    while asks:
        assert time.monotonic() < until_s, f"no server answers {list(asks)}"
        for topic, document in asks.values():
            link.publish(topic, encode(document), qos=1)
        time.sleep(0.5)
        while not events.empty():
            event = events.get()
            said = event.topic if isinstance(event, Message) else ""
            asks = {mark: ask for mark, ask in asks.items() if mark not in said}


def _take(events: "queue.Queue[LinkEvent]", fits: Callable[[LinkEvent], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not fits(event := events.get(timeout=WAIT_S)):
        assert time.monotonic() < until_s, event
