"""The link to the broker: brokers that freeze, lie, flood or throw out, and what a close costs."""

import queue
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mqtt_fixtures import DEVICE, WAIT_S, AgentBox, Mosquitto, Watcher
from paho.mqtt import publish
from paho.mqtt.enums import MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from device.protocol import left_out, mqtt, mqtt_connection
from device.protocol.left_out import AGAIN_S, STEADY_S, LeftOut
from device.protocol.mqtt import (
    Link,
    LinkDown,
    LinkEvent,
    LinkSettings,
    LinkUp,
    Message,
    pause_s,
    queue_putter,
)
from device.protocol.mqtt_client import MAX_MESSAGE_BYTES, MAX_PACKET_BYTES, Client
from device.protocol.mqtt_connection import CLOSE_WAIT_S, MAX_UNSENT
from device.protocol.tls import TlsFiles
from device.protocol.topics import Topics
from toolkit.fleet.trust.certificates import init_identity

PATIENCE_S = 2.0  # for a loaded machine


@contextmanager
def link_to(
    port: int, name: str = "link", version: str = "auto", keepalive_s: int = 30
) -> Iterator[tuple[Link, "queue.Queue[LinkEvent]"]]:
    events: queue.Queue[LinkEvent] = queue.Queue()
    ended = threading.Event()
    settings = LinkSettings(
        "127.0.0.1", port, name, (("t/#", 1),), version, keepalive_s=keepalive_s
    )
    link = Link(settings, queue_putter(events, ended))
    link.start()
    yield link, events
    ended.set()
    link.close()


def seconds_to_close(link: Link) -> float:
    begun_s = time.monotonic()
    link.close()
    return time.monotonic() - begun_s


@pytest.mark.parametrize("unsent", [0, MAX_UNSENT])
def test_a_frozen_broker_does_not_hold_up_a_close(broker: Mosquitto, unsent: int) -> None:
    with link_to(broker.port) as (link, events):
        assert isinstance(events.get(timeout=WAIT_S), LinkUp)
        broker.signal(signal.SIGSTOP)
        for _ in range(unsent):  # more than the socket takes: the goodbye stays behind it
            link.publish("x", bytes(256 * 1024), qos=0)
        assert seconds_to_close(link) < 2 * CLOSE_WAIT_S + PATIENCE_S
        broker.signal(signal.SIGCONT)


def test_a_broker_that_is_frozen_from_the_start_does_not_hold_up_a_close(
    broker: Mosquitto,
) -> None:
    broker.signal(signal.SIGSTOP)
    with link_to(broker.port) as (link, _events):
        assert seconds_to_close(link) < 2 * CLOSE_WAIT_S + PATIENCE_S
    broker.signal(signal.SIGCONT)


def test_what_a_frozen_broker_does_not_take_is_refused_not_kept(broker: Mosquitto) -> None:
    with link_to(broker.port) as (link, events):
        assert isinstance(events.get(timeout=WAIT_S), LinkUp)
        broker.signal(signal.SIGSTOP)
        taken = sum(link.publish("x", bytes(256 * 1024), qos=0) for _ in range(3 * MAX_UNSENT))
        assert MAX_UNSENT <= taken < 2 * MAX_UNSENT
        broker.signal(signal.SIGCONT)


def test_a_quiet_link_is_held_by_its_pings_and_ends_once_none_is_answered(
    broker: Mosquitto,
) -> None:
    keepalive_s = 2  # a broker throws a client out that is silent for half as long again
    with link_to(broker.port, keepalive_s=keepalive_s) as (_link, events):
        assert isinstance(events.get(timeout=WAIT_S), LinkUp)
        with pytest.raises(queue.Empty):
            events.get(timeout=3.5 * keepalive_s)
        broker.signal(signal.SIGSTOP)
        assert isinstance(events.get(timeout=2 * keepalive_s + PATIENCE_S), LinkDown)
        broker.signal(signal.SIGCONT)


