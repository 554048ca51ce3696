"""Looks for boards: the USB network, mDNS, then serial ports, in this order.

Finding is one thing, asking is another: whatever a place says of itself, the board behind it is
asked at its address before it counts, and one with several addresses counts once.
"""

import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from device.control.upload_request import BoardFacts
from device.errors import TandemError
from device.install_advice import pip_install
from device.smp.message import READ
from toolkit.fleet.transports.addresses import TRANSPORTS, open_board, parse_address
from toolkit.fleet.transports.transport import TransportError

USB_HOST = "192.168.55.1"  # a Jetson at a USB port
SSH_PORT = 22
SERVICE = "_tandem._tcp.local."
CONNECT_S = 1.0
MDNS_S = 2.0
MAX_ASKED = 16  # boards that are asked at once
_SHOWN = 64  # characters of a name that a stranger announces
# A board says where its agent is. Anybody can say so for a known host: no other program is run.
_ANNOUNCED = {
    "agent": re.compile(r"/[A-Za-z0-9_./-]*/tandem-agent\Z"),
    "config": re.compile(r"/[A-Za-z0-9_./-]*\.toml\Z"),
}
NVIDIA = 0x0955  # the vendor in the USB ids of a Jetson's own port, and of its recovery mode
DEVICE_MODE = (0x7020, 0x7045)  # "Linux for Tegra" with its serial port, 0x7045 without the disk
BAUD = 115200


@dataclass(frozen=True, slots=True)
class SerialAnswer:
    """What a port answered; `device`: what the agent calls itself, "" if it does not say it."""

    sentence: str
    answers: bool = False
    device: str = ""


def jetson_ports() -> list[str]:
    """Return the serial ports of this host that are Jetsons, by their USB ids."""
    try:
        from serial.tools.list_ports import comports
    except ImportError:
        return []
    return sorted(
        port.device for port in comports() if port.vid == NVIDIA and port.pid in DEVICE_MODE
    )


def ask_serial(port: str) -> SerialAnswer:
    """Ask one port; whatever is wrong with it becomes the sentence."""
    from toolkit.fleet.transports.smp_client import TANDEM, SmpClient
    from toolkit.fleet.transports.smp_links import SerialLine

    client = SmpClient(SerialLine(port, BAUD, "console"))
    try:
        client.connect(tries=1)  # most ports have a login, which never answers
        device = client.ask(READ, TANDEM, 0, {}).get("device")
    except TandemError as error:
        return SerialAnswer(str(error))
    finally:
        client.close()
    name = device if isinstance(device, str) and device.isprintable() else ""
    return SerialAnswer(f"{port}: {name or 'an agent'} answers", True, name)


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How found boards are reached. `user`, `ssh_config`: of ssh, "" for its own defaults."""

    user: str = ""
    ssh_config: str = ""


@dataclass(frozen=True, slots=True)
class BoardAddress:
    """The address at which a board may be, and what it calls itself, "" if it does not."""

    address: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one look gave; `sentence` for a line."""

    kind: str
    sentence: str
    places: tuple[BoardAddress, ...] = ()


@dataclass(frozen=True, slots=True)
class FoundBoard:
    """A board that was asked. `facts`: None if it did not answer, `error` says why."""

    address: str
    name: str
    facts: BoardFacts | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Search:
    """All looks, and the boards behind them."""

    looks: tuple[ProbeResult, ...]
    boards: tuple[FoundBoard, ...]


class NoBoardError(TransportError):
    """No board, or several where one was needed."""


def look_usb(options: SearchOptions) -> ProbeResult:
    """Knock at the address that a Jetson has on its USB cable."""
    try:
        socket.create_connection((USB_HOST, SSH_PORT), CONNECT_S).close()
    except OSError as error:
        reason = "nobody answers" if isinstance(error, TimeoutError) else error.strerror
        return ProbeResult("USB network", f"{USB_HOST}: {reason or error}")
    place = BoardAddress(_ssh_address(USB_HOST, SSH_PORT, options))
    return ProbeResult("USB network", f"{USB_HOST} answers", (place,))


def look_mdns(options: SearchOptions) -> ProbeResult:
    """Ask the network who offers `_tandem._tcp`; avahi of a board does that."""
    try:
        from zeroconf import Zeroconf
    except ImportError:
        return ProbeResult("mDNS", f"not asked: zeroconf is not installed; {pip_install('host')}")
    try:
        with Zeroconf() as network:
            places = _announced(network, options)
    except OSError as error:
        return ProbeResult("mDNS", f"this host has no network for it: {error.strerror or error}")
    names = ", ".join(place.name for place in places)
    return ProbeResult(
        "mDNS", names or f"nobody announces {SERVICE.removesuffix('.local.')}", places
    )


