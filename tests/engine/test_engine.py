"""The engine file: bytes, checks of the container, and what an open engine hands out."""

import hashlib
import json
import mmap
import os
import random
import re
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from engine_fixtures import (
    engine_parts,
    single_network,
    split_network,
    without_checksums,
    write_network,
)

from device.engine.container import MAX_HEADER_BYTES
from device.engine.file import Engine, encode_manifest, open_engine, write_engine
from device.errors import EngineError

ALL_KINDS = ("bool", "int8", "uint8", "int16", "uint16", "float16", "int32", "uint32", "float32")
ALL_KINDS += ("int64", "uint64", "float64")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_network(tmp_path / "small.engine", split_network("batch"))


def extra_entries() -> dict[str, np.ndarray]:
    """One array of each dtype and of each odd layout."""
    draw = np.random.default_rng(3)
    results = {f"kind/{kind}": draw.integers(0, 2, (3, 5)).astype(kind) for kind in ALL_KINDS}
    grid = np.arange(24, dtype=np.float32).reshape(4, 6)
    results["strided"] = grid[::2, ::-1]
    results["column major"] = np.asfortranarray(grid)
    results["big endian"] = grid.astype(">f4")
    results["scalar"] = np.array(7, np.int64)
    results["empty"] = np.empty((0, 4), np.float64)
    results['a "name"\n\u00e9\u2028\U0001f600\x01'] = np.ones(1, np.int8)
    return results


def all_parts() -> tuple[object, dict[str, np.ndarray]]:
    manifest, entries = engine_parts(split_network())
    return manifest, entries | extra_entries()


def header_of(data: bytes) -> dict[str, object]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])


def with_header(data: bytes, header: dict[str, object] | str) -> bytes:
    text = header if isinstance(header, str) else json.dumps(header)
    old = int.from_bytes(data[:8], "little")
    blob = text.encode()
    return len(blob).to_bytes(8, "little") + blob + data[8 + old :]


def with_manifest(data: bytes, text: str) -> bytes:
    header = header_of(data)
    header["__metadata__"] = {"tandem": text}
    return with_header(data, header)


def manifest_of(data: bytes) -> dict[str, object]:
    return json.loads(header_of(data)["__metadata__"]["tandem"])


