"""Bundles: engines with their pipeline and labels, the unit that is deployed.

A bundle is a plain USTAR file with few members in a fixed order and no freedom in its headers: the
same inputs give the same bytes, any `tar` can list it, and a reader compares each header with
the only one that is allowed, so that no hostile name, link or size is ever interpreted.
"""

import errno
import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from device.errors import BundleError, BundleReadError
from device.files import UnfitFileError, open_to_read, replacing, sync_folder, write_synced
from device.update.agent_payload import PROFILE, AgentPayload, members_problem
from device.update.bundle_info import (
    AGENT,
    ONE_MODEL,
    SERVICE,
    SEVERAL_MODELS,
    BomWriter,
    BundleFacts,
    BundleInfo,
    Golden,
    GoldenLimit,
)
from device.update.members import (
    BOM,
    ENGINE,
    GOLDEN,
    INFO,
    LABELS,
    MAX_BUNDLE_BYTES,
    PIPELINE,
    REQUIRED,
    BundleFile,
    BundleModel,
    ModelSource,
    check_payload,
    describe_file,
    expected_members,
    member_limit,
    models_of,
)

__all__ = [
    "BOM",
    "ENGINE",
    "GOLDEN",
    "INFO",
    "LABELS",
    "PIPELINE",
    "REQUIRED",
    "BomWriter",
    "BundleFacts",
    "BundleFile",
    "BundleInfo",
    "BundleModel",
    "Golden",
    "GoldenLimit",
    "ModelSource",
    "bundle_pieces",
    "check_bundle",
    "extract_bundle",
    "hash_folder",
    "member_offsets",
    "read_bundle_info",
    "read_folder_info",
    "verify_folder",
    "write_agent_bundle",
    "write_bundle",
    "write_bundle_of_models",
    "write_bundle_of_service",
]

FORMATS = (ONE_MODEL, SEVERAL_MODELS, AGENT, SERVICE)
MAX_INFO_BYTES = 64 * 1024

# What opening a file says of the files themselves; any other error is of the disk or the system.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
_BLOCK = 512
_RECORD = 20 * _BLOCK  # tar pads its files to whole records
_READ_BYTES = 1024 * 1024
_USTAR = struct.Struct("100s8s8s8s12s12s8sc100s6s2s32s32s8s8s155s12x")


def write_bundle(
    out: Path,
    *,
    engine: Path,
    pipeline: Path,
    labels: Path,
    name: str,
    version: str,
    profile: str,
    golden: Path | None = None,
    facts: BundleFacts | None = None,
    bom: BomWriter | None = None,
) -> BundleInfo:
    """Write a bundle; the file appears under its name whole or not at all.

    `golden`: the file that `facts.golden` describes. `bom` writes the bill of materials.
    """
    sources = {ENGINE: engine, PIPELINE: pipeline, LABELS: labels}
    if golden is not None:
        sources[GOLDEN] = golden
    info = BundleInfo(
        format=ONE_MODEL, name=name, version=version, profile=profile, files=(), **_stated(facts)
    )
    return _write(out, sources, info, bom)


def write_bundle_of_models(
    out: Path,
    *,
    models: Sequence[ModelSource],
    pipeline: Path,
    name: str,
    version: str,
    profile: str,
    facts: BundleFacts | None = None,
    bom: BomWriter | None = None,
) -> BundleInfo:
    """Write a bundle of several models, as `write_bundle` does; what they share is there once."""
    try:
        rows, members = models_of(models)
    except OSError as error:
        raise BundleError(f"cannot write {out}: {_os_reason(error)}") from error
    info = BundleInfo(
        format=SEVERAL_MODELS, name=name, version=version, profile=profile, files=(), models=rows,
        **_stated(facts),
    )  # fmt: skip
    return _write(out, {**members, PIPELINE: pipeline}, info, bom)


def write_agent_bundle(
    out: Path, *, wheels: Sequence[Path], version: str, payload: AgentPayload
) -> BundleInfo:
    """Write a release of the agent, as `write_bundle` does."""
    info = BundleInfo(
        format=AGENT, name="tandem-agent", version=version, profile=PROFILE, files=(), agent=payload
    )
    return _write(out, {path.name: path for path in sorted(wheels, key=lambda w: w.name)}, info)


