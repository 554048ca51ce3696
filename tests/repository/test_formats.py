"""Files that earlier versions wrote: today's readers open each, and refuse those of later ones.

`NAME-N-early` and all whose number is not today's were written by code of the project's history.
"""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from calibration import state as calibration_state
from calibration import table
from calibration.errors import CalibrationError
from device.engine.file import open_engine
from device.engine.manifest import FORMAT_VERSION
from device.errors import BundleError, EngineError, SessionError
from device.protocol import documents
from device.protocol.signed import open_desired
from device.runtime import timing_cache
from device.trust.exchange import TRUSTED
from device.update import agent_versions, slot_store
from device.update.bundle import FORMATS, check_bundle
from device.update.decisions import decide
from device.update.slot_store import SlotStore
from device.update.slots import SLOT_FORMAT, SlotState

FILES = Path(__file__).parents[1] / "data" / "formats"
MAX_BYTES = 200_000


def _engine(path: Path) -> int:
    engine = open_engine(path)
    assert [segment.name for segment in engine.manifest.segments]
    return engine.manifest.format


def _bundle(path: Path) -> int:
    info, _ = check_bundle(path)
    assert info.version in ("1", "1.0")
    return info.format


def _table(path: Path) -> int:
    read = table.read_table(path)
    assert read.amax("x") == 1.5
    return read.format


def _state(path: Path) -> int:
    assert calibration_state.read_state(path).histograms["x"].amax == 1.0
    return 1


def _timings(path: Path) -> int:
    (device,) = timing_cache.read_timings(path).devices
    assert device.median_us == {"gemm 64x64": 12.5}
    return 1


def _slots(path: Path) -> int:
    """The state folder of an agent that has just this copy of its state."""
    folder = path.parent / "state"
    folder.mkdir(mode=0o700)
    shutil.copy(path, folder / "slots.1")
    number = int(msgspec.json.decode(path.read_bytes().partition(b"\n")[2])["format"])
    store = SlotStore(folder)
    try:
        state = store.load()
    finally:
        store.close()
    assert (state.active, state.recovery, store.odd) == ("b", "", ())
    assert state.a is not None
    assert state.b is not None
    assert (state.a.sha256, state.b.sha256) == ("a" * 64, "b" * 64)
    return number


def _desired(path: Path) -> int:
    desired, signed = open_desired(path.read_bytes())
    assert signed is None
    decision = decide(desired, SlotState(), profile="laptop", verdict=TRUSTED)
    assert decision.word == "fetch", decision.reason
    return desired.format


def _versions(path: Path) -> int:
    folder = path.parent / agent_versions.FOLDER
    folder.mkdir()
    shutil.copy(path, folder / agent_versions.FILE)
    read = agent_versions.read_versions(path.parent)
    assert (read.current, read.reason) == ("1.1-aaaaaaaaaaaa", "it hung")
    return 1


# Beginning of a file's name -> its reader, and the formats that are written today.
READERS: dict[str, tuple[Callable[[Path], int], tuple[int, ...]]] = {
    "engine": (_engine, (FORMAT_VERSION,)),
    "bundle": (_bundle, FORMATS),
    "table": (_table, table.FORMATS),
    "state": (_state, (1,)),
    "timings": (_timings, (timing_cache.FORMAT,)),
    "slots": (_slots, (SLOT_FORMAT,)),
    "desired": (_desired, (documents.DOCUMENT_FORMAT, documents.CHOSEN_FORMAT)),
    "versions": (_versions, (1,)),
}
NAMES = sorted(path.name for path in FILES.iterdir())


def split(name: str) -> tuple[str, int]:
    kind, _, rest = name.partition(".")[0].partition("-")
    return kind, int(rest.partition("-")[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_each_format_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    shutil.copy(FILES / name, path)
    kind, number = split(name)
    assert READERS[kind][0](path) == number


@pytest.mark.parametrize("kind", READERS)
def test_each_format_that_is_written_has_a_file(kind: str) -> None:
    """A new format needs one: it must stay readable from then on."""
    assert set(READERS[kind][1]) <= {split(name)[1] for name in NAMES if split(name)[0] == kind}


def test_the_files_are_small() -> None:
    assert sum((FILES / name).stat().st_size for name in NAMES) < MAX_BYTES


def _with_hash(data: bytes) -> bytes:
    """A calibration state of format 9."""
    size = len(calibration_state.MAGIC) + hashlib.sha256().digest_size
    body = data[size:].replace(b"\xa6format\x01", b"\xa6format\x09", 1)
    return calibration_state.MAGIC + hashlib.sha256(body).digest() + body


# file, how it becomes one of format 9, the error, which names both formats
LATER: list[tuple[str, Callable[[bytes], bytes], type[Exception], str]] = [
    (
        "engine-1-early.engine", lambda data: data.replace(rb'\"format\":1', rb'\"format\":9', 1),
        EngineError, "format version 9, this Tandem reads 1; update Tandem",
    ),
    (
        "bundle-1.bundle", lambda data: data.replace(b'"format":1', b'"format":9', 1),
        BundleError, f"bundle format 9, this version reads {', '.join(map(str, FORMATS))}",
    ),
    (
        "table-1.json", lambda data: data.replace(b'"format": 1', b'"format": 9', 1),
        CalibrationError, f"format 9, but this version reads formats 1 to {table.FORMATS[-1]}",
    ),
    (
        "state-1.tandem-state", _with_hash,
        CalibrationError, "format 9, but this version reads format 1",
    ),
    (
        "timings-1.json", lambda data: data.replace(b'timings":1', b'timings":9', 1),
        SessionError, "format 9, this Tandem reads 1",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "error", "sentence"), LATER)
def test_a_file_of_a_later_format_is_refused_by_both_numbers(
    name: str, change: Callable[[bytes], bytes], error: type[Exception], sentence: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    data = (FILES / name).read_bytes()
    path = tmp_path / name
    path.write_bytes(change(data))
    assert path.read_bytes() != data
    with pytest.raises(error, match=sentence):
        READERS[split(name)[0]][0](path)


def test_a_desired_document_of_a_later_format_is_refused_by_both_numbers() -> None:
    desired, _ = open_desired((FILES / "desired-2.json").read_bytes())
    later = msgspec.structs.replace(desired, format=9)
    decision = decide(later, SlotState(), profile="laptop", verdict=TRUSTED)
    assert "has format 9, this agent reads 1 to 3: update the agent" in decision.reason


def test_a_state_of_slots_of_a_later_format_keeps_what_is_not_known(tmp_path: Path) -> None:
    """A board goes back to an older agent, and forth again."""
    body = msgspec.json.decode((FILES / "slots-2").read_bytes().partition(b"\n")[2])
    text = msgspec.json.encode({**body, "format": 9, "key_of_a_later_format": [1]})
    path = tmp_path / "slots-9"
    path.write_bytes(slot_store._crc32(text).encode() + b"\n" + text)
    assert _slots(path) == 9
    store = SlotStore(tmp_path / "state")
    store.save(store.load())
    store.close()
    copies = [(tmp_path / "state" / f"slots.{n}").read_bytes() for n in (0, 1)]
    assert all(b'"key_of_a_later_format":[1]' in copy for copy in copies)
    assert all(b'"format":9' in copy for copy in copies)
