"""A board at the end of a serial line, or behind UDP, whose agent serves SMP."""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import cast

import msgspec

from device.control.upload_request import REPOSITORY, BoardFacts
from device.errors import TandemError
from device.files import sha256_of
from device.protocol.control import Answer
from device.protocol.documents import Measured, Phase, Reported, Update
from device.smp.cbor import Scalar
from device.smp.inbox import Statement
from device.smp.intake import ChunkList
from device.smp.message import READ, WRITE
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.bundles.delta import DeltaEncoder
from toolkit.fleet.bundles.library import Library
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.flash_board import RESUMES, Patience, await_result, send_patiently
from toolkit.fleet.transports.smp_client import IMAGE, TANDEM, SmpClient, SmpRefusedError
from toolkit.fleet.transports.smp_links import Line
from toolkit.fleet.transports.smp_records import Records, numbers_of
from toolkit.fleet.transports.transport import (
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
MAX_BESIDE = 32  # bundles beside the one that is flashed: each is hashed


class SmpBoard:
    """The board of one line. `name`: of the line until its device has said its own."""

    sent_bytes = 0
    measured: Measured | None = None
    shared = False

    def __init__(self, line: Line) -> None:
        self.name = self._line = line.name
        self._client = SmpClient(line)

    def facts(self) -> BoardFacts:
        """Return what the board is."""
        self._client.connect()
        answer = self._report()
        self.name = answer.device
        return BoardFacts(facts=_reported(answer).facts, answer=answer)

    def send(self, delivery: Delivery, on_progress: OnProgress) -> None:
        """Send what the board lacks, and its statement."""
        if delivery.erase:
            self._client.ask(WRITE, IMAGE, 5, {"slot": 1})
        statement = _statement(delivery, self.name)
        send_patiently(
            self,
            lambda: Sender(self._client, delivery, statement, on_progress),
            Patience(lambda _tries: self._reconnect(), max_silent_s=PATIENCE_S),
            delivery.blob.spec.bytes,
            on_progress,
        )

    def install(self, delivery: Delivery, on_progress: OnProgress) -> Update:
        """Ask for the release, and follow until it is live, or waits for a commit."""
        try:
            self._activate(delivery)
            update = await_result(self._updates(delivery), self, delivery, on_progress)
        except SmpRefusedError as error:
            raise RefusedError(f"{self.name} refused {delivery.named}: {error}") from error
        self.measured = _reported(self._report()).measured
        return update

    def cancel(self, request: str) -> None:
        """End the update that came over this line."""
        with suppress(SmpRefusedError):  # it has not begun
            self._client.ask(WRITE, TANDEM, CANCEL, {})

    def commit(self) -> Answer:
        """Keep the release on trial; the board's slots tell whether it did."""
        self._client.connect()
        update = _reported(self._report()).update
        if not update.waits_for_commit:
            raise RefusedError(f"no release on {self._line} waits for a commit")
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
                self._reconnect()
                return self._report()
            except TransportError as error:
                raise TransportError(
                    f"whether {self._line} has kept the release is not known: look with `tandem "
                    f"board info` at the same address ({error})"
                ) from error

    def _report(self) -> Answer:
        try:
            answer = msgspec.json.decode(self._client.download(REPORT), type=Answer)
        except ValueError as error:
            raise TransportError(
                f"the report of {self._line} is not understood ({error}): its agent must be of "
                "this version"
            ) from error
        if answer.reported is None:
            raise TransportError(
                f"the agent behind {self._line} reports nothing: is it of this version?"
            )
        return answer

    def _reconnect(self) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._client.connect()
                return
            except TransportError as error:
                if time.monotonic() >= until_s:
                    raise TransportError(f"{error}; {RESUMES}") from error
                time.sleep(LOOK_S)

    def _activate(self, delivery: Delivery) -> None:
        """Ask for the release. Raises SmpRefusedError, or TransportError: no answer comes."""
        digest = bytes.fromhex(delivery.blob.spec.sha256)
        try:
            self._client.ask(WRITE, TANDEM, INSTALL, {"hash": digest})
        except (TransportError, SmpRefusedError):
            # It may have begun, and its answer was lost: asked again it calls itself busy.
            if self._status().get("request") != delivery.request:
                raise

    def _updates(self, delivery: Delivery) -> Iterator[Update]:
        """Yield the update until it ends, or another one has taken its place for long."""
        begun_s = time.monotonic()
        while True:
            status = self._status()
            update = Update(
                phase=cast("Phase", str(status.get("phase"))),
                request=str(status.get("request")),
                reason=str(status.get("reason")),
                waits_for_commit=bool(status.get("waits")),
            )
            if update.request == delivery.request:
                begun_s = time.monotonic()
                yield update
                if update.waits_for_commit or update.phase in ("live", "refused", "rolled_back"):
                    return
            elif time.monotonic() - begun_s > PATIENCE_S:
                yield update
                return
            time.sleep(LOOK_S)

    def _status(self) -> Mapping[str, Scalar]:
        try:
            return self._client.ask(READ, TANDEM, STATUS, {})
        except TransportError:  # the agent may start again, or the line be gone for a moment
            self._reconnect()
            return self._client.ask(READ, TANDEM, STATUS, {})


class Sender:
    """One connection that brings what the board lacks."""

    def __init__(
        self, client: SmpClient, delivery: Delivery, statement: bytes, on_progress: OnProgress
    ) -> None:
        self.sent_bytes = 0
        self.received_bytes = -1
        self._statement = statement
        self._client = client
        self._delivery = delivery
        self._on_progress = on_progress

    def run(self) -> None:
        """Send the statement and the missing chunks."""
        blob = self._delivery.blob
        chunks = msgspec.json.encode(ChunkList(blob=blob.spec, index=blob.index))
        self._client.upload(CHUNK_LIST, chunks, hashlib.sha256(chunks).digest())
        digest = hashlib.sha256(self._statement).digest()
        self._client.upload(STATEMENT, self._statement, digest)
        self._on_progress(Progress("comparing", max(0, self.received_bytes), blob.spec.bytes))
        plan, bitmap = self._read_plan()
        missing = numbers_of(bitmap)
        if not missing:
            self.received_bytes = blob.spec.bytes
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
        self.received_bytes = total - missing_bytes
        self._on_progress(Progress("sending", self.received_bytes, total))

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

    def __init__(self, sender: Sender, records: Records) -> None:
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


def difference_encoder(
    blob: Blob, bases: Sequence[str], fleet: Path | None
) -> tuple[DeltaEncoder, Blob] | None:
    """Return what encodes chunks of a bundle against the first base that is on this host.

    `bases`: SHA-256 of releases on the board. Looked for in the fleet's repository, and beside the
    bundle. The base is to be closed. Raises OSError.
    """
    for number, sha256 in enumerate(bases):
        if sha256 == blob.spec.sha256:
            continue
        base = _published(sha256, fleet) or _beside(blob.path, sha256)
        if base is not None:
            return DeltaEncoder(blob.file, base.file, number), base
    return None


def _published(sha256: str, fleet: Path | None) -> Blob | None:
    return None if fleet is None else Library(fleet / "repository").blob(sha256)


def _beside(bundle: Path, sha256: str) -> Blob | None:
    paths = [path for path in sorted(bundle.parent.glob(f"*{bundle.suffix}")) if path != bundle]
    for path in paths[:MAX_BESIDE]:
        with suppress(OSError):  # not ours to read, or gone: it is no base
            if path.is_file() and sha256_of(path) == sha256:
                return Blob(path)
    return None
