"""The door of an agent: a real agent, its socket, and `tandem-agent control`."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from control_fixtures import client_of, desired_of
from mqtt_fixtures import WAIT_S, AgentBox, free_port, make_bundle
from msgspec.structs import replace

import device.control.__main__ as control
from device.agent.agent import Agent
from device.control.client import Client
from device.control.upload_request import check_path
from device.errors import StateError, TransferError
from device.protocol.control import AskProgress, Cancel, Install, Rollback, connect
from device.protocol.documents import Update, encode
from device.update.versions import is_older


@pytest.fixture
def board(tmp_path: Path) -> Iterator[AgentBox]:
    """An agent whose broker is not there."""
    box = AgentBox(tmp_path, free_port())
    with box.config.open("a") as file:
        file.write("[pipeline]\nstall_s = 30.0\n")
    text = box.config.read_text().replace("[update]\n", '[update]\nmin_version = "1.5"\n')
    box.config.write_text(text)
    box.start()
    yield box
    box.close()


def install(client: Client, bundle: Path) -> tuple[str, str]:
    """Phase and reason at the end of an update from a file."""
    desired = desired_of(bundle, retry=True)
    client.ask(Install(desired=encode(desired).decode(), bundle=str(bundle)))
    *_, last = client.follow(desired.request)
    assert last.reported is not None
    return last.reported.update.phase, last.reported.update.reason


def test_a_file_is_installed_without_a_broker_and_taken_back(
    tmp_path: Path, board: AgentBox
) -> None:
    client = client_of(board)
    first, second = (make_bundle(tmp_path / "in", version=text) for text in ("2.0", "3.0"))
    renamed = first.rename(tmp_path / "in" / "first.tandem")
    with pytest.raises(StateError, match="there is no release to go back to"):
        client.ask(Rollback())
    assert install(client, renamed) == ("live", "")
    assert install(client, second) == ("live", "")
    roles = {row.version: row.role for row in client.ask(AskProgress()).slots}
    assert roles == {"2.0": "idle", "3.0": "active"}
    client.ask(Rollback())
    answer = client.ask(AskProgress())
    assert {row.version: row.role for row in answer.slots} == {"2.0": "active", "3.0": "idle"}
    assert answer.reported is not None
    assert answer.reported.update.reason == "it was asked for on the board"
    client.close()


def test_refusals_have_the_sentence_of_every_way(tmp_path: Path, board: AgentBox) -> None:
    client = client_of(board)
    old = make_bundle(tmp_path / "in", version="1.4.9")
    assert install(client, old) == (
        "refused",
        "the release good 1.4.9 is older than 1.5, the min_version of this device: install 1.5 "
        "or newer",
    )
    module = make_bundle(tmp_path / "in", version="2.0", profile="agx-thor")
    phase, reason = install(client, module)
    assert (phase, "is built for agx-thor, this device is test-board" in reason) == (
        "refused",
        True,
    )
    with pytest.raises(StateError, match="the desired document is not understood"):
        client.ask(Install(desired="{}"))
    client.close()


def test_a_cancelled_trial_leaves_the_old_release(tmp_path: Path, board: AgentBox) -> None:
    client = client_of(board)
    assert install(client, make_bundle(tmp_path / "in", version="2.0")) == ("live", "")
    slow = make_bundle(tmp_path / "in", "hangs", version="3.0")  # never gives a frame
    desired = desired_of(slow)
    client.ask(Install(desired=encode(desired).decode(), bundle=str(slow)))
    for answer in client.follow(desired.request):
        if answer.reported is not None and answer.reported.update.phase == "trial":
            break
    answer = client.ask(Cancel(request=desired.request))
    assert {row.version: row.role for row in answer.slots} == {"2.0": "active", "3.0": "idle"}
    client.close()


def test_a_live_release_is_not_cancelled_and_the_answer_says_so(
    tmp_path: Path, board: AgentBox
) -> None:
    client = client_of(board)
    bundle = make_bundle(tmp_path / "in", version="2.0")
    desired = desired_of(bundle)
    client.ask(Install(desired=encode(desired).decode(), bundle=str(bundle)))
    *_, last = client.follow(desired.request)
    assert last.reported is not None
    assert last.reported.update.phase == "live"
    with pytest.raises(StateError, match="is live and cannot be cancelled: go back"):
        client.ask(Cancel(request=desired.request))
    client.close()


@pytest.mark.parametrize("live", ["1", ""])
def test_a_release_whose_signatures_are_verified_is_cancelled(live: str) -> None:
    """What is reported meanwhile is the release before it."""
    forgotten: list[str] = []
    agent = SimpleNamespace(
        _desired=SimpleNamespace(request="2"),
        _agent_update=SimpleNamespace(
            update=None, on_desired=lambda *_: forgotten.append("agent's update")
        ),
        _updater=SimpleNamespace(
            update=Update(phase="live" if live else "verifying", request=live),
            ask=lambda word, request: forgotten.append(f"{word} {request}"),
        ),
        _verification=SimpleNamespace(forget=lambda: forgotten.append("verification")),
    )
    assert Agent._cancel(agent, Cancel(request="2")) == ""  # type: ignore[arg-type]
    assert forgotten == ["cancel 2", "verification", "agent's update"]
    assert agent._desired is None


@pytest.mark.parametrize(("request_id", "status"), [("2", 0), ("1", 1)])
def test_an_install_that_ends_with_the_report_of_another_request_has_failed(
    request_id: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = make_bundle(tmp_path / "in", version="2.0")
    desired = replace(desired_of(bundle), request="2")
    update = Update(phase="live", request=request_id)
    answer = SimpleNamespace(device="board", reported=SimpleNamespace(update=update))
    client = SimpleNamespace(
        ask=lambda _: answer, follow=lambda _: iter((answer,)), state_dir=tmp_path / "state"
    )
    monkeypatch.setattr(control, "_say", lambda _: None)
    monkeypatch.setattr(control, "_desired_in", lambda *_: (encode(desired).decode(), bundle))
    options = argparse.Namespace(folder=tmp_path / "in")
    assert control._install(client, options) == status  # type: ignore[arg-type]


def test_the_command_writes_lines_and_hostile_ones_are_answered(
    tmp_path: Path, board: AgentBox
) -> None:
    client_of(board).close()
    command = (sys.executable, "-m", "device.agent", "control", "--config", str(board.config))
    done = subprocess.run((*command, "facts"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["answer"]["device"] == board.device
    assert facts["facts"]["free_mb"] > 0
    empty = subprocess.run(
        (*command, "install", str(tmp_path)), capture_output=True, text=True, check=False
    )
    assert empty.returncode == 1
    assert f"has nothing for the device {board.device}" in empty.stderr
    with connect(board.state_dir, WAIT_S) as connection, connection.makefile("rb") as lines:
        connection.sendall(b'{"op": "format"}\nnot JSON\n')
        assert b"is not understood" in lines.readline()
        assert b"is not understood" in lines.readline()
    assert (board.state_dir / "control.sock").stat().st_mode & 0o777 == 0o600
    board.terminate()
    with pytest.raises(StateError, match="no agent runs on"):
        Client(board.state_dir)


@pytest.mark.parametrize(
    ("version", "older"),
    [
        ("1.5", False),
        ("1.5.0", False),
        ("v1.5", False),
        ("1.4.99", True),
        ("1.10", False),
        ("2", False),
        ("1", True),
        ("1.5-rc1", True),
        ("nightly", True),
        ("1.6x", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, older: bool) -> None:
    assert is_older(version, "1.5") == older


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../b", "a//b", ".x", "a/.b", "a b", ""])
def test_paths_that_leave_the_inbox_are_refused(path: str) -> None:
    with pytest.raises(TransferError, match="is no path of a file that a board takes"):
        check_path(path)
    assert check_path("repository/metadata/1.root.json")