def _announced(network: "object", options: SearchOptions) -> tuple[BoardAddress, ...]:
    """Return the places of all services that answer within MDNS_S."""
    from zeroconf import BadTypeInNameException, ServiceBrowser, Zeroconf

    assert isinstance(network, Zeroconf)
    names: set[str] = set()

    def on_change(zeroconf: object, service_type: str, name: str, state_change: object) -> None:
        names.add(name)

    browser = ServiceBrowser(network, SERVICE, handlers=[on_change])
    try:
        time.sleep(MDNS_S)  # nobody says that all have answered
    finally:
        browser.cancel()
    places = []
    for name in sorted(names):
        try:
            info = network.get_service_info(SERVICE, name, round(CONNECT_S * 1000))
        except BadTypeInNameException:  # a stranger's: control characters, or too long
            continue
        if info is None:
            continue
        addresses = info.parsed_addresses()
        if not addresses or info.port is None:
            continue
        text = {key: _text(value) for key, value in info.decoded_properties.items()}
        host = _host(info.server or "", addresses)
        user = options.user or text.get("user", "")
        parts = announced_paths(text)
        address = _ssh_address(host, info.port, options, user=user, parts=parts)
        label = _text(name.removesuffix(f".{SERVICE}")[:_SHOWN])
        places.append(BoardAddress(address, text.get("device") or label))
    return tuple(places)


def announced_paths(text: Mapping[str, str]) -> dict[str, str]:
    """Return where a board's agent and its agent.toml are, of what an mDNS record says."""
    return {key: text[key] for key, form in _ANNOUNCED.items() if form.match(text.get(key, ""))}


def _text(value: str | None) -> str:
    """Return what a stranger announces as a short printable text, "" if it is none."""
    return value if value and value.isprintable() and len(value) <= 256 else ""


def _host(server: str, addresses: Sequence[str]) -> str:
    """Return the name of a host where this one resolves it: keys of hosts are known by names."""
    name = server.removesuffix(".")
    try:
        known = {row[4][0] for row in socket.getaddrinfo(name, None)}
    except (OSError, UnicodeError):
        known = set()
    return name if known.intersection(addresses) else addresses[0]


def look_serial(_: SearchOptions) -> ProbeResult:
    """Ask the ports of Jetsons by SMP, all at once."""
    ports = jetson_ports()
    with ThreadPoolExecutor(MAX_ASKED) as pool:
        answers = list(pool.map(ask_serial, ports))
    places = (
        BoardAddress(f"serial://{quote(port)}", answer.device)
        for port, answer in zip(ports, answers, strict=True)
        if answer.answers
    )
    sentence = "; ".join(answer.sentence for answer in answers)
    return ProbeResult("serial", sentence or "no Jetson at a port", tuple(places))


Finder = Callable[[SearchOptions], ProbeResult]
FINDERS: tuple[Finder, ...] = (look_usb, look_mdns, look_serial)


def find_boards(options: SearchOptions, on_look: Callable[[ProbeResult], None]) -> Search:
    """Look everywhere, ask what is there, and count each board once."""
    looks = []
    for finder in FINDERS:
        look = finder(options)
        on_look(look)
        looks.append(look)
    places = [place for look in looks for place in look.places]
    with ThreadPoolExecutor(MAX_ASKED) as pool:
        boards = list(pool.map(_ask, places))
    return Search(tuple(looks), distinct(boards))


def distinct(answers: Sequence[FoundBoard]) -> tuple[FoundBoard, ...]:
    """Return each board once, by the first of its addresses that answers."""
    boards: dict[str, FoundBoard] = {}
    for board in answers:
        earlier = boards.get(board.name or board.address)
        if earlier is None or (earlier.facts is None and board.facts is not None):
            boards[board.name or board.address] = board
    return tuple(boards.values())


def _ask(place: BoardAddress) -> FoundBoard:
    """Ask the board at a place what it is; a place with a wrong address is one that fails."""
    scheme = place.address.partition(":")[0]
    if scheme not in TRANSPORTS:
        return FoundBoard(
            place.address, place.name, error=f"{scheme}:// is no transport of this Tandem"
        )
    import click

    try:
        board = open_board(parse_address(place.address))
        try:
            facts = board.facts()
        finally:
            board.close()
    except click.UsageError as error:
        return FoundBoard(place.address, place.name, error=error.message)
    except TandemError as error:
        return FoundBoard(place.address, place.name, error=str(error))
    name = place.name if facts is None else facts.answer.device
    return FoundBoard(place.address, name, facts)


def the_one(search: Search) -> FoundBoard:
    """Return the only board; NoBoardError lists what was seen if there is none, or several."""
    if len(search.boards) == 1:
        return search.boards[0]
    if search.boards:
        rows = "; ".join(f"{board.name or 'unknown'} at {board.address}" for board in search.boards)
        raise NoBoardError(
            f"{len(search.boards)} boards are there ({rows}): name one with `tandem flash --to`, "
            "or take all with `tandem flash --all-found`"
        )
    raise no_boards(search)


def no_boards(search: Search) -> NoBoardError:
    """Return the error that says where was looked in vain."""
    looks = "; ".join(f"{look.kind}: {look.sentence}" for look in search.looks)
    return NoBoardError(
        f"no board was found ({looks}): connect its USB cable and switch it on, or name it with "
        "--to ssh://user@host"
    )


def _ssh_address(
    host: str,
    port: int,
    options: SearchOptions,
    *,
    user: str | None = None,
    parts: dict[str, str] | None = None,
) -> str:
    """Return the ssh:// address of a host."""
    name = options.user if user is None else user
    login = f"{quote(name, safe='')}@" if name else ""
    place = f"[{host}]" if ":" in host else host
    query = dict(parts or {})
    if options.ssh_config:
        query["ssh_config"] = options.ssh_config
    behind = f"?{urlencode(query, safe='/')}" if query else ""
    return f"ssh://{login}{place}{'' if port == SSH_PORT else f':{port}'}{behind}"
