"""A board at the end of a serial line, or behind UDP, whose agent serves SMP."""

import hashlib
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress

import msgspec

from device.control.upload_request import REPOSITORY, BoardFacts
from device.errors import TandemError
from device.protocol.control import Answer
from device.protocol.documents import Reported
from device.smp.cbor import Scalar
from device.smp.inbox import Statement
from device.smp.intake import ChunkList
from device.smp.message import READ, WRITE
from toolkit.fleet.transports.bases import difference_encoder
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.smp_client import IMAGE, TANDEM, SmpClient, SmpRefusedError
from toolkit.fleet.transports.smp_links import Line
from toolkit.fleet.transports.smp_records import Records, numbers_of
from toolkit.fleet.transports.transport import (
    Delivered,
    OnProgress,
    Progress,
    RefusedError,
    RolledBackError,
    TransportError,
)

STATUS, PLAN, CHUNKS, INSTALL, CANCEL = range(5)  # commands of Tandem's own group
STATEMENT, CHUNK_LIST = 1, 2  # images
REPORT = "/report.json"
PATIENCE_S = 30.0  # a line that is gone, or a board that starts again, may come back for so long
LOOK_S = 0.3
COMMIT_S = 5.0  # a commit is on the disk by then, unless that is full
PLAN_S = 300.0  # the board hashes its slots meanwhile
_SHA256_BYTES = 32


