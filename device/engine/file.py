"""The engine file: a safetensors file with a manifest in its metadata, read with mmap.

`open_engine` checks every length, offset, dtype and reference before it hands anything out, and the
header's checksum; a section's is checked when it is first read (`device.engine.checksums`).
`write_engine` replaces a file in one step, so whoever has the old one open keeps it whole.

A file that another program shortens in place while it is mapped ends the process with SIGBUS at the
next look into it; no check can prevent that, only a copy of all weights. On a board the process is
a pipeline's: the agent sees it die, compares the slot with its hashes and takes the other slot.
"""

import hashlib
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from device.closing import Closing
from device.engine.checksums import (
    KEY,
    METADATA_KEY,
    Checksums,
    check_section,
    checksum,
    checksums_of,
    sealed,
    stated,
)
from device.engine.container import (
    PREFIX_BYTES,
    Entry,
    Header,
    encode_header,
    header_length,
    lay_out,
    parse_header,
    repeated_key,
)
from device.engine.manifest import FORMAT_VERSION, Manifest
from device.engine.manifest_check import check_manifest
from device.errors import EngineError
from device.files import open_to_read, replacing

Array = npt.NDArray[Any]
PathLike = str | os.PathLike[str]

_LARGE_BYTES = 1 << 20  # of a section that is checked beside its use: 0.05 ms or more


class _Version(msgspec.Struct):
    """The part of a manifest that every format version has."""

    format: int


_VERSION_DECODER = msgspec.json.Decoder(_Version)
_MANIFEST_DECODER = msgspec.json.Decoder(Manifest)