def write_bundle_of_service(
    out: Path,
    *,
    payload: Mapping[str, Path],
    executables: tuple[str, ...],
    pipeline: Path,
    name: str,
    version: str,
    profile: str,
    facts: BundleFacts | None = None,
    bom: BomWriter | None = None,
) -> BundleInfo:
    """Write a bundle of a program of another runtime, as `write_bundle` does.

    `payload`: the file of each member, in the order of their names; `executables`: those that are
    programs.
    """
    check_payload(tuple(payload), out)
    info = BundleInfo(
        format=SERVICE, name=name, version=version, profile=profile, files=(),
        executables=executables, **_stated(facts),
    )  # fmt: skip
    return _write(out, {PIPELINE: pipeline, **payload}, info, bom)


def _stated(facts: BundleFacts | None) -> dict[str, Any]:
    return msgspec.structs.asdict(facts or BundleFacts())


def _write(
    out: Path, sources: Mapping[str, Path], info: BundleInfo, bom: BomWriter | None = None
) -> BundleInfo:
    """`sources`: the file of each member, in order; `info`: all that is said of it but these."""
    try:
        files = tuple(describe_file(member, path) for member, path in sources.items())
        info = msgspec.structs.replace(info, files=files)
        if bom is not None:
            sources = {**sources, BOM: bom(info)}
            files = (*files, describe_file(BOM, sources[BOM]))
            info = msgspec.structs.replace(info, files=files)
        # Checked like a read one, so that nothing is written that cannot be read back.
        checked = _decode_info(msgspec.json.encode(info), out)
        with replacing(out) as file:
            file.writelines(_bundle_bytes(checked, sources))
    except OSError as error:
        raise BundleError(f"cannot write {out}: {_os_reason(error)}") from error
    return info


def read_bundle_info(path: Path) -> BundleInfo:
    """Return bundle.json of a bundle; the members are not read (see `extract_bundle`)."""
    with _opened(path, f"cannot read {path}") as (_, info):
        pass
    return info


def extract_bundle(path: Path, into: Path) -> BundleInfo:
    """Unpack a bundle into the new folder `into`, checking every byte, and sync it to the disk."""
    with _opened(path, f"cannot unpack {path} into {into}") as (file, info):
        into.mkdir(0o700, parents=True)
        write_synced(into / INFO, [msgspec.json.encode(info)], 0o600)
        for entry in info.files:
            mode = 0o700 if entry.name in info.executables else 0o600
            (into / entry.name).parent.mkdir(0o700, parents=True, exist_ok=True)
            write_synced(into / entry.name, _member(file, entry, path), mode)
        _check_end(file, path)
        for folder in {(into / entry.name).parent for entry in info.files}:
            for unpacked in (folder, *folder.parents):
                sync_folder(unpacked)
                if unpacked == into:
                    break
    return info


def read_folder_info(folder: Path) -> BundleInfo:
    """Return bundle.json of an unpacked bundle; the members are not read. Raises as
    `verify_folder`."""
    try:
        with open_to_read(folder / INFO) as file:
            return _decode_info(file.read(MAX_INFO_BYTES + 1), folder)
    except OSError as error:
        raise _unread(folder, error) from error


def verify_folder(folder: Path, *, between: Callable[[], None] = lambda: None) -> BundleInfo:
    """Return bundle.json of an unpacked bundle after comparing every file with its hash.

    `between` is called after each piece that was read.
    Raises BundleError: a file is gone or another one; BundleReadError: the disk did not give one.
    """
    info = read_folder_info(folder)
    try:
        for entry in info.files:
            path = folder / entry.name
            same_size = path.lstat().st_size == entry.bytes  # a sparse file may have any size
            if (
                not same_size
                or describe_file(entry.name, path, follow=False, between=between) != entry
            ):
                raise BundleError(
                    f"{path} is not the file that {INFO} names (sha256 "
                    f"{entry.sha256[:12]}...): it was changed or damaged, deploy it again"
                )
    except OSError as error:
        raise _unread(folder, error) from error
    return info


def hash_folder(folder: Path) -> tuple[BundleInfo, str, int]:
    """Return bundle.json, the sha256 and the length of the bundle that was unpacked into a folder.

    Raises as `verify_folder`.
    """
    info = verify_folder(folder)
    digest, size = hashlib.sha256(), 0
    try:
        for part in _bundle_bytes(info, {entry.name: folder / entry.name for entry in info.files}):
            digest.update(part)
            size += len(part)
    except OSError as error:
        raise _unread(folder, error) from error
    return info, digest.hexdigest(), size