class SmpBoard:
    """The board of one line."""

    def __init__(self, line: Line) -> None:
        self.name = line.name
        self._client = SmpClient(line)
        self._device = ""
        self._sent_bytes = 0

    def facts(self) -> BoardFacts:
        """Return what the board is."""
        self._client.connect()
        answer = self._report()
        self._device = answer.device
        return BoardFacts(facts=_reported(answer).facts, answer=answer)

    def deliver(self, delivery: Delivery, on_progress: OnProgress) -> Delivered:
        """Send, install and follow; see `toolkit.fleet.transports.transport.Board`."""
        if not self._device:
            self.facts()
        if delivery.erase:
            self._client.ask(WRITE, IMAGE, 5, {"slot": 1})
        statement = _statement(delivery, self._device)
        self._send_patiently(delivery, statement, on_progress)
        try:
            self._install(delivery)
            waits = self._follow(delivery, on_progress)
        except KeyboardInterrupt:
            with suppress(SmpRefusedError):  # it has not begun
                self._client.ask(WRITE, TANDEM, CANCEL, {})
            raise
        except SmpRefusedError as error:
            raise RefusedError(f"{self._device} refused {delivery.named}: {error}") from error
        return Delivered(self._sent_bytes, _reported(self._report()).measured, waits)

    def commit(self) -> Answer:
        """Keep the release on trial; the board's slots tell whether it did."""
        self._client.connect()
        update = _reported(self._report()).update
        if not update.waits_for_commit:
            raise RefusedError(f"no release on {self.name} waits for a commit")
        lost: TandemError | None = None
        try:
            self._client.ask(WRITE, TANDEM, INSTALL, {"confirm": True})
        except (TransportError, SmpRefusedError) as error:
            # It may have committed, and its answer was lost: asked again it calls itself busy.
            lost = error
        return self._committed(update.sha256, lost)

    def close(self) -> None:
        """Close the line."""
        self._client.close()

    def _committed(self, sha256: str, lost: TandemError | None) -> Answer:
        """Return what the board says once it has kept a release.

        `lost`: what was heard in place of the answer. It is raised where the release still waits.
        """
        until_s = time.monotonic() + COMMIT_S
        while True:
            answer = self._report_patiently()
            update, role = _reported(answer).update, _role_of(sha256, answer)
            if role not in ("active", "trial"):
                raise RolledBackError(
                    f"{answer.device} did not keep the release on trial: "
                    f"{update.reason or 'it runs another one'}"
                )
            if role == "active" or not update.waits_for_commit:
                return answer
            if time.monotonic() >= until_s:
                if lost is not None:
                    raise lost
                return answer  # it keeps the release once its disk has room for that
            time.sleep(LOOK_S)

    def _report_patiently(self) -> Answer:
        try:
            return self._report()
        except TransportError:  # the line may be gone for a moment
            try:
                self._reconnect(time.monotonic() + PATIENCE_S)
                return self._report()
            except TransportError as error:
                raise TransportError(
                    f"whether {self.name} has kept the release is not known: look with `tandem "
                    f"board info` at the same address ({error})"
                ) from error

    def _report(self) -> Answer:
        try:
            answer = msgspec.json.decode(self._client.download(REPORT), type=Answer)
        except ValueError as error:
            raise TransportError(
                f"the report of {self.name} is not understood ({error}): its agent must be of this "
                "version"
            ) from error
        if answer.reported is None:
            raise TransportError(
                f"the agent behind {self.name} reports nothing: is it of this version?"
            )
        return answer

    # -- sending

    def _send_patiently(
        self, delivery: Delivery, statement: bytes, on_progress: OnProgress
    ) -> None:
        """Send; a line that is gone is waited for, as long as it brings something each time."""
        total, most, silent_s = delivery.blob.spec.bytes, -1, float("inf")
        while True:
            sender = _Sender(self._client, delivery, on_progress)
            try:
                sender.send(statement)
                return
            except TransportError as error:
                now_s = time.monotonic()
                silent_s = now_s if sender.on_board_bytes > most else min(silent_s, now_s)
                most = max(most, sender.on_board_bytes)
                if now_s - silent_s > PATIENCE_S:
                    raise TransportError(
                        f"{error}; the board keeps what has arrived: flash again, it goes on there"
                    ) from error
                on_progress(Progress("reconnecting", max(0, most), total, str(error)))
            finally:
                self._sent_bytes += sender.sent_bytes
            self._reconnect(time.monotonic() + PATIENCE_S)

    def _reconnect(self, until_s: float) -> None:
        while True:
            try:
                self._client.connect()
                return
            except TransportError as error:
                if time.monotonic() >= until_s:
                    raise TransportError(
                        f"{error}; the board keeps what has arrived: flash again, it goes on there"
                    ) from error
                time.sleep(LOOK_S)

    # -- installing

    def _install(self, delivery: Delivery) -> None:
        """Ask for the release. Raises SmpRefusedError, or TransportError: no answer comes."""
        digest = bytes.fromhex(delivery.blob.spec.sha256)
        try:
            self._client.ask(WRITE, TANDEM, INSTALL, {"hash": digest})
        except (TransportError, SmpRefusedError):
            # It may have begun, and its answer was lost: asked again it calls itself busy.
            if self._status().get("request") != delivery.request:
                raise

    def _follow(self, delivery: Delivery, on_progress: OnProgress) -> bool:
        """Follow the update until it is live; return whether it waits for a commit instead."""
        total, begun_s = delivery.blob.spec.bytes, time.monotonic()
        while True:
            status = self._status()
            phase, reason = str(status.get("phase")), str(status.get("reason"))
            if status.get("request") == delivery.request:
                on_progress(Progress(phase, total, total, reason))
                if phase == "refused":
                    raise RefusedError(f"{self._device} refused {delivery.named}: {reason}")
                if phase == "rolled_back":
                    raise RolledBackError(f"{self._device} rolled {delivery.named} back: {reason}")
                if phase == "live" or status.get("waits"):
                    return phase != "live"
                begun_s = time.monotonic()
            elif time.monotonic() - begun_s > PATIENCE_S:
                raise RefusedError(
                    f"another release took the place of {delivery.named}: somebody else updates "
                    f"{self._device}"
                )
            time.sleep(LOOK_S)

    def _status(self) -> Mapping[str, Scalar]:
        try:
            return self._client.ask(READ, TANDEM, STATUS, {})
        except TransportError:  # the agent may start again, or the line be gone for a moment
            self._reconnect(time.monotonic() + PATIENCE_S)
            return self._client.ask(READ, TANDEM, STATUS, {})


