"""Chunks that are cut by content: their index, the cuts, and what a device copies of its slots."""

import hashlib
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from bundle_models import detector, write_bundle_of_several, write_model_bundle
from hypothesis import example, given, settings
from hypothesis import strategies as st

from device.errors import TransferError
from device.protocol.documents import CHUNK_BYTES, BlobSpec
from device.update.bundle import extract_bundle
from device.update.byte_source import FileBytes, UnpackedBundle
from device.update.chunk_table import (
    ChunkTable,
    decode_index,
    encode_index,
    index_fits,
    make_table,
    repeats_of,
)
from device.update.cuts import cut_bundle
from device.update.layout import read_layout
from device.update.part_file import Fetch
from toolkit.fleet.bundles.blob import Blob

ROW = struct.Struct("<32sI")


class Bytes:
    """A blob in memory."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]


def spec_for(index: bytes, size: int, chunk_format: int = 2) -> BlobSpec:
    return BlobSpec(
        sha256="0" * 64,
        bytes=size,
        chunk_bytes=CHUNK_BYTES,
        index_sha256=hashlib.sha256(index).hexdigest(),
        chunk_format=chunk_format,
    )


# -- the index


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, CHUNK_BYTES), min_size=1, max_size=40), st.randoms())
def test_an_index_is_read_as_it_was_written(sizes: list[int], chance: random.Random) -> None:
    hashes = chance.randbytes(32 * len(sizes))
    index = encode_index(make_table(hashes, sizes))
    table = decode_index(index, spec_for(index, sum(sizes)))
    assert [table.size(n) for n in range(table.count)] == sizes
    assert b"".join(table.digest(n) for n in range(table.count)) == hashes
    assert list(table.starts) == [sum(sizes[:n]) for n in range(len(sizes) + 1)]


def rows(*sizes: int) -> bytes:
    return b"".join(ROW.pack(b"h" * 32, size) for size in sizes)


@pytest.mark.parametrize(
    ("index", "size", "chunk_format", "message"),
    [
        (rows(CHUNK_BYTES), CHUNK_BYTES, 2, ""),
        (rows(CHUNK_BYTES + 1), CHUNK_BYTES + 1, 2, "gives chunk 0 65537 bytes, allowed"),
        (rows(1, 0), 1, 2, "gives chunk 1 0 bytes, allowed"),
        (rows(5, 5), 11, 2, "lists 10 bytes, the blob has 11"),
        (rows(5, 2**32 - 1), 4, 2, "gives chunk 1 4294967295 bytes"),
        (rows(5)[:-1], 5, 2, "has 35 bytes, no multiple of 36"),
        (b"", 5, 2, "lists 0 bytes"),
        (rows(*[1] * 29_128), 29_128, 2, "lists 29128 chunks, the limit is 29127"),
        (b"h" * 64, CHUNK_BYTES + 1, 1, ""),
        (b"h" * 65, CHUNK_BYTES + 1, 1, "has 65 bytes, 2 chunks need 64"),
        (b"h" * 32, CHUNK_BYTES + 1, 1, "has 32 bytes, 2 chunks need 64"),
    ],
)
def test_an_index_makes_up_the_blob_or_is_refused(
    index: bytes, size: int, chunk_format: int, message: str
) -> None:
    spec = spec_for(index, size, chunk_format)
    if not message:
        decode_index(index, spec)
        return
    with pytest.raises(TransferError, match=message):
        decode_index(index, spec)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.integers(1, 10**6), st.sampled_from([1, 2]))
@example(b"", 1, 2)
def test_no_index_does_more_than_be_refused(index: bytes, size: int, chunk_format: int) -> None:
    try:
        table = decode_index(index, spec_for(index, size, chunk_format))
    except TransferError:
        return
    assert table.starts[-1] == size


def test_an_index_of_another_hash_is_dropped() -> None:
    index = rows(5)
    assert index_fits(index, spec_for(index, 5))
    for garbled in (index[:-1], index + b"\0", b"x" + index[1:], b""):
        assert not index_fits(garbled, spec_for(index, 5))


# -- the cuts


def table_of(path: Path) -> ChunkTable:
    file = FileBytes(path)
    table, _chunk_bytes = cut_bundle(file)
    file.close()
    return table


def sizes_by_hash(table: ChunkTable) -> dict[bytes, int]:
    return {table.digest(n): table.size(n) for n in range(table.count)}


def new_share(base: Path, bundle: Path) -> float:
    """Return the share of a bundle's bytes whose chunks the base does not have."""
    before, after = sizes_by_hash(table_of(base)), sizes_by_hash(table_of(bundle))
    new_bytes = sum(size for digest, size in after.items() if digest not in before)
    return new_bytes / bundle.stat().st_size


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 400_000))
def test_chunks_cover_any_file(seed: int, size: int) -> None:
    data = random.Random(seed).randbytes(size)
    table, chunk_bytes = cut_bundle(Bytes(data))
    assert chunk_bytes == CHUNK_BYTES
    assert table.starts[-1] == size
    for number in range(table.count):
        start = table.starts[number]
        assert table.fits(number, data[start : start + table.size(number)])


