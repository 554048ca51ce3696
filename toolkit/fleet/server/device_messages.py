"""What a message of a device changes in its row of the store, and who signed the message."""

from typing import Protocol

from msgspec.structs import replace

from device.errors import TrustError
from device.protocol.documents import Beat, Reported, StateDocument, decode
from device.protocol.mqtt import Message
from device.protocol.signed import Told, open_told
from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.folder import IDENTITY
from toolkit.fleet.store.devices import DeviceRow


class Reader(Protocol):
    """Reads what devices say."""

    def knows(self, device: str) -> bool:
        """Whether a device signs what it says."""

    def open(self, device: str, payload: bytes, kind: type[Told]) -> Told:
        """Return a report or a beat. Raises ValueError, TrustError."""


class BareReader:
    """Reads what the devices of a bench say: nothing is signed."""

    def knows(self, device: str) -> bool:
        """No device has a key."""
        return False

    def open(self, device: str, payload: bytes, kind: type[Told]) -> Told:
        """Return a report or a beat. Raises ValueError."""
        return open_told(payload, kind)


def reader_of(fleet: Fleet) -> Reader:
    """Return what reads a device's reports: by its certificate, where the fleet has a CA."""
    identity = fleet.folder / IDENTITY
    if not identity.is_dir():
        return BareReader()
    from toolkit.fleet.trust.report_keys import ReportKeys

    return ReportKeys(identity)


def row_after(
    message: Message, kind: str, row: DeviceRow, reader: Reader, received_s: float
) -> DeviceRow | None:
    """Return the row of a device after its message of `kind` ("state", "reported" or "beat").

    `received_s`: when it came; what is retained or old says nothing of now. None: what is retained
    was known already, and its signature is not checked. Raises ValueError, TrustError: it is not
    understood, not signed by the device, or older than what is known.
    """
    heard_s = row.heard_s if message.retained else received_s
    if kind == "state":
        return _after_state(message, row, reader, heard_s)
    return (_after_report if kind == "reported" else _after_beat)(message, row, reader, heard_s)


def _after_state(message: Message, row: DeviceRow, reader: Reader, heard_s: float) -> DeviceRow:
    state = _newer(row.state, decode(message.payload, StateDocument))
    # Nobody signs it, and what is lost is said by the broker.
    is_now = not message.retained and state.state != "lost"
    believed = is_now and not reader.knows(row.id)
    return replace(row, state=state, heard_s=heard_s if believed else row.heard_s)


def _after_report(
    message: Message, row: DeviceRow, reader: Reader, heard_s: float
) -> DeviceRow | None:
    known = 0 if row.reported is None else row.reported.counter
    if _is_known(known, message, Reported):
        return None
    reported = reader.open(row.id, message.payload, Reported)
    if not _is_new(reported.counter, known, message):
        return row
    return replace(row, reported=reported, heard_s=heard_s)


def _after_beat(
    message: Message, row: DeviceRow, reader: Reader, heard_s: float
) -> DeviceRow | None:
    # Reports and beats count in one sequence.
    known = max(row.beat, 0 if row.reported is None else row.reported.counter)
    if _is_known(known, message, Beat):
        return None
    beat = reader.open(row.id, message.payload, Beat)
    if not _is_new(beat.counter, known, message):
        return row
    return replace(row, beat=beat.counter, beat_at=beat.at, heard_s=heard_s)


def _is_known(known: int, message: Message, kind: type[Told]) -> bool:
    """Whether a device has said what is retained, or something later: then nothing is taken of it,
    and its signature, which takes most of the time, need not be checked. Raises ValueError."""
    return known > 0 and message.retained and open_told(message.payload, kind).counter <= known


def _is_new(counter: int, known: int, message: Message) -> bool:
    """Whether a counter says that something is new; 0: of an agent that does not count.

    What is retained is older than a beat, and comes with each connection. Raises TrustError: it
    was said before, and somebody says it again.
    """
    if counter > known or known == 0:
        return True
    if counter < known and not message.retained:
        raise TrustError(
            f"{message.topic} has the counter {counter}, and {known} was there before: somebody "
            "has published an old one again, or the device has lost its state and its clock"
        )
    return False


def is_back(kind: str, message: Message) -> bool:
    """Whether a message says that a device which left the fleet is in it again: it connects or
    reports now. Its will, its beats and what the broker has retained do not."""
    online = kind == "state" and b'"online"' in message.payload
    return not message.retained and (kind == "reported" or online)


def is_birth(known: StateDocument | None, state: StateDocument | None) -> bool:
    """Whether a device has connected anew."""
    if state is None or state.state != "online":
        return False
    return known is None or known.session < state.session


def _newer(known: StateDocument | None, state: StateDocument) -> StateDocument:
    """Return a device's state; the will of an older session than the last is stale."""
    if state.state == "lost" and known is not None and state.session < known.session:
        return known
    return state