def refuse(path: Path, data: bytes) -> str:
    """Return the sentence with which an engine of these bytes is refused."""
    path.write_bytes(data)
    with pytest.raises(EngineError) as caught:
        open_engine(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    manifest, entries = all_parts()
    write_engine(tmp_path / "e", manifest, entries)
    with open_engine(tmp_path / "e") as engine:
        assert engine.manifest == manifest
        assert set(engine.entries) == set(entries)
        for name, expected in entries.items():
            result = engine.entry(name)
            assert result.shape == expected.shape
            assert result.dtype == expected.dtype.newbyteorder("=")
            np.testing.assert_array_equal(result, expected)


def test_entries_are_read_only_views_of_the_file(path: Path) -> None:
    with open_engine(path) as engine:
        for name in engine.entries:
            view = engine.entry(name)
            assert isinstance(view.base, mmap.mmap), name
            assert not view.flags.writeable
            assert view.flags.aligned
        with pytest.raises(ValueError, match="read-only"):
            engine.entry("w1")[0] = 0


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    manifest, entries = all_parts()
    shuffled = list(entries.items())
    random.Random(0).shuffle(shuffled)
    write_engine(tmp_path / "a", manifest, entries)
    write_engine(tmp_path / "b", manifest, dict(shuffled))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_order_of_versions_does_not_change_the_bytes() -> None:
    manifest, _ = engine_parts(single_network())
    versions = manifest.provenance.versions
    assert len(versions) > 1
    text = encode_manifest(manifest)
    backwards = json.loads(text)
    backwards["provenance"]["versions"] = dict(reversed(versions.items()))
    again = msgspec.json.decode(json.dumps(backwards), type=type(manifest))
    assert list(again.provenance.versions) != list(versions)
    assert encode_manifest(again) == text


def test_the_bytes_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    manifest, entries = all_parts()
    plain = {
        # The library writes memory as it lies, so it is given row-major little endian arrays.
        name: np.ascontiguousarray(value, value.dtype.newbyteorder("<")).reshape(value.shape)
        for name, value in entries.items()
    }
    write_engine(tmp_path / "e", manifest, entries)
    expected = safetensors.numpy.save(plain, {"tandem": encode_manifest(manifest)})
    assert without_checksums((tmp_path / "e").read_bytes()) == expected


def test_the_safetensors_library_opens_an_engine(tmp_path: Path) -> None:
    manifest, entries = all_parts()
    write_engine(tmp_path / "e", manifest, entries)
    with safetensors.safe_open(tmp_path / "e", "numpy") as file:
        metadata = file.metadata()
        assert metadata.pop("checksums").startswith("xxh3_64 ")
        assert metadata == {"tandem": encode_manifest(manifest)}
        assert set(file.keys()) == set(entries)
    for name, actual in safetensors.numpy.load_file(tmp_path / "e").items():
        np.testing.assert_array_equal(actual, entries[name])


def test_an_engine_saved_by_the_safetensors_library_opens(path: Path) -> None:
    manifest, entries = engine_parts(split_network())
    metadata = {"format": "np", "tandem": encode_manifest(manifest)}
    safetensors.numpy.save_file(entries, path, metadata)
    with open_engine(path) as engine:
        assert engine.manifest == manifest
        np.testing.assert_array_equal(engine.entry("w1"), entries["w1"])


def test_entries_that_lie_unaligned_are_still_handed_out_aligned(path: Path) -> None:
    manifest, entries = engine_parts(split_network())
    write_engine(path, manifest, entries)
    data = without_checksums(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    longer = (length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :]
    path.write_bytes(longer)
    with open_engine(path) as engine:
        view = engine.entry("w1")
        assert view.flags.aligned
        assert not view.flags.writeable
        np.testing.assert_array_equal(view, entries["w1"])


def place_of(engine: Engine, name: str) -> tuple[int, int]:
    """Where a section lies in the file."""
    begin = len(engine.path.read_bytes()) - max(e.stop for e in engine.entries.values())
    return begin + engine.entries[name].start, begin + engine.entries[name].stop


def test_a_byte_that_was_changed_is_found_wherever_it_is(path: Path) -> None:
    """A thousand offsets: the length, the header with the manifest, every section."""
    data = write_network(path, split_network()).read_bytes()
    draw = random.Random(28)
    head = 8 + int.from_bytes(data[:8], "little")
    offsets = [*range(8), *draw.sample(range(8, head), 500)]
    offsets += draw.sample(range(head, len(data)), 1000 - len(offsets))
    with open_engine(path) as engine:
        places = {name: place_of(engine, name) for name in engine.entries}
    for offset in offsets:
        changed = bytearray(data)
        changed[offset] ^= draw.randrange(1, 256)
        path.write_bytes(changed)
        if offset < head:
            with pytest.raises(EngineError, match=str(path)):
                open_engine(path)
            continue
        name, (start, stop) = next(row for row in places.items() if row[1][0] <= offset < row[1][1])
        message = f"section {name!r} at byte {start} ({stop - start} bytes) has the checksum"
        with open_engine(path) as engine:
            with pytest.raises(EngineError, match=re.escape(message)):
                engine.verify()
            with pytest.raises(EngineError, match=re.escape(message)):
                engine.entry(name)
            for second in places.keys() - {name}:
                engine.entry(second)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"checksums":', b'"checksumz":', "its metadata has 'checksumz', known are tandem"),
        (b'"xxh3_64 ', b'"xxh3_65 ', "of kind 'xxh3_65', not 14 of xxh3_64"),
        (b"small.onnx", b"smell.onnx", "its header at byte 0"),
    ],
)
def test_a_header_that_was_changed_says_so(
    path: Path, old: bytes, new: bytes, message: str
) -> None:
    data = write_network(path, split_network()).read_bytes()
    assert data.count(old) == 1
    assert message in refuse(path, data.replace(old, new))


