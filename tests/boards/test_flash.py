"""`tandem flash`: a real agent behind a real sshd, a stick, and a broker."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from control_fixtures import client_of
from flash_fixtures import (
    MEGABYTE,
    Site,
    bundle_of,
    flash,
    run,
    site,  # noqa: F401  (fixtures)
)
from mqtt_fixtures import WAIT_S, AgentBox, Mosquitto, free_port, make_bundle
from ssh_fixtures import ROOT, Sshd

from device.protocol.control import Answer, AskProgress
from toolkit.fleet.folder import make_fleet
from toolkit.fleet.transports import ssh
from toolkit.fleet.transports.addresses import parse_address
from toolkit.fleet.transports.checks import lacks_room
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.flash_board import deliver
from toolkit.fleet.transports.transport import (
    Progress,
    RefusedError,
    RolledBackError,
    TransportError,
)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.kill()


@pytest.fixture
def board(tmp_path: Path) -> Iterator[AgentBox]:
    """A board on a bench, whose broker is not there."""
    box = AgentBox(tmp_path, free_port())
    box.start()
    client_of(box).close()
    yield box
    box.close()


def test_a_connection_that_breaks_is_made_again_and_only_differences_are_sent(
    tmp_path: Path,
    sshd: Sshd,
    board: AgentBox,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ssh, "PAUSE_S", 0.1)
    engine, address = rng.bytes(8 * MEGABYTE), sshd.address(board)
    first = bundle_of(tmp_path / "in", engine, "1")
    cuts: list[int] = []

    def cut(progress: Progress) -> None:
        if progress.phase == "sending" and progress.received_bytes > 4 * MEGABYTE and not cuts:
            cuts.append(progress.received_bytes)
            sshd.cut()

    result = flash(address, first, cut)
    assert (result.phase, len(cuts)) == ("live", 1)
    assert result.total_bytes <= result.sent_bytes < 1.6 * result.total_bytes
    again = flash(address, first)
    assert (again.phase, again.sent_bytes) == ("same", 0)
    changed = engine[: 5 * MEGABYTE] + rng.bytes(1000) + engine[5 * MEGABYTE + 1000 :]
    second = flash(address, bundle_of(tmp_path / "in", changed, "2"))
    assert (second.phase, second.sent_bytes < 0.2 * MEGABYTE) == ("live", True)
    assert not list((board.state_dir / "inbox").glob("*.bundle"))


@pytest.mark.slow
def test_a_server_that_dies_leaves_a_transfer_that_goes_on_later(
    tmp_path: Path,
    sshd: Sshd,
    board: AgentBox,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ssh, "PAUSE_S", 0.01)
    bundle, address = bundle_of(tmp_path / "in", rng.bytes(12 * MEGABYTE), "1"), sshd.address(board)

    def kill(progress: Progress) -> None:
        if progress.phase == "sending" and progress.received_bytes > 8 * MEGABYTE:
            sshd.kill()

    with pytest.raises(
        TransportError, match=r"no SSH server runs there.*flash again, it goes on there"
    ):
        flash(address, bundle, kill)
    sshd.start()
    rest = flash(address, bundle)
    assert rest.phase == "live"
    assert 0 < rest.sent_bytes < 0.8 * rest.total_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_a_release_that_fails_is_rolled_back_and_ctrl_c_leaves_the_old_one(
    tmp_path: Path, sshd: Sshd, board: AgentBox
) -> None:
    address = sshd.address(board)
    assert flash(address, make_bundle(tmp_path / "in", version="1")).phase == "live"
    bad = make_bundle(tmp_path / "in", "fails", version="2")
    with pytest.raises(RolledBackError, match="camera /dev/video9 does not exist"):
        flash(address, bad)
    slow = make_bundle(tmp_path / "in", "hangs", version="3")
    command = (sys.executable, "-m", "toolkit.cli", "flash", str(slow), "--to", address, "--json")
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    client = client_of(board)
    for _ in range(int(2 * WAIT_S / 0.05)):
        if board.runs()[-1][0] == "hangs":
            break
        assert child.poll() is None, child.communicate()
        try:
            child.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    child.send_signal(signal.SIGINT)
    _, message = child.communicate(timeout=2 * WAIT_S)
    assert child.returncode == 130, message
    assert "the board stays on its old release" in message
    answer = client.ask(AskProgress())
    client.close()
    assert {row.version: row.role for row in answer.slots}["1"] == "active"


FULL_BOARD = """
import sys
print('{"kind":"missing","missing":[0,1,2,3,4],"present_bytes":0}', flush=True)
print('{"kind":"taken","error":"the board\\'s disk failed: No space left on device"}', flush=True)
"""


def test_a_board_that_takes_no_more_says_why(tmp_path: Path) -> None:
    script = tmp_path / "board.py"
    script.write_text(FULL_BOARD)
    board = ssh.ControlBoard(
        ("sh", "-c"), parse_address("ssh://board-1"), (sys.executable, str(script))
    )
    board._device = "board-1"
    delivery = Delivery(make_bundle(tmp_path / "in", engine_bytes=MEGABYTE), None)
    with pytest.raises(RefusedError, match="disk failed: No space left on device"):
        deliver(board, delivery, lambda _progress: None)
    delivery.close()


def test_a_host_key_that_has_changed_is_called_that(
    tmp_path: Path, sshd: Sshd, board: AgentBox
) -> None:
    second, known = tmp_path / "other", tmp_path / "known hosts"
    command = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(second))
    subprocess.run(command, check=True)
    key = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    known.write_text(f"[127.0.0.1]:{sshd.port} {key}\n")
    config = tmp_path / "ssh_config"
    lines = sshd.config.read_text().splitlines()
    lines_left = [line for line in lines if not line.startswith("UserKnownHostsFile")]
    config.write_text("\n".join((*lines_left, f'UserKnownHostsFile "{known}"\n')))
    address = sshd.address(board).replace(str(sshd.config), str(config))
    done = run(str(make_bundle(tmp_path / "in")), "--to", address, "--json")
    assert done.exit_code == 1
    error = json.loads(done.stdout)["error"]
    assert "accept its key once" not in error
    assert "Another machine may answer in its place (an attack)" in error
    forget = f"ssh-keygen -f '{known}' -R '[127.0.0.1]:{sshd.port}'"
    assert f"`{forget}`, then `ssh -F {config} -p {sshd.port} " in error
    subprocess.run(shlex.split(forget), check=True, capture_output=True)  # as the advice says
    done = run(str(make_bundle(tmp_path / "in")), "--to", address, "--json")
    assert "compare and accept its key once" in json.loads(done.stdout)["error"]


def test_a_host_key_that_was_revoked_is_not_to_be_accepted(
    tmp_path: Path, sshd: Sshd, board: AgentBox
) -> None:
    folder = sshd.config.parent
    known, config = tmp_path / "known_hosts", tmp_path / "ssh_config"
    known.write_text(f"@revoked {(folder / 'known_hosts').read_text()}")
    config.write_text(sshd.config.read_text().replace(f"{folder}/known_hosts", str(known)))
    address = sshd.address(board).replace(str(sshd.config), str(config))
    done = run(str(make_bundle(tmp_path / "in")), "--to", address, "--json")
    assert done.exit_code == 1
    error = json.loads(done.stdout)["error"]
    assert "marked as revoked" in error
    assert "accept its key once" not in error


@pytest.mark.parametrize(
    ("address", "message", "words"),
    [
        ("ssh://u@b", "Host key verification failed.", "once with `ssh u@b`"),
        ("ssh://u@b:2222", "Host key verification failed.", "once with `ssh -p 2222 u@b`"),
        ("ssh://u@b:2222", "Permission denied (publickey)", "`ssh-copy-id -p 2222 u@b`"),
        ("ssh://u@b:2222", "sh: tandem-agent: not found", "`tandem board init ssh://u@b:2222`"),
        ("ssh://b", "REMOTE HOST IDENTIFICATION HAS CHANGED!", "`ssh-keygen -R b`, then `ssh b`"),
        ("ssh://b", "what else", ""),
    ],
)
def test_advice_names_the_port(address: str, message: str, words: str) -> None:
    advice = ssh.advice_for(parse_address(address), message)
    assert words in advice
    assert bool(advice) == bool(words)


def test_a_host_that_is_not_known_is_refused(tmp_path: Path, sshd: Sshd, board: AgentBox) -> None:
    stranger = tmp_path / "ssh_config"
    stranger.write_text(
        sshd.config.read_text().replace("known_hosts\nGlobal", "unknown_hosts\nGlobal")
    )
    address = sshd.address(board).replace(str(sshd.config), str(stranger))
    bundle = make_bundle(tmp_path / "in")
    done = run(str(bundle), "--to", address, "--json")
    assert done.exit_code == 1
    assert "compare and accept its key once" in json.loads(done.stdout)["error"]
    absent = sshd.address(board).replace("-agent&", "-absent&")
    done = run(str(bundle), "--to", absent, "--json")
    assert done.exit_code == 1
    assert "install the agent, or name it" in json.loads(done.stdout)["error"]


REFUSED = {
    "module": ({"profile": "agx-thor"}, "is built for agx-thor, this device is test-board"),
    "unsigned": ({"version": "2"}, "is not signed and this device takes only signed ones"),
    "old": ({"version": "0.9"}, "is older than 1, the min_version of this device"),
}


def test_a_signed_release_goes_over_every_transport_and_the_rest_is_refused(
    tmp_path: Path,
    sshd: Sshd,
    site: Site,  # noqa: F811
) -> None:
    box, signed = site.box, ("--fleet", str(site.fleet))
    addresses = (sshd.address(box), f"mqtt://127.0.0.1:{site.broker.port}/{box.device}")
    for address in addresses:
        for name, (changes, words) in REFUSED.items():
            bundle = make_bundle(tmp_path / "in", engine_bytes=3000, **changes)
            keys = () if name == "unsigned" else signed
            done = run(str(bundle), "--to", address, "--json", *keys)
            assert (done.exit_code, words in done.stdout) == (3, True), (address, done.output)
    for version, address in zip(("2.1", "2.2"), addresses, strict=True):
        bundle = make_bundle(tmp_path / "in", version=version)
        done = run(str(bundle), "--to", address, *signed)
        assert done.exit_code == 0, done.output + box.log()
        assert f"good {version} is live on {box.device}" in done.stdout


@pytest.mark.slow
def test_a_stick_is_installed_and_refused_as_the_other_ways(tmp_path: Path, site: Site) -> None:  # noqa: F811
    box, fleet, stick = site.box, site.fleet, tmp_path / "stick"
    stick.mkdir()
    control = (sys.executable, "-m", "device.agent", "control", "--config", str(box.config))
    to, device = ("--to", f"dir://{stick}"), ("--device", box.device)
    good = make_bundle(tmp_path / "in", version="3")
    unnamed = run(str(good), *to, "--fleet", str(fleet), "--json")
    assert (unnamed.exit_code, "tandem flash --device" in unnamed.stdout) == (3, True)
    for name, (changes, _) in REFUSED.items():
        bundle = make_bundle(tmp_path / "in", engine_bytes=3000, **changes)
        signed = () if name == "unsigned" else ("--fleet", str(fleet))
        assert run(str(bundle), *to, *device, *signed).exit_code == 0
        done = subprocess.run((*control, "install", str(stick)), capture_output=True, check=False)
        update = msgspec.json.decode(done.stdout.splitlines()[-1], type=Answer)
        assert update.reported is not None
        assert (done.returncode, update.reported.update.phase) == (1, "refused")
        words = {"unsigned": "the release is not signed"}.get(name, REFUSED[name][1])
        assert words in update.reported.update.reason
    written = run(str(good), *to, *device, "--fleet", str(fleet))
    assert written.exit_code == 0, written.output
    assert f"`tandem-agent control install {stick}`" in written.stdout
    done = subprocess.run((*control, "install", str(stick)), capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    again = json.loads(run(str(good), *to, *device, "--fleet", str(fleet), "--json").stdout)
    assert (again["phase"], again["sent_bytes"]) == ("written", 0)


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path: Path, sshd: Sshd) -> None:
    broker = Mosquitto(tmp_path)
    make_fleet(tmp_path / "robots", name="robots", broker="127.0.0.1:1")
    shutil.copytree(tmp_path / "robots" / "trust", tmp_path / "trust")
    (tmp_path / "usb").mkdir()
    box = AgentBox(tmp_path, broker.port)
    box.start()
    agent = f"{sys.executable} -m device.agent"
    stands_for = {
        "board$ tandem-agent control": f"{agent} control --config {box.config}",
        "$ tandem flash": f"{sys.executable} -m toolkit.cli flash",
        "ssh://robot@192.168.55.1": f"'{sshd.address(box)}'",
        "/media/usb": f"{tmp_path}/usb",
        "192.168.1.10:1883": f"127.0.0.1:{broker.port}",
    }
    text = (ROOT / "docs/flashing.md").read_text()
    # What comes before is followed on a fresh board by tests/boards/test_walk_flashing.py.
    text = text.partition("## Transports")[2]
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) == 8
    try:
        client_of(box).close()
        for number, line in enumerate(lines):
            if "--erase-cache" not in line:  # each is another release, else it was live already
                bundle = make_bundle(tmp_path / "in", version=str(number))
                shutil.copy(bundle, tmp_path / "robot.bundle")
            command = line
            for words, other_words in stands_for.items():
                command = command.replace(words, other_words)
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            assert done.returncode == 0, (line, done.stdout, done.stderr, box.log())
    finally:
        box.close()
        broker.close()


@pytest.mark.parametrize("words", [words for words, _ in ssh.CAUSES])
def test_the_page_has_every_cause_of_ssh(words: str) -> None:
    assert words in (ROOT / "docs/flashing.md").read_text()


@pytest.mark.parametrize(
    ("free_mb", "size", "words"),
    [(216, 100 << 20, ""), (215, 100 << 20, "needs 216 MiB on the board"), (0, 100 << 20, "")],
)
def test_room_is_judged_at_the_limit(free_mb: int, size: int, words: str) -> None:
    reason = lacks_room(free_mb, size)
    assert (words in reason, bool(reason)) == (True, bool(words))


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("usb://x", "begins with one of ssh://, serial://, smp+udp://, dir://"),
        ("ssh://", "names no host"),
        ("ssh://-oProxyCommand=x", "is no name of a host or a user"),
        ("ssh://-l@host", "is no name of a host or a user"),
        ("ssh://u:secret@host", "takes no password"),
        ("ssh://host?agnt=x", "has no option 'agnt'"),
        ("ssh://host:99999", "Port out of range"),
        ("ssh://[host", "Invalid IPv6 URL"),
        ("dir://media/usb", "by its whole path"),
        ("serial://", "write serial:///dev/ttyACM0"),
        ("serial://dev/ttyACM0", "write serial:///dev/ttyACM0"),
        ("serial:///dev/ttyX?baud=fast", "baud = 'fast' is no rate"),
        ("serial:///dev/ttyX?framing=slip", "framing is console or raw"),
        ("smp+udp://", "write smp+udp://192.168.55.1"),
        ("mqtt://broker", "write mqtt://broker:1883/device-id"),
    ],
)
def test_addresses_that_are_none_are_refused(tmp_path: Path, address: str, words: str) -> None:
    done = run(str(make_bundle(tmp_path / "in", engine_bytes=3000)), "--to", address)
    assert (done.exit_code, words in done.output) == (2, True), done.output


@pytest.mark.parametrize(
    ("address", "destination"),
    [
        ("ssh://[::1]:2222", "::1"),
        ("ssh://robot@[fe80::1%25eth0]", "robot@fe80::1%25eth0"),
        ("ssh://[2001:db8::1]", "2001:db8::1"),
    ],
)
def test_a_board_is_named_by_its_ipv6_address(address: str, destination: str) -> None:
    assert ssh.destination_of(parse_address(address)) == destination