def check_bundle(path: Path) -> tuple[BundleInfo, int]:
    """Compare every byte of a bundle with its hashes and write nothing.

    Returns bundle.json and the offset of the first engine in the file. Raises BundleError.
    """
    with _opened(path, f"cannot read {path}") as (file, info):
        engine_offset = file.tell() + _BLOCK  # it is the first member
        for entry in info.files:
            for _part in _member(file, entry, path):
                pass
        _check_end(file, path)
    return info, engine_offset


@contextmanager
def _opened(path: Path, what: str) -> Iterator[tuple[BinaryIO, BundleInfo]]:
    """Yield the file of a bundle behind bundle.json, which is read and fits the file's length.

    An OSError in the block becomes a BundleError that begins with `what`.
    """
    try:
        with open_to_read(path, follow=True) as file:
            info = _read_info(file, path)
            _check_length(file, info, path)
            yield file, info
    except OSError as error:
        raise BundleError(f"{what}: {_os_reason(error)}") from error


def _decode_info(blob: bytes, where: Path) -> BundleInfo:
    if len(blob) > MAX_INFO_BYTES:
        raise BundleError(f"{INFO} of {where} is larger than {MAX_INFO_BYTES} bytes")
    try:
        info = msgspec.json.decode(blob, type=BundleInfo)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{INFO} of {where} is damaged: {error}") from error
    if info.format not in FORMATS:
        raise BundleError(
            f"{where} has bundle format {info.format}, this version reads "
            f"{', '.join(map(str, FORMATS))}: use the version of Tandem that wrote it"
        )
    if (info.format == SEVERAL_MODELS) != bool(info.models):
        raise BundleError(f"{where} has bundle format {info.format} and {len(info.models)} models")
    if (info.format == AGENT) != (info.agent is not None):
        raise BundleError(
            f"{where} has bundle format {info.format}, which its content does not fit"
        )
    _check_members(info, where)
    _check_sizes(info, where)
    if (size := _file_bytes(info, len(blob))) > MAX_BUNDLE_BYTES:
        raise BundleError(
            f"{where} has {size} bytes, a device fetches {MAX_BUNDLE_BYTES} at most: deploy fewer "
            "models in one bundle"
        )
    return info


def _check_members(info: BundleInfo, where: Path) -> None:
    """Raise BundleError unless the members are those of the models."""
    names = tuple(entry.name for entry in info.files)
    if info.agent is not None:
        if problem := members_problem(info.version, names):
            raise BundleError(f"{where} is no release of the agent: {problem}")
        return
    if info.is_service:
        if info.golden is not None:
            raise BundleError(f"{where} is a service, and has golden inputs")
        payload = tuple(name for name in names if name not in (PIPELINE, BOM))
        check_payload(payload, where)
        expected: tuple[str, ...] = (PIPELINE, *payload)
    else:
        payload = ()
        expected = expected_members(info.models, where, golden=info.golden is not None)
    if strangers := [name for name in info.executables if name not in payload]:
        raise BundleError(f"{where} names {strangers[0]!r} as a program, which it does not hold")
    if names not in (expected, (*expected, BOM)):
        raise BundleError(f"{where} names the members {names!r}, expected {expected!r}")
    if info.golden is not None and info.golden.limits:
        runs = {run.name for run in info.runs}
        if info.golden.limits.keys() != runs:
            raise BundleError(
                f"{where} has limits of golden inputs for {sorted(info.golden.limits)}, its models "
                f"are {sorted(runs)}"
            )


def _check_sizes(info: BundleInfo, where: Path) -> None:
    for entry in info.files:
        if entry.bytes > (limit := member_limit(entry.name)):
            raise BundleError(
                f"{entry.name} of {where} has {entry.bytes} bytes, allowed are {limit}"
            )


def _header(name: str, size: int) -> bytes:
    """The only header that a member of this name and size may have."""
    fields = [
        name.encode("ascii"), b"0000644\0", b"0000000\0", b"0000000\0", b"%011o\0" % size,
        b"00000000000\0", b" " * 8, b"0", b"", b"ustar\0", b"00", b"", b"", b"0000000\0",
        b"0000000\0", b"",
    ]  # fmt: skip
    fields[6] = b"%06o\0 " % sum(_USTAR.pack(*fields))
    return _USTAR.pack(*fields)


def _padding(size: int, unit: int) -> int:
    return -size % unit


def _members_bytes(info: BundleInfo, info_bytes: int) -> int:
    sizes = [info_bytes, *(entry.bytes for entry in info.files)]
    return sum(_BLOCK + size + _padding(size, _BLOCK) for size in sizes)


