"""`tandem board init` on a fresh board: real sshd, sudo, useradd, Python, pip and agent."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fresh_board import LOGIN, PASSWORD, FreshBoard
from mqtt_fixtures import Mosquitto
from ssh_fixtures import ROOT
from wheel_fixtures import tandem_wheel

from toolkit.cli.main import tandem
from toolkit.errors import BoardError
from toolkit.fleet.boards.care import reboot_board
from toolkit.fleet.boards.power import set_mode
from toolkit.fleet.boards.shell import Done, UnreachableError
from toolkit.fleet.folder import make_fleet

STEPS = [
    *("user", "environment", "packages", "command", "config", "trust", "identity", "power mode"),
    *("serial line", "unit", "announcement", "agent", "system's packages"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tandem_wheel(tmp_path_factory)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[FreshBoard]:
    board = FreshBoard(tmp_path / "board")
    yield board
    board.close()


@pytest.fixture(autouse=True)
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_SUDO_PASSWORD", PASSWORD)


def board(*words: str) -> Result:
    return CliRunner().invoke(tandem, ("board", *words))


def outcomes(done: Result) -> dict[str, str]:
    assert done.exit_code == 0, (done.output, done.exception)
    return {row["step"]: row["outcome"] for row in json.loads(done.stdout)["steps"]}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fresh_board_is_set_up_once_and_a_second_run_changes_nothing(
    tmp_path: Path, fresh: FreshBoard, wheel: Path
) -> None:
    broker = Mosquitto(tmp_path)
    fleet = tmp_path / "robots"
    make_fleet(fleet, name="robots", broker=f"127.0.0.1:{broker.tls_port}")
    common = (fresh.address, "--device", "board-7", "--profile", "laptop", "--fleet", str(fleet))
    common += ("--wheel", str(wheel), "--label", "site=lab", "--power-mode", "maxn", "--json")
    try:
        planned = outcomes(board("init", *common, "--dry-run"))
        assert list(planned) == STEPS
        assert {planned[name] for name in STEPS[:8]} == {"would do"}
        assert fresh.run("ls /opt; ls /var/lib/double") == ""

        first = board("init", *common)
        assert {outcomes(first)[name] for name in STEPS[:8]} == {"done"}
        assert outcomes(first)["agent"] == "done"
        assert set(json.loads(first.stdout)["system"]) == {"numpy", "cv2", "tensorrt"}
        second = outcomes(board("init", *common))
        assert set(second.values()) == {"already", "skipped"}, second
        assert [call for call in fresh.calls() if call.startswith("restart")] == [
            "restart tandem-agent"
        ]
    finally:
        broker.close()
    # Who may read what: the key is the agent's alone, the login speaks to it by one command.
    modes = fresh.run("stat -c '%n %a %U:%G' /etc/tandem/* /etc/sudoers.d/tandem-agent")
    assert "/etc/tandem/device.key 640 root:tandem" in modes
    assert "/etc/tandem/agent.toml 640 root:tandem" in modes
    assert "/etc/sudoers.d/tandem-agent 440 root:root" in modes
    assert "User=tandem" in fresh.run("cat /etc/systemd/system/tandem-agent.service")
    assert "site" in fresh.run("cat /etc/tandem/agent.toml")
    assert (fleet / "identity/devices/board-7").is_dir()
    assert PASSWORD not in fresh.sshd.log() + fresh.log()
    # The agent sees the system's packages, and has none of its own in their place.
    path = fresh.run("/opt/tandem/bin/python -c 'import numpy; print(numpy.__file__)'")
    assert not path.startswith("/opt/tandem")
    facts = json.loads(board("info", fresh.address, "--json").stdout)
    assert facts["answer"]["device"] == "board-7"
    assert facts["facts"]["power_mode"] == "MAXN"
    text = board("info", fresh.address)
    assert "power mode  MAXN" in text.stdout, text.output
    assert "runs        nothing" in text.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_failed_goes_on_and_a_changed_file_is_kept(
    fresh: FreshBoard, wheel: Path, tmp_path: Path
) -> None:
    bench = (fresh.address, "--device", "b", "--profile", "laptop", "--dev", "--wheel", str(wheel))
    bench += ("--broker", "127.0.0.1:1", "--json")
    nvpmodel = fresh.folder / "usr_local/bin/nvpmodel"
    whole = nvpmodel.read_text()
    nvpmodel.write_text(whole.replace("-m) test", "-m) echo 'NVPM ERROR: hot'; exit 1; test"))
    done = board("init", *bench, "--power-mode", "0")
    assert done.exit_code == 1
    assert (
        "nvpmodel does not take the mode MAXN: NVPM ERROR: hot" in json.loads(done.stdout)["error"]
    )
    nvpmodel.write_text(whole)
    fresh.run("echo '# mine' >> /etc/tandem/agent.toml")
    rest = board("init", *bench, "--power-mode", "40W")
    steps = outcomes(rest)
    assert [steps[name] for name in ("user", "environment", "packages", "config")] == [
        "already"
    ] * 4
    assert (steps["power mode"], steps["agent"]) == ("pending", "done")
    assert "# mine" in fresh.run("cat /etc/tandem/agent.toml")
    replaced = outcomes(board("init", *bench, "--overwrite"))
    assert (replaced["config"], replaced["agent"]) == ("done", "done")
    assert "# mine" not in fresh.run("cat /etc/tandem/agent.toml")
    assert "# mine" in fresh.run("cat /etc/tandem/agent.toml.old")

    # Looking after it: log, power mode, a reboot that the kernel of the double does not do.
    assert "tandem.agent" in subprocess_of("logs", fresh.address, "-n", "5")
    assert fresh.calls("journalctl")[-1].startswith("-u tandem-agent -n 5")
    listed = json.loads(board("power-mode", "--to", fresh.address, "--json").stdout)
    assert (listed["mode"], listed["modes"]) == ("15W", ["MAXN", "15W", "40W"])
    unknown = board("power-mode", "50W", "--to", fresh.address)
    assert "has no power mode '50W': 15W, 40W, MAXN" in str(unknown.exception), unknown.exception
    refused = board("power-mode", "40W", "--to", fresh.address)
    assert "needs a reboot" in str(refused.exception)
    assert board("power-mode", "40W", "--to", fresh.address, "--reboot").exit_code == 0
    assert "yes" in fresh.run("cat /var/lib/double/rebooted")
    assert board("reboot", fresh.address, "--no-wait").stdout == "127.0.0.1 goes down\n"
    waited = board("reboot", fresh.address, "--timeout", "3")
    assert "is not back after 3 s: it has not gone down yet" in str(waited.exception)


def subprocess_of(*words: str) -> str:
    command = (sys.executable, "-m", "toolkit.cli", "board", *words)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wrong_password_and_a_board_that_does_not_fit_are_refused(
    fresh: FreshBoard, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = ("--dev", "--broker", "127.0.0.1:1", "--profile", "laptop", "--wheel", str(wheel))
    monkeypatch.setenv("TANDEM_SUDO_PASSWORD", "wrong")
    done = board("init", fresh.address, *bench)
    assert f"does not take the password in TANDEM_SUDO_PASSWORD for {LOGIN}" in str(done.exception)
    monkeypatch.delenv("TANDEM_SUDO_PASSWORD")
    assert "there is no terminal to ask you" in str(board("init", fresh.address, *bench).exception)
    monkeypatch.setenv("TANDEM_SUDO_PASSWORD", PASSWORD)
    no_profile = board("init", fresh.address, *bench[:3], "--wheel", str(wheel))
    assert "no profile has the part number of this board" in str(no_profile.exception)
    old = fresh.folder / "usr_local/bin/python3"
    text = old.read_text()
    old.write_text("#!/bin/sh\nexec cat /var/lib/double/answer\n")
    answer = {"python": [3, 8, 10], "abi": "cp38", "machine": "aarch64", "glibc": "2.31",
        "free_mb": 9000, "model": "Jetson", "compatible": "", "serial": "", "nv_release": "",
        "host": "b", "systemd": True, "packages": {}, "distributions": {},
            "numpy": "numpy>=1.23"}  # fmt: skip
    path = fresh.folder / "var_lib/double/answer"
    for change, words in (
        ({}, "has Python 3.8.10, the agent needs 3.10"),
        ({"python": [3, 10, 12], "free_mb": 499}, "has 499 MB free below /opt, 500 MB are needed"),
        ({"python": [3, 10, 12], "systemd": False}, "has no systemctl"),
    ):
        path.write_text(json.dumps({**answer, **change}))
        path.chmod(0o644)
        assert words in str(board("init", fresh.address, *bench).exception)
    old.write_text(text)
    assert fresh.run("ls /opt") == ""
    absent = board("init", fresh.address.replace(str(fresh.sshd.port), "1"), *bench)
    assert "no SSH server runs there" in str(absent.exception)


class GoesDown:
    """Stands for the shell of a board that goes down before `systemctl reboot` answers."""

    name = "b"

    def __init__(self, end: Done | None) -> None:
        self._end = end

    def must(self, _script: str, **_options: object) -> Done:
        return Done(0, b"boot-1\n", "")

    def as_root(self, script: str) -> Done:
        assert script == "systemctl reboot"
        if self._end is None:
            raise UnreachableError("b cannot be reached: Connection closed by remote host")
        return self._end

    def forget_connection(self) -> None:
        """There is none."""


def test_a_reboot_may_cut_its_own_connection_but_not_fail() -> None:
    assert reboot_board(GoesDown(None)) == "boot-1"
    assert reboot_board(GoesDown(Done(0, b"", ""))) == "boot-1"
    with pytest.raises(BoardError, match="cannot start the board again: inhibited"):
        reboot_board(GoesDown(Done(1, b"", "inhibited\n")))


class RebootsAtOnce:
    """Stands for the shell of a board whose nvpmodel reboots before it answers."""

    name = "b"

    def run(self, _script: str) -> Done:
        return Done(0, b"< POWER_MODEL ID=2 NAME=40W >\n", "")

    def as_root(self, _script: str) -> Done:
        raise UnreachableError("b cannot be reached: Connection closed by remote host")


def test_a_power_mode_that_reboots_may_cut_its_own_connection() -> None:
    assert set_mode(RebootsAtOnce(), "40W", reboot=True).name == "40W"
    with pytest.raises(UnreachableError):
        set_mode(RebootsAtOnce(), "40W")


def test_shell_becomes_ssh_with_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, tuple[str, ...]]] = []
    monkeypatch.setattr(os, "execvp", lambda file, words: commands.append((file, words)))
    board("shell", "ssh://robot@10.0.0.2:2222")
    assert shlex.join(commands[0][1]) == "ssh -t -p 2222 robot@10.0.0.2"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("init", "ssh://h"), "takes no release: name the fleet's folder, or write --dev"),
        (("init", "dir:///media/usb", "--dev"), "this goes over SSH alone"),
        (("init", "ssh://h", "--dev", "--label", "site"), "is no label: write KEY=VALUE"),
        (("init", "ssh://h", "--dev", "--packages", "/nonexistent"), "write host, board, or a"),
        (("init", "ssh://h", "--dev", "--user", "a;reboot"), "'a;reboot' is no name of a user"),
        (("logs", "ssh://-oProxyCommand=x"), "is no name of a host or a user"),
    ],
)
def test_what_cannot_be_done_is_said_before_a_board_is_asked(
    words: tuple[str, ...], reason: str
) -> None:
    done = board(*words)
    assert reason in done.output + str(done.exception)
