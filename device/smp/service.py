"""Answers SMP requests: a table of the commands, and how slots and trial look to a client.

Slot 0 is what runs, a release on trial included; slot 1 is what was uploaded, or the release that
the board would go back to. "test" and "confirm" of an uploaded bundle both install it as a fleet
update: the trial is never skipped, and the agent alone commits.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from device.errors import TandemError
from device.protocol.control import Answer, Ask, AskProgress, Cancel, Commit
from device.protocol.documents import Update
from device.protocol.signed import open_desired
from device.smp.cbor import Scalar, Value, decode_map
from device.smp.files import Files
from device.smp.inbox import HandedIn, Inbox
from device.smp.message import HEADER, MAX_MESSAGE, READ, WRITE, Code, SmpError, answer, read_header
from device.smp.upload import Session
from device.update.slots import SlotRecord, SlotState

LOG = logging.getLogger("tandem.agent")
OS, IMAGE, FILES, TANDEM = 0, 1, 8, 65
# Requests that a client may send without an answer. A UART without flow control keeps 64 KiB while
# this board writes to its disk.
BUFFERS, MAX_BUFFERS, IN_FLIGHT_BYTES = 4, 32, 48 * 1024
REPORT, LOGS = "/report.json", "/agent.log"
MAX_CLIENTS = 16
_PLAN_BYTES = 320  # of a plan beside its bitmap
MAX_REASON = 400  # characters of a sentence: an answer must fit into one datagram
_INSTALLING = ("verifying", "downloading", "staging", "trial")
_SHA256_BYTES = 32
UNAME_FIELDS = (
    "snrvbmpio"  # the order in which they are answered, whatever the order of the request
)
Request = Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class BoardState:
    """What the agent knows now."""

    slots: SlotState
    update: Update


class SmpService:
    """The commands. `handle` may be called by several threads; one request runs at a time."""

    def __init__(
        self,
        inbox: Inbox,
        *,
        device: str,
        profile: str,
        dev: bool,
        state: Callable[[], BoardState],
        install: Callable[[HandedIn], None],
        restart: Callable[[], None],
        ask: Callable[[Ask], Answer] = lambda _ask: Answer(),
        log: Callable[[], bytes] = bytes,
    ) -> None:
        """`install` and `restart` only tell the agent: they return at once. `ask` waits for its
        answer; `log`: its last lines."""
        self._inbox = inbox
        self._ask = ask
        self._files = Files(
            {REPORT: lambda: msgspec.json.encode(self._answer_of(AskProgress())), LOGS: log}
        )
        self._device, self._profile, self._dev = device, profile, dev
        self._state, self._install, self._restart = state, install, restart
        self._lock = threading.Lock()
        self._buffer_bytes = MAX_MESSAGE  # of the line that is answered
        self._image_of: dict[object, int] = {}  # what each client uploads; later pieces do not say
        self._handlers: dict[tuple[int, int, int], Callable[[object, Request], Value]] = {
            (OS, 0, READ): self._echo,
            (OS, 0, WRITE): self._echo,
            (OS, 4, READ): _date_and_time,
            (OS, 5, WRITE): self._reset,
            (OS, 6, READ): self._parameters,
            (OS, 7, READ): self._info,
            (IMAGE, 0, READ): self._images,
            (IMAGE, 0, WRITE): self._set_state,
            (IMAGE, 1, WRITE): self._upload,
            (IMAGE, 5, WRITE): self._erase,
            (FILES, 0, READ): self._download,
            (FILES, 1, READ): self._files.status,
            (FILES, 2, READ): self._files.checksum,
            (FILES, 3, READ): self._files.checksums,
            (FILES, 4, WRITE): self._files.close,
            (TANDEM, 0, READ): self._status,
            (TANDEM, 1, READ): self._plan,
            (TANDEM, 2, WRITE): self._chunks,
            (TANDEM, 3, WRITE): self._install_uploaded,
            (TANDEM, 4, WRITE): self._cancel,
        }

    def handle(self, message: bytes, peer: object, buffer_bytes: int = MAX_MESSAGE) -> bytes | None:
        """Return the answer to a message; None: it is no request.

        `peer`: who asks; uploads of two are kept apart. `buffer_bytes`: the largest message that
        its line takes.
        """
        if len(message) < HEADER.size:
            return None
        header = read_header(message)
        if header is None or header.length != len(message) - HEADER.size:
            return None
        handler = self._handlers.get((header.group, header.command, header.operation))
        try:
            if handler is None:
                raise SmpError(
                    Code.NOT_SUPPORTED,
                    f"this board has no command {header.command} of group {header.group}",
                )
            try:
                request = decode_map(message[HEADER.size :]) if header.length else {}
            except ValueError as error:
                raise SmpError(Code.INVALID, str(error)) from error
            with self._lock:
                self._buffer_bytes = buffer_bytes
                content = handler(peer, request)
        except SmpError as error:
            LOG.warning("SMP: refused: %s", error)
            content = {"rc": int(error.code), "rsn": str(error)[:MAX_REASON]}
        except (TandemError, OSError) as error:
            LOG.error("SMP: %s", error)
            content = {"rc": int(Code.UNKNOWN), "rsn": str(error)[:MAX_REASON]}
        assert isinstance(content, Mapping)
        return answer(header, content)

    # -- group 0: OS

    def _echo(self, _peer: object, request: Request) -> Value:
        return {"r": _text(request, "d")}

    def _parameters(self, _peer: object, _request: Request) -> Value:
        buffers = max(1, min(MAX_BUFFERS, IN_FLIGHT_BYTES // self._buffer_bytes))
        whole = self._buffer_bytes >= MAX_MESSAGE  # a line that makes the client wait
        return {"buf_size": self._buffer_bytes, "buf_count": BUFFERS if whole else buffers}

    def _reset(self, _peer: object, _request: Request) -> Value:
        LOG.warning("SMP: a client starts the agent again")
        self._restart()
        return {}

    def _info(self, _peer: object, request: Request) -> Value:
        return _system_info(request, self._profile)

    # -- group 8: files

    def _download(self, peer: object, request: Request) -> Value:
        return self._files.download(peer, request, self._buffer_bytes)

    # -- group 1: images

    def _images(self, _peer: object, _request: Request) -> Value:
        return {"images": self._rows(), "splitStatus": 0}

    def _rows(self) -> Sequence[Value]:
        board, bundle = self._state(), self._inbox.bundle
        slots = board.slots
        running = slots.trial or slots.active
        rows = []
        first = slots.record(running)
        if first is not None:
            rows.append(_row(0, first, confirmed=slots.trial is None, active=True))
        second = slots.record("a" if running == "b" else "b")
        if bundle is not None and (first is None or bundle.stem != first.sha256):
            pending = board.update.phase in _INSTALLING and board.update.sha256 == bundle.stem
            rows.append(_uploaded_row(bundle.stem, pending=pending))
        elif second is not None:
            rows.append(_row(1, second, confirmed=second.good, active=False))
        return rows

    def _set_state(self, _peer: object, request: Request) -> Value:
        confirm = request.get("confirm")
        if confirm not in (None, False, True):
            raise SmpError(Code.INVALID, "confirm is neither true nor false")
        digest, board = _hash(request, "hash"), self._state()
        slots = board.slots
        active, trial = slots.record(slots.active), slots.record(slots.trial)
        if trial is not None and digest in (None, trial.sha256) and confirm and trial.policy.manual:
            self._answer_of(Commit())
            return self._images(_peer, request)
        if trial is not None and digest in (None, trial.sha256) and not trial.policy.manual:
            raise SmpError(
                Code.BUSY,
                f"{trial.name} {trial.version} is on trial: the agent commits it by itself when it "
                "runs well, and goes back otherwise; read the state again later",
            )
        if active is not None and digest in (None, active.sha256):
            return self._images(_peer, request)
        if digest is None:
            raise SmpError(Code.BAD_STATE, "no release runs, so none can be confirmed")
        bundle = self._inbox.bundle
        if bundle is None or bundle.stem != digest:
            raise SmpError(
                Code.NO_ENTRY,
                f"no bundle with the SHA-256 {digest[:12]}... was uploaded: upload it as image 0",
            )
        if not self._is_installing():
            self._install(self._inbox.hand_in(profile=self._profile, dev=self._dev))
        return self._images(_peer, request)

    def _upload(self, peer: object, request: Request) -> Value:
        offset, data = _number(request, "off"), request.get("data", b"")
        if not isinstance(data, bytes):
            raise SmpError(Code.INVALID, "data is no byte string")
        image = _number(request, "image", self._image_of.get(peer, 0) if offset else 0)
        if not 0 <= image < len(self._inbox.uploads):
            raise SmpError(
                Code.INVALID,
                f"there is no image {image}: 0 is the bundle, 1 is the statement that signs it, 2 "
                "a list of chunks",
            )
        if offset:
            return _progress(*self._inbox.uploads[image].go_on(peer, offset, data))
        return self._begin(peer, image, request, data)

    def _begin(self, peer: object, image: int, request: Request, data: bytes) -> Value:
        upload = self._inbox.uploads[image]
        if request.get("upgrade"):
            raise SmpError(
                Code.NOT_SUPPORTED,
                "upgrade = true: this board does not order versions; upload without it",
            )
        length, digest = _number(request, "len"), _hash(request, "sha")
        if length < 1:
            raise SmpError(Code.INVALID, f"the {upload.name} is empty")
        if self._is_installing():
            raise SmpError(
                Code.BUSY,
                f"a release is being installed ({self._state().update.phase}): upload the "
                f"{upload.name} when that has ended",
            )
        if self._inbox.holds(image, digest, length):
            return _progress(length, True)
        if image in (0, 2) and self._inbox.intake.is_busy(peer):
            raise SmpError(Code.BUSY, "another client sends a bundle: wait until it has ended")
        others = [row for row in self._image_of.items() if row[0] != peer]
        self._image_of = dict([*others[-MAX_CLIENTS:], (peer, image)])
        return _progress(*upload.begin(peer, Session(bytes=length, sha256=digest), data))

    def _erase(self, _peer: object, request: Request) -> Value:
        slot = _number(request, "slot", 1)
        if slot != 1:
            raise SmpError(
                Code.ACCESS_DENIED, f"slot {slot} is not erased: only uploads, in slot 1, are"
            )
        if self._is_installing():
            raise SmpError(
                Code.BUSY,
                f"a release is being installed ({self._state().update.phase}): erase when that has "
                "ended",
            )
        self._inbox.clear()
        return {}

    def _is_installing(self) -> bool:
        """Whether the agent installs the bundle of the inbox."""
        update, bundle = self._state().update, self._inbox.bundle
        if update.waits_for_commit:  # the slot has it
            return False
        return bundle is not None and bundle.stem == update.sha256 and update.phase in _INSTALLING

    # -- group 65: Tandem

    def _status(self, _peer: object, _request: Request) -> Value:
        update = self._state().update
        return {
            "device": self._device,
            "profile": self._profile,
            "phase": update.phase,
            "request": update.request,
            "waits": update.waits_for_commit,
            "received": update.received_bytes,
            "total": update.total_bytes,
            "reason": update.reason[:MAX_REASON],
        }

    def _plan(self, peer: object, request: Request) -> Value:
        """What a client has to send of a bundle whose list of chunks it uploaded; in pages of its
        bitmap, which stays as it is while nothing is sent."""
        plan, at = self._inbox.intake.plan(peer), _number(request, "at", 0)
        return {
            "sha": bytes.fromhex(plan.sha256),
            "bytes": len(plan.missing),
            "missing": plan.missing[at : at + max(64, self._buffer_bytes - _PLAN_BYTES)],
            "chunk": plan.chunk,
            "start": plan.start,
            "off": plan.offset,
            "bases": b"".join(bytes.fromhex(sha256) for sha256 in plan.bases),
        }

    def _chunks(self, peer: object, request: Request) -> Value:
        offset, data = _number(request, "off"), request.get("data")
        if not isinstance(data, bytes):
            raise SmpError(Code.INVALID, "data is no byte string")
        taken = self._inbox.intake.take(peer, offset, data)
        rejected = {"bad": True} if taken.rejected else {}
        return {**_progress(taken.offset, taken.match), **rejected}

    def _install_uploaded(self, peer: object, request: Request) -> Value:
        """As `image state-write`, with a short answer."""
        self._set_state(peer, request)
        return {}

    def _cancel(self, _peer: object, _request: Request) -> Value:
        """End what came over a line, and nothing else."""
        handed_in = self._inbox.handed_in()
        if handed_in is None:
            raise SmpError(Code.BAD_STATE, "nothing that came over this line is being installed")
        self._answer_of(Cancel(request=open_desired(handed_in.document)[0].request))
        return {}

    def _answer_of(self, ask: Ask) -> Answer:
        answered = self._ask(ask)
        if answered.error:
            raise SmpError(Code.BAD_STATE, answered.error)
        return answered


def _system_info(request: Request, module: str) -> Value:
    """Answer `os info`; `module` is what the hardware is, or the profile where that is not known.

    `format`: the letters of Zephyr's specification, "a" for all; "s" alone where there is none.
    """
    letters = request.get("format") or "s"
    if not isinstance(letters, str) or not set(letters) <= set(f"{UNAME_FIELDS}a"):
        raise SmpError(Code.INVALID, f"format takes letters of {UNAME_FIELDS}a")
    system = os.uname()
    texts = {
        "s": system.sysname,
        "n": system.nodename,
        "r": system.release,
        "v": system.version,
        "b": "unknown",  # the date of a kernel's build is in its version
        "m": system.machine,
        "p": system.machine,
        "i": module,
        "o": "GNU/Linux",
    }
    chosen = (
        UNAME_FIELDS if "a" in letters else [letter for letter in UNAME_FIELDS if letter in letters]
    )
    return {"output": " ".join(texts[letter] for letter in chosen)}


def _date_and_time(_peer: object, _request: Request) -> Value:
    """Answer the date and time of the board, UTC."""
    return {"datetime": time.strftime("%Y-%m-%dT%H:%M:%S.000000+00:00", time.gmtime())}


def _row(slot: int, record: SlotRecord, *, confirmed: bool, active: bool) -> Value:
    return {
        "image": 0,
        "slot": slot,
        "version": f"{record.name} {record.version}",
        "hash": bytes.fromhex(record.sha256),
        "bootable": True,
        "pending": False,
        "confirmed": confirmed,
        "active": active,
        "permanent": False,
    }


def _uploaded_row(sha256: str, *, pending: bool) -> Value:
    return {
        "image": 0,
        "slot": 1,
        "version": "uploaded",
        "hash": bytes.fromhex(sha256),
        "bootable": False,
        "pending": pending,
        "confirmed": False,
        "active": False,
        "permanent": False,
    }


def _progress(offset: int, match: bool | None) -> dict[str, Value]:
    return {"off": offset} if match is None else {"off": offset, "match": match}


def _text(request: Request, key: str) -> str:
    value = request.get(key)
    if not isinstance(value, str):
        raise SmpError(Code.INVALID, f"{key} is no text")
    return value


def _number(request: Request, key: str, default: int | None = None) -> int:
    value = request.get(key, default)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SmpError(Code.INVALID, f"{key} is no number from 0 on")
    return value


def _hash(request: Request, key: str) -> str | None:
    value = request.get(key)
    if value is None:
        return None
    if not isinstance(value, bytes) or len(value) != _SHA256_BYTES:
        raise SmpError(Code.INVALID, f"{key} is no SHA-256 of 32 bytes")
    return value.hex()
