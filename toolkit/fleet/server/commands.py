"""Gives a device a command over MQTT and waits for how it ended."""

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

import msgspec

from device.protocol.documents import Command, CommandState, CommandStatus, decode, encode
from device.protocol.mqtt import Link, LinkDown, LinkEvent, LinkUp, Message, queue_putter
from device.protocol.signed import sign_command
from device.protocol.topics import Topics
from toolkit.errors import RolloutError
from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.server.control import COMMAND
from toolkit.fleet.server.operations import unknown_device
from toolkit.fleet.store import log
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.devices import load_device
from toolkit.fleet.trust.director import next_counter
from toolkit.fleet.trust.publish import is_signed
from toolkit.fleet.trust.repository import FleetRepository

CONNECT_S = 15.0
FINAL: tuple[CommandStatus, ...] = ("successful", "failed")


@dataclass(frozen=True, slots=True)
class Given:
    """A command that was published, and the last that the device said of it, None: nothing."""

    command: Command
    state: CommandState | None


def make_command(
    database: Database, device: str, op: str, words: Sequence[str], *, expires_s: float, who: str
) -> Command:
    """Return a new command for a device of the fleet, noted in the audit log.

    `words`: its arguments, KEY=VALUE. Raises RolloutError.
    """
    _check_known(database, device)
    expires = datetime.now(timezone.utc) + timedelta(seconds=expires_s)
    values = {
        "op": op,
        "id": secrets.token_hex(4),
        "device": device,
        "counter": next_counter(),
        "expires": expires.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "arguments": dict(_parse(word) for word in words),
    }
    try:
        command = msgspec.convert(values, Command)
    except msgspec.ValidationError as error:
        raise RolloutError(f"{op!r} is no operation: {error}") from error
    body = msgspec.json.encode({"device": device, "command": command}).decode()
    with database.write():
        log.append(database, [log.Note(who, COMMAND, body, devices=(device,))], database.now_s())
    return command


def _check_known(database: Database, device: str) -> None:
    """Refuse what is no device of the fleet: as part of a topic, "+" would be all devices."""
    if load_device(database, device) is None:
        raise RolloutError(unknown_device(database, device))


def payload_of(fleet: Fleet, command: Command) -> bytes:
    """Return a command as it is published: signed by the director's key, bare on a bench."""
    if not is_signed(fleet.folder):
        return encode(command)
    return sign_command(command, (FleetRepository(fleet.folder).director_signer(),))


def give(fleet: Fleet, command: Command, *, wait_s: float) -> Given:
    """Publish a command; wait until it has ended, then clear its topic.

    `wait_s` 0: only publish. Raises RolloutError: the broker cannot be reached.
    """
    topics = Topics(command.device)
    topic = topics.command(command.op, command.id)
    events: queue.Queue[LinkEvent] = queue.Queue(256)
    ended = threading.Event()
    settings = fleet.link_settings(f"fleet-run-{command.id}", ((topic, 1),))
    link = Link(settings, queue_putter(events, ended))
    link.start()
    try:
        _connect(events)
        payload = payload_of(fleet, command)
        if not link.publish(topic, payload, qos=1, retain=True, wait_s=CONNECT_S):
            raise RolloutError("the broker did not take the command: try again")
        state = _await_end(events, topic, wait_s)
        if state is not None and state.status in FINAL:
            link.publish(topic, b"", qos=1, retain=True, wait_s=CONNECT_S)
        return Given(command, state)
    finally:
        ended.set()
        link.close()


def _connect(events: "queue.Queue[LinkEvent]") -> None:
    until_s = time.monotonic() + CONNECT_S
    reason = f"no answer within {CONNECT_S:g} s"
    while (left_s := until_s - time.monotonic()) > 0.0:
        with contextlib.suppress(queue.Empty):
            event = events.get(timeout=left_s)
            if isinstance(event, LinkUp):
                return
            if isinstance(event, LinkDown):
                reason = event.reason
    raise RolloutError(f"the broker cannot be reached: {reason}")


def _await_end(events: "queue.Queue[LinkEvent]", topic: str, wait_s: float) -> CommandState | None:
    """Return the last state that the device published within `wait_s`."""
    state: CommandState | None = None
    until_s = time.monotonic() + wait_s
    while (left_s := until_s - time.monotonic()) > 0.0:
        try:
            event = events.get(timeout=left_s)
        except queue.Empty:
            break
        if not isinstance(event, Message) or event.topic != topic or not event.payload:
            continue
        try:
            reported = decode(event.payload, CommandState)
        except ValueError:  # our own, signed
            continue
        if reported.status != "init":
            state = reported
            if state.status in FINAL:
                break
    return state


def clear_ended(fleet: Fleet, device: str, *, quiet_s: float = 1.0) -> list[CommandState]:
    """Clear the commands of a device that have ended; return them.

    `quiet_s`: after so long without another retained message all have come. Raises RolloutError:
    the fleet does not know the device, or the broker cannot be reached.
    """
    database = fleet.open_store()
    try:
        _check_known(database, device)
    finally:
        database.close()
    events: queue.Queue[LinkEvent] = queue.Queue(1024)
    ended = threading.Event()
    topics = Topics(device)
    settings = fleet.link_settings(f"fleet-clear-{secrets.token_hex(4)}", ((topics.commands, 1),))
    link = Link(settings, queue_putter(events, ended))
    link.start()
    cleared: Mapping[str, CommandState] = {}
    try:
        _connect(events)
        cleared = _ended_commands(events, quiet_s)
        for topic in cleared:
            link.publish(topic, b"", qos=1, retain=True, wait_s=CONNECT_S)
    finally:
        ended.set()
        link.close()
    return list(cleared.values())


def _ended_commands(events: "queue.Queue[LinkEvent]", quiet_s: float) -> dict[str, CommandState]:
    states: dict[str, CommandState] = {}
    while True:
        try:
            event = events.get(timeout=quiet_s)
        except queue.Empty:
            return states
        if isinstance(event, Message) and event.payload:
            with contextlib.suppress(ValueError):
                state = decode(event.payload, CommandState)
                if state.status in FINAL:
                    states[event.topic] = state


def _parse(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not (key and equals):
        raise RolloutError(f"{word!r} is no argument: write KEY=VALUE, for example lines=100")
    return key, value
