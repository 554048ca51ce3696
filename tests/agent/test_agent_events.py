"""Events of an agent: what is told, that nothing final is lost, and the form on the wire."""

import json
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import paho.mqtt.client as paho
import pytest
from deploy_fixtures import deploy
from mqtt_fixtures import DEVICE, WAIT_S, AgentBox, Mosquitto, make_bundle
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from device.agent.event_sender import events_of
from device.agent.outbox import MAX_TOLD, Outbox
from device.protocol.cloud_events import CloudEvent
from device.protocol.documents import PipelineReport, Reported, Update

SHA = "a" * 64
SOURCE = "fleet/v1/board-1"


def report(phase: str = "idle", status: str = "running", session: int = 1) -> Reported:
    return Reported(
        agent="1",
        profile="laptop",
        dev=True,
        warning="",
        session=session,
        running=None,
        pipeline=PipelineReport(status=status),
        update=Update(phase=phase, sha256=SHA, request="r-1", reason="why"),
    )


def event(number: int, size: int = 10) -> CloudEvent:
    data = msgspec.Raw(msgspec.json.encode("x" * size))
    return CloudEvent(id=str(number), source=SOURCE, type="t", time="now", data=data)


def event_types(before: Reported | None, now: Reported) -> list[str]:
    return [one.event.type for one in events_of(before, now, source=SOURCE, at="now")]


@pytest.mark.parametrize(
    ("before", "now", "types"),
    [
        (None, report("idle"), []),
        (None, report("live"), ["edge.tandem.update.live"]),  # it may have ended just before
        (report("trial"), report("live"), ["edge.tandem.update.live"]),
        (report("trial"), report("rolled_back"), ["edge.tandem.update.rolled_back"]),
        (report("idle"), report("refused"), ["edge.tandem.update.refused"]),
        (report("live"), report("live"), []),
        (report("idle"), report("downloading"), []),
        (report(), report(status="stalled"), ["edge.tandem.pipeline.stalled"]),
        (None, report(status="stalled"), []),
    ],
)
def test_what_a_report_tells(before: Reported | None, now: Reported, types: list[str]) -> None:
    assert event_types(before, now) == types


def test_the_end_of_an_update_is_the_same_event_after_a_restart() -> None:
    first, again = (
        next(iter(events_of(None, report("live", session=session), source=SOURCE, at=at)))
        for session, at in ((1, "noon"), (2, "later"))
    )
    assert first.event.id == again.event.id
    second = next(iter(events_of(None, report("refused"), source=SOURCE, at="noon")))
    assert second.event.id != first.event.id


