"""Releases that came by SMP, in a folder of their own: the agent fetches them from there as from a
USB stick, so that slots, signatures, trial and rollback are those of every update.

inbox/SHA256.bundle      the bundle that was uploaded last (image 0)
statement.json           what signs it (image 1): a desired document, and the metadata it needs
repository/              that metadata, unpacked
desired.json             the document that was handed to the agent last
"""

import contextlib
import hashlib
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from device.errors import BundleError
from device.files import make_folder, replacing
from device.protocol.documents import (
    CHUNK_BYTES,
    DOCUMENT_FORMAT,
    MAX_BLOB_BYTES,
    BlobSpec,
    Desired,
    ReleaseSpec,
    encode,
)
from device.protocol.signed import open_desired
from device.smp.message import Code, SmpError
from device.smp.upload import Upload
from device.update.bundle import read_bundle_info

MAX_STATEMENT_BYTES = 8 * 1024**2
STATEMENT_FORMAT = 1
_FILE = re.compile(r"(metadata|targets)/[A-Za-z0-9_%+-][A-Za-z0-9_.%+-]*\Z")


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a bundle one that a board may install without a connection to its fleet.

    `desired`: the text of the signed document; `files`: signed metadata by their paths in the
    repository.
    """

    format: Annotated[int, Meta(ge=1)] = STATEMENT_FORMAT
    desired: str
    files: Annotated[dict[str, str], Meta(max_length=256)]


@dataclass(frozen=True, slots=True)
class HandedIn:
    """The agent shall bring the board to this document. `repository`: the folder of its metadata,
    empty for one that is not signed."""

    document: bytes
    repository: str


class Inbox:
    """The folder. One thread at a time uses it."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "inbox"
        self.repository = root / "repository"
        self._statement = root / "statement.json"
        self._desired = root / "desired.json"
        for folder in (root, self.folder):
            make_folder(folder)
        self.uploads = (
            Upload(root, "bundle", max_bytes=MAX_BLOB_BYTES, on_whole=self._take_bundle),
            Upload(root, "statement", max_bytes=MAX_STATEMENT_BYTES, on_whole=self._take_statement),
        )

    @property
    def bundle(self) -> Path | None:
        """The bundle that is there."""
        return next(iter(sorted(self.folder.glob("*.bundle"))), None)

    def holds(self, image: int, sha256: str | None, size: int) -> bool:
        """Whether a whole file of this hash is there already."""
        if image == 0:
            path = self.folder / f"{sha256}.bundle"
            return sha256 is not None and path.is_file() and path.stat().st_size == size
        try:
            return hashlib.sha256(self._statement.read_bytes()).hexdigest() == sha256
        except FileNotFoundError:
            return False

    def clear(self) -> None:
        """Remove the uploaded files, whole or not."""
        for upload in self.uploads:
            upload.remove()
        for path in (*self.folder.glob("*.bundle"), self._statement):
            path.unlink(missing_ok=True)
        self.forget_handed_in()

    def handed_in(self) -> HandedIn | None:
        """Return the document that was handed in last, for an agent that starts again."""
        try:
            document = self._desired.read_bytes()
            _, signed = open_desired(document)
        except (OSError, ValueError):
            return None
        return HandedIn(document, "" if signed is None else str(self.repository))

    def forget_handed_in(self) -> None:
        """Another document has come since."""
        with contextlib.suppress(OSError):
            self._desired.unlink(missing_ok=True)

    def hand_in(self, *, profile: str, dev: bool) -> HandedIn:
        """Return the document that installs the bundle, and keep it. Raises SmpError."""
        bundle = self.bundle
        if bundle is None:
            raise SmpError(Code.NO_ENTRY, "there is no uploaded bundle: upload one as image 0")
        try:
            info = read_bundle_info(bundle)
        except BundleError as error:
            raise SmpError(Code.CORRUPT, str(error)) from error
        if info.profile != profile:
            raise SmpError(
                Code.INVALID,
                f"the bundle is built for {info.profile}, this device is {profile}: build an "
                f"engine for {profile}",
            )
        statement = self._read_statement(bundle.stem)
        if statement is not None:
            self._unpack(statement)
            handed_in = HandedIn(statement.desired.encode(), str(self.repository))
        elif dev:
            release = ReleaseSpec(
                name=info.name, version=info.version, profile=info.profile, blob=_spec(bundle)
            )
            desired = Desired(
                format=DOCUMENT_FORMAT, request=uuid.uuid4().hex, release=release, retry=True
            )
            handed_in = HandedIn(encode(desired), "")
        else:
            raise SmpError(
                Code.ACCESS_DENIED,
                "the bundle is not signed and this device takes only signed ones: upload what "
                "`tandem fleet statement` wrote for it as image 1",
            )
        with replacing(self._desired) as file:
            file.write(handed_in.document)
        return handed_in

    def _read_statement(self, sha256: str) -> Statement | None:
        """Return the statement on a bundle, None if there is none or it is on another one."""
        try:
            statement = msgspec.json.decode(self._statement.read_bytes(), type=Statement)
            desired, signed = open_desired(statement.desired.encode())
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            raise SmpError(
                Code.CORRUPT, f"the statement is not understood: {error}; upload it again"
            ) from error
        if statement.format != STATEMENT_FORMAT:
            raise SmpError(
                Code.NOT_SUPPORTED,
                f"the statement has format {statement.format}, this agent reads "
                f"{STATEMENT_FORMAT}: update the agent",
            )
        return None if signed is None or desired.release.blob.sha256 != sha256 else statement

    def _unpack(self, statement: Statement) -> None:
        """Write the metadata where the check of signatures reads them."""
        strange = next((name for name in statement.files if not _FILE.match(name)), None)
        if strange is not None:
            raise SmpError(
                Code.INVALID, f"the statement names the file {strange!r}: it is no signed metadata"
            )
        shutil.rmtree(self.repository, ignore_errors=True)
        for name, text in statement.files.items():
            path = self.repository / name
            make_folder(path.parent)
            path.write_text(text)

    def _take_bundle(self, path: Path, sha256: str) -> None:
        for other in self.folder.glob("*.bundle"):
            other.unlink()
        path.rename(self.folder / f"{sha256}.bundle")

    def _take_statement(self, path: Path, _sha256: str) -> None:
        path.rename(self._statement)


def _spec(bundle: Path) -> BlobSpec:
    """Return what the agent fetches a bundle by, cut into pieces of one size."""
    whole, index, size = hashlib.sha256(), hashlib.sha256(), 0
    with bundle.open("rb") as file:
        while block := file.read(CHUNK_BYTES):
            whole.update(block)
            index.update(hashlib.sha256(block).digest())
            size += len(block)
    return BlobSpec(
        sha256=whole.hexdigest(),
        bytes=size,
        chunk_bytes=CHUNK_BYTES,
        index_sha256=index.hexdigest(),
    )
