"""Thousands of MQTT 3.1.1 clients in one thread: asyncio and the few packets that devices need.

They speak to a real broker as the agent does (paho would take a thread for each). QoS is 1 for
control and 0 for chunks, as in the protocol.
"""

import asyncio
import ssl
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

CONNECT, CONNACK, PUBLISH, PUBACK, SUBSCRIBE, SUBACK = 0x10, 0x20, 0x30, 0x40, 0x82, 0x90
KEEPALIVE_S = 600
CONNECTING = 400  # connections that are being made at the same time

OnMessage = Callable[["Client", str, bytes], None]


def _length(count: int) -> bytes:
    """Return MQTT's variable-length number."""
    parts = bytearray()
    while True:
        count, low = divmod(count, 128)
        parts.append(low | (0x80 if count else 0))
        if not count:
            return bytes(parts)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">H", len(data)) + data


def _packet(kind: int, body: bytes) -> bytes:
    return bytes((kind,)) + _length(len(body)) + body


@dataclass(frozen=True, slots=True)
class Birth:
    """What a client says of itself: a retained message at once, and another as its will."""

    topic: str
    online: bytes
    lost: bytes


class Client(asyncio.Protocol):
    """One connection. `on_message` is called for each message of its subscriptions."""

    def __init__(
        self,
        name: str,
        subscriptions: Sequence[tuple[str, int]],
        on_message: OnMessage,
        birth: Birth | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.name = name
        self.tls = tls
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._subscriptions = subscriptions
        self._on_message = on_message
        self._birth = birth
        self._data = bytearray()
        self._mid = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say CONNECT; the rest follows from the broker's answers."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        flags, tail = 0x02, b""
        if self._birth is not None:
            flags |= 0x04 | 0x08 | 0x20  # a will, QoS 1, retained
            tail = _text(self._birth.topic) + struct.pack(">H", len(self._birth.lost))
            tail += self._birth.lost
        body = _text("MQTT") + bytes((4, flags)) + struct.pack(">H", KEEPALIVE_S)
        transport.write(_packet(CONNECT, body + _text(self.name) + tail))

    def publish(self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False) -> None:
        """Hand a message to the socket."""
        body = _text(topic)
        if qos:
            self._mid = self._mid % 65535 + 1
            body += struct.pack(">H", self._mid)
        assert self._transport is not None
        self._transport.write(_packet(PUBLISH | qos << 1 | retain, body + payload))

    def close(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail whoever waits for the connection."""
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(f"{self.name}: {exc or 'closed'}"))

    def data_received(self, data: bytes) -> None:
        """Take the packets that are whole."""
        self._data += data
        at = 0
        while (end := self._packet_end(at)) is not None:
            self._take(at, end)
            at = end
        del self._data[:at]

    def _packet_end(self, at: int) -> int | None:
        count = shift = 0
        for index in range(at + 1, min(at + 5, len(self._data))):
            count |= (self._data[index] & 0x7F) << shift
            shift += 7
            if not self._data[index] & 0x80:
                end = index + 1 + count
                return end if end <= len(self._data) else None
        return None

    def _take(self, at: int, end: int) -> None:
        kind = self._data[at] & 0xF0
        body_at = at + 2
        while self._data[body_at - 1] & 0x80:
            body_at += 1
        if kind == PUBLISH:
            self._take_message(self._data[at], body_at, end)
        elif kind == CONNACK:
            self._take_connack(self._data[body_at + 1])
        elif kind == SUBACK and not self.ready.done():
            self.ready.set_result(None)

    def _take_connack(self, code: int) -> None:
        if code:
            self.ready.set_exception(ConnectionError(f"{self.name}: refused with code {code}"))
            return
        if self._birth is not None:
            self.publish(self._birth.topic, self._birth.online, qos=1, retain=True)
        filters = b"".join(_text(topic) + bytes((qos,)) for topic, qos in self._subscriptions)
        assert self._transport is not None
        self._transport.write(_packet(SUBSCRIBE, b"\0\1" + filters))

    def _take_message(self, head: int, at: int, end: int) -> None:
        topic_end = at + 2 + int.from_bytes(self._data[at : at + 2], "big")
        topic = self._data[at + 2 : topic_end].decode()
        if head & 0x06:
            assert self._transport is not None
            self._transport.write(_packet(PUBACK, bytes(self._data[topic_end : topic_end + 2])))
            topic_end += 2
        self._on_message(self, topic, bytes(self._data[topic_end:end]))


async def connect(port: int, clients: Sequence[Client]) -> None:
    """Connect clients to a broker on this machine, and wait until all have subscribed."""
    places = asyncio.Semaphore(CONNECTING)
    loop = asyncio.get_running_loop()

    async def one(client: Client) -> None:
        async with places:
            await loop.create_connection(lambda: client, "127.0.0.1", port, ssl=client.tls)
            await client.ready

    tasks: list[Awaitable[None]] = [one(client) for client in clients]
    await asyncio.gather(*tasks)
