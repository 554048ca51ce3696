"""The files that `tandem board init` writes to a board: values in, texts out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

import configs
from device.agent.config import AgentConfig
from device.toml_file import decode_toml
from toolkit.errors import BoardError

VENV = "/opt/tandem"
ETC = "/etc/tandem"
CONFIG = f"{ETC}/agent.toml"
STATE = "/var/lib/tandem"
UNIT = "/etc/systemd/system/tandem-agent.service"
COMMAND = "/usr/local/bin/tandem-agent"
SUDOERS = "/etc/sudoers.d/tandem-agent"
AVAHI = "/etc/avahi/services"
ANNOUNCEMENT = f"{AVAHI}/tandem.service"
AGENT = f"{VENV}/bin/tandem-agent"
SERVICE = "_tandem._tcp"
GROUPS = ("video", "render")  # cameras, and the device files of GPU and DLA


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What agent.toml of a new board says. `tls`: a fleet's certificates are beside it."""

    device: str
    profile: str
    host: str
    port: int
    dev: bool = False
    tls: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    smp_device: str = ""


def agent_toml(settings: AgentSettings) -> str:
    """Return agent.toml; BoardError if the agent would refuse it."""
    lines = [
        "# Written by `tandem board init`, which leaves it alone once it was changed.",
        f"device = {_text(settings.device)}",
        f"profile = {_text(settings.profile)}",
        f"state_dir = {_text(STATE)}",
        f"dev = {str(settings.dev).lower()}",
        "",
        "[broker]",
        f"host = {_text(settings.host)}",
        f"port = {settings.port}",
    ]
    if settings.tls:
        lines += ['tls = {ca = "ca.crt", certificate = "device.crt", key = "device.key"}']
    if settings.labels:
        rows = (f"{_text(key)} = {_text(value)}" for key, value in settings.labels.items())
        lines += ["", "[labels]", *rows]
    if settings.smp_device:
        lines += ["", "[smp]", f"device = {_text(settings.smp_device)}"]
    text = "\n".join(lines) + "\n"
    try:
        decode_toml(text.encode(), AgentConfig)
    except ValueError as error:
        raise BoardError(f"no agent.toml can be made of this: {error}") from error
    return text


def unit_text(user: str, groups: tuple[str, ...]) -> str:
    """Return the unit of systemd for the agent, as this user and with those groups."""
    lines = (configs.ROOT / "tandem-agent.service").read_text().splitlines()
    body = lines[lines.index("[Unit]") :]
    changed = {
        "User=": f"User={user}",
        "SupplementaryGroups=": f"SupplementaryGroups={' '.join(groups)}",
        "ExecStart=": f"ExecStart={AGENT} --config {CONFIG}",
    }
    rows = [
        next((new for key, new in changed.items() if line.startswith(key)), line) for line in body
    ]
    return "\n".join(["# Written by `tandem board init`.", *rows]) + "\n"


def command_text(user: str) -> str:
    """Return the command of the PATH: `control` runs as the agent's user, whose socket it is."""
    return f"""#!/bin/sh
# `control` speaks to the agent by a socket that is its user's alone.
if [ "$1" = control ] && [ "$(id -un)" != {user} ]; then
    if [ "$(id -u)" = 0 ]; then exec runuser -u {user} -- {AGENT} "$@"; fi
    exec sudo -n -u {user} {AGENT} "$@"
fi
exec {AGENT} "$@"
"""


def sudoers_text(login: str, user: str) -> str:
    """Return the right of a login to run `tandem-agent control` as the agent's user, no more."""
    return f"# Written by `tandem board init`.\n{login} ALL=({user}) NOPASSWD: {AGENT} control *\n"


def announcement_text(device: str, login: str, ssh_port: int) -> str:
    """Return the service file of avahi by which `tandem board find` sees the board."""
    return f"""<?xml version="1.0" standalone="no"?>
<!DOCTYPE service-group SYSTEM "avahi-service.dtd">
<service-group>
  <name>{escape(device)}</name>
  <service>
    <type>{SERVICE}</type>
    <port>{ssh_port}</port>
    <txt-record>device={escape(device)}</txt-record>
    <txt-record>user={escape(login)}</txt-record>
  </service>
</service-group>
"""


def _text(value: str) -> str:
    """Return a text of TOML, whose basic strings are written as those of JSON."""
    return json.dumps(value, ensure_ascii=False)
