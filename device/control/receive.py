"""Takes a request from a stream into the inbox; what has arrived stays when the stream breaks."""

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from device.control.upload_request import (
    MAX_REQUEST_BYTES,
    Missing,
    Taken,
    UploadRequest,
    check_path,
)
from device.errors import TandemError, TransferError
from device.files import make_folder, open_to_read, sync_folder, write_synced
from device.protocol.documents import BlobSpec
from device.update.part_file import Fetch

INBOX = "inbox"
PART = "part"  # in the inbox: what has not arrived whole
TOLD_BYTES = 256 * 1024  # between two lines about progress
WINDOW_CHUNKS = 64
_READ_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class _Stream:
    """Both directions of the conversation."""

    incoming: BinaryIO
    outgoing: BinaryIO


def receive(
    state_dir: Path, bases: Mapping[str, Path], incoming: BinaryIO, outgoing: BinaryIO
) -> None:
    """Take one request. `bases`: folders of unpacked bundles by their SHA-256, to copy from.

    The last line says where it lies, or why it does not.
    """
    try:
        folder, size = _take(state_dir / INBOX, bases, _Stream(incoming, outgoing))
        _say(outgoing, Taken(received_bytes=size, folder=str(folder)))
    except (TandemError, OSError) as error:
        text = f"the board's disk failed: {error}" if isinstance(error, OSError) else str(error)
        _say(outgoing, Taken(error=text))


def erase(state_dir: Path) -> None:
    """Remove what transfers have left."""
    shutil.rmtree(state_dir / INBOX, ignore_errors=True)


def _take(inbox: Path, bases: Mapping[str, Path], stream: _Stream) -> tuple[Path, int]:
    request = _read_request(stream.incoming)
    index = _read(stream.incoming, request.index_bytes)
    if request.erase:
        erase(inbox.parent)
    make_folder(inbox / PART, 0o700)
    bundle = inbox / f"{request.blob.sha256}.bundle"
    for leftover in inbox.iterdir():
        if leftover not in (bundle, inbox / PART):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    if _is_whole(bundle, request.blob):
        _say(stream.outgoing, Missing(missing=(), present_bytes=request.blob.bytes))
    else:
        bundle.unlink(missing_ok=True)
        _fetch(request.blob, index, bundle, bases, stream)
    for path, content in request.files.items():
        place = inbox / check_path(path)
        make_folder(place.parent, 0o700)
        place.unlink(missing_ok=True)
        write_synced(place, [content], 0o600)
    sync_folder(inbox)
    return inbox, request.blob.bytes


def _fetch(
    blob: BlobSpec, index: bytes, bundle: Path, bases: Mapping[str, Path], stream: _Stream
) -> None:
    """Fill the part file and give it the name of a whole bundle."""
    fetch = Fetch(bundle.parent / PART, blob, WINDOW_CHUNKS, bases)
    try:
        fetch.on_part("index", index, 0.0)
        table, download = fetch.download.table, fetch.download
        if table is None:
            raise TransferError("the index does not fit the blob: send the bundle again")
        missing, told_bytes = download.missing, download.received_bytes
        _say(stream.outgoing, Missing(missing=missing, present_bytes=told_bytes))
        for number in missing:
            fetch.on_part(str(number), _read(stream.incoming, table.size(number)), 0.0)
            if download.wants(number):
                raise TransferError(f"chunk {number} was damaged on its way: send it again")
            if download.received_bytes - told_bytes >= TOLD_BYTES:
                told_bytes = download.received_bytes
                _say(stream.outgoing, Taken(received_bytes=told_bytes))
        try:
            fetch.file.finish()
        except TransferError:
            fetch.file.path.unlink()  # resumed it would end the same way
            raise
        os.rename(fetch.file.path, bundle)
    finally:
        fetch.close()


def _is_whole(bundle: Path, blob: BlobSpec) -> bool:
    """Whether an earlier transfer has brought these very bytes."""
    digest = hashlib.sha256()
    try:
        with open_to_read(bundle) as file:
            while part := file.read(_READ_BYTES):
                digest.update(part)
    except FileNotFoundError:
        return False
    return digest.hexdigest() == blob.sha256


def _read_request(incoming: BinaryIO) -> UploadRequest:
    line = incoming.readline(MAX_REQUEST_BYTES + 1)
    if len(line) > MAX_REQUEST_BYTES:
        raise TransferError(
            f"the request has more than {MAX_REQUEST_BYTES} bytes beside the bundle"
        )
    try:
        return msgspec.json.decode(line, type=UploadRequest)
    except (ValueError, RecursionError) as error:
        raise TransferError(f"the request is not understood: {error}") from error


def _read(incoming: BinaryIO, size: int) -> bytes:
    data = incoming.read(size)
    if len(data) != size:
        raise TransferError("the transfer was cut off: flash again, it goes on where it was")
    return data


def _say(outgoing: BinaryIO, line: msgspec.Struct) -> None:
    outgoing.write(msgspec.json.encode(line) + b"\n")
    outgoing.flush()
