"""The transports to a board, as addresses: ssh://, serial://, smp+udp://, dir:// and mqtt://."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from urllib.parse import parse_qsl, unquote, urlsplit

import click

from device.install_advice import pip_install
from toolkit.fleet.brokers.address import BrokerAddress, parse_broker
from toolkit.fleet.transports.transport import Board

USB = "ssh://192.168.55.1"  # a Jetson at a USB port
_RENAMED = {"rescue": "console"}  # options as addresses of earlier versions have them
_NAME = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.%:-]*\Z")  # ::1 too, never an option of ssh


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of an address. `devices`: of the command line; `broker`: with its login."""

    text: str
    user: str = ""
    host: str = ""
    port: int | None = None
    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    broker: BrokerAddress | None = None
    timeout_s: float = 120.0


def _ssh(address: Address) -> Board:
    from toolkit.fleet.transports.ssh import ssh_board

    if not address.host:
        raise click.UsageError(f"{address.text} names no host: write ssh://user@host")
    return ssh_board(address)


def _folder(address: Address) -> Board:
    from toolkit.fleet.transports.folder import FolderBoard

    if not address.path.startswith("/") or address.host:
        raise click.UsageError(
            f"{address.text} names no folder by its whole path: write dir:///media/usb"
        )
    return FolderBoard(Path(address.path), address.devices)


def _mqtt(address: Address) -> Board:
    from toolkit.fleet.transports.mqtt import MqttBoard

    device = address.path.strip("/")
    if not address.host or not device:
        raise click.UsageError(f"{address.text}: write mqtt://broker:1883/device-id")
    broker = address.broker or parse_broker(_host_port(address))
    return MqttBoard(broker, device, address.timeout_s)


def _serial(address: Address) -> Board:
    framing, baud = address.options.get("framing", "console"), address.options.get("baud", "115200")
    device = address.path or address.host.upper()  # COM3 has no path
    if not device.strip("/") or (address.path and address.host):
        raise click.UsageError(f"{address.text}: write serial:///dev/ttyACM0?baud=921600")
    if framing not in ("console", "raw"):
        raise click.UsageError(f"{address.text}: framing is console or raw, not {framing!r}")
    if not (baud.isascii() and baud.isdigit() and 1200 <= int(baud) <= 12_000_000):
        raise click.UsageError(f"{address.text}: baud = {baud!r} is no rate, such as 921600")
    lines = _lines(address)
    if "console" in address.options:
        return _console(address, device, int(baud))
    from toolkit.fleet.transports.smp import SmpBoard

    return SmpBoard(lines.SerialLine(device, int(baud), "raw" if framing == "raw" else "console"))


def _console(address: Address, device: str, baud: int) -> Board:
    from toolkit.fleet.transports.console import ConsoleBoard

    if address.options["console"] != "zmodem":
        raise click.UsageError(f"{address.text}: the console install is console=zmodem")
    return ConsoleBoard(address, device, baud, lambda text, secret: _ask(text, secret=secret))


def _ask(text: str, *, secret: bool) -> str:
    answer: str = click.prompt(text, hide_input=secret, err=True)
    return answer


def _udp(address: Address) -> Board:
    if not address.host:
        raise click.UsageError(f"{address.text} names no host: write smp+udp://192.168.55.1")
    lines = _lines(address)
    from toolkit.fleet.transports.smp import SmpBoard

    return SmpBoard(lines.UdpLine(address.host, address.port))


def _lines(address: Address) -> ModuleType:
    """Return the lines of SMP, which need pyserial."""
    try:
        from toolkit.fleet.transports import smp_links as lines
    except ImportError as error:
        raise click.UsageError(f"{address.text} needs pyserial: {pip_install('serial')}") from error
    return lines


# Scheme -> what opens it, and the options that its address may have behind "?".
TRANSPORTS: Mapping[str, tuple[Callable[[Address], Board], frozenset[str]]] = {
    "ssh": (_ssh, frozenset({"agent", "config", "ssh_config"})),
    "serial": (_serial, frozenset({"baud", "framing", "console", "user", "agent", "config"})),
    "smp+udp": (_udp, frozenset()),
    "dir": (_folder, frozenset()),
    "mqtt": (_mqtt, frozenset()),
}


def parse_address(text: str, devices: Sequence[str] = ()) -> Address:
    """Return the parts of an address; UsageError says what is wrong with it."""
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError as error:
        raise click.UsageError(f"{text}: {error}") from error
    if url.scheme not in TRANSPORTS:
        names = ", ".join(f"{name}://" for name in TRANSPORTS)
        raise click.UsageError(f"{text} is no address of a board: it begins with one of {names}")
    pairs = parse_qsl(url.query, keep_blank_values=True)
    options = {_RENAMED.get(name, name): value for name, value in pairs}
    for name in sorted(set(options) - TRANSPORTS[url.scheme][1]):
        raise click.UsageError(f"{text}: {url.scheme}:// has no option {name!r}")
    user, host = unquote(url.username or ""), url.hostname or ""
    for part in filter(None, (user, host)):
        if _NAME.match(part) is None:
            raise click.UsageError(f"{text}: {part!r} is no name of a host or a user")
    if url.password is not None:
        raise click.UsageError(
            "An address takes no password: others could read it in the list of tasks"
        )
    return Address(
        text=text,
        user=user,
        host=host,
        port=port,
        path=unquote(url.path),
        options=options,
        devices=tuple(devices),
    )


def open_board(address: Address) -> Board:
    """Return the board at an address; nothing is connected yet."""
    return TRANSPORTS[urlsplit(address.text).scheme][0](address)


def _host_port(address: Address) -> str:
    host = f"[{address.host}]" if ":" in address.host else address.host
    return host if address.port is None else f"{host}:{address.port}"
