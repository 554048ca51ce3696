"""The embedded broker: ready when it says so, one sentence when it cannot be, gone afterwards."""

import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading

import pytest
from mqtt_fixtures import WAIT_S
from process_lines import next_line

from device.errors import BrokerError
from device.protocol.mqtt import Link, LinkSettings, LinkUp, Message, queue_putter
from device.protocol.mqtt_version import probe_version, version_of
from toolkit.fleet.brokers.local import start_broker


def test_a_large_message_goes_round() -> None:
    payload = bytes(range(256)) * 4096
    with start_broker() as broker:
        events: queue.Queue[object] = queue.Queue()
        ended = threading.Event()
        settings = LinkSettings(broker.host, broker.port, "round", (("t/+/x", 1),))
        link = Link(settings, queue_putter(events, ended))
        link.start()
        up = events.get(timeout=WAIT_S)
        assert isinstance(up, LinkUp)
        assert up.mqtt_version == "3.1.1"
        assert link.publish("t/1/x", payload, qos=1)
        assert events.get(timeout=WAIT_S) == Message("t/1/x", payload)
        ended.set()
        link.close()


def test_its_version_is_found_out_without_waiting() -> None:
    with start_broker() as broker:
        assert probe_version(broker.host, broker.port).name == "MQTTv311"


@pytest.mark.parametrize(
    ("connack", "name"),
    [
        (bytes((0x20, 3, 0, 0)), "MQTTv5"),
        (bytes((0x20, 6, 0, 0x87)), "MQTTv5"),  # not authorized, but in MQTT 5
        (bytes((0x20, 2, 0, 1)), "MQTTv311"),
        (bytes((0x20, 3, 0)), "MQTTv311"),
        (b"", "MQTTv311"),
    ],
)
def test_a_connack_tells_the_version(connack: bytes, name: str) -> None:
    assert version_of(connack).name == name


def test_a_port_in_use_is_one_sentence_with_a_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BrokerError, match=f"port {port} on 127.0.0.1 is in use") as info:
            start_broker(port)
    assert "--broker" in str(info.value)
    assert "\n" not in str(info.value)


def test_it_ends_with_the_block() -> None:
    with start_broker() as broker:
        pass
    assert broker.process.poll() is not None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((broker.host, broker.port), 1.0)


def test_it_does_not_outlive_a_killed_parent() -> None:
    code = (
        "from toolkit.fleet.brokers.local import start_broker\nb = start_broker()\n"
        "print(b.process.pid, flush=True)\nimport signal; signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        watch = os.pidfd_open(int(next_line(parent)))
        parent.send_signal(signal.SIGKILL)
        ready, _, _ = select.select([watch], [], [], WAIT_S)
        os.close(watch)
    assert ready
