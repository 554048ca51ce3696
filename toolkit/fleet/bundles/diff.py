"""What changed between two bundles: settings, labels, and the engines tensor by tensor."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from device.errors import BundleError, ConfigError
from device.toml_file import decode_toml
from device.update.bundle import PIPELINE, BundleInfo
from device.update.byte_source import FileBytes
from device.update.chunk_table import ChunkTable
from device.update.cuts import cut_like
from device.update.layout import Part, read_layout
from pipelines.config import load_labels
from pipelines.sources.uri import redact
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.bundles.delta import DeltaEncoder
from toolkit.fleet.bundles.facts import hash_of
from toolkit.fleet.bundles.unpacked import Unpacked, label_members

State = Literal["equal", "changed", "added", "removed"]
_READ_BYTES = 1024 * 1024


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A setting by its path, such as source.uri; None: that bundle does not have it."""

    key: str
    before: str | None
    after: str | None


class TensorChange(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the bundle; of tensors `dtype` is safetensors' name, else empty."""

    name: str
    dtype: str
    before_bytes: int
    after_bytes: int
    state: State


class FetchBytes(msgspec.Struct, frozen=True, kw_only=True):
    """All in bytes; every transfer but `whole_bytes` begins with the index.

    `reused_bytes`: of chunks that the board copies from its slot. `reuse_bytes`: what it then
    fetches, chunks as they are. `delta_bytes`: the same with differences where they are smaller.
    """

    chunks: int
    index_bytes: int
    whole_bytes: int
    reused_chunks: int
    reused_bytes: int
    reuse_bytes: int
    delta_bytes: int


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """All that differs. `parts` lists equal ones, too; `fetch`: of a board that has `before`."""

    before: str
    after: str
    same: bool
    statements: tuple[Change, ...]
    engines: tuple[Change, ...]
    pipeline: tuple[Change, ...]
    labels: tuple[Change, ...]
    parts: tuple[TensorChange, ...]
    fetch: FetchBytes


def compare_bundles(before: Unpacked, after: Unpacked) -> Difference:
    """Return what changed. Raises TandemError: a member cannot be read."""
    return Difference(
        before=str(before.path),
        after=str(after.path),
        same=hash_of(before.path) == hash_of(after.path),
        statements=changes(_statements(before.info), _statements(after.info)),
        engines=changes(_engine_facts(before), _engine_facts(after)),
        pipeline=changes(_settings(before.folder), _settings(after.folder)),
        labels=changes(_labels(before), _labels(after)),
        parts=_parts(before.path, after.path),
        fetch=fetch_bytes(before.path, after.path),
    )


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Change, ...]:
    """Return the keys whose values differ, those of `before` first."""
    return tuple(
        Change(key=key, before=_shown(before.get(key)), after=_shown(after.get(key)))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
    )


def _shown(text: str | None) -> str | None:
    """Return a value without the passwords of camera addresses."""
    return None if text is None else redact(text)


def flattened(value: object, path: str = "") -> dict[str, str]:
    """Return the leaves of nested tables and lists by their paths, such as sinks.0.kind."""
    if isinstance(value, Mapping):
        rows = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        rows = [(str(number), item) for number, item in enumerate(value)]
    else:
        return {path: _text(value)}
    leaves: dict[str, str] = {}
    for key, item in rows:
        leaves |= flattened(item, f"{path}.{key}" if path else key)
    return leaves


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _statements(info: BundleInfo) -> dict[str, str]:
    """Return what bundle.json says beside the members, which are compared by their bytes."""
    return flattened({k: v for k, v in msgspec.to_builtins(info).items() if k != "files"})


def _engine_facts(bundle: Unpacked) -> dict[str, str]:
    facts: dict[str, Any] = {}
    for name, engine in bundle.engines.items():
        manifest = engine.manifest
        facts[name] = {
            "profile": manifest.profile,
            "segments": {
                segment.name: f"{segment.processor}, {len(segment.nodes)} nodes"
                for segment in manifest.segments
            },
            **msgspec.to_builtins(manifest.provenance),
        }
    return flattened(facts)


