"""Ctrl-C in `tandem flash --to mqtt://`: the release is taken back before its trial."""

import contextlib
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from control_fixtures import client_of, desired_of
from flash_fixtures import Site, flash, site  # noqa: F401  (a fixture)
from fleet_fixtures import Fleet
from mqtt_fixtures import DEVICE, WAIT_S, AgentBox, Mosquitto, Watcher, make_bundle
from serial_board_fixtures import roles, wait_for
from ssh_fixtures import ROOT

from device.protocol.control import Install
from device.protocol.documents import (
    BlobGet,
    Desired,
    InstallPolicy,
    PipelineReport,
    Reported,
    Running,
    Update,
    encode,
)
from device.protocol.mqtt import Link, LinkEvent, LinkSettings, LinkUp, Message
from device.protocol.signed import open_desired
from device.protocol.topics import Topics
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.transports import withdrawal
from toolkit.fleet.transports.addresses import open_board, parse_address
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.device_deployment import Before, Deployment
from toolkit.fleet.transports.flash_board import flash_board
from toolkit.fleet.transports.transport import Progress
from toolkit.fleet.transports.withdrawal import document_before

LARGE = 8_000_000
DESIRED, END = Topics(DEVICE).desired, "tests/end"


@pytest.fixture
def board(board: AgentBox) -> AgentBox:
    board.start()
    return board


class Client:
    """A client that sees what is desired, and may say it."""

    def __init__(self, port: int) -> None:
        self._events: queue.Queue[LinkEvent] = queue.Queue()
        settings = LinkSettings("127.0.0.1", port, "client", ((DESIRED, 1), (END, 1)))
        self.link = Link(settings, self._events.put)
        self.link.start()
        while not isinstance(self._events.get(timeout=WAIT_S), LinkUp):
            pass

    def newest(self) -> bytes:
        """The last document, b"" if none is retained; what is on its way has arrived."""
        assert self.link.publish(END, b"", qos=1, wait_s=WAIT_S)
        payload = b""
        while (event := self._events.get(timeout=WAIT_S)) != Message(END, b""):
            assert isinstance(event, Message)
            payload = event.payload
        return payload


def retained(port: int) -> bytes:
    client = Client(port)
    try:
        return client.newest()
    finally:
        client.link.close()


def interrupted(
    address: str,
    bundle: Path,
    phase: str,
    *,
    fleet: Path | None = None,
    policy: InstallPolicy | None = None,
    act: Callable[[], None] = lambda: None,
) -> str:
    """Flash, and press Ctrl-C in a phase; return what is output then."""

    def press(state: Progress) -> None:
        if state.phase == phase:
            act()
            raise KeyboardInterrupt

    delivery = Delivery(bundle, fleet, policy=policy or InstallPolicy())
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            flash_board(
                open_board(parse_address(address)), address, delivery,
                on_facts=lambda _facts: None, on_progress=press,
            )  # fmt: skip
    finally:
        delivery.close()
    return str(caught.value)