def test_two_clients_of_one_name_back_off(broker: Mosquitto) -> None:
    with link_to(broker.port, "same") as (_one, events), link_to(broker.port, "same"):
        begun_s = time.monotonic()
        for _ in range(3):  # pauses of at least half of 0.5 and 1 s
            while not isinstance(events.get(timeout=WAIT_S), LinkDown):
                pass
        assert time.monotonic() - begun_s > 0.7


def test_a_client_that_another_one_replaces_is_told_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        with link_to(server.getsockname()[1], "same", "5") as (_link, events):
            connection, _address = server.accept()
            connection.recv(1024)
            connection.sendall(bytes((0x20, 3, 0, 0, 0)))
            connection.recv(1024)
            connection.sendall(bytes((0x90, 4, 0, 1, 0, 1)))
            assert isinstance(events.get(timeout=WAIT_S), LinkUp)
            connection.sendall(bytes((0xE0, 1, 0x8E)))
            down = events.get(timeout=WAIT_S)
            connection.close()
    assert isinstance(down, LinkDown)
    assert down.reason.endswith("Session taken over, as another client calls itself same")


def test_a_message_larger_than_any_that_is_meant_for_us_is_not_taken(broker: Mosquitto) -> None:
    for version in ("5", "3.1.1"):
        with link_to(broker.port, version=version) as (link, events):
            assert isinstance(events.get(timeout=WAIT_S), LinkUp)
            assert link.publish("t/1", bytes(MAX_MESSAGE_BYTES + 1), qos=1, wait_s=WAIT_S)
            assert link.publish("t/2", b"x", qos=1, wait_s=WAIT_S)
            assert events.get(timeout=WAIT_S) == Message("t/2", b"x")


GIANT_BYTES = 40 * 2**20
WRITER = """
import sys
from paho.mqtt import publish
from paho.mqtt.enums import MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
publish.single("t/1", bytes(int(sys.argv[2])), qos=1, retain=True, port=int(sys.argv[1]))
"""


def test_a_retained_giant_ends_the_connection_before_it_is_read(broker: Mosquitto) -> None:
    """A broker of MQTT 3.1.1 cannot be told the limit, so its header must be enough."""
    # In a process of its own: this one's peak of memory is what is measured.
    subprocess.run([sys.executable, "-c", WRITER, str(broker.port), str(GIANT_BYTES)], check=True)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with link_to(broker.port, version="3.1.1") as (_link, events):
        while not isinstance(event := events.get(timeout=WAIT_S), LinkDown):
            assert isinstance(event, LinkUp)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert f"sent a packet of {GIANT_BYTES + 7} bytes, the limit is" in event.reason
    assert "clear the retained message on the topic 't/1'" in event.reason
    assert grown_kib < 16 * 1024


