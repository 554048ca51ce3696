"""`tandem doctor`: what this machine has for Tandem, and how to fix what it lacks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from toolkit.cli.command import command, json_option, option

Job = Literal["host", "board", "demo"]


def _parse_address(text: str | None) -> tuple[str, int] | None:
    """Read HOST or HOST:PORT, with [brackets] around an IPv6 host."""
    if text is None:
        return None
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, "1883"
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise click.BadParameter(f"{text!r} is not HOST:PORT with a port from 1 to 65535")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class Doctor:
    """Check what this machine has for Tandem.

    Exit status 1 if something that the job needs is missing.

    \b
    Examples:
      tandem doctor                          what this machine lacks for its job
      tandem doctor --job demo               for `tandem demo`
      tandem doctor --broker 10.0.0.2:1883   whether that broker accepts a client
      tandem doctor --report report.json     what a bug report needs, in one file
    """

    broker: tuple[str, int] | None = option(
        "Also try an MQTT broker (default port 1883).", parse=_parse_address, metavar="HOST:PORT"
    )
    job: Job | None = option(
        "What the machine is for: builds, running on a board, or the demo.  "
        "[default: board on a Jetson, else host]"
    )
    report: Path | None = option(
        "Also write a file for a bug report: the checks, versions and settings, without names, "
        "addresses and paths of yours.",
        metavar="FILE",
    )
    as_json: bool = json_option("Print JSON instead of a table.")


doctor = command(Doctor, "doctor:doctor")