def _file_bytes(info: BundleInfo, info_bytes: int) -> int:
    """The length of a whole bundle: members, two empty blocks, filled to a record."""
    used = _members_bytes(info, info_bytes) + 2 * _BLOCK
    return used + _padding(used, _RECORD)


def bundle_pieces(info: BundleInfo) -> tuple[bytes | BundleFile, ...]:
    """Return what a bundle consists of, in order: its own bytes, and its members."""
    blob = msgspec.json.encode(info)
    pieces: list[bytes | BundleFile] = [
        _header(INFO, len(blob)) + blob + bytes(_padding(len(blob), _BLOCK))
    ]
    for entry in info.files:
        pieces += [_header(entry.name, entry.bytes), entry, bytes(_padding(entry.bytes, _BLOCK))]
    return (*pieces, bytes(_file_bytes(info, len(blob)) - _members_bytes(info, len(blob))))


def member_offsets(info: BundleInfo) -> dict[str, int]:
    """Return where the bytes of each member begin in the bundle's file."""
    offsets: dict[str, int] = {}
    offset = 0
    for piece in bundle_pieces(info):
        if isinstance(piece, BundleFile):
            offsets[piece.name] = offset
        offset += piece.bytes if isinstance(piece, BundleFile) else len(piece)
    return offsets


def _bundle_bytes(info: BundleInfo, sources: Mapping[str, Path]) -> Iterator[bytes]:
    for piece in bundle_pieces(info):
        if isinstance(piece, bytes):
            yield piece
            continue
        with open_to_read(sources[piece.name], follow=True) as file:
            yield from _exactly(file, piece, sources[piece.name])


def _read_info(file: BinaryIO, path: Path) -> BundleInfo:
    header = file.read(_BLOCK)
    try:
        size = int(header[124:135], 8)
    except ValueError as error:
        raise BundleError(f"{path} is not a bundle: its first header is damaged") from error
    if not 0 < size <= MAX_INFO_BYTES or header != _header(INFO, size):
        raise BundleError(f"{path} is not a bundle: it does not begin with {INFO}")
    blob = file.read(size)
    info = _decode_info(blob, path)
    if msgspec.json.encode(info) != blob or any(file.read(_padding(size, _BLOCK))):
        raise BundleError(f"{INFO} of {path} is not in the form that Tandem writes")
    return info


def _check_length(file: BinaryIO, info: BundleInfo, path: Path) -> None:
    """Truncated and overlong files are refused before any member is read."""
    expected = _file_bytes(info, len(msgspec.json.encode(info)))
    actual_bytes = os.fstat(file.fileno()).st_size
    if actual_bytes != expected:
        raise BundleError(
            f"{path} has {actual_bytes} bytes, its {INFO} says {expected}: it is cut off "
            "or damaged, copy or build it again"
        )


def _member(file: BinaryIO, entry: BundleFile, path: Path) -> Iterator[bytes]:
    """Yield the bytes of the next member; BundleError if anything in it is not as announced."""
    if file.read(_BLOCK) != _header(entry.name, entry.bytes):
        raise BundleError(f"the header of {entry.name} in {path} is damaged")
    yield from _exactly(file, entry, path)
    if any(file.read(_padding(entry.bytes, _BLOCK))):
        raise BundleError(f"the bytes after {entry.name} in {path} are not zero")


def _exactly(file: BinaryIO, entry: BundleFile, path: Path) -> Iterator[bytes]:
    """Yield the bytes of a member; BundleError at the end unless they are those announced."""
    digest = hashlib.sha256()
    remaining = entry.bytes
    while remaining and (part := file.read(min(_READ_BYTES, remaining))):
        digest.update(part)
        remaining -= len(part)
        yield part
    if remaining or digest.hexdigest() != entry.sha256:
        raise BundleError(
            f"{entry.name} in {path} does not match its sha256 {entry.sha256[:12]}...: "
            "it is damaged, copy or build it again"
        )


def _check_end(file: BinaryIO, path: Path) -> None:
    if any(file.read(2 * _RECORD)):
        raise BundleError(f"{path} holds bytes after its last member")


def _unread(folder: Path, error: OSError) -> BundleError:
    unfit = isinstance(error, UnfitFileError) or error.errno in _GONE
    kind = BundleError if unfit else BundleReadError
    return kind(f"cannot read {folder}: {_os_reason(error)}")


def _os_reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
