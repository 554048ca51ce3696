"""The agent as a service: what it tells systemd, and the files that it is started by."""

import configparser
import logging
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from device.agent.log import JOURNAL, JournalFormatter
from device.agent.sd_notify import READY, STOPPING, WATCHDOG, Notifier

CONFIGS = Path(__file__).parents[1] / "configs"
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


def test_the_unit_notifies_watches_and_gives_no_rights_away() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    assert (service["Type"], service["User"], service["Restart"]) == ("notify", "tandem", "always")
    assert int(service["WatchdogSec"]) >= 60
    assert service["NoNewPrivileges"] == "yes"
    assert service["ProtectSystem"] == "strict"


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


def test_the_container_runs_the_agent_as_a_user_of_its_own() -> None:
    text = (CONFIGS / "Containerfile").read_text().replace("\\\n", " ")
    rows = [line.split(maxsplit=1) for line in text.splitlines() if line and line[0] != "#"]
    known = {"ARG", "FROM", "RUN", "COPY", "USER", "VOLUME", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    assert {row[0] for row in rows} <= known
    last_user = [row[1] for row in rows if row[0] == "USER"][-1]
    assert last_user == "tandem"
    assert rows.index(["USER", "tandem"]) > max(i for i, row in enumerate(rows) if row[0] == "RUN")
    assert ["STOPSIGNAL", "SIGTERM"] in rows