def _settings(folder: Path) -> dict[str, str]:
    try:
        return flattened(decode_toml((folder / PIPELINE).read_bytes(), dict[str, Any]))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{PIPELINE} of the bundle cannot be read: {error}") from error


def _labels(bundle: Unpacked) -> dict[str, str]:
    """Return class names by their ids, with the member's name where there are several."""
    members = label_members(bundle.info)
    named = {name: load_labels(bundle.folder / name) for name in members}
    return flattened(named[members[0]] if len(members) == 1 else named)


def _parts(before: Path, after: Path) -> tuple[TensorChange, ...]:
    """Compare the parts of two bundles, but for the headers and fillings between members."""
    try:
        first, second = _hashed_parts(before), _hashed_parts(after)
    except OSError as error:
        raise BundleError(f"cannot read {before} or {after}: {error.strerror}") from error
    return tuple(
        _compared(key, first.get(key), second.get(key)) for key in dict.fromkeys((*first, *second))
    )


def _compared(
    key: str, before: tuple[Part, bytes] | None, after: tuple[Part, bytes] | None
) -> TensorChange:
    part = (after or before or (Part(key, 0, 0),))[0]
    state: State = "changed"
    if before is None or after is None:
        state = "added" if before is None else "removed"
    elif (before[1], before[0].dtype) == (after[1], after[0].dtype):
        state = "equal"
    return TensorChange(
        name=key,
        dtype=part.dtype,
        before_bytes=_bytes(before),
        after_bytes=_bytes(after),
        state=state,
    )


def _bytes(part: tuple[Part, bytes] | None) -> int:
    return 0 if part is None else part[0].stop - part[0].start


def _hashed_parts(path: Path) -> dict[str, tuple[Part, bytes]]:
    """Return the parts that hold something, by their keys, with the SHA-256 of each."""
    source = FileBytes(path)
    try:
        parts: dict[str, tuple[Part, bytes]] = {}
        for part in read_layout(source):
            if not part.dtype and part.key.startswith(_FRAME):
                continue
            digest = hashlib.sha256()
            for start in range(part.start, part.stop, _READ_BYTES):
                digest.update(source.read(start, min(_READ_BYTES, part.stop - start)))
            parts[part.key] = part, digest.digest()
        return parts
    finally:
        source.close()


# Keys of what lies around the members in the file.
_FRAME = ("header of ", "after ", "end")


def fetch_bytes(base: Path, bundle: Path) -> FetchBytes:
    """Return what a board with `base` in its slot fetches for `bundle`. Raises BundleError.

    Nothing is estimated: the bundle is cut as the server cuts it, the other one as the board cuts
    what is in its slots, and differences are encoded as the server sends them.
    """
    blob = Blob(bundle)
    try:
        base_file = FileBytes(base)
    except OSError as error:
        blob.close()
        raise BundleError(f"cannot read {base}: {error.strerror}") from error
    try:
        return _counted(blob, base_file)
    except OSError as error:
        raise BundleError(f"cannot read {base} or {bundle}: {error.strerror or error}") from error
    finally:
        base_file.close()
        blob.close()


def _counted(blob: Blob, base: FileBytes) -> FetchBytes:
    table = blob.table
    known = _digests(cut_like(base, blob.spec.chunk_bytes))
    missing = [number for number in range(table.count) if table.digest(number) not in known]
    missing_bytes = sum(table.size(number) for number in missing)
    encoder = DeltaEncoder(blob.file, base)
    sent_bytes = 0
    for number in missing:
        difference = encoder.encode(table.starts[number], table.size(number))
        sent_bytes += table.size(number) if difference is None else len(difference)
    index_bytes = len(blob.index)
    return FetchBytes(
        chunks=table.count,
        index_bytes=index_bytes,
        whole_bytes=index_bytes + blob.spec.bytes,
        reused_chunks=table.count - len(missing),
        reused_bytes=blob.spec.bytes - missing_bytes,
        reuse_bytes=index_bytes + missing_bytes,
        delta_bytes=index_bytes + sent_bytes,
    )


def _digests(table: ChunkTable) -> frozenset[bytes]:
    return frozenset(table.digest(number) for number in range(table.count))
