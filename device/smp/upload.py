"""Files that arrive in pieces, in order; a broken upload goes on at the exact byte.

`NAME.part` holds what came, `NAME.session` whose upload it is. The length of the part file is the
offset: what a power cut or a bad line has spoiled in it shows by the SHA-256 at the end, and then
the upload begins anew.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from device.files import open_regular, read_regular, replace_file, sync_folder
from device.protocol.documents import Sha256
from device.smp.message import Code, SmpError
from device.update.admission import SPARE_BYTES
from device.update.background_sync import BackgroundSync

LOG = logging.getLogger("tandem.agent")
SYNC_BYTES = 4 * 1024**2 // 3  # as in `device.update.part_file`
MAX_RECORD_BYTES = 64 * 1024
IDLE_S = 10.0  # an upload that is silent for so long gives way to another one


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """What is uploaded. Without a `sha256` it cannot be continued."""

    bytes: Annotated[int, Meta(ge=1)]
    sha256: Sha256 | None = None


class Upload:
    """The upload of one kind of file into a folder; a whole one is passed to `on_whole`."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        max_bytes: int,
        on_whole: Callable[[Path, str], None],
        on_begin: Callable[[str | None], None] = lambda _sha256: None,
    ) -> None:
        """`on_whole` takes the whole file, which it moves, and its SHA-256. `on_begin` makes room
        for a file with the SHA-256 that was announced, if one was."""
        self.name = name
        self._part = folder / f"{name}.part"
        self._record = folder / f"{name}.session"
        self._max_bytes = max_bytes
        self._on_whole = on_whole
        self._on_begin = on_begin
        self._session: Session | None = None
        self._peer: object = None
        self._file = -1
        self._background: BackgroundSync | None = None
        self._offset = self._unsynced_bytes = 0
        self._heard_s = 0.0

    def begin(self, peer: object, session: Session, data: bytes) -> tuple[int, bool | None]:
        """Begin or continue an upload; return the next offset, and at the end whether it fits.

        `data` are the first bytes; they are dropped where more is there already.
        """
        same = self._session is not None and session == self._session and session.sha256 is not None
        busy = self._session is not None and time.monotonic() - self._heard_s < IDLE_S
        if busy and not same and peer != self._peer:
            raise SmpError(
                Code.BUSY,
                f"another client uploads a {self.name}: wait until it has ended, or until it is "
                f"silent for {IDLE_S:g} s",
            )
        if session.bytes > self._max_bytes:
            raise SmpError(
                Code.INVALID,
                f"the {self.name} has {session.bytes} bytes, the limit is {self._max_bytes}",
            )
        try:
            if not same:
                self._open(session)
            self._peer, self._heard_s = peer, time.monotonic()
            return self._take(0, data)
        except OSError as error:
            raise self._disk(error) from error

    def go_on(self, peer: object, offset: int, data: bytes) -> tuple[int, bool | None]:
        """Take bytes at an offset; return as `begin`. Those of another offset are dropped."""
        if self._session is None:
            raise SmpError(
                Code.BAD_STATE, f"no upload of a {self.name} has begun: begin at the offset 0"
            )
        if peer != self._peer:
            raise SmpError(
                Code.BUSY, f"another client has continued the upload of the {self.name}: begin anew"
            )
        self._heard_s = time.monotonic()
        try:
            return self._take(offset, data)
        except OSError as error:
            raise self._disk(error) from error

    def remove(self) -> None:
        """Forget the upload."""
        self._close()
        for path in (self._part, self._record):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def _open(self, session: Session) -> None:
        self._close()
        self._on_begin(session.sha256)
        if session.sha256 is None or session != self._recorded():
            self.remove()
            replace_file(self._record, msgspec.json.encode(session), 0o600)
        present = self._part.stat().st_size if self._part.exists() else 0
        status = os.statvfs(self._part.parent)
        free_bytes = status.f_bavail * status.f_frsize - SPARE_BYTES
        if session.bytes - present > free_bytes:
            raise SmpError(
                Code.NO_MEMORY,
                f"the {self.name} needs {session.bytes - present} bytes, the disk has {free_bytes}"
                " for it: make room",
            )
        self._file = open_regular(self._part, os.O_RDWR | os.O_CREAT)
        if present > session.bytes:
            os.ftruncate(self._file, 0)
            present = 0
        self._background = BackgroundSync(self._file)
        self._offset = present
        self._session = session

    def _recorded(self) -> Session | None:
        try:
            return msgspec.json.decode(read_regular(self._record, MAX_RECORD_BYTES), type=Session)
        except (OSError, ValueError):
            return None

    def _take(self, offset: int, data: bytes) -> tuple[int, bool | None]:
        session, background = self._session, self._background
        assert session is not None
        assert background is not None
        if offset == self._offset:
            if offset + len(data) > session.bytes:
                raise SmpError(
                    Code.INVALID,
                    f"the bytes {offset} to {offset + len(data)} go beyond the end of the "
                    f"{self.name} at {session.bytes}",
                )
            written = os.pwrite(self._file, data, offset)
            self._offset += written
            self._unsynced_bytes += written
            if self._unsynced_bytes >= SYNC_BYTES:
                background.sync(self._offset)
                self._unsynced_bytes = 0
        if self._offset < session.bytes:
            return self._offset, None
        return session.bytes, self._finish(session, background)

    def _finish(self, session: Session, background: BackgroundSync) -> bool:
        """Pass a whole file on; return whether its SHA-256 is the one that was announced."""
        self._background = None
        digest = background.digest(session.bytes)
        fits = session.sha256 in (None, digest)
        if fits:
            os.fsync(self._file)
            self._close()
            self._on_whole(self._part, digest)
            sync_folder(self._part.parent)
        else:
            LOG.warning("the %s that was uploaded has another SHA-256: it is dropped", self.name)
        self.remove()
        return fits

    def _close(self) -> None:
        if self._background is not None:
            self._background.close()
            self._background = None
        if self._file >= 0:
            os.close(self._file)
        self._file, self._session, self._peer = -1, None, None
        self._offset = self._unsynced_bytes = 0

    def _disk(self, error: OSError) -> SmpError:
        """Begin anew from the disk with the next upload, as it is not known what it has."""
        self._close()
        return SmpError(
            Code.UNKNOWN,
            f"the disk does not take the {self.name}: {error.strerror}; make room and upload again",
        )