def test_a_broker_that_does_not_finish_handshakes_is_left_alone_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has more to do than it can: its port is open, and nothing answers there."""
    monkeypatch.setattr(mqtt_connection, "CONNECT_TIMEOUT_S", 0.05)
    sizes: queue.Queue[tuple[int, int]] = queue.Queue()
    monkeypatch.setattr(
        mqtt, "pause_s", lambda failures, crowded, _chance: sizes.put((failures, crowded)) or 0.0
    )
    authority = init_identity(tmp_path / "identity", fleet="f", hosts=("127.0.0.1",))
    tls = TlsFiles(authority.folder / "ca.crt")
    with socket.create_server(("127.0.0.1", 0)) as full:
        settings = LinkSettings("127.0.0.1", full.getsockname()[1], "link", (), "3.1.1", tls=tls)
        link = Link(settings, lambda _event: None)
        link.start()
        assert [sizes.get(timeout=WAIT_S) for _ in range(3)] == [(1, 1), (2, 2), (3, 3)]
        full.close()
        while sizes.get(timeout=WAIT_S)[1]:  # refused: that costs a broker nothing
            pass
        link.close()
    assert 0.0 <= pause_s(9, 1, 0.0) < pause_s(9, 1, 1.0) < pause_s(9, 2, 1.0) == pause_s(9, 9, 1.0)


def publish_retained(port: int, topic: str, payload: bytes) -> None:
    publish.single(topic, payload, qos=1, retain=True, port=port)


def test_a_retained_giant_costs_its_subscription_alone_and_only_while_it_is_there(
    broker: Mosquitto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(left_out, "AGAIN_S", (0.5,))
    monkeypatch.setattr(mqtt, "BACKOFF_S", (0.1,))
    publish_retained(broker.port, "t/1", bytes(MAX_PACKET_BYTES))
    events: queue.Queue[LinkEvent] = queue.Queue()
    subscriptions = (("t/#", 1), ("u/+", 1))
    settings = LinkSettings("127.0.0.1", broker.port, "link", subscriptions, "3.1.1")
    link = Link(settings, queue_putter(events, threading.Event()))
    link.start()
    try:
        ends = 0
        while link.left_out != ("t/#",) or ends < 3:  # also after it was tried again
            ends += isinstance(events.get(timeout=WAIT_S), LinkDown)
        while not isinstance(events.get(timeout=WAIT_S), LinkUp):
            pass
        publish_retained(broker.port, "t/1", b"")
        publish_retained(broker.port, "t/2", b"small")
        publish_retained(broker.port, "u/1", b"heard")
        expected = {("u/1", b"heard"), ("t/2", b"small")}
        while expected:
            if isinstance(event := events.get(timeout=WAIT_S), Message):
                expected.discard((event.topic, event.payload))
        assert link.left_out == ()
    finally:
        link.close()


def test_what_is_left_out_is_tried_again_with_back_off() -> None:
    rows = LeftOut(["a/#", "b"])
    assert rows.connect(0.0) == ("a/#", "b")
    assert rows.ended("a/x", 1.0) == ()
    assert rows.connect(2.0) == ("a/#", "b")
    assert rows.ended("a/y", 3.0) == ("a/#",)
    for again_s in (*AGAIN_S[1:], AGAIN_S[-1]):
        due_s = rows.due_s
        assert due_s is not None
        assert rows.connect(due_s - 1.0) == ("b",)
        assert rows.due(due_s - 1.0) == ()
        assert rows.due(due_s) == ("a/#",)
        assert rows.ended("a/x", due_s + 1.0) == ("a/#",)
        assert rows.due_s == due_s + 1.0 + again_s
    due_s = rows.due_s
    assert rows.due(due_s) == ("a/#",)
    assert rows.ended("a/x", due_s + STEADY_S) == ()  # it was well for long: this one is another
    assert rows.ended("c", due_s + STEADY_S + 1.0) == ()


def test_an_agent_says_what_a_retained_giant_keeps_from_it(
    broker: Mosquitto, tmp_path: Path
) -> None:
    topic = Topics(DEVICE).chunk("0" * 64, 0, "rogue")
    publish_retained(broker.port, topic, bytes(MAX_PACKET_BYTES))
    box = AgentBox(tmp_path, broker.port)
    text = box.config.read_text()
    box.config.write_text(text.replace("[broker]", '[broker]\nmqtt_version = "3.1.1"'))
    box.start()
    try:
        with Watcher(broker.port) as watcher:
            while not (reports := watcher.seen.reports) or not reports[-1].warning.count("larger"):
                assert watcher.take(WAIT_S), watcher.seen.reports
        assert f"a message on {Topics(DEVICE).chunks} is larger" in reports[-1].warning
    finally:
        box.close()


CONNACK = bytes((0x20, 2, 0, 0))
SUBACK = bytes((0x90, 3, 0, 1, 1))


@pytest.mark.parametrize(
    "packet",
    [
        bytes((0x90, 0)),  # a SUBACK without its number
        bytes((0x32, 1, 0)),  # a PUBLISH without its topic
        bytes((0x30, 4, 0, 9)) + b"ab",  # a topic that is longer than the packet
        bytes((0x40, 1, 0)),  # a PUBACK cut off
        bytes((0x62, 0)),
        bytes((0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF)),
    ],
)
def test_a_broker_that_sends_rubbish_costs_the_connection_not_the_link(packet: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        with link_to(server.getsockname()[1], version="3.1.1") as (_link, events):
            for _ in range(2):  # it comes back after the first
                connection, _address = server.accept()
                connection.recv(1024)
                connection.sendall(CONNACK)
                connection.recv(1024)
                connection.sendall(SUBACK)
                assert isinstance(events.get(timeout=WAIT_S), LinkUp)
                connection.sendall(packet)
                down = events.get(timeout=WAIT_S)
                assert isinstance(down, LinkDown), down
                assert "\n" not in down.reason
                connection.close()


@pytest.mark.parametrize("version", ["3.1.1", "5"])
def test_messages_of_each_kind_are_taken_as_they_were_published(
    broker: Mosquitto, version: str
) -> None:
    """With properties of MQTT 5 and without, of which paho reads only the former here."""
    named = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    named.ContentType, named.UserProperty = "text/plain", ("a", "b" * 200)
    sent = [
        {"topic": f"t/{qos}/{count}/{bool(properties)}", "payload": b"\0" * count, "qos": qos,
         "properties": properties}
        for qos in (0, 1, 2) for properties in (None, named) for count in (1, 2, 70_000)
    ]  # fmt: skip
    with link_to(broker.port, version=version) as (_link, events):
        assert isinstance(events.get(timeout=WAIT_S), LinkUp)
        publish.multiple(sent, port=broker.port, protocol=MQTTProtocolVersion.MQTTv5)
        taken = [events.get(timeout=WAIT_S) for _ in sent]
    expected = [Message(str(one["topic"]), bytes(one["payload"])) for one in sent]
    assert sorted(taken, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("piece", [1, 7, 4096])
def test_packets_are_taken_wherever_the_stream_is_cut(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With QoS 1: each is acknowledged, those that came together in one write."""
    sizes = [*range(300), 16_383, 16_384, 40_000]
    writes: list[int] = []
    send = Client._sock_send

    def counted(client: Client, data: bytes) -> int:
        writes.append(len(data))
        return send(client, data)

    monkeypatch.setattr(Client, "_sock_send", counted)
    packets = [
        packet(0x32, b"\0\3t/1" + struct.pack(">H", number) + bytes(size))
        for number, size in enumerate(sizes, start=1)
    ]
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        with link_to(server.getsockname()[1], version="3.1.1") as (_link, events):
            connection, _address = server.accept()
            connection.settimeout(WAIT_S)
            connection.recv(1024)
            connection.sendall(CONNACK)
            connection.recv(1024)
            connection.sendall(SUBACK)
            assert isinstance(events.get(timeout=WAIT_S), LinkUp)
            writes.clear()
            stream = b"".join(packets)
            for begin in range(0, len(stream), piece):
                connection.sendall(stream[begin : begin + piece])
            taken = [events.get(timeout=WAIT_S) for _ in sizes]
            answers = bytearray()
            while len(answers) < 4 * len(sizes):
                answers += connection.recv(65536)
            connection.close()
    assert taken == [Message("t/1", bytes(size)) for size in sizes]
    numbers = range(1, len(sizes) + 1)
    assert answers == b"".join(struct.pack(">BBH", 0x40, 2, number) for number in numbers)
    if piece == 4096:
        assert len(writes) < len(sizes) / 2


def packet(head: int, body: bytes) -> bytes:
    """Return a packet of MQTT."""
    length, rest = bytearray(), len(body)
    while rest > 127:
        length.append(rest & 127 | 128)
        rest >>= 7
    return bytes((head, *length, rest)) + body


def test_a_topic_that_is_not_text_is_dropped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        with link_to(server.getsockname()[1], version="3.1.1") as (_link, events):
            connection, _address = server.accept()
            connection.recv(1024)
            connection.sendall(CONNACK)
            connection.recv(1024)
            connection.sendall(SUBACK + b"\x30\x04\x00\x02\xff\xfe" + b"\x30\x06\x00\x03t/1x")
            assert isinstance(events.get(timeout=WAIT_S), LinkUp)
            assert events.get(timeout=WAIT_S) == Message("t/1", b"x")
            connection.close()
