"""From what was asked, and what the board is, to the settings of its agent."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from device.errors import ProfileError
from device.profile import load_profile
from toolkit.errors import BoardError
from toolkit.fleet.authority import check_device
from toolkit.fleet.boards.probe import Probe
from toolkit.fleet.boards.texts import AgentSettings
from toolkit.fleet.brokers.address import DEFAULT_PORT, TLS_PORT, parse_broker
from toolkit.fleet.folder import load_settings

_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}\Z")


@dataclass(frozen=True, slots=True)
class InitRequest:
    """What `tandem board init` was asked for; empty texts are taken from board and fleet."""

    device: str = ""
    profile: str = ""
    broker: str = ""
    fleet: Path | None = None
    dev: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    smp_device: str = ""


def agent_settings(request: InitRequest, probe: Probe) -> AgentSettings:
    """Return the settings of the agent; BoardError names what is missing."""
    host, port = _broker(request)
    return AgentSettings(
        device=_device(request, probe),
        profile=_profile(request, probe),
        host=host,
        port=port,
        dev=request.dev,
        tls=request.fleet is not None and load_settings(request.fleet).broker.tls,
        labels=request.labels,
        smp_device=request.smp_device,
    )


def _device(request: InitRequest, probe: Probe) -> str:
    device = request.device or probe.host
    check_device(device)
    return device


def _profile(request: InitRequest, probe: Probe) -> str:
    """Return the profile; one of another module than the board's is refused."""
    board = probe.model or probe.machine
    if not request.profile and not probe.profile:
        raise BoardError(
            f"no profile has the part number of this board ({board}): name one with --profile; "
            "`tandem profiles` lists them"
        )
    name = request.profile or probe.profile
    try:
        profile = load_profile(name)
    except ProfileError as error:
        raise BoardError(str(error)) from error
    of_module = name.removesuffix("-super") == probe.profile.removesuffix("-super")
    if probe.profile and profile.part and not of_module:
        raise BoardError(
            f"the profile {name} is of the module {profile.title}, this board is {board}: leave "
            f"--profile out, or take {probe.profile}"
        )
    return profile.name


def _broker(request: InitRequest) -> tuple[str, int]:
    if request.broker:
        default = DEFAULT_PORT if request.fleet is None else TLS_PORT
        address = parse_broker(request.broker, default_port=default)
        return address.host, address.port
    if request.fleet is None:
        raise BoardError(
            "it is not known where the board's broker is: name the fleet's folder with --fleet, or "
            "for a bench the broker with --broker and --dev"
        )
    broker = load_settings(request.fleet).broker
    return broker.host, broker.port


def check_request(request: InitRequest) -> None:
    """Refuse what no board could be made of, before one is asked; BoardError."""
    if request.fleet is None and not request.dev:
        raise BoardError(
            "a board without --fleet takes no release: name the fleet's folder, or write --dev for "
            "a bench, which takes releases that nobody signed"
        )


def check_user(user: str) -> None:
    """Refuse what is no name of a user on Linux; BoardError."""
    if _USER.match(user) is None:
        raise BoardError(
            f"{user!r} is no name of a user: --user takes up to 32 small letters, digits, - and _"
        )


def parse_labels(rows: Sequence[str]) -> dict[str, str]:
    """Return labels of KEY=VALUE; BoardError for one that is not."""
    labels = {}
    for row in rows:
        key, equals, value = row.partition("=")
        if not key.strip() or not equals:
            raise BoardError(f"{row!r} is no label: write KEY=VALUE, such as site=lab")
        labels[key.strip()] = value.strip()
    return labels
