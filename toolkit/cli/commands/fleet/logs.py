"""`tandem fleet logs`: what happened to a device, and what it says now."""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.cli.options.fleet import fleet_option, json_option

if TYPE_CHECKING:
    from toolkit.fleet.fleet_folder import Fleet

# Topics below the device's that are followed.
FOLLOWED = ("state", "reported", "log/#", "evt/#")


@click.command(epilog="Example: tandem fleet logs board-1 --fleet fleet/ -f")
@click.argument("device", metavar="ID")
@fleet_option
@click.option("-f", "--follow", is_flag=True, help="Go on with what the device says, until Ctrl-C.")
@json_option
def logs(device: str, folder: Path, follow: bool, as_json: bool) -> None:
    """Print what rollouts did to the device ID; with -f also its messages as they come."""
    import msgspec

    from toolkit.errors import RolloutError
    from toolkit.fleet.fleet_folder import load_fleet
    from toolkit.fleet.server.history import history_of
    from toolkit.fleet.server.operations import unknown_device
    from toolkit.fleet.server.times import utc
    from toolkit.fleet.store.devices import load_device

    fleet = load_fleet(folder)
    database = fleet.open_store()
    try:
        if load_device(database, device) is None:
            raise RolloutError(unknown_device(database, device))
        for row in history_of(database, device):
            if as_json:
                values = {"at": utc(row.at_s), "rollout": row.rollout, "text": row.text}
                click.echo(msgspec.json.encode(values).decode())
            else:
                place = f"rollout {row.rollout}" if row.rollout else "fleet"
                click.echo(f"{utc(row.at_s)}  {place}  {row.text}")
    finally:
        database.close()
    if follow:
        for line in _messages(fleet, device, as_json=as_json):
            click.echo(line)


def _shown(topic: str, payload: bytes, text: str) -> str:
    """Return what is shown of a message: of a log line its text."""
    from device.protocol.documents import LogLine, decode

    if not topic.startswith("log/"):
        return text
    try:
        line = decode(payload, LogLine)
    except ValueError:
        return text
    before = f"({line.left_out} lines were left out) " if line.left_out else ""
    return f"{before}{line.level} {line.text}"


def _messages(fleet: "Fleet", device: str, *, as_json: bool) -> Iterator[str]:
    """Yield a line for each message of a device, for ever."""
    import secrets
    import time

    import msgspec

    from device.protocol.mqtt import Link, LinkEvent, Message, queue_putter
    from device.protocol.topics import Topics
    from toolkit.fleet.server.history import printable
    from toolkit.fleet.server.times import utc

    root = Topics(device).root
    subscriptions = tuple((f"{root}/{topic}", 1) for topic in FOLLOWED)
    settings = fleet.link_settings(f"fleet-logs-{secrets.token_hex(4)}", subscriptions)
    events: queue.Queue[LinkEvent] = queue.Queue(1024)
    ended = threading.Event()
    link = Link(settings, queue_putter(events, ended))
    link.start()
    try:
        while True:
            event = events.get()
            if isinstance(event, Message):
                topic = event.topic.removeprefix(f"{root}/")
                text = event.payload.decode(errors="replace")
                at = utc(time.time())
                if as_json:
                    row = {"at": at, "topic": topic, "payload": text}
                    yield msgspec.json.encode(row).decode()
                else:
                    yield f"{at}  {topic}  {printable(_shown(topic, event.payload, text))}"
    finally:
        ended.set()
        link.close()
