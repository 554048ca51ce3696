"""What the log tells of one device."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from device.protocol.documents import Command
from toolkit.fleet.rollout import values as v
from toolkit.fleet.server.control import COMMAND, DECOMMISSION, DOCUMENT, ENROL, LABEL
from toolkit.fleet.store import log
from toolkit.fleet.store.database import Database

STARTED = '{"event":"started"'  # what the first event of a rollout begins with; it may be long


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """Something that happened to a device: when, in which rollout (0: none), and what."""

    at_s: float
    rollout: int
    text: str


def history_of(database: Database, device: str) -> Iterator[HistoryEntry]:
    """Yield what the log has on a device, in order."""
    for row in log.rows_of(database, device):
        text = ""
        if row.kind == log.EVENT:
            is_first = row.body.startswith(STARTED)
            text = "is in this rollout" if is_first else _event_text(v.EVENTS.decode(row.body))
        elif row.kind == DOCUMENT:
            text = _document_text(row.body)
        elif row.kind == DECOMMISSION:
            text = f"decommissioned by {row.who}"
        elif row.kind == ENROL:
            text = f"may enrol anew, says {row.who}"
        elif row.kind == LABEL:
            text = f"labelled by {row.who}"
        elif row.kind == COMMAND:
            text = _command_text(row.body, row.who)
        if text:
            yield HistoryEntry(row.at_s, row.rollout, text)


class _CommandRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the log that says that a command was given."""

    command: Command


def _command_text(body: str, who: str) -> str:
    command = msgspec.json.decode(body, type=_CommandRow).command
    return f"{who} gave the command {command.op} ({command.id})"


def printable(text: str) -> str:
    """Return a device's text with blanks for what would steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def _document_text(body: str) -> str:
    row = msgspec.json.decode(body)
    what = "the release before" if row["undo"] else "the release"
    return f"is sent {what} {row['sha256'][:12]} (counter {row['counter']})"


def _about(event: v.Silent | v.Superseded | v.Decommissioned) -> str:
    if isinstance(event, v.Superseded):
        return f"is taken over by rollout {event.by}"
    is_out = isinstance(event, v.Decommissioned)
    return "left the fleet" if is_out else "is not heard any more"


def _event_text(event: v.Event) -> str:
    """Return what an event says of a device that it is about."""
    if isinstance(event, v.Silent | v.Superseded | v.Decommissioned):
        return _about(event)
    if isinstance(event, v.Started | v.Begun | v.Ordered | v.Reconnected | v.Tick):
        return ""
    if isinstance(event, v.Joined):
        return "joins this rollout late"
    if isinstance(event, v.Figures):
        return "has measured more of the release"
    words = {
        (False, True): "runs the release",
        (False, False): "does not run the release",
        (True, True): "runs the release before again",
        (True, False): "did not get back to the release before",
    }
    reason = f": {printable(event.reason)}" if event.reason else ""
    return f"{words[event.undo, event.live]}{reason}"