class Engine(Closing):
    """An open engine file. Close it, or use it in a `with`; arrays handed out stay valid."""

    def __init__(
        self, path: Path, mapped: mmap.mmap, head: "_Head", identity: tuple[int, ...]
    ) -> None:
        """Take a mapped file whose header and manifest were checked; use `open_engine`."""
        self.path = path
        # None: an earlier Tandem, or another program, wrote the file.
        self.checksums = head.checksums
        # Of the file, whatever is at its path now: device, inode, length, time of last change.
        self.identity = identity
        self.manifest = head.manifest
        self.entries: Mapping[str, Entry] = MappingProxyType(dict(head.header.entries))
        self._data_start = head.header.data_start
        self._mapped: mmap.mmap | None = mapped
        self._sha256: str | None = None
        self._verified: set[str] = set()
        self._beside: dict[int, Callable[..., None]] = {}  # by thread: starts a check

    def entry(self, name: str) -> Array:
        """Return an entry as a read-only array of its dtype and shape, without a copy.

        Raises EngineError if there is no such entry, its bytes are not those that were written, or
        the engine is closed.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise EngineError(f"{self.path} has no entry {name!r}; build it again")
        self._verify(name, entry)
        view: Array = np.ndarray(
            entry.shape,
            np.dtype(entry.dtype).newbyteorder("<"),
            self._bytes(),
            self._data_start + entry.start,
        )
        if not view.flags.aligned:  # only in files of other programs
            view = view.copy()
            view.flags.writeable = False
        return view

    @contextmanager
    def checking_beside(self) -> Iterator[None]:
        """Check large sections in a thread beside the work of this one, until the block ends.

        Its end waits for them. Raises EngineError, in place of whatever the block raised: one is
        damaged.
        """
        checks: dict[str, Future[None]] = {}
        with ThreadPoolExecutor(1) as pool:

            def begin(data: mmap.mmap, name: str, *rest: Any) -> None:  # noqa: ANN401
                checks[name] = pool.submit(check_section, data, name, *rest)

            self._beside[get_ident()] = begin
            try:
                yield
            finally:
                del self._beside[get_ident()]
                self._verified -= {name for name, check in checks.items() if check.exception()}
                for check in checks.values():
                    check.result()

    def verify(self) -> None:
        """Check every section that was not read yet. Raises EngineError: one is damaged.

        A file without checksums passes; see `checksums`.
        """
        for name, entry in self.entries.items():
            self._verify(name, entry)

    def _verify(self, name: str, entry: Entry) -> None:
        if self.checksums is None or name in self._verified:
            return
        large = entry.stop - entry.start >= _LARGE_BYTES
        check = self._beside.get(get_ident(), check_section) if large else check_section
        check(self._bytes(), name, entry, self.checksums, str(self.path))
        self._verified.add(name)

    @property
    def sha256(self) -> str:
        """The SHA-256 of the whole file in hex, computed at first use."""
        if self._sha256 is None:
            self._sha256 = hashlib.sha256(self._bytes()).hexdigest()
        return self._sha256

    def close(self) -> None:
        """Close the file. Its mapping ends with the last array that refers to it."""
        self._mapped = None

    def _bytes(self) -> mmap.mmap:
        if self._mapped is None:
            raise EngineError(f"{self.path} is closed; open it again")
        return self._mapped


def open_engine(path: PathLike) -> Engine:
    """Open an engine file and check all of it but the values of its arrays.

    Raises EngineError, which names the file and what is wrong with it.
    """
    where = Path(path)
    mapped, identity = _map(where)
    end = PREFIX_BYTES + header_length(mapped[:PREFIX_BYTES], len(mapped), str(where))
    head = _read_head(mapped[:end], len(mapped), str(where))
    try:
        check_manifest(head.manifest, head.header.entries)
    except EngineError as error:
        raise EngineError(f"{where}: {error}") from error
    return Engine(where, mapped, head, identity)


def read_manifest(path: Path, offset: int, size: int) -> Manifest:
    """Return the manifest of an engine within another file, at `offset` with `size` bytes.

    Its arrays are not read. Raises EngineError, which names the file and what is wrong with it.
    """
    try:
        with open_to_read(path, follow=True) as file:
            file.seek(offset)
            prefix = file.read(PREFIX_BYTES)
            blob = file.read(header_length(prefix, size, str(path)))
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error}") from error
    return _read_head(prefix + blob, size, str(path)).manifest


@dataclass(frozen=True, slots=True)
class _Head:
    """What stands before the sections of a file."""

    header: Header
    checksums: Checksums | None
    manifest: Manifest


def _read_head(head: bytes, size: int, where: str) -> _Head:
    """Return what the length and header of a file of `size` bytes say, checked."""
    header = parse_header(head[PREFIX_BYTES:], size, where)
    checksums = checksums_of(head, header, where)
    return _Head(header, checksums, _manifest(header.metadata, where))


def _map(path: Path) -> tuple[mmap.mmap, tuple[int, ...]]:
    try:
        with open_to_read(path, follow=True) as file:
            status = os.fstat(file.fileno())
            if status.st_size == 0:
                raise EngineError(f"{path} is empty; copy or build it again")
            identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), identity
    except FileNotFoundError as error:
        raise EngineError(f"{path} does not exist; build it with 'tandem build'") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise EngineError(f"{path} cannot be read: {error}") from error


def _manifest(metadata: Mapping[str, str], where: str) -> Manifest:
    text = metadata.get(METADATA_KEY)
    if text is None:
        raise EngineError(
            f"{where} is a safetensors file but not an engine: its metadata has no "
            f"{METADATA_KEY!r}; build one with 'tandem build'"
        )
    try:
        version = _VERSION_DECODER.decode(text).format
        if version == FORMAT_VERSION:
            manifest = _MANIFEST_DECODER.decode(text)
            again = repeated_key(text)
    except (ValueError, RecursionError) as error:
        raise EngineError(
            f"{where} is damaged: its manifest is not valid ({error}); copy or build it again"
        ) from error
    if version != FORMAT_VERSION:
        remedy = "update Tandem" if version > FORMAT_VERSION else "build it again"
        raise EngineError(
            f"{where} has format version {version}, this Tandem reads {FORMAT_VERSION}; {remedy}"
        )
    if again is not None:
        raise EngineError(
            f"{where} is damaged: its manifest names {again!r} twice; copy or build it again"
        )
    return manifest


def write_engine(path: PathLike, manifest: Manifest, entries: Mapping[str, Array]) -> None:
    """Write an engine file; the same manifest and arrays always give the same bytes.

    The file appears whole or not at all. Raises EngineError if the manifest and the entries do not
    fit each other, or the file cannot be written.
    """
    where = Path(path)
    try:
        placed = lay_out({name: (value.dtype.name, value.shape) for name, value in entries.items()})
        check_manifest(manifest, placed)
        sums = (checksum(_little(entries[name], entry).data) for name, entry in placed.items())
        metadata = {METADATA_KEY: encode_manifest(manifest), KEY: stated(sums)}
        head = sealed(encode_header(placed, metadata))
    except EngineError as error:
        raise EngineError(f"{where} is not written: {error}") from error
    try:
        with replacing(where) as file:
            file.write(head)
            for name, entry in placed.items():
                file.write(_little(entries[name], entry).data)
    except OSError as error:
        raise EngineError(f"{where} cannot be written: {error}") from error


def _little(array: Array, entry: Entry) -> npt.NDArray[np.uint8]:
    """Return the bytes of an array as the file has them: copied only if strided or big endian."""
    little = np.dtype(entry.dtype).newbyteorder("<")
    return np.ascontiguousarray(array, dtype=little).reshape(-1).view(np.uint8)


def encode_manifest(manifest: Manifest) -> str:
    """Return the manifest as JSON in one fixed form: fields as declared, maps by key.

    Raises EngineError if a name is not valid Unicode.
    """
    try:
        return msgspec.json.encode(manifest, order="deterministic").decode()
    except UnicodeEncodeError as error:
        raise EngineError(f"the name {error.object!r} is not valid Unicode; rename it") from error