def test_what_was_desired_before_is_desired_again_and_the_transfer_goes_on_later(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    address = f"mqtt://127.0.0.1:{broker.port}/{DEVICE}"
    assert flash(address, make_bundle(tmp_path / "in", version="1")).phase == "live"
    before = retained(broker.port)
    second = make_bundle(tmp_path / "in", version="2", engine_bytes=LARGE)
    output = interrupted(address, second, "downloading")
    assert output == (
        f"{DEVICE} stays on its old release, and keeps what has arrived; what was desired "
        "before is desired again"
    )
    assert retained(broker.port) == before
    board.kill()  # one that begins anew follows it, too
    board.start()
    client_of(board).close()
    assert roles(board) == {"1": "active"}
    assert flash(address, second).phase == "live"


def test_of_a_board_that_had_nothing_nothing_is_desired(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    address, bundle = f"mqtt://127.0.0.1:{broker.port}/{DEVICE}", make_bundle(tmp_path / "in")
    output = interrupted(address, bundle, "downloading")
    assert output.endswith("keeps what has arrived; nothing is desired of it")
    assert retained(broker.port) == b""
    assert roles(board) == {}
    assert flash(address, bundle).phase == "live"


def test_a_release_that_was_brought_by_hand_stays(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    address = f"mqtt://127.0.0.1:{broker.port}/{DEVICE}"
    first, second, third = (make_bundle(tmp_path / "in", version=version) for version in "123")
    assert flash(address, first).phase == "live"
    with contextlib.closing(client_of(board)) as client:
        document = encode(desired_of(second, request="by-hand")).decode()
        client.ask(Install(desired=document, bundle=str(second)))
    wait_for(lambda: roles(board) == {"1": "idle", "2": "active"}, board)
    assert "nothing is desired of it" in interrupted(address, third, "downloading")
    assert retained(broker.port) == b""
    assert roles(board) == {"1": "idle", "2": "active"}


def test_a_signed_board_is_told_anew_what_it_runs(tmp_path: Path, site: Site) -> None:  # noqa: F811
    box, port = site.box, site.broker.port
    address = f"mqtt://127.0.0.1:{port}/{box.device}"
    first = Delivery(make_bundle(tmp_path / "in", version="2.1"), site.fleet)
    flash_board(open_board(parse_address(address)), address, first,
                on_facts=lambda _: None, on_progress=lambda _: None)  # fmt: skip
    first.close()
    before, _ = open_desired(retained(port))
    second = make_bundle(tmp_path / "in", version="2.2", engine_bytes=LARGE)
    counters: list[int] = []
    output = interrupted(
        address, second, "downloading", fleet=site.fleet,
        act=lambda: counters.append(open_desired(retained(port))[0].counter),
    )  # fmt: skip
    assert output.endswith("what was desired before is desired again")
    after, signed = open_desired(retained(port))
    assert signed is not None
    assert before.counter < counters[0] < after.counter
    assert (after.request, after.release) == (before.request, before.release)
    box.kill()
    box.start()
    with Watcher(port) as watcher:
        watcher.seen.reports.clear()
        report = watcher.wait_report("live")
    assert (report.update.request, report.problems) == (before.request, ())
    assert roles(box) == {"2.1": "active"}


def test_a_trial_goes_on_and_the_operator_is_told_how_to_go_back(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    address = f"mqtt://127.0.0.1:{broker.port}/{DEVICE}"
    assert flash(address, make_bundle(tmp_path / "in", version="1")).phase == "live"
    slow = make_bundle(tmp_path / "in", "hangs", version="2")
    output = interrupted(address, slow, "trial")
    assert output == (
        f"{DEVICE} tries hangs 2 already, and goes on; `tandem-agent control rollback` on the "
        "board goes back"
    )
    assert open_desired(retained(broker.port))[0].release.version == "2"
    assert roles(board) == {"1": "active", "2": "trial"}


@pytest.mark.parametrize("was_desired", [True, False])
def test_a_trial_that_begins_meanwhile_is_said(
    tmp_path: Path,
    broker: Mosquitto,
    board: AgentBox,
    monkeypatch: pytest.MonkeyPatch,
    was_desired: bool,
) -> None:
    def in_trial(before: Before, ours: bytes, fleet: Path | None) -> bytes:
        wait_for(lambda: "trial" in roles(board).values(), board)
        return document_before(before, ours, fleet)

    monkeypatch.setattr(withdrawal, "document_before", in_trial)
    monkeypatch.setattr(withdrawal.Withdrawal, "_is_up_to_date", lambda _self: True)
    address = f"mqtt://127.0.0.1:{broker.port}/{DEVICE}"
    if was_desired:
        assert flash(address, make_bundle(tmp_path / "in", version="1")).phase == "live"
    output = interrupted(address, make_bundle(tmp_path / "in", version="2"), "staging")
    assert output.startswith(f"{DEVICE} had begun to try good 2")
    if was_desired:
        assert ": it goes back by itself when that has ended, as what was desired before" in output
        wait_for(lambda: roles(board) == {"1": "active", "2": "idle"}, board)
    else:
        assert output.endswith(f"and goes on; {withdrawal.GO_BACK}")
        wait_for(lambda: roles(board) == {"2": "active"}, board)


def test_a_trial_that_somebody_has_to_commit_ends(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    address = f"mqtt://127.0.0.1:{broker.port}/{DEVICE}"
    assert flash(address, make_bundle(tmp_path / "in", version="1")).phase == "live"
    slow = make_bundle(tmp_path / "in", "hangs", version="2")
    output = interrupted(address, slow, "trial", policy=InstallPolicy(manual=True))
    assert output.startswith(f"{DEVICE} stays on its old release")
    assert roles(board) == {"1": "active", "2": "idle"}


def test_a_request_for_chunks_is_nothing_that_was_desired_before(tmp_path: Path) -> None:
    """It may come before our own document has come back."""
    blob = Blob(make_bundle(tmp_path / "in", version="2"))
    desired = desired_of(blob.path, request="ours")
    deployment = Deployment(blob, desired, DEVICE, timeout_s=WAIT_S, now_s=0.0)
    request = encode(BlobGet(sha256="0" * 64, index=True))
    deployment.on_message(Message(deployment.topics.blob_get, request), 1.0)
    assert deployment.before.desired == b""
    assert not deployment.on_request(request, 1.0)
    assert deployment.on_request(encode(BlobGet(sha256=blob.spec.sha256, index=True)), 1.0)
    beyond = BlobGet(sha256=blob.spec.sha256, chunks=(blob.table.count,))
    assert not deployment.on_request(encode(beyond), 2.0)
    blob.close()


def test_a_newer_deployment_is_left_alone(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    address = f"mqtt://127.0.0.1:{broker.port}/{DEVICE}"
    newer = encode(desired_of(make_bundle(tmp_path / "in", version="3"), request="newer"))
    client = Client(broker.port)

    def deploy() -> None:
        client.newest()  # it has come back to both by then
        assert client.link.publish(DESIRED, newer, qos=1, retain=True, wait_s=WAIT_S)
        client.newest()
        time.sleep(0.5)  # the other thread of this process takes it in meanwhile

    try:
        bundle = make_bundle(tmp_path / "in", version="2", engine_bytes=LARGE)
        output = interrupted(address, bundle, "downloading", act=deploy)
    finally:
        client.link.close()
    assert output == "another deployment (good 3) took its place: nothing was withdrawn"
    assert retained(broker.port) == newer


def test_a_broker_that_is_gone_is_said(
    tmp_path: Path, broker: Mosquitto, board: AgentBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(withdrawal, "BROKER_S", 0.5)
    address = f"mqtt://127.0.0.1:{broker.port}/{DEVICE}"
    bundle = make_bundle(tmp_path / "in", version="2", engine_bytes=LARGE)
    output = interrupted(address, bundle, "downloading", act=broker.kill)
    assert output == (
        f"the broker does not answer, so good 2 stays desired and {DEVICE} may install it: flash "
        "the release before once the broker is back"
    )


def test_a_second_ctrl_c_ends_at_once(
    tmp_path: Path, broker: Mosquitto, board: AgentBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"mqtt://127.0.0.1:{broker.port}/{DEVICE}"
    bundle = make_bundle(tmp_path / "in", version="2", engine_bytes=LARGE)

    def press(_self: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(withdrawal.Withdrawal, "run", press)
    output = interrupted(address, bundle, "downloading")
    assert output == (
        f"good 2 may still be desired of {DEVICE}, and be installed: flash the release before"
    )


@pytest.mark.usefixtures("ctrl_c")
def test_the_command_says_in_one_line_what_was_done(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    bundle = make_bundle(tmp_path / "in", engine_bytes=4 * LARGE)
    address = f"mqtt://127.0.0.1:{broker.port}/{DEVICE}"
    command = (sys.executable, "-m", "toolkit.cli", "flash", str(bundle), "--to", address, "--json")
    with Watcher(broker.port) as watcher:
        watcher.wait_report("idle")
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        watcher.wait_report("downloading")
        assert board.process is not None
        board.process.send_signal(signal.SIGSTOP)  # or all might arrive before the command stops
    child.send_signal(signal.SIGINT)
    wait_for(lambda: retained(broker.port) == b"", board)
    board.process.send_signal(signal.SIGCONT)
    _, output = child.communicate(timeout=2 * WAIT_S)
    assert (child.returncode, output.count("\n")) == (130, 1), output
    assert output.startswith(f"stopped: {DEVICE} stays on its old release, and keeps what has")
    assert retained(broker.port) == b""


# -- what takes the place of a document


def report(desired: Desired, **changes: object) -> bytes:
    """The report of a device that runs a desired release."""
    release = desired.release
    whole = Reported(
        agent="1",
        profile=release.profile,
        dev=False,
        warning="",
        session=1,
        running=Running(slot="a", sha256=release.blob.sha256, name="n", version="1"),
        pipeline=PipelineReport(status="running"),
        update=Update(phase="live", request=desired.request),
    )
    return encode(msgspec.structs.replace(whole, **changes))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return Fleet(tmp_path_factory.mktemp("withdrawal"))


def test_only_what_the_director_signed_and_the_device_runs_is_signed_anew(
    tmp_path: Path, fleet: Fleet
) -> None:
    desired = fleet.desired(7)
    document, ours = fleet.signed(desired), fleet.signed(fleet.desired(2**50))

    def of(document: bytes, reported: bytes) -> bytes:
        return document_before(Before(DEVICE, document, reported), ours, fleet.folder)

    anew, signed = open_desired(of(document, report(desired)))
    assert signed is not None
    assert (anew.counter, anew.release, anew.request) == (2**50 + 1, desired.release, "r7")
    assert fleet.verify(of(document, report(desired))).custom  # the device takes it
    other_fleet = Fleet(tmp_path / "other")
    forged = other_fleet.signed(desired)
    elsewhere, expired = fleet.desired(7, "cam-2"), fleet.desired(7, expires="2020-01-01T00:00:00Z")
    refused = Update(phase="refused", request="r7")
    for planted, reported in (
        (forged, report(desired)),
        (fleet.signed(elsewhere), report(elsewhere)),
        (fleet.signed(expired), report(expired)),
        (document, report(desired, running=None, update=refused)),
        (document, report(fleet.desired(8))),  # it follows another one
    ):
        assert of(planted, reported) == b""


def test_a_document_that_nobody_can_judge_here_is_put_back_as_it_was(fleet: Fleet) -> None:
    document = fleet.signed(fleet.desired(7))
    ours = fleet.signed(fleet.desired(8))
    for desired, reported, folder in (
        (b"of a newer host", b"{}", fleet.folder),
        (document, b"", fleet.folder),  # no agent was ever there
        (document, report(fleet.desired(7)), None),  # on a bench, without the keys
        (b"", b"", None),
    ):
        assert document_before(Before(DEVICE, desired, reported), ours, folder) == desired