def test_a_section_is_checked_once_and_when_it_is_first_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_network(path, split_network())
    checked: list[str] = []
    monkeypatch.setattr(
        "device.engine.file.check_section", lambda _, name, *__: checked.append(name)
    )
    with open_engine(path) as engine:
        assert checked == []
        engine.entry("w1")
        engine.entry("w1")
        assert checked == ["w1"]
        engine.verify()
        engine.verify()
        assert len(checked) == len(engine.entries)


def test_a_section_is_checked_at_the_speed_of_memory(path: Path) -> None:
    manifest, entries = engine_parts(split_network())
    entries["large"] = np.random.default_rng(0).integers(0, 255, 2**26, np.uint8)
    write_engine(path, manifest, entries)
    seconds = []
    for _ in range(5):
        with open_engine(path) as engine:  # mapped anew: the first touch of its pages counts
            begin = time.thread_time()
            engine.verify()
            seconds.append(time.thread_time() - begin)
    assert 2**26 / min(seconds) > 5e9


def test_a_large_section_is_checked_beside_its_use(path: Path) -> None:
    manifest, entries = engine_parts(split_network())
    entries["large"] = np.zeros(2**21, np.uint8)
    write_engine(path, manifest, entries)
    data = bytearray(path.read_bytes())
    with open_engine(path) as engine:
        data[place_of(engine, "large")[0]] ^= 4
    path.write_bytes(data)
    with open_engine(path) as engine:
        with pytest.raises(EngineError, match="section 'large'"), engine.checking_beside():
            assert engine.entry("large").size == 2**21  # the end of the block says it

        def load() -> None:
            with engine.checking_beside():
                engine.entry("large")
                raise ValueError("what came of the damage")

        with pytest.raises(EngineError, match="section 'large'") as caught:
            load()
        assert isinstance(caught.value.__context__, ValueError)
        with pytest.raises(EngineError, match="section 'large'"):
            engine.entry("large")


def test_an_engine_of_an_earlier_tandem_opens_without_checksums(path: Path) -> None:
    path.write_bytes(without_checksums(write_network(path, split_network()).read_bytes()))
    with open_engine(path) as engine:
        assert engine.checksums is None
        engine.verify()
        assert engine.entry("w1").shape == (8, 3, 3, 3)


def test_arrays_outlive_their_engine(path: Path) -> None:
    engine = open_engine(path)
    view = engine.entry("w1")
    expected = view.copy()
    engine.close()
    engine.close()
    del engine
    np.testing.assert_array_equal(view, expected)


def test_a_closed_engine_hands_out_nothing(path: Path) -> None:
    with open_engine(path) as engine:
        pass
    with pytest.raises(EngineError, match="is closed; open it again"):
        engine.entry("w1")


def test_the_hash_is_that_of_the_file(path: Path) -> None:
    with open_engine(path) as engine:
        assert engine.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        engine.close()
        assert len(engine.sha256) == 64  # kept once computed


def test_an_unknown_entry_is_named(path: Path) -> None:
    with open_engine(path) as engine, pytest.raises(EngineError, match="no entry 'nope'"):
        engine.entry("nope")


def test_an_open_engine_stays_whole_when_its_file_is_replaced(path: Path) -> None:
    with open_engine(path) as engine:
        expected = engine.entry("w1").copy()
        before = engine.sha256
        manifest, entries = engine_parts(split_network())
        write_engine(path, manifest, entries | {"w1": entries["w1"] + 1})
        np.testing.assert_array_equal(engine.entry("w1"), expected)
        with open_engine(path) as new:
            assert new.sha256 != before


