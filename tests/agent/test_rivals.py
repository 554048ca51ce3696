"""Two agents with one id are noticed, and both say so."""

from pathlib import Path

import pytest
from mqtt_fixtures import DEVICE, AgentBox, Mosquitto, Watcher

from device.agent.broker_connection import Rivals
from device.protocol.mqtt import CROWDED_S

# A TLS handshake that takes too long, as on a machine under load, makes an agent pause.
PATIENCE_S = CROWDED_S[-1] + 60.0
SENTENCE = f"another agent calls itself {DEVICE} too (its session is "


@pytest.mark.timeout(900)
def test_both_of_two_agents_with_one_id_say_so(tmp_path: Path, broker: Mosquitto) -> None:
    boxes = []
    for dev in (True, False):  # tells their reports apart
        folder = tmp_path / str(dev)
        folder.mkdir()
        port = broker.port if dev else broker.tls_port
        boxes.append(AgentBox(folder, port, dev=dev, ca=None if dev else broker.ca))
    with Watcher(broker.port) as watcher:
        try:
            for box in boxes:
                box.start()
            warned_dev: set[bool] = set()
            while warned_dev != {True, False}:
                assert watcher.take(PATIENCE_S), [box.log() for box in boxes]
                warned_dev = {r.dev for r in watcher.seen.reports if SENTENCE in r.warning}
            assert all(SENTENCE in box.log() for box in boxes)
        finally:
            for box in boxes:
                box.close()


def test_an_agent_that_was_killed_and_starts_again_has_no_rival(
    tmp_path: Path, broker: Mosquitto
) -> None:
    box = AgentBox(tmp_path, broker.port)
    with Watcher(broker.port) as watcher:
        for _ in range(3):
            sessions = {report.session for report in watcher.drain().reports}
            box.start()
            while not {report.session for report in watcher.seen.reports} - sessions:
                assert watcher.take(PATIENCE_S)
            box.kill()
        assert [r.warning for r in watcher.seen.reports if "calls itself" in r.warning] == []
    assert "calls itself" not in box.log()


@pytest.mark.parametrize(
    ("seen", "rival"),
    [
        ([], False),
        ([100, 101], False),  # our own
        ([7], False),  # an earlier process left it
        ([7, 7, 100, 7], False),
        ([900], False),  # left by an earlier process whose clock was ahead
        ([7, 8], False),  # its birth and the will of its next connection, which came to nothing
        ([7, 8, 9], True),  # nobody leaves two wills: a rival whose clock is behind
        ([7, 102], True),  # it connected after us
        ([900, 901], True),
    ],
)
def test_a_rival_is_known_by_its_sessions(seen: list[int], rival: bool) -> None:
    rivals = Rivals()
    assert not rivals.is_rival(5)  # before the first connection nothing is known
    rivals.note_own(100)
    rivals.note_own(101)
    assert any(rivals.is_rival(session) for session in seen) == rival


def test_a_connection_that_flaps_for_long_is_not_a_rival() -> None:
    rivals = Rivals()
    for session in range(100, 1100):
        rivals.note_own(session)
        assert not rivals.is_rival(session)
        assert not rivals.is_rival(max(100, session - 1))  # the will of the connection before
