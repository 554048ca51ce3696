"""Console install: a real shell behind a login on a real pty, and Debian's rz."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from control_fixtures import client_of
from flash_fixtures import MEGABYTE, bundle_of
from mqtt_fixtures import AgentBox, free_port, make_bundle
from serial_board_fixtures import roles
from smp_fixtures import Cable, cable
from ssh_fixtures import ROOT

from toolkit.fleet.transports import addresses
from toolkit.fleet.transports.addresses import open_board, parse_address
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.flash_board import flash_board
from toolkit.fleet.transports.transport import (
    Flashed,
    OnProgress,
    Progress,
    RefusedError,
    TransportError,
)

# Stands for getty and login, which only root may run; the shell behind it is bash.
LOGIN = """
stty sane
while true; do  # as a getty, again after each session
    printf '\\r\\nboard login: '; read -r user
    [ -n "$user" ] || continue
    printf 'Password: '; stty -echo; read -r password; stty echo; echo
    [ "$user $password" = "robot secret" ] || { sleep 0.2; echo 'Login incorrect'; continue; }
    (cd "$HOME" && exec bash --noprofile --norc -i)
    stty sane
done
"""


class Console:
    """A board whose serial line has a login; `home` is the user's."""

    def __init__(self, folder: Path, wire: Cable) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        script = folder / "login.sh"
        script.write_text(LOGIN)
        command = f"exec setsid --ctty bash {script} <{wire.board} >{wire.board} 2>&1"
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            env={"HOME": str(self.home), "PATH": os.environ["PATH"], "TERM": "dumb"},
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def wire() -> Iterator[Cable]:
    assert shutil.which("rz"), "rz is missing: apt-get install lrzsz"
    with cable() as one:
        yield one


@pytest.fixture
def console(tmp_path: Path, wire: Cable) -> Iterator[Console]:
    one = Console(tmp_path, wire)
    yield one
    one.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentBox]:
    """An agent that serves no line."""
    box = AgentBox(tmp_path, free_port())
    box.start()
    client_of(box).close()
    yield box
    box.close()


def address_of(wire: Cable, box: AgentBox | None, folder: Path) -> str:
    program = folder / "tandem-agent"
    if box is not None:
        program.write_text(
            f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m device.agent "$@"'
        )
        program.chmod(0o755)
    config = "none" if box is None else box.config
    return f"serial://{wire.host}?console=zmodem&user=robot&agent={program}&config={config}"


def install(
    address: str,
    bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    password: str = "secret",
    on_progress: OnProgress = lambda _progress: None,
) -> Flashed:
    requests: list[bool] = []

    def answer(_text: str, *, secret: bool) -> str:
        requests.append(secret)
        return password

    monkeypatch.setattr(addresses, "_ask", answer)
    delivery, board = Delivery(bundle, None), open_board(parse_address(address))
    try:
        return flash_board(
            board, address, delivery, on_facts=lambda _facts: None, on_progress=on_progress
        )
    finally:
        board.close()
        delivery.close()
        assert requests in ([], [True], [True, True])


def test_a_board_is_installed_through_its_login_shell(
    tmp_path: Path,
    wire: Cable,
    console: Console,
    agent: AgentBox,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, bundle = (
        address_of(wire, agent, tmp_path),
        bundle_of(tmp_path / "in", rng.bytes(MEGABYTE), "1"),
    )
    result = install(address, bundle, monkeypatch)
    assert (result.phase, result.device) == ("live", agent.device)
    assert roles(agent) == {"1": "active"}
    assert not (console.home / "tandem-install").exists()


@pytest.mark.slow
def test_a_wrong_password_a_transfer_that_ends_and_a_bad_bundle(
    tmp_path: Path,
    wire: Cable,
    console: Console,
    agent: AgentBox,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, bundle = (
        address_of(wire, agent, tmp_path),
        bundle_of(tmp_path / "in", rng.bytes(MEGABYTE), "1"),
    )
    with pytest.raises(RefusedError, match="does not take this user and password"):
        install(address, bundle, monkeypatch, "wrong")

    def stop(progress: Progress) -> None:
        if progress.received_bytes > MEGABYTE // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install(address, bundle, monkeypatch, on_progress=stop)
    (part,) = (console.home / "tandem-install").glob("*.bundle")
    arrived_bytes = part.stat().st_size
    assert arrived_bytes > 0
    result = install(address, bundle, monkeypatch)
    assert result.phase == "live"
    assert result.sent_bytes < 1.2 * result.total_bytes - arrived_bytes
    old = make_bundle(tmp_path / "other", version="2", profile="agx-thor")
    with pytest.raises(RefusedError, match="is built for agx-thor"):
        install(address, old, monkeypatch)


def test_a_board_without_an_agent_keeps_both_files_for_later(
    tmp_path: Path,
    wire: Cable,
    console: Console,
    agent: AgentBox,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = make_bundle(tmp_path / "in")
    result = install(address_of(wire, None, tmp_path), bundle, monkeypatch)
    assert result.phase == "written"
    folder = console.home / "tandem-install"
    address_of(wire, agent, tmp_path)  # it is installed now
    script = folder / "install.sh"
    script.write_bytes(
        script.read_bytes().replace(b"--config none", b"--config %s" % str(agent.config).encode())
    )
    done = subprocess.run(["sh", str(script)], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert roles(agent) == {"1": "active"}
    (whole,) = folder.glob("*.bundle")
    whole.write_bytes(whole.read_bytes()[:-1])
    done = subprocess.run(["sh", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, "is not whole: send it again" in done.stderr) == (2, True)


def test_a_line_where_nobody_answers_is_told(
    tmp_path: Path, wire: Cable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.fleet.transports.login_shell.PROMPT_S", 0.3)
    monkeypatch.setattr("toolkit.fleet.transports.login_shell.ALIVE_S", 0.3)
    with pytest.raises(TransportError, match="is a login shell there"):
        install(address_of(wire, None, tmp_path), make_bundle(tmp_path / "in"), monkeypatch)