class Interrupted(Mapping[str, np.ndarray]):
    """Entries of which the second read from the start of writing on is Ctrl-C."""

    def __init__(self, entries: Mapping[str, np.ndarray], error: BaseException) -> None:
        self._entries, self._error, self._reads = entries, error, 0

    def __getitem__(self, name: str) -> np.ndarray:
        self._reads += 1
        if self._reads > len(self._entries) + 1:
            raise self._error
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    path: Path, error: BaseException
) -> None:
    before = path.read_bytes()
    manifest, entries = engine_parts(split_network())
    with pytest.raises(type(error)):
        write_engine(path, manifest, Interrupted(entries, error))
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from pathlib import Path
from device.errors import EngineError
from engine_fixtures import split_network, write_network
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    write_network(Path(sys.argv[1]), split_network())
except EngineError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "e")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.fullmatch(r"\S+ cannot be written: \[Errno 27\] .*\n", done.stdout), done
    assert os.listdir(tmp_path) == []


def test_the_bytes_are_on_the_disk_before_the_file_takes_its_name(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, bool]] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        fsync(descriptor)
        done.append(("fsync", os.path.isdir(f"/proc/self/fd/{descriptor}")))

    def note_replace(old: Path, new: Path) -> None:
        done.append(("replace", False))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_network(path, split_network())
    assert done == [("fsync", False), ("replace", False), ("fsync", True)]


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"cannot be written: .*No such file or directory"):
        write_network(tmp_path / "none" / "e", split_network())


def test_the_file_has_the_rights_that_the_user_asks_for(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        written = write_network(tmp_path / "e", split_network())
    finally:
        os.umask(old)
    assert written.stat().st_mode & 0o777 == 0o640


def test_writing_needs_no_second_copy_of_the_arrays(tmp_path: Path) -> None:
    manifest, entries = engine_parts(split_network())
    entries |= {f"big{n}": np.zeros(1 << 20, np.float32) for n in range(8)}
    tracemalloc.start()
    write_engine(tmp_path / "e", manifest, entries)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("c", np.zeros(1, np.complex64), "entry 'c' has dtype complex64; known are"),
        ("__metadata__", np.zeros(1), "an entry cannot be named '__metadata__'"),
        ("", np.zeros(1), "an entry cannot be named ''"),
        ("\ud800", np.zeros(1), "is not valid Unicode"),
    ],
)
def test_an_entry_that_the_format_cannot_hold_is_refused(
    tmp_path: Path, name: str, value: np.ndarray, message: str
) -> None:
    manifest, entries = engine_parts(split_network())
    with pytest.raises(EngineError, match=re.escape(message)):
        write_engine(tmp_path / "e", manifest, entries | {name: value})
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"none\.engine does not exist; build it"):
        open_engine(tmp_path / "none.engine")


def test_what_is_not_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for odd in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(EngineError, match="cannot be read: it is not a regular file"):
            open_engine(odd)
    with pytest.raises(EngineError, match="cannot be read"):
        open_engine("a\0b")


