"""Print what happened to a device and what it says now, and check the audit log."""

import queue
import secrets
import threading
import time
from collections.abc import Iterator

import click
import msgspec

from device.protocol.documents import LogLine, decode
from device.protocol.mqtt import Link, LinkEvent, Message, queue_putter
from device.protocol.topics import Topics
from toolkit.cli.actions.fleet.views import open_store, operator
from toolkit.cli.actions.outputs import print_result
from toolkit.cli.commands.fleet import ArchiveAudit, Logs, VerifyAudit
from toolkit.errors import RolloutError
from toolkit.fleet.fleet_folder import Fleet, load_fleet
from toolkit.fleet.server.history import history_of, printable
from toolkit.fleet.server.operations import archive_log, unknown_device
from toolkit.fleet.server.times import utc
from toolkit.fleet.store import log
from toolkit.fleet.store.devices import load_device

# Topics below the device's that are followed.
FOLLOWED = ("state", "reported", "log/#", "evt/#")


def logs(options: Logs) -> None:
    """Print the history of a device, and follow its messages. Raises RolloutError: not known."""
    device, as_json = options.device, options.as_json
    with open_store(options.folder) as database:
        if load_device(database, device) is None:
            raise RolloutError(unknown_device(database, device))
        for row in history_of(database, device):
            if as_json:
                values = {"at": utc(row.at_s), "rollout": row.rollout, "text": row.text}
                click.echo(msgspec.json.encode(values).decode())
            else:
                place = f"rollout {row.rollout}" if row.rollout else "fleet"
                click.echo(f"{utc(row.at_s)}  {place}  {row.text}")
    if options.follow:
        for line in _messages(load_fleet(options.folder), device, as_json=as_json):
            click.echo(line)


def verify(options: VerifyAudit) -> None:
    """Check the audit log. Raises TandemError: a row was changed, taken out or put in."""
    with open_store(options.folder) as database:
        verified = log.verify(database, options.head)
    text = f"The audit log holds: chain verified to row {verified.rows}, whose hash is "
    text += verified.head
    if verified.checkpoint:
        text += f"; the rows 1 to {verified.checkpoint} are in archives"
    print_result(verified, text, as_json=options.as_json)


def archive(options: ArchiveAudit) -> None:
    """Move the older rows of the audit log to a file. Raises TandemError."""
    with open_store(options.folder) as database:
        count = archive_log(
            database, options.output, keep_s=options.keep_days * 86400.0, who=operator()
        )
    text = f"{count} rows are now in {options.output}" if count else "No row is that old."
    print_result({"rows": count}, text, as_json=options.as_json)


def _shown(topic: str, payload: bytes, text: str) -> str:
    """Return what is shown of a message: of a log line its text."""
    if not topic.startswith("log/"):
        return text
    try:
        line = decode(payload, LogLine)
    except ValueError:
        return text
    before = f"({line.left_out} lines were left out) " if line.left_out else ""
    return f"{before}{line.level} {line.text}"


def _messages(fleet: Fleet, device: str, *, as_json: bool) -> Iterator[str]:
    """Yield a line for each message of a device, for ever."""
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
