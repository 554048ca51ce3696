"""Array files of others: what they ask for is judged before it is read or unpacked."""

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device.array_files import MAX_HEADER_BYTES, read_arrays, read_npz
from device.errors import ArrayFileError

LIMIT = 1 << 20


def header(text: str, version: int = 1) -> bytes:
    form = "<H" if version == 1 else "<I"
    return b"\x93NUMPY" + bytes((version, 0)) + struct.pack(form, len(text)) + text.encode()


def described(shape: str, descr: str = "'<f4'") -> bytes:
    return header(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}")


def npz(arrays: dict[str, np.ndarray], method: int = zipfile.ZIP_STORED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array)
            archive.writestr(f"{name}.npy", member.getvalue())
    return data.getvalue()


def file_of(folder: Path, data: bytes) -> Path:
    path = folder / "arrays"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.zeros((), np.float16),
        np.zeros((0, 3), np.float32),
        np.array(["one", "three"]),
        np.array([True, False]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_what_numpy_writes_is_read(array: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array)
    read = read_arrays(tmp_path / "a.npy", LIMIT)
    assert isinstance(read, np.ndarray)
    np.testing.assert_array_equal(read, array, strict=True)
    np.savez_compressed(tmp_path / "a.npz", one=array)
    archive = read_arrays(tmp_path / "a.npz", LIMIT)
    assert isinstance(archive, dict)
    np.testing.assert_array_equal(archive["one"], array, strict=True)


def test_the_limit_is_at_the_last_byte(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(100, np.float32))
    assert len(read_arrays(tmp_path / "a.npy", 400)) == 100
    with pytest.raises(ArrayFileError, match="has 400 bytes, the limit is 399"):
        read_arrays(tmp_path / "a.npy", 399)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no whole archive"),
        (b"\x93NUMPY", "header is damaged"),
        (b"\x93NUMPY\x09\x00", "does not begin as an array"),
        (described("(4,)"), "16 bytes, the file 0"),
        (described("(2**40,)"), "header is damaged"),
        (described("(4611686018427387904, 4)"), "the limit is"),
        (described("(-4,)") + bytes(16), "no shape of numbers"),
        (described("(4.0,)") + bytes(16), "no shape of numbers"),
        (described("4") + bytes(16), "no shape of numbers"),
        (described(f"({'1,' * 33})") + bytes(4), "no shape of numbers"),
        (described("(1,)", "'|O'") + pickle.dumps([1]), "pickles are not read"),
        (described("(1,)", "[('a', '<f4')]") + bytes(4), "no plain type"),
        (described("(1,)", "'<U2147483647'"), "the limit is|damaged"),
        (header("{"), "header is damaged"),
        (header("(" * 5000), "header is damaged"),
        (header("{" * (MAX_HEADER_BYTES + 1)), "at most 10000"),
        (header("x", 2)[:8] + struct.pack("<I", 2**32 - 1), "at most 10000"),
        (npz({"a": np.zeros(4)})[:-10], "no whole archive"),
    ],
)  # fmt: skip
def test_a_false_file_is_refused_with_its_cause(data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArrayFileError, match=message):
        read_arrays(file_of(tmp_path, data), LIMIT)


def test_an_archive_that_unpacks_to_more_than_the_limit_is_refused_unread(tmp_path: Path) -> None:
    bomb = npz({"a": np.zeros(8 * LIMIT, np.uint8)}, zipfile.ZIP_DEFLATED)
    assert len(bomb) < LIMIT / 100
    with pytest.raises(ArrayFileError, match=f"bytes unpacked, the limit is {LIMIT}"):
        read_arrays(file_of(tmp_path, bomb), LIMIT)


@pytest.mark.parametrize(
    ("method", "message"),
    [(zipfile.ZIP_BZIP2, "packed by method 12"), (zipfile.ZIP_LZMA, "packed by method 14")],
)
def test_other_ways_of_packing_are_refused(method: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArrayFileError, match=message):
        read_arrays(file_of(tmp_path, npz({"a": np.zeros(4)}, method)), LIMIT)


@pytest.mark.parametrize(
    ("value", "message"),
    [(b"\x01\x00", "is encrypted"), (b"\x00\x00", "packed by method 99")],
)
def test_encryption_and_unknown_methods_are_refused(
    value: bytes, message: str, tmp_path: Path
) -> None:
    data = bytearray(npz({"a": np.zeros(4)}))
    at = data.index(b"PK\x01\x02")  # the directory: flags at 8, method at 10
    data[at + 8 : at + 10] = value
    data[at + 10 : at + 12] = struct.pack("<H", 99 if message.endswith("99") else 0)
    with pytest.raises(ArrayFileError, match=message):
        read_arrays(file_of(tmp_path, bytes(data)), LIMIT)


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ArrayFileError, match="it is no file"):
            read_arrays(path, LIMIT)
    with pytest.raises(FileNotFoundError):
        read_arrays(tmp_path / "none", LIMIT)


GOOD = npz({"a": np.arange(40.0), "b": np.zeros((3, 3), np.int8)}, zipfile.ZIP_DEFLATED)


@settings(max_examples=300, deadline=None)
@given(
    at=st.integers(0, len(GOOD) - 1),
    piece=st.binary(max_size=6),
    cut=st.integers(0, len(GOOD)),
    whole=st.booleans(),
)
def test_a_damaged_archive_is_read_or_refused(at: int, piece: bytes, cut: int, whole: bool) -> None:
    data = GOOD[:at] + piece + GOOD[at + len(piece) :]
    try:
        arrays = read_npz(io.BytesIO(data if whole else data[:cut]), LIMIT)
    except ArrayFileError:
        return
    assert sum(array.nbytes for array in arrays.values()) <= LIMIT