def test_old_telemetry_makes_room_and_what_is_final_stays(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox.db", max_bytes=3000)
    outbox.add("update", event(0, 500), final=True)
    for number in range(1, 20):
        outbox.add("pipeline", event(number, 500), final=False)
    waiting_ids = [row.id for row in outbox.waiting(100)]
    assert waiting_ids[0] == "0"
    assert waiting_ids[1:] == ["16", "17", "18", "19"]
    for number in range(100, 110):  # finals alone are over the limit: none goes
        outbox.add("update", event(number, 500), final=True)
    assert [row.id for row in outbox.waiting(100)] == ["0", *map(str, range(100, 110))]


def test_what_was_sent_is_not_sent_again_even_by_the_next_process(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox.db")
    outbox.add("update", event(1), final=True)
    outbox.add("update", event(1), final=True)
    assert [row.id for row in outbox.waiting(9)] == ["1"]
    outbox.sent(["1"])
    outbox.close()
    outbox = Outbox(tmp_path / "outbox.db")
    outbox.add("update", event(1), final=True)
    assert outbox.waiting(9) == ()
    for number in range(2, MAX_TOLD + 2):  # the memory of it is bounded
        outbox.add("update", event(number), final=True)
        outbox.sent([str(number)])
    outbox.add("update", event(1), final=True)
    assert [row.id for row in outbox.waiting(9)] == ["1"]


def test_an_event_is_on_the_disk_once_it_was_added(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\nfrom pathlib import Path\nimport msgspec\n"
        "from device.agent.outbox import Outbox\n"
        "from device.protocol.cloud_events import CloudEvent\n"
        "box = Outbox(Path(sys.argv[1]))\n"
        "for n in range(5):\n"
        "    box.add('update', CloudEvent(id=str(n), source='s', type='t', time='now',\n"
        "            data=msgspec.Raw(b'1')), final=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "o.db")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [row.id for row in Outbox(tmp_path / "o.db").waiting(9)] == list("01234")


def test_a_damaged_outbox_is_kept_aside_and_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    path.write_bytes(os.urandom(5000))
    outbox = Outbox(path)
    outbox.add("update", event(1), final=True)
    assert [row.id for row in outbox.waiting(9)] == ["1"]
    (unreadable,) = tmp_path.glob("outbox.db.unreadable-*")
    assert len(unreadable.read_bytes()) == 5000


def test_a_schema_that_is_no_text_does_not_end_the_agent(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox.db")
    outbox.add("update", event(1), final=True)
    outbox.close()
    data = (tmp_path / "outbox.db").read_bytes()
    name = b"sqlite_autoindex_waiting_1"
    damaged = data.replace(name, name.replace(b"q", b"\xf1"))
    assert damaged != data
    (tmp_path / "outbox.db").write_bytes(damaged)
    outbox = Outbox(tmp_path / "outbox.db")
    outbox.add("update", event(2), final=True)
    assert [row.id for row in outbox.waiting(9)] == ["2"]
    outbox.close()


@pytest.mark.parametrize("value", ["7", "NULL", "x'ff00'", "'[['"])
def test_an_event_of_another_type_costs_that_event_alone(tmp_path: Path, value: str) -> None:
    outbox = Outbox(tmp_path / "outbox.db")
    for number in range(3):
        outbox.add("update", event(number), final=True)
    with sqlite3.connect(tmp_path / "outbox.db") as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_schema SET sql = replace(sql, 'NOT NULL', '')")
    connection.close()
    with sqlite3.connect(tmp_path / "outbox.db") as connection:
        connection.execute(f"UPDATE waiting SET event = {value} WHERE id = '1'")
    connection.close()
    assert [row.id for row in outbox.waiting(9)] == ["0", "2"]
    outbox.close()


def test_an_event_that_the_disk_damaged_costs_that_event_alone(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox.db")
    for number in range(3):
        outbox.add("update", event(number), final=True)
    with sqlite3.connect(tmp_path / "outbox.db") as connection:
        connection.execute("UPDATE waiting SET event = x'7b00ff' WHERE id = '1'")
    for _ in range(2):
        assert [row.id for row in outbox.waiting(9)] == ["0", "2"]


def test_events_behind_a_page_of_damaged_ones_are_read(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox.db")
    for number in range(10):
        outbox.add("update", event(number), final=True)
    with sqlite3.connect(tmp_path / "outbox.db") as connection:
        damaged = [(str(number),) for number in (0, 1, 2, 3, 5)]
        connection.executemany("UPDATE waiting SET event = x'7b00ff' WHERE id = ?", damaged)
    assert [row.id for row in outbox.waiting(4)] == ["4", "6", "7", "8"]


def test_a_disk_that_takes_nothing_costs_the_disk_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = Outbox(tmp_path / "outbox.db")
    with sqlite3.connect(tmp_path / "outbox.db") as connection:
        connection.execute(
            "DROP TABLE told"
        )  # any write of the end of an update fails from here on
        connection.execute("DROP TABLE waiting")
    outbox.add("update", event(1), final=True)
    outbox.add("update", event(2), final=True)
    assert "takes nothing" in caplog.text
    assert [row.id for row in outbox.waiting(9)] == ["1", "2"]


# -- on the wire


class Listener:
    """A stock client of either version of MQTT."""

    def __init__(self, port: int, version: MQTTProtocolVersion) -> None:
        self.messages: queue.Queue[paho.MQTTMessage] = queue.Queue()
        self.client = paho.Client(CallbackAPIVersion.VERSION2, protocol=version)
        self.client.on_connect = lambda client, *_: client.subscribe(f"fleet/v1/{DEVICE}/evt/#", 1)
        self.client.on_message = lambda _client, _data, message: self.messages.put(message)
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()

    def wait(self, topic: str) -> paho.MQTTMessage:
        until = time.monotonic() + WAIT_S
        while True:
            message = self.messages.get(timeout=max(0.1, until - time.monotonic()))
            if message.topic.endswith(topic):
                return message

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


def test_the_end_of_an_update_comes_as_an_event_of_mqtt_5(
    tmp_path: Path, broker: Mosquitto
) -> None:
    box = AgentBox(tmp_path, broker.port)
    listener = Listener(broker.port, MQTTProtocolVersion.MQTTv5)
    box.start()
    try:
        deploy(broker.port, make_bundle(tmp_path / "in", "fails"))
        message = listener.wait("evt/update")
        attributes = dict(message.properties.UserProperty)
        assert attributes["type"] == "edge.tandem.update.rolled_back"
        assert attributes["source"] == f"fleet/v1/{DEVICE}"
        assert attributes["specversion"] == "1.0"
        assert message.properties.ContentType == "application/json"
        assert "/dev/video9" in json.loads(message.payload)["reason"]
        box.kill()  # the next process may say it again: it is the same event then
        box.start()
        deploy(broker.port, make_bundle(tmp_path / "in", "good"))
        following = dict(listener.wait("evt/update").properties.UserProperty)
        while following["id"] == attributes["id"]:
            following = dict(listener.wait("evt/update").properties.UserProperty)
        assert following["type"] == "edge.tandem.update.live"
    finally:
        box.close()
        listener.close()


def test_an_old_broker_gets_the_event_as_one_object_and_an_absence_loses_none(
    tmp_path: Path, broker: Mosquitto
) -> None:
    box = AgentBox(tmp_path, broker.port)
    text = box.config.read_text().replace("[broker]", '[broker]\nmqtt_version = "3.1.1"')
    box.config.write_text(text)
    box.start()
    try:
        # It crashes once it is live, and the broker is gone by then.
        deploy(broker.port, make_bundle(tmp_path / "in", "crashes"))
        broker.kill()
        until = time.monotonic() + WAIT_S
        while "crashes" not in [name for name, _ in box.runs()[1:]]:
            assert time.monotonic() < until
            time.sleep(0.05)
        broker.start()
        listener = Listener(broker.port, MQTTProtocolVersion.MQTTv311)
        event_ = json.loads(listener.wait("evt/pipeline").payload)
        listener.close()
    finally:
        box.close()
    assert event_["specversion"] == "1.0"
    assert event_["type"].startswith("edge.tandem.pipeline.")
    assert event_["datacontenttype"] == "application/json"
    assert event_["data"]["status"] in {"restarting", "starting", "running"}