class _Sender:
    """One connection that brings what the board lacks."""

    def __init__(self, client: SmpClient, delivery: Delivery, on_progress: OnProgress) -> None:
        self.sent_bytes = 0
        self.on_board_bytes = -1
        self._client = client
        self._delivery = delivery
        self._on_progress = on_progress

    def send(self, statement: bytes) -> None:
        """Send the statement and the missing chunks."""
        blob = self._delivery.blob
        chunks = msgspec.json.encode(ChunkList(blob=blob.spec, index=blob.index))
        self._client.upload(CHUNK_LIST, chunks, hashlib.sha256(chunks).digest())
        self._client.upload(STATEMENT, statement, hashlib.sha256(statement).digest())
        self._on_progress(Progress("comparing", max(0, self.on_board_bytes), blob.spec.bytes))
        plan, bitmap = self._read_plan()
        missing = numbers_of(bitmap)
        if not missing:
            self.on_board_bytes = blob.spec.bytes
            return
        row, start = missing.index(_number(plan, "chunk")), _number(plan, "start")
        records = Records(blob, missing, row, start)
        bases = _digests(plan.get("bases"))
        with ExitStack() as stack:
            encoder = difference_encoder(blob, bases, self._delivery.fleet)
            if encoder is not None:
                stack.callback(encoder[1].close)
                table = blob.table
                records.differ = lambda number: encoder[0].encode(
                    table.starts[number], table.size(number)
                )
            answer = self._client.stream(
                TANDEM, CHUNKS, _Shown(self, records), _number(plan, "off"), self._count
            )
        if answer.get("match") is not True:
            raise TransportError("what the board put together has another SHA-256: flash again")

    def show(self, missing_bytes: int) -> None:
        """Tell how much is on the board."""
        total = self._delivery.blob.spec.bytes
        self.on_board_bytes = total - missing_bytes
        self._on_progress(Progress("sending", self.on_board_bytes, total))

    def _count(self, size: int) -> None:
        self.sent_bytes += size

    def _read_plan(self) -> tuple[dict[str, Scalar], bytes]:
        """Return the plan and the whole bitmap, of which an answer has a page."""
        bitmap = b""
        while True:
            content = {"at": len(bitmap)}
            plan = self._client.ask(READ, TANDEM, PLAN, content, patience_s=PLAN_S)
            page = plan.get("missing")
            if plan.get("sha") != bytes.fromhex(self._delivery.blob.spec.sha256):
                raise TransportError("somebody else sends a bundle to this board: flash again")
            bitmap += page if isinstance(page, bytes) else b""
            if len(bitmap) >= _number(plan, "bytes") or not page:
                return plan, bitmap


class _Shown:
    """Records whose progress is shown."""

    def __init__(self, sender: _Sender, records: Records) -> None:
        self._sender, self._records = sender, records
        self.read, self.rejected = records.read, records.rejected

    def acknowledged(self, offset: int) -> None:
        self._records.acknowledged(offset)
        self._sender.show(self._records.missing_bytes)


def _statement(delivery: Delivery, device: str) -> bytes:
    """Return what makes the board install the bundle (`device.smp.inbox`)."""
    files = {
        name.removeprefix(f"{REPOSITORY}/"): content.decode()
        for name, content in delivery.metadata().items()
    }
    desired = delivery.desired(device).decode()
    return msgspec.json.encode(Statement(desired=desired, files=files))


def _reported(answer: Answer) -> Reported:
    assert answer.reported is not None
    return answer.reported


def _role_of(sha256: str, answer: Answer) -> str:
    """Return what a release is on the board: "active", "trial", "idle"; "" if it is not there."""
    return next((row.role for row in answer.slots if row.sha256 == sha256), "")


def _number(answer: Mapping[str, Scalar], key: str) -> int:
    value = answer.get(key)
    if not isinstance(value, int):
        raise TransportError(f"the board's answer has no {key}: its agent must be of this version")
    return value


def _digests(value: Scalar) -> tuple[str, ...]:
    data = value if isinstance(value, bytes) else b""
    places = range(0, len(data), _SHA256_BYTES)
    return tuple(data[at : at + _SHA256_BYTES].hex() for at in places)