def test_files_that_are_no_engine_are_told_apart(path: Path) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    second = safetensors.numpy.save({"a": np.zeros(3)}, {"format": "np"})
    huge = (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + data[8:]
    assert "is empty" in refuse(path, b"")
    assert "has 3 bytes, an engine at least 8" in refuse(path, b"abc")
    assert f"the limit is {MAX_HEADER_BYTES}" in refuse(path, huge)
    assert "is cut off: its header is" in refuse(path, data[: length // 2])
    assert "is cut off: its entries take" in refuse(path, data[:-1])
    assert "has bytes that belong to no entry" in refuse(path, data + b"\0")
    assert "does not start with '{'" in refuse(path, data[:8] + b" " + data[9:])
    assert "is a safetensors file but not an engine" in refuse(path, second)
    assert "header is not valid" in refuse(path, with_header(data, '{"a": [[[['))
    assert "manifest is not valid" in refuse(path, with_manifest(data, "{"))
    assert "manifest is not valid" in refuse(path, with_manifest(data, "[" * 100_000))


@pytest.mark.parametrize(
    ("format_", "message"),
    [
        (2, "has format version 2, this Tandem reads 1; update Tandem"),
        (0, "has format version 0, this Tandem reads 1; build it again"),
    ],
)
def test_another_format_version_says_what_to_do(path: Path, format_: int, message: str) -> None:
    data = path.read_bytes()
    # A newer version may have anything beside its number.
    text = json.dumps({"format": format_, "graphs": [1, 2], "profile": 5})
    assert message in refuse(path, with_manifest(data, text))


def test_unknown_and_repeated_keys_are_refused(path: Path) -> None:
    data = path.read_bytes()
    manifest = json.dumps(manifest_of(data))
    header = json.dumps(header_of(data))
    extra = manifest.replace('"format": 1', '"format": 1, "colour": 1')
    twice = manifest.replace('"format": 1', '"format": 1, "format": 1')
    again = '{"w1": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, ' + header[1:]
    inner = header.replace('"dtype": "F32"', '"dtype": "F32", "dtype": "F32"', 1)
    assert "unknown field `colour`" in refuse(path, with_manifest(data, extra))
    assert "its manifest names 'format' twice" in refuse(path, with_manifest(data, twice))
    assert "its header names 'w1' twice" in refuse(path, with_header(data, again))
    assert "its header names 'dtype' twice" in refuse(path, with_header(data, inner))


ENTRY_EDITS = [
    ("dtype", "BF16", "has dtype 'BF16'; known are"),
    ("dtype", "F64", "takes 864 bytes, its dtype and shape need 1728"),
    ("shape", [8, 3, 3, 4], "takes 864 bytes, its dtype and shape need 1152"),
    ("shape", [1, 3, 3, 3], "takes 864 bytes, its dtype and shape need 108"),
    ("shape", [-8, -3, 3, 3], "Expected `int` >= 0"),
    ("shape", [8.0, 3, 3, 3], "Expected `int`, got `float`"),
    ("shape", [2**40, 2**40, 0], "which is more than 9223372036854775807 bytes"),
    ("shape", [2**64], "is not valid"),
    ("shape", [1] * 33, "has 33 dimensions, the limit is 32"),
    ("data_offsets", [864, 0], "takes -864 bytes"),
    ("data_offsets", [10**6, 10**6 + 864], "belong|starts at byte|ends at"),
    ("data_offsets", [0], "Expected `array` of length 2"),
    ("dtype", None, "Expected `str`, got `null`"),
]


@pytest.mark.parametrize(("key", "value", "message"), ENTRY_EDITS)
def test_an_impossible_entry_is_refused(path: Path, key: str, value: object, message: str) -> None:
    data = path.read_bytes()
    header = header_of(data)
    header["w1"][key] = value
    assert re.search(
        message if "|" in message else re.escape(message), refuse(path, with_header(data, header))
    )


def test_entries_that_overlap_or_leave_a_hole_are_refused(path: Path) -> None:
    data = path.read_bytes()
    names = [name for name, entry in header_of(data).items() if name in ("w1", "w3")]
    assert len(names) == 2
    overlapping = header_of(data)
    w3 = overlapping["w3"]["data_offsets"]
    w1 = overlapping["w1"]["data_offsets"]
    overlapping["w3"]["data_offsets"] = [w1[0], w1[0] + w3[1] - w3[0]]
    assert "starts at byte" in refuse(path, with_header(data, overlapping))
    holed = header_of(data)
    del holed["w1"]
    assert "starts at byte" in refuse(path, with_header(data, holed))


def test_an_engine_is_its_own_context(path: Path) -> None:
    with open_engine(str(path)) as engine:
        assert isinstance(engine, Engine)
        assert engine.path == path
