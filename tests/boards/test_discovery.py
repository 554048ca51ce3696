"""Finding boards: mDNS on loopback, serial lines that are joined; flashing all that are found."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from cli_fixtures import invoke
from control_fixtures import client_of
from hypothesis import given
from hypothesis import strategies as st
from mqtt_fixtures import WAIT_S, AgentBox, free_port, make_bundle
from serial_board_fixtures import roles, wait_for
from smp_fixtures import Cable, cable
from ssh_fixtures import ROOT, Sshd
from zeroconf import ServiceBrowser, ServiceInfo, Zeroconf

from device.control.upload_request import BoardFacts
from device.errors import TandemError
from device.protocol.control import Answer
from device.protocol.documents import DeviceFacts
from device.smp.message import HEADER, READ
from toolkit.fleet.boards import discovery
from toolkit.fleet.boards.discovery import (
    FoundBoard,
    ProbeResult,
    Search,
    SearchOptions,
    announced_paths,
    distinct,
    jetson_ports,
)
from toolkit.fleet.boards.many import BoardResult, ManyFlasher, exit_status
from toolkit.fleet.transports import smp_client
from toolkit.fleet.transports.smp_client import SmpClient
from toolkit.fleet.transports.transport import Progress

NAMES = ("board-1", "board-2")


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.kill()


class PatientBrowser(ServiceBrowser):
    """One that has heard both boards once it is there: no fixed time is waited then."""

    def __init__(self, network: Zeroconf, kind: str, handlers: list[Callable[..., None]]) -> None:
        heard: set[str] = set()
        both_answered = threading.Event()

        def note(zeroconf: Zeroconf, service_type: str, name: str, state_change: object) -> None:
            handlers[0](zeroconf, service_type, name, state_change)
            heard.add(name)
            if len(heard) == len(NAMES):
                both_answered.set()

        super().__init__(network, kind, handlers=[note])
        assert both_answered.wait(3 * WAIT_S), heard


@pytest.fixture
def boards(tmp_path: Path, sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[AgentBox]]:
    """Two boards behind one sshd, which announce themselves as avahi would, with their agents."""
    monkeypatch.setattr("zeroconf.ServiceBrowser", PatientBrowser)
    monkeypatch.setattr(discovery, "MDNS_S", 0.0)
    boxes = []
    with Zeroconf(interfaces=["127.0.0.1"]) as network:
        for name in NAMES:
            folder = tmp_path / name
            folder.mkdir()
            box = AgentBox(folder, free_port(), device=name, trial_timeout_s=60.0)
            box.start()
            client_of(box).close()
            boxes.append(box)
            agent = sshd.address(box).partition("agent=")[2].partition("&")[0]
            network.register_service(
                ServiceInfo(
                    discovery.SERVICE,
                    f"{name}.{discovery.SERVICE}",
                    port=sshd.port,
                    addresses=[socket.inet_aton("127.0.0.1")],
                    properties={"device": name, "agent": agent, "config": str(box.config)},
                    server=f"{name}.invalid.",
                )
            )
        yield boxes
    for box in boxes:
        box.close()


@pytest.fixture(autouse=True)
def no_usb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is on the USB network of this machine, nor at its ports."""
    monkeypatch.setattr(discovery, "USB_HOST", "127.0.0.2")
    monkeypatch.setattr(discovery, "SSH_PORT", 1)
    monkeypatch.setattr(discovery, "jetson_ports", list)


def test_two_boards_are_listed_refused_and_flashed_at_once(
    tmp_path: Path, sshd: Sshd, boards: list[AgentBox]
) -> None:
    config = ("--ssh-config", str(sshd.config))
    seen = invoke("board", "find", *config)
    assert seen.exit_code == 0, seen.output
    assert [line.split()[0] for line in seen.stdout.splitlines()] == list(NAMES)
    assert "USB network 127.0.0.2: " in seen.stderr
    assert "mDNS        board-1, board-2" in seen.stderr
    assert "serial      no Jetson at a port" in seen.stderr

    bundle = make_bundle(tmp_path / "in", version="1")
    refused = invoke("flash", str(bundle), *config)
    assert refused.exit_code == 1
    assert "2 boards are there (board-1 at ssh://" in str(refused.exception)
    assert "--all-found" in str(refused.exception)

    done = invoke("flash", str(bundle), "--all-found", *config)
    assert done.exit_code == 0, done.output
    assert "2 of 2 boards run it" in done.stdout

    # One that is away does not hold up the other; the exit status says that it failed.
    boards[0].kill()
    second = make_bundle(tmp_path / "in", version="2")
    mixed = invoke("flash", str(second), "--all-found", "--json", *config)
    rows = {row["device"]: row for row in json.loads(mixed.stdout)}
    assert mixed.exit_code == 1
    assert (rows["board-1"]["state"], rows["board-2"]["state"]) == ("failed", "live")
    assert "no agent runs on" in rows["board-1"]["reason"]
    boards[0].start()
    client_of(boards[0]).close()

    # One that rolls back: its own status.
    bad = make_bundle(tmp_path / "in", "fails", version="3")
    failed = invoke("flash", str(bad), "--all-found", "--json", *config)
    assert failed.exit_code == 4
    assert all("rolled good" in row["reason"] or "rolled fails" in row["reason"]
               for row in json.loads(failed.stdout))  # fmt: skip


