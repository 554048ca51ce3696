"""Releases that came by SMP, in a folder of their own: the agent fetches them from there as from a
USB stick, so that slots, signatures, trial and rollback are those of every update.

inbox/SHA256.bundle      the bundle that was uploaded last (image 0)
statement.json           what signs it (image 1): a desired document, and the metadata it needs
chunks/, chunks.list     a bundle that arrives in chunks (`device.smp.intake`; its list is image 2)
repository/              that metadata, unpacked
desired.json             the document that was handed to the agent last
"""

import contextlib
import hashlib
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from device.errors import BundleError
from device.files import (
    make_folder,
    open_to_read,
    read_regular,
    replace_file,
    sync_folder,
    write_synced,
)
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
from device.smp.intake import MAX_LIST_BYTES, Intake
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

    def __init__(self, root: Path, slots: Callable[[], Mapping[str, Path]] = dict) -> None:
        """`slots`: the folders of unpacked releases by their SHA-256, to copy chunks from."""
        self.folder = root / "inbox"
        self.repository = root / "repository"
        self._statement = root / "statement.json"
        self._desired = root / "desired.json"
        for folder in (root, self.folder):
            make_folder(folder, 0o700)
        self.intake = Intake(root, slots, prepare=self._prepare, on_whole=self._take_bundle)
        self.uploads = (
            Upload(
                root,
                "bundle",
                max_bytes=MAX_BLOB_BYTES,
                on_whole=self._take_bundle,
                on_begin=self._begin_bundle,
            ),
            Upload(root, "statement", max_bytes=MAX_STATEMENT_BYTES, on_whole=self._take_statement),
            Upload(root, "list", max_bytes=MAX_LIST_BYTES, on_whole=self.intake.take_list),
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
        if image == 2:
            return self.intake.holds(sha256)
        try:
            return hashlib.sha256(self._read(self._statement)).hexdigest() == sha256
        except OSError:
            return False

    def clear(self) -> None:
        """Remove the uploaded files, whole or not."""
        for upload in self.uploads:
            upload.remove()
        self.intake.remove()
        for path in (*self.folder.glob("*.bundle"), self._statement):
            path.unlink(missing_ok=True)
        self.forget_handed_in()

    def handed_in(self) -> HandedIn | None:
        """Return the document that was handed in last, for an agent that starts again."""
        try:
            document = self._read(self._desired)
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
        statement, signed = self._read_statement(bundle.stem)
        if statement is not None and signed:
            self._unpack(statement)
            handed_in = HandedIn(statement.desired.encode(), str(self.repository))
        elif statement is not None and dev:
            handed_in = HandedIn(statement.desired.encode(), "")
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
        replace_file(self._desired, handed_in.document, 0o600)
        return handed_in

    @staticmethod
    def _read(path: Path) -> bytes:
        """Return an uploaded document. Raises OSError."""
        return read_regular(path, MAX_STATEMENT_BYTES)

    def _read_statement(self, sha256: str) -> tuple[Statement | None, bool]:
        """Return the statement on a bundle and whether it is signed; None if there is none, or it
        is on another bundle."""
        try:
            statement = msgspec.json.decode(self._read(self._statement), type=Statement)
            desired, signed = open_desired(statement.desired.encode())
        except OSError:
            return None, False
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
        fits = desired.release.blob.sha256 == sha256
        return statement if fits else None, signed is not None

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
            make_folder(path.parent, 0o700)
            write_synced(path, [text.encode()], 0o600)
            sync_folder(path.parent)

    def make_room(self, sha256: str | None) -> None:
        """Remove the bundles that another one takes the place of, so that never two are there."""
        for bundle in self.folder.glob("*.bundle"):
            if bundle.stem != sha256:
                bundle.unlink()

    def _begin_bundle(self, sha256: str | None) -> None:
        """Make room for a bundle that is uploaded whole."""
        self.intake.remove()
        self.make_room(sha256)

    def _prepare(self, blob: BlobSpec) -> bool:
        """Make room for chunks; return whether their bundle is there."""
        self.uploads[0].remove()
        self.make_room(blob.sha256)
        return self.holds(0, blob.sha256, blob.bytes)

    def _take_bundle(self, path: Path, sha256: str) -> None:
        self.make_room(sha256)
        path.rename(self.folder / f"{sha256}.bundle")
        sync_folder(self.folder)

    def _take_statement(self, path: Path, _sha256: str) -> None:
        path.rename(self._statement)


def _spec(bundle: Path) -> BlobSpec:
    """Return what the agent fetches a bundle by, cut into pieces of one size."""
    whole, index, size = hashlib.sha256(), hashlib.sha256(), 0
    with open_to_read(bundle) as file:
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
