"""The checksums of an engine: one of the header, one of each section (entry).

They stand in the metadata of the file, under their own key:

    "checksums": "xxh3_64 HEADER SECTION SECTION ..."    16 hex digits each, in the header's order

The header's covers the first 8 bytes (its length) and the header itself, with its own 16 digits as
zeros. A flipped bit anywhere is found: in a section by the section's, elsewhere by the header's, or
the header is refused before. XXH3 (Yann Collet, https://xxhash.com) is as fast as memory, so that a
section can be checked whenever it is loaded; it keeps nobody from changing a file on purpose, which
signatures of releases do.

Nothing here needs numpy: the agent checks the engines of a release with `verify_engine_file`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from os import fstat
from pathlib import Path

import xxhash

from device.engine.container import PREFIX_BYTES, Entry, Header, header_length, parse_header
from device.errors import DamagedEngineError, EngineError
from device.files import open_to_read

KEY = "checksums"
METADATA_KEY = "tandem"  # of the manifest
_METADATA_KEYS = (METADATA_KEY, KEY, "format")  # safetensors' own writers add the last
ALGORITHM = "xxh3_64"
NO_CHECKSUMS = "has no checksums: an earlier Tandem wrote it; build it again to have it checked"
_DIGITS = 16
_UNKNOWN = "0" * _DIGITS
_MARK = f'"{KEY}":"{ALGORITHM} '.encode()  # a name or a text of the header has its quotes escaped


@dataclass(frozen=True, slots=True)
class Checksums:
    """The checksums of the sections of a file by name, in hex. `data_start`: of the first one."""

    data_start: int
    sections: Mapping[str, str]


def checksum(data: bytes | memoryview) -> str:
    """Return the checksum of bytes, in hex."""
    return xxhash.xxh3_64_hexdigest(data)


def stated(sections: Iterable[str]) -> str:
    """Return the text for the metadata, with the header's checksum not filled in yet."""
    return " ".join((ALGORITHM, _UNKNOWN, *sections))


def sealed(head: bytes) -> bytes:
    """Return the length and header of a file, which hold a text of `stated`, with its checksum."""
    place = head.index(_MARK) + len(_MARK)
    return head[:place] + checksum(head).encode() + head[place + _DIGITS :]


def checksums_of(head: bytes, header: Header, where: str) -> Checksums | None:
    """Return the checksums of a file whose length and header are `head`; that of these is checked.

    None: an earlier Tandem, or another program, wrote the file. Raises EngineError, which begins
    with `where`.
    """
    unknown = next((key for key in header.metadata if key not in _METADATA_KEYS), None)
    # A flipped bit in the name of the checksums must not hide them.
    if unknown is not None and METADATA_KEY in header.metadata:
        raise EngineError(
            f"{where} is damaged, or of a newer Tandem: its metadata has {unknown[:40]!r}, "
            f"known are {', '.join(_METADATA_KEYS)}; copy or build it again"
        )
    if KEY not in header.metadata:
        return None
    algorithm, *digits = header.metadata[KEY].split(" ")
    if algorithm != ALGORITHM or len(digits) != len(header.entries) + 1:
        raise EngineError(
            f"{where} is damaged, or of a newer Tandem: its checksums are {len(digits)} of kind "
            f"{algorithm[:40]!r}, not {len(header.entries) + 1} of {ALGORITHM}; copy or build it "
            "again"
        )
    place = head.find(_MARK) + len(_MARK)
    actual = checksum(head[:place] + _UNKNOWN.encode() + head[place + _DIGITS :])
    if head[place : place + _DIGITS] != actual.encode():
        raise DamagedEngineError(
            f"{where} is damaged: its header at byte 0 ({len(head)} bytes) has the checksum "
            f"{actual}, written was {digits[0]}; copy or build it again"
        )
    return Checksums(header.data_start, dict(zip(header.entries, digits[1:], strict=True)))


def check_section(data: mmap, name: str, entry: Entry, checksums: Checksums, where: str) -> None:
    """Raise EngineError unless the bytes of a section are those that were written.

    `data`: the whole file.
    """
    start, stop = checksums.data_start + entry.start, checksums.data_start + entry.stop
    with memoryview(data) as view, view[start:stop] as part:
        actual = checksum(part)
    if actual != checksums.sections[name]:
        raise DamagedEngineError(
            f"{where} is damaged: section {name!r} at byte {start} ({stop - start} bytes) has the "
            f"checksum {actual}, written was {checksums.sections[name]}; copy or build it again"
        )


def verify_engine_file(path: Path, where: str) -> bool:
    """Check all checksums of an engine file; False if it has none.

    `where`: how messages name it. Raises EngineError: it is damaged, or no engine file; OSError: it
    cannot be read.
    """
    with open_to_read(path) as file:
        size = fstat(file.fileno()).st_size
        prefix = file.read(PREFIX_BYTES)
        head = prefix + file.read(header_length(prefix, size, where))
        header = parse_header(head[PREFIX_BYTES:], size, where)
        checksums = checksums_of(head, header, where)
        if checksums is None:
            return False
        with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            for name, entry in header.entries.items():
                check_section(data, name, entry, checksums, where)
    return True
