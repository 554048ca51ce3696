"""The last step: the agent is started, or started again, and answers."""

import hashlib
import time

import msgspec

from device.control.upload_request import BoardFacts
from toolkit.errors import BoardError
from toolkit.fleet.boards.packages import STAMP
from toolkit.fleet.boards.setup import Setup, State
from toolkit.fleet.boards.texts import COMMAND, CONFIG, ETC, UNIT, VENV

UNIT_NAME = "tandem-agent"
STARTED = f"{VENV}/tandem.started"  # of what the agent was last started with
LOOK_S = 0.5
_FILES = f"{STAMP} {CONFIG} {UNIT} {ETC}/*.crt {ETC}/trust/*"


def look_started(setup: Setup) -> State:
    """Whether the agent runs with the files that are there now."""
    if setup.shell.run(f"systemctl is-active --quiet {UNIT_NAME}").status != 0:
        return State("todo", "start the agent and wait until it answers")
    if setup.read(STARTED) != _digest(setup):
        return State("todo", "start the agent again, with what has changed")
    return State("already", "it runs")


def start_agent(setup: Setup) -> str:
    """Start it, also after the next boot; wait until it answers."""
    shell, begun_s = setup.shell, time.monotonic()
    script = f"systemctl enable {UNIT_NAME} && systemctl restart {UNIT_NAME}"
    shell.must(script, root=True, what="start the agent")
    last_line = ""
    while time.monotonic() - begun_s < setup.options.start_timeout_s:
        done = shell.as_root(f"{COMMAND} control --config {CONFIG} facts")
        if done.status == 0:
            setup.write(STARTED, _digest(setup), mode="644")
            return f"{_said(done.stdout)} after {time.monotonic() - begun_s:.1f} s"
        last_line = done.last_line
        time.sleep(LOOK_S)
    raise BoardError(
        f"{shell.name}: the agent does not answer within {setup.options.start_timeout_s:g} s "
        f"({last_line.removeprefix('tandem-agent: ')}): `tandem board logs` says more"
    )


def _said(line: bytes) -> str:
    try:
        return f"{msgspec.json.decode(line, type=BoardFacts).answer.device} answers"
    except ValueError as error:
        raise BoardError(f"the agent answers {line[:80]!r}, which is not understood") from error


def _digest(setup: Setup) -> bytes:
    done = setup.shell.as_root(f"cat {_FILES} 2>/dev/null")
    return hashlib.sha256(done.stdout).hexdigest().encode() + b"\n"
