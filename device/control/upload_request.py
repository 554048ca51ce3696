"""An upload to a board: a conversation of lines of JSON and raw chunks, over any stream.

The sender writes an `UploadRequest` line and the bytes of the index; the board answers with
`Missing`. The sender writes those chunks in that order, each as it is, and the board writes `Taken`
lines; the last one has the folder in which all lies.

A folder (a USB stick, or `inbox` in the state folder) holds

    SHA256.bundle             the bundle
    desired.json              the desired document, for every board with dev = true
    desired/DEVICE.json       a signed one, for one device
    repository/               signed metadata
"""

import re
from typing import Annotated, Union

import msgspec
from msgspec import Meta

from device.errors import TransferError
from device.protocol.control import Answer
from device.protocol.documents import MAX_INDEX_BYTES, BlobSpec, DeviceFacts

DESIRED = "desired.json"
DESIRED_OF = "desired/{device}.json"
REPOSITORY = "repository"
MAX_REQUEST_BYTES = 16 * 1024**2
_PATH = re.compile(r"[A-Za-z0-9_.+-]{1,200}(/[A-Za-z0-9_.+-]{1,200}){0,8}\Z")


class UploadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What comes: the blob, the length of its index in bytes, and small files by their paths.

    `erase`: forget what an earlier transfer has left.
    """

    blob: BlobSpec
    index_bytes: Annotated[int, Meta(ge=1, le=MAX_INDEX_BYTES)]
    files: dict[str, bytes] = {}
    erase: bool = False


class Missing(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="missing"):
    """The numbers of the chunks that the board lacks, and the bytes that it has."""

    missing: tuple[int, ...]
    present_bytes: int


class Taken(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="taken"):
    """The bytes on the board by now; `folder`: all is there and fits its hash."""

    received_bytes: int = 0
    folder: str = ""
    error: str = ""


Reply = Union[Missing, Taken]  # noqa: UP007  (read by msgspec on 3.10)


class BoardFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a board says of itself. `answer`: of its agent."""

    facts: DeviceFacts
    answer: Answer


class Chunks(msgspec.Struct, frozen=True, kw_only=True):
    """The chunks of the release in a slot, by their SHA-256 in hexadecimal."""

    slot: str
    sha256: str
    chunk_bytes: int
    chunks: tuple[str, ...]


def check_path(path: str) -> str:
    """Return the path of a small file; TransferError if it could leave its folder."""
    if _PATH.match(path) is None or any(part.startswith(".") for part in path.split("/")):
        raise TransferError(f"{path!r} is no path of a file that a board takes")
    return path