def test_the_only_board_is_flashed_without_a_word(
    tmp_path: Path, sshd: Sshd, boards: list[AgentBox], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = discovery.look_mdns

    def first_alone(options: SearchOptions) -> ProbeResult:
        look = whole(options)
        return ProbeResult(look.kind, look.sentence, look.places[:1])

    monkeypatch.setattr(discovery, "FINDERS", (first_alone,))
    bundle = make_bundle(tmp_path / "in", version="1")
    done = invoke("flash", str(bundle), "--ssh-config", str(sshd.config))
    assert done.exit_code == 0, done.output
    assert "good 1 is live on board-1" in done.stdout


INTERRUPTIBLE = """
import sys
from toolkit.fleet.boards import discovery
discovery.USB_HOST, discovery.SSH_PORT, discovery.jetson_ports = "127.0.0.2", 1, list
from toolkit.cli.main import main
sys.argv[0] = "tandem"
main()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_leaves_every_board_on_its_old_release(
    tmp_path: Path, sshd: Sshd, boards: list[AgentBox]
) -> None:
    config = ("--ssh-config", str(sshd.config))
    assert invoke("flash", str(make_bundle(tmp_path / "in", version="1")), "--all-found",
               *config).exit_code == 0  # fmt: skip
    slow = make_bundle(tmp_path / "in", "hangs", version="2")
    command = (sys.executable, "-c", INTERRUPTIBLE, "flash", str(slow), "--all-found", *config)
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    for _ in range(int(3 * WAIT_S / 0.05)):
        if all("hangs" in dict(box.runs()) for box in boards):
            break
        assert child.poll() is None, child.communicate()
        try:
            child.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    child.send_signal(signal.SIGINT)
    _, output = child.communicate(timeout=3 * WAIT_S)
    assert child.returncode == 130, output
    assert "boards that were not live yet stay on their old release" in output
    for box in boards:
        client = client_of(box)
        rows = {row.version: row.role for row in client_of_slots(client)}
        client.close()
        assert rows["1"] == "active"


def client_of_slots(client):
    from device.protocol.control import AskProgress

    return client.ask(AskProgress()).slots


# -- serial lines


@pytest.fixture
def line() -> Iterator[Cable]:
    with cable() as joined:
        yield joined


def test_a_board_at_a_serial_line_says_its_name(tmp_path: Path, line: Cable) -> None:
    box = AgentBox(tmp_path, free_port(), device="board-9")
    with box.config.open("a") as file:
        file.write(f'[smp]\ndevice = "{line.board}"\n')
    box.start()
    client_of(box).close()
    try:
        answer = discovery.ask_serial(line.host)
        assert (answer.answers, answer.device) == (True, "board-9"), answer
        # Noise and a login's prompt on the line do not hide it.
        line.change = lambda data: b"\r\nfresh login: \x06\x09AAAA\n" + data
        assert discovery.ask_serial(line.host).device == "board-9"
    finally:
        box.close()
    silent = discovery.ask_serial(line.host)
    assert (silent.answers, silent.sentence[:19]) == (False, "nobody answers SMP ")
    absent = discovery.ask_serial("/dev/does-not-exist")
    assert "/dev/does-not-exist cannot be opened" in absent.sentence


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_of_all_found_ends_a_trial_at_the_end_of_a_cable(
    tmp_path: Path, line: Cable
) -> None:
    box = AgentBox(tmp_path, free_port(), device="board-9", trial_timeout_s=3600.0)
    with box.config.open("a") as file:
        file.write(f'[smp]\ndevice = "{line.board}"\n')
    box.start()
    client_of(box).close()
    board = found_board("board-9", f"serial://{line.host}")
    interrupted = threading.Event()

    def interrupt(_board: FoundBoard, state: Progress) -> None:
        if state.phase == "trial" and not interrupted.is_set():
            interrupted.set()
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)

    slow = make_bundle(tmp_path / "in", "hangs", version="1")
    flasher = ManyFlasher(slow, None, erase=False, on_progress=interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            flasher.flash([board])
        wait_for(lambda: roles(box) == {"1": "idle"}, box)
    finally:
        box.close()


@given(st.binary(max_size=300))
def test_no_answer_of_a_line_raises(data: bytes) -> None:
    class Line:
        name = "line"
        bytes_per_s: float | None = None

        def __init__(self, *messages: bytes) -> None:
            self.messages = list(messages)

        def open(self) -> None:
            """It is open."""

        def write(self, _message: bytes) -> None:
            """Nobody reads it."""

        def read(self, _timeout_s: float) -> list[bytes]:
            messages, self.messages = self.messages, []
            return messages

        def close(self) -> None:
            """Nothing is held."""

    for answer in (data, HEADER.pack(9, 0, len(data), 0, 1, 0) + data):
        client = SmpClient(Line(answer))
        with mock.patch.object(smp_client, "ANSWER_S", 0.001), contextlib.suppress(TandemError):
            client.ask(READ, 0, 0, {}, tries=1)


def test_only_ports_of_jetsons_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Port:
        def __init__(self, device: str, vid: int | None, pid: int | None) -> None:
            self.device, self.vid, self.pid = device, vid, pid

    ports = [
        Port("/dev/ttyACM1", 0x0955, 0x7020),
        Port("/dev/ttyACM0", 0x0955, 0x7045),
        Port("/dev/ttyUSB0", 0x0403, 0x6001),  # an FTDI cable: anything may be behind it
        Port("/dev/ttyS0", None, None),
    ]
    monkeypatch.setattr("serial.tools.list_ports.comports", lambda: ports)
    assert jetson_ports() == ["/dev/ttyACM0", "/dev/ttyACM1"]


def test_a_stranger_on_the_network_breaks_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("\x1b[31mred", "\u202eright to left", "board-1")

    class Browser:
        """Stands for a network on which these are announced."""

        def __init__(
            self, network: Zeroconf, kind: str, handlers: list[Callable[..., None]]
        ) -> None:
            for name in names:
                handlers[0](network, kind, f"{name}.{kind}", None)

        def cancel(self) -> None:
            """Nothing runs."""

    def info_of(_network: Zeroconf, kind: str, name: str, _timeout_ms: int) -> ServiceInfo:
        address = socket.inet_aton("127.0.0.1")
        return ServiceInfo(kind, name, port=22, addresses=[address], server="x.invalid.")

    monkeypatch.setattr("zeroconf.ServiceBrowser", Browser)
    monkeypatch.setattr(Zeroconf, "get_service_info", info_of)
    monkeypatch.setattr(discovery, "MDNS_S", 0.0)
    look = discovery.look_mdns(SearchOptions())
    assert sorted(place.name for place in look.places) == ["", "board-1"]


# -- what is decided


def found_board(name: str, address: str, *, answers: bool = True) -> FoundBoard:
    facts = BoardFacts(facts=DeviceFacts(), answer=Answer(device=name)) if answers else None
    return FoundBoard(address, name, facts, "" if answers else "it is away")


def test_a_board_that_is_there_by_several_ways_counts_once() -> None:
    usb, mdns = found_board("b", "ssh://192.168.55.1"), found_board("b", "ssh://b.local")
    serial = found_board("c", "serial:///dev/ttyACM0")
    assert distinct([usb, mdns, serial]) == (usb, serial)
    silent = found_board("b", "ssh://192.168.55.1", answers=False)
    assert distinct([silent, mdns]) == (mdns,)
    unnamed = [found_board("", "ssh://1", answers=False), found_board("", "ssh://2", answers=False)]
    assert len(distinct(unnamed)) == 2


def test_no_board_says_where_was_looked() -> None:
    looks = (
        ProbeResult("USB network", "192.168.55.1: nobody answers"),
        ProbeResult("mDNS", "nobody"),
    )
    words = str(discovery.no_boards(Search(looks, ())))
    assert "USB network: 192.168.55.1: nobody answers; mDNS: nobody" in words
    assert "connect its USB cable" in words


@pytest.mark.parametrize(
    ("user", "host", "address"),
    [
        ("", "b.local", "ssh://b.local"),
        ("robot", "fe80::1%eth0", "ssh://robot@[fe80::1%eth0]"),
        ("-oProxyCommand=x", "h", "ssh://-oProxyCommand%3Dx@h"),
    ],
)
def test_what_is_announced_becomes_an_address(user: str, host: str, address: str) -> None:
    assert discovery._ssh_address(host, discovery.SSH_PORT, SearchOptions(), user=user) == address


@pytest.mark.parametrize("address", ["ssh://-oProxyCommand%3Dx@h", "ssh://h?agnt=1", "usb://x"])
def test_a_place_with_a_wrong_address_is_one_that_fails(address: str) -> None:
    board = discovery._ask(discovery.BoardAddress(address, "liar"))
    assert board.facts is None
    assert board.error


def test_the_status_of_many_is_that_of_the_worst() -> None:
    def row(status: int) -> BoardResult:
        return BoardResult(
            device="b", address="w", state="failed" if status else "live", status=status
        )

    assert exit_status([row(0), row(0)]) == 0
    assert exit_status([row(0), row(3), row(1)]) == 3
    assert exit_status([]) == 1


def test_all_found_and_one_address_exclude_each_other(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "in", engine_bytes=3000)
    done = invoke("flash", str(bundle), "--all-found", "--to", "ssh://h")
    assert (done.exit_code, "takes neither --to nor --device" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("key", "path", "is_taken"),
    [
        ("agent", "/opt/tandem/venv/bin/tandem-agent", True),
        ("agent", "/bin/sh", False),
        ("agent", "tandem-agent", False),
        ("agent", "/opt/x;reboot/tandem-agent", False),
        ("config", "/etc/tandem/agent.toml", True),
        ("config", "/etc/passwd", False),
        ("user", "root", False),
    ],
)
def test_an_announcement_names_no_other_program_than_the_agent(
    key: str, path: str, is_taken: bool
) -> None:
    assert announced_paths({key: path}) == ({key: path} if is_taken else {})