def test_a_tensor_begins_a_chunk_of_its_own_length(tmp_path: Path) -> None:
    tensors = detector(np.random.default_rng(1))
    bundle = write_model_bundle(tmp_path / "m.bundle", tensors)
    source = FileBytes(bundle)
    starts = set(table_of(bundle).starts)
    large = [part for part in read_layout(source) if part.stop - part.start >= CHUNK_BYTES]
    source.close()
    assert len(large) == 6
    for part in large:
        assert part.start in starts
        assert tensors[part.key.removeprefix("tensor ")].nbytes == part.stop - part.start


def test_a_change_moves_no_other_chunks(tmp_path: Path) -> None:
    chance = np.random.default_rng()
    tensors = detector(chance, blocks=20, width=32)
    base = write_model_bundle(tmp_path / "1.bundle", tensors)
    total = base.stat().st_size
    head = {**tensors, "head.weight": tensors["head.weight"] + 1}
    first = {"a.first": chance.normal(size=77).astype(np.float32), **tensors}
    middle = {"block5.extra": chance.normal(size=901).astype(np.float32), **tensors}
    changed = {
        "head": write_model_bundle(tmp_path / "2.bundle", head, version="2"),
        "grown header": write_model_bundle(tmp_path / "3.bundle", head, metadata="m" * 3560),
        "a tensor in front": write_model_bundle(tmp_path / "4.bundle", first),
        "a tensor in the middle": write_model_bundle(tmp_path / "5.bundle", middle),
    }
    shares = {name: new_share(base, path) for name, path in changed.items()}
    for name, share in shares.items():
        assert share <= 4 * CHUNK_BYTES / total, (name, shares)


def test_a_large_file_has_larger_chunks_instead_of_a_long_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("device.update.cuts.MAX_CHUNKS_OF", {2: 10})
    data = random.Random(1).randbytes(12 * CHUNK_BYTES)
    table, chunk_bytes = cut_bundle(Bytes(data))
    assert chunk_bytes == 2 * CHUNK_BYTES
    assert table.count <= 10


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_bundle_still_has_a_layout(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "layout.bundle"
    if not path.exists():
        write_model_bundle(path, detector(np.random.default_rng(2), blocks=2, width=8))
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, 4000))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.sampled_from([100, 700, 3000, len(whole)]))])
    parts = read_layout(Bytes(cut))
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert (parts[0].start, parts[-1].stop) == (0, len(cut))


# -- what the slots have


def test_an_unpacked_bundle_reads_as_the_file(tmp_path: Path) -> None:
    bundle = write_model_bundle(tmp_path / "m.bundle", detector(np.random.default_rng(3), 2))
    extract_bundle(bundle, tmp_path / "slot")
    unpacked, data = UnpackedBundle(tmp_path / "slot"), bundle.read_bytes()
    chance = random.Random(1)
    assert unpacked.size == len(data)
    assert unpacked.read(0, len(data) + 10) == data
    for _ in range(300):
        offset, length = chance.randrange(len(data)), chance.randrange(3000)
        assert unpacked.read(offset, length) == data[offset : offset + length]
    unpacked.close()


def serve(fetch: Fetch, blob: Blob) -> list[int]:
    """Answer all requests of a download; return which chunks were asked for."""
    requests: list[int] = []
    while (request := fetch.download.next_request(0.0)) is not None:
        requests.extend(request.chunks)
        for part in blob.parts_of(request):
            fetch.on_part(f"{part}/host", blob.read(part), 0.0)
    return requests


