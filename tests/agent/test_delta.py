"""Chunks that are sent as differences: what comes out, how little is sent, and hostile ones."""

import hashlib
import random
import struct
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import zstandard
from bundle_models import Tensors, detector, write_model_bundle
from hypothesis import given, settings
from hypothesis import strategies as st

from device.errors import TransferError
from device.update import delta as decoder
from device.update.bundle import extract_bundle
from device.update.byte_source import FileBytes
from device.update.delta import DIFFERENCE, HEAD, OPERATION, PATCH, PLAIN, decode_delta
from device.update.part_file import Fetch
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.bundles.delta import DeltaEncoder

CHUNK = 64 * 1024


class Bytes:
    """A base in memory."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]


def fine_tuned(
    tensors: Tensors, chance: np.random.Generator, dtype: str
) -> tuple[Tensors, Tensors]:
    """Return weights in a dtype before and after each moved by 1 % of the deviation of all."""
    before, after = {}, {}
    for name, weights in tensors.items():
        sigma = float(weights.std())
        moved = weights + chance.normal(0.0, 0.01 * sigma, weights.shape)
        if dtype == "int8":
            scale = np.abs(weights).max() / 127
            for out, values in ((before, weights), (after, moved)):
                out[name] = np.clip(np.round(values / scale), -127, 127).astype(np.int8)
        else:
            before[name], after[name] = weights.astype(dtype), moved.astype(dtype)
    return before, after


# -- the arithmetic, against numpy's


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 300), st.randoms())
def test_numbers_are_added_in_their_range(
    item_bytes: int, count: int, chance: random.Random
) -> None:
    base = chance.randbytes(item_bytes * count)
    residual = chance.randbytes(item_bytes * count)
    kind = np.dtype(f"<u{item_bytes}")
    lanes = np.frombuffer(residual, np.uint8).reshape(item_bytes, -1).T.copy().view(kind).ravel()
    unzigzagged = [int(z) // 2 if z % 2 == 0 else -(int(z) + 1) // 2 for z in lanes]
    numbers = [int(number) for number in np.frombuffer(base, kind)]
    total = [(n + d) % 2 ** (8 * item_bytes) for n, d in zip(numbers, unzigzagged, strict=True)]
    assert decoder._add(base, residual, item_bytes) == np.array(total, kind).tobytes()


# -- whole bundles


def sent_by(blob: Blob, encoder: DeltaEncoder | None, fetch: Fetch) -> int:
    """Serve a download, with differences where they have a use; return how much was sent."""
    sent_bytes = 0
    while (request := fetch.download.next_request(0.0)) is not None:
        for part in blob.parts_of(request):
            topic, payload = str(part), blob.read(part)
            if encoder is not None and isinstance(part, int) and request.bases:
                shorter = encoder.encode(blob.table.starts[part], blob.table.size(part))
                topic, payload = (topic, payload) if shorter is None else (f"d{part}", shorter)
            sent_bytes += len(payload)
            fetch.on_part(f"{topic}/host", payload, 0.0)
    return sent_bytes


def download(folder: Path, base: Path, bundle: Path) -> float:
    """Update a device from one bundle to another; return the share of the bytes that was sent."""
    extract_bundle(base, folder / "slot")
    (folder / "download").mkdir()
    blob, base_file = Blob(bundle), FileBytes(base)
    encoder = DeltaEncoder(blob.file, base_file)
    fetch = Fetch(folder / "download", blob.spec, 64, {"1" * 64: folder / "slot"})
    sent_bytes = sent_by(blob, encoder, fetch)
    fetch.file.finish()
    assert fetch.file.path.read_bytes() == bundle.read_bytes()
    fetch.remove()
    base_file.close()
    blob.close()
    return sent_bytes / bundle.stat().st_size


@pytest.mark.parametrize(("dtype", "most"), [("float16", 0.57), ("int8", 0.22), ("float32", 0.74)])
def test_a_fine_tune_is_sent_as_differences(tmp_path: Path, dtype: str, most: float) -> None:
    chance = np.random.default_rng()
    before, after = fine_tuned(detector(chance, blocks=10, width=64), chance, dtype)
    base = write_model_bundle(tmp_path / "1.bundle", before)
    bundle = write_model_bundle(tmp_path / "2.bundle", after, version="2")
    assert download(tmp_path, base, bundle) <= most


def test_a_changed_head_and_header_cost_little(tmp_path: Path) -> None:
    chance = np.random.default_rng()
    tensors = detector(chance, blocks=10)
    manifest = '{"name": "x", "ranges": [%s]}'
    first, second = (", ".join(map(str, chance.random(4000))) for _ in range(2))
    base = write_model_bundle(tmp_path / "1.bundle", tensors, metadata=manifest % first)
    after = {**tensors, "head.weight": tensors["head.weight"] * 1.5}
    texts = manifest % f"{first[:-100]} {second[:300]}"
    bundle = write_model_bundle(tmp_path / "2.bundle", after, version="2", metadata=texts)
    assert download(tmp_path, base, bundle) <= 0.03


def test_tensors_of_another_shape_or_dtype_are_not_subtracted(tmp_path: Path) -> None:
    chance = np.random.default_rng()
    before = detector(chance, blocks=3, width=32)
    after = {**before, "block1.weight": before["block1.weight"].astype(np.float16)}
    after["block2.weight"] = chance.normal(size=(96, 96, 3, 2)).astype(np.float32)
    base = write_model_bundle(tmp_path / "1.bundle", before)
    bundle = write_model_bundle(tmp_path / "2.bundle", after)
    download(tmp_path, base, bundle)


def test_another_base_than_the_server_has_costs_only_bytes(tmp_path: Path) -> None:
    chance = np.random.default_rng()
    before, after = fine_tuned(detector(chance), chance, "float16")
    rival = write_model_bundle(tmp_path / "0.bundle", detector(np.random.default_rng(), 6))
    base = write_model_bundle(tmp_path / "1.bundle", before)
    bundle = write_model_bundle(tmp_path / "2.bundle", after)
    extract_bundle(rival, tmp_path / "slot")
    (tmp_path / "download").mkdir()
    blob, base_file = Blob(bundle), FileBytes(base)
    fetch = Fetch(tmp_path / "download", blob.spec, 64, {"1" * 64: tmp_path / "slot"})
    sent_by(blob, DeltaEncoder(blob.file, base_file), fetch)
    assert fetch.download.bases == ()
    fetch.file.finish()
    fetch.remove()


def test_without_zstd_the_chunks_are_asked_for(tmp_path: Path) -> None:
    bundle = write_model_bundle(tmp_path / "1.bundle", detector(np.random.default_rng(1), 2))
    extract_bundle(bundle, tmp_path / "slot")
    second = write_model_bundle(tmp_path / "2.bundle", detector(np.random.default_rng(2), 2))
    (tmp_path / "download").mkdir()
    blob = Blob(second)
    with mock.patch.dict("sys.modules", {"zstandard": None}):
        fetch = Fetch(tmp_path / "download", blob.spec, 64, {"1" * 64: tmp_path / "slot"})
        sent_by(blob, None, fetch)
    assert fetch.download.bases == ()
    fetch.file.finish()
    fetch.remove()


# -- hostile ones


BASE = Bytes(random.Random(1).randbytes(3 * CHUNK))


def frame(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def payload(
    rows: list[tuple[int, int, int, int]], body: bytes, version: int = 1, base: int = 0
) -> bytes:
    head = HEAD.pack(version, base, len(rows))
    return head + b"".join(OPERATION.pack(*row) for row in rows) + body


@pytest.mark.parametrize(
    ("hostile", "message"),
    [
        (b"", "has 0 bytes"),
        (payload([(0, 100, PLAIN, 1)], frame(bytes(100)), version=2), "has format 2"),
        (payload([(0, 100, PLAIN, 1)], frame(bytes(100)), base=1), "names base 1"),
        (payload([], frame(bytes(100))), "has 0 operations"),
        (HEAD.pack(1, 0, 65535) + b"x" * 100, "has 65535 operations"),
        (payload([(0, 99, PLAIN, 1)], frame(bytes(100))), "does not make a chunk of 100"),
        (payload([(0, 2**32 - 1, PLAIN, 1)], frame(bytes(100))), "does not make a chunk of 100"),
        (payload([(0, 100, PLAIN, 1)], frame(bytes(99))), "holds 99 bytes"),
        (payload([(0, 100, PLAIN, 1)], frame(bytes(101))), "holds 101 bytes"),
        (payload([(0, 100, PLAIN, 1)], b"not zstd"), "cannot be decompressed"),
        (payload([(0, 100, DIFFERENCE, 3)], frame(bytes(100))), "an operation 1 on 3 bytes"),
        (payload([(0, 100, DIFFERENCE, 8)], frame(bytes(100))), "an operation 1 on 8 bytes"),
        (payload([(0, 100, 7, 1)], frame(bytes(100))), "an operation 7"),
        (payload([(0, 50, PATCH, 1), (0, 50, PATCH, 1)], frame(bytes(100))), "an operation 2"),
        (payload([(3 * CHUNK - 99, 100, DIFFERENCE, 1)], frame(bytes(100))), "its base has"),
        (payload([(2**64 - 1, 100, DIFFERENCE, 1)], frame(bytes(100))), "its base has"),
        (payload([(0, 300_000, PATCH, 1)], frame(bytes(100))), "allowed 262144"),
    ],
)
def test_a_hostile_difference_is_refused(hostile: bytes, message: str) -> None:
    with pytest.raises(TransferError, match=message):
        decode_delta(hostile, 100, [BASE])


def test_a_decompression_bomb_is_cut_off_at_the_size_of_the_chunk() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(512 * 1024**2))
    assert len(bomb) < 64 * 1024
    rows = [(0, CHUNK, PLAIN, 1)]
    peak = _peak_bytes(lambda: decode_delta(payload(rows, bomb), CHUNK, [BASE]))
    assert peak < 16 * 1024**2


def _peak_bytes(act) -> int:
    """Run what must raise TransferError; return the most memory that Python had for it."""
    import tracemalloc

    tracemalloc.start()
    with pytest.raises(TransferError):
        act()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_difference_does_more_than_be_refused(data: st.DataObject) -> None:
    chance = data.draw(st.randoms())
    size = data.draw(st.sampled_from([8, 100, CHUNK]))
    rows = [
        (
            chance.randrange(2 * CHUNK),
            size,
            data.draw(st.integers(0, 2)),
            chance.choice([1, 2, 4, 8]),
        )
    ]
    whole = bytearray(payload(rows, frame(chance.randbytes(size))))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, min(40, len(whole) - 1)))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, 3))
    try:
        chunk = decode_delta(bytes(whole[: len(whole) - cut]), size, [BASE])
    except TransferError:
        return
    assert len(chunk) == size


def test_garbled_parts_never_make_another_file(tmp_path: Path) -> None:
    """Chunks, differences and indices: lost, garbled, cut off, doubled and misplaced."""
    chance = np.random.default_rng()
    before, after = fine_tuned(detector(chance, blocks=4, width=32), chance, "float16")
    base = write_model_bundle(tmp_path / "1.bundle", before)
    bundle = write_model_bundle(tmp_path / "2.bundle", after)
    extract_bundle(base, tmp_path / "slot")
    (tmp_path / "download").mkdir()
    blob, base_file = Blob(bundle), FileBytes(base)
    encoder = DeltaEncoder(blob.file, base_file)
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    fetch = Fetch(tmp_path / "download", blob.spec, 64, {"1" * 64: tmp_path / "slot"})
    now_s = 0.0
    for _ in range(5000):
        if fetch.download.complete:
            break
        request = fetch.download.next_request(now_s)
        now_s = now_s + 0.001 if request else max(now_s + 0.001, fetch.download.wake_at_s or 0.0)
        for part in () if request is None else blob.parts_of(request):
            sent, topic = blob.read(part), str(part)
            if isinstance(part, int) and draw.random() < 0.5:
                shorter = encoder.encode(blob.table.starts[part], blob.table.size(part))
                sent, topic = (sent, topic) if shorter is None else (shorter, f"d{part}")
            for _copy in range(draw.choice([1, 1, 1, 2])):
                fetch.on_part(f"{topic}/host", _bent(sent, draw), now_s)
            if draw.random() < 0.1:
                fetch.on_part(f"{draw.choice(['d', ''])}{draw.randrange(99)}/host", sent, now_s)
    assert fetch.download.complete, seed
    fetch.file.finish()
    assert hashlib.sha256(fetch.file.path.read_bytes()).hexdigest() == blob.spec.sha256
    fetch.remove()


def _bent(sent: bytes, draw: random.Random) -> bytes:
    kind = draw.choice(["whole"] * 6 + ["garbled", "cut", "longer", "empty"])
    place = draw.randrange(len(sent))
    return {
        "whole": sent,
        "garbled": sent[:place] + bytes([sent[place] ^ 1]) + sent[place + 1 :],
        "cut": sent[:place],
        "longer": sent + struct.pack("<I", place),
        "empty": b"",
    }[kind]