def test_a_device_copies_what_a_slot_has_and_asks_for_the_rest(tmp_path: Path) -> None:
    tensors = detector(np.random.default_rng(4), blocks=9)
    base = write_model_bundle(tmp_path / "1.bundle", tensors)
    head = {**tensors, "head.weight": -tensors["head.weight"]}
    bundle = write_model_bundle(tmp_path / "2.bundle", head, version="2")
    extract_bundle(base, tmp_path / "slot")
    (tmp_path / "download").mkdir()
    blob = Blob(bundle)
    fetch = Fetch(tmp_path / "download", blob.spec, 64, {"1" * 64: tmp_path / "slot"})
    requests = serve(fetch, blob)
    fetch.file.finish()
    assert fetch.file.path.read_bytes() == bundle.read_bytes()
    assert fetch.copied_bytes > 0.9 * blob.spec.bytes
    assert sum(map(blob.table.size, requests)) == blob.spec.bytes - fetch.copied_bytes
    fetch.close()
    again = Fetch(tmp_path / "download", blob.spec, 64)
    assert again.download.complete
    again.remove()
    blob.close()


def test_what_two_models_share_is_fetched_once(tmp_path: Path) -> None:
    backbone = detector(np.random.default_rng(6), blocks=9)
    engines = {
        "detector": backbone,
        "other": {**backbone, "head.weight": -backbone["head.weight"]},
    }
    bundle = write_bundle_of_several(tmp_path / "2.bundle", engines)
    (tmp_path / "download").mkdir()
    blob = Blob(bundle)
    fetch = Fetch(tmp_path / "download", blob.spec, 64)
    requests = serve(fetch, blob)
    assert len(requests) == len(set(requests))
    assert sum(map(blob.table.size, requests)) < 0.6 * blob.spec.bytes
    fetch.file.finish()
    assert fetch.file.path.read_bytes() == bundle.read_bytes()
    fetch.remove()
    # The first place of what is shared was lost, the second one is there.
    repeats = repeats_of(blob.table)
    assert repeats
    (tmp_path / "download" / f"{blob.spec.sha256}.index").write_bytes(blob.index)
    part = bytearray(bundle.read_bytes())
    for first in repeats:
        start = blob.table.starts[first]
        part[start : start + blob.table.size(first)] = bytes(blob.table.size(first))
    (tmp_path / "download" / f"{blob.spec.sha256}.part").write_bytes(part)
    again = Fetch(tmp_path / "download", blob.spec, 64)
    assert again.download.complete
    again.file.finish()
    again.remove()
    blob.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=12))
def test_repeated_chunks_are_found(letters: list[str]) -> None:
    hashes = b"".join(letter.encode() * 32 for letter in letters)
    repeats = repeats_of(make_table(hashes, [1] * len(letters)))
    places = {letter: [n for n, one in enumerate(letters) if one == letter] for letter in letters}
    expected = {rows[0]: tuple(rows[1:]) for rows in places.values() if rows[1:]}
    assert repeats == expected


def test_a_damaged_slot_gives_only_what_fits(tmp_path: Path) -> None:
    tensors = detector(np.random.default_rng(5), blocks=8)
    bundle = write_model_bundle(tmp_path / "1.bundle", tensors)
    folders = {}
    for name in ("damaged", "cut off", "empty"):
        folders[hashlib.sha256(name.encode()).hexdigest()] = tmp_path / name
        extract_bundle(bundle, tmp_path / name)
    data = (tmp_path / "damaged" / "model.engine").read_bytes()
    middle = len(data) // 2
    (tmp_path / "damaged" / "model.engine").write_bytes(data[:middle] + b"x" + data[middle + 1 :])
    (tmp_path / "cut off" / "model.engine").write_bytes(data[: middle // 2])
    (tmp_path / "empty" / "bundle.json").write_bytes(b"{")
    (tmp_path / "download").mkdir()
    blob = Blob(bundle)
    fetch = Fetch(tmp_path / "download", blob.spec, 64, folders)
    requests = serve(fetch, blob)
    assert len(requests) == 1
    fetch.file.finish()
    fetch.remove()
    blob.close()
