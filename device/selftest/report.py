"""The report of a selftest: a zip file with `report.json`, times of tactics and recorded outputs.

    report.json          `Report`
    timings.json         the timing cache of the tactics that were timed
    recorded/NAME.npz    inputs and outputs of a reference engine on the DLA

It comes from outside: every size and name is checked before anything is read. Keys that this
version does not know are skipped within a major version of the format; another one is refused.
"""

import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from device.errors import TandemError
from device.files import replace_file
from device.runtime.cuda.facts import GpuFacts

MAJOR, MINOR = 1, 2
REPORT = "report.json"
TIMINGS = "timings.json"
RECORDED = "recorded/"

MAX_FILE_BYTES = 64 * 2**20
MAX_ENTRIES = 64
MAX_ENTRY_BYTES = 64 * 2**20
MAX_TEXT = 2000

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Variant = Literal["gpu", "dla", "split"]
Side = Literal["at", "beyond"]


class ReportError(TandemError):
    """A report cannot be read, is damaged, or is of another version."""


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the parts. A newer minor version may have more keys."""


class Machine(_Value, frozen=True, kw_only=True):
    """The board. "" and 0 for what is not there.

    `power_mode`: nvpmodel's number, `power_mode_name` its name. `clocks_mhz`: "gpu now", "gpu max",
    "cpu0 now" and so on. `locked`: clocks are held at their highest, as jetson_clocks does.
    """

    model: Text = ""
    soc: Text = ""
    l4t: Text = ""
    python: Text = ""
    tensorrt: Text = ""
    dla_compiler: Text = ""
    dla_cores: Count = 0
    power_mode: Text = ""
    power_mode_name: Text = ""
    clocks_mhz: dict[Text, Amount] = {}
    locked: bool = False
    memory_mb: Count = 0
    free_memory_mb: Count = 0
    free_disk_mb: Count = 0
    idle_watts: dict[Text, Amount] = {}
    gpu: GpuFacts | None = None
    problem: Text = ""


class Output(_Value, frozen=True, kw_only=True):
    """An output beside the known one. `sha256`: of the bytes of the first run.

    `differing`: elements whose bits differ; `relative`: norm of the difference / norm.
    """

    name: Text
    elements: Count
    differing: Count
    largest: Amount
    relative: Amount
    limit: Amount
    sha256: Text


class KernelRow(_Value, frozen=True, kw_only=True):
    """A reference engine on the GPU. `tried` of its `tactics` ran; `worst` over all of them."""

    item: Text
    precision: Text = ""
    kernels: Count = 0
    tactics: Count = 0
    tried: Count = 0
    rounds: Count = 0
    repeatable: bool = False
    outputs: tuple[Output, ...] = ()
    problem: Text = ""


class RuleRow(_Value, frozen=True, kw_only=True):
    """A case of a DLA rule. `expected`: what Tandem's table says; `can_run`: can_run_on_DLA;
    `built`: a loadable was compiled. None: not known.
    """

    item: Text
    rule: Text = ""
    side: Side = "at"
    op: Text = ""
    precision: Text = ""
    certainty: Text = ""
    expected: bool = True
    can_run: bool | None = msgspec.field(default=None, name="asked")
    built: bool | None = None
    message: Text = msgspec.field(default="", name="said")
    problem: Text = ""


class SegmentRow(_Value, frozen=True, kw_only=True):
    """A segment as it ran. `time_us`: its median by the host's clock."""

    name: Text
    processor: Text
    implementation: Text
    reason: Text
    nodes: tuple[Text, ...]
    time_us: Amount
    finished_s: Amount = 0.0
    refused_layers: tuple[Text, ...] = ()
    problem: Text = ""


class LayerRow(_Value, frozen=True, kw_only=True):
    """The median time of one operation of a GPU segment by itself."""

    nodes: tuple[Text, ...]
    time_us: Amount


class NetworkRow(_Value, frozen=True, kw_only=True):
    """A network on one placement. `watts`: the mean by rail while it ran without a pause."""

    item: Text
    network: Text = ""
    variant: Variant = "gpu"
    precision: Text = ""
    model_sha256: Text = ""
    runs: Count = 0
    median_ms: Amount = 0.0
    p10_ms: Amount = 0.0
    p90_ms: Amount = 0.0
    load_s: Amount = 0.0
    watts: dict[Text, Amount] = {}
    segments: tuple[SegmentRow, ...] = ()
    layers: tuple[LayerRow, ...] = ()
    problem: Text = ""


class TacticRow(_Value, frozen=True, kw_only=True):
    """A part of an engine's tactics: `timings.json` has their times by these keys."""

    item: Text
    keys: tuple[Text, ...] = ()
    problem: Text = ""


class RecordedRow(_Value, frozen=True, kw_only=True):
    """A reference engine whose DLA segments ran: its outputs are in `recorded/ITEM.npz`."""

    item: Text
    engine_sha256: Text = ""
    segments: tuple[SegmentRow, ...] = ()
    problem: Text = ""


class DemoRow(_Value, frozen=True, kw_only=True):
    """The demo pipeline."""

    item: Text
    frames: Count = 0
    detections: Count = 0
    seconds: Amount = 0.0
    problem: Text = ""


class StepRow(_Value, frozen=True, kw_only=True):
    """A step: how many of its items were done, and why not the others, `left_out`."""

    name: Text
    items: Count
    done: Count
    seconds: Amount
    crashes: Count = 0
    problem: Text = ""
    left_out: tuple[Text, ...] = ()


class Report(_Value, frozen=True, kw_only=True):
    """What came of a selftest. `kit`: the digest of the kit."""

    format: tuple[int, int] = (MAJOR, MINOR)
    tandem: Text
    kit: Text
    profile: Text
    seconds: Amount
    steps: tuple[StepRow, ...]
    machine: Machine = Machine()
    kernels: tuple[KernelRow, ...] = ()
    rules: tuple[RuleRow, ...] = ()
    recorded: tuple[RecordedRow, ...] = ()
    networks: tuple[NetworkRow, ...] = ()
    tactics: tuple[TacticRow, ...] = ()
    demo: tuple[DemoRow, ...] = ()


class _Version(msgspec.Struct):
    format: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ReportFile:
    """A report that was read: its JSON, and the bytes of the other files by name."""

    report: Report
    files: Mapping[str, bytes]


def is_report(path: Path) -> bool:
    """Whether a file begins as a report does: a zip file whose first entry is report.json."""
    start = b"PK\x03\x04"
    try:
        with path.open("rb") as file:
            head = file.read(30 + len(REPORT))
    except OSError:
        return False
    return head.startswith(start) and head[30:] == REPORT.encode()


def write_report(path: Path, report: Report, files: Mapping[str, bytes]) -> None:
    """Write a report; it appears whole or not at all. Raises ReportError."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {REPORT: msgspec.json.encode(report), **files}.items():
            entry = zipfile.ZipInfo(name)  # a fixed time: nothing of the board but what is listed
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    try:
        replace_file(path, packed.getvalue())
    except OSError as error:
        raise ReportError(
            f"{path} cannot be written: {error.strerror}; name another file with "
            "`tandem-agent selftest --out`"
        ) from error


def read_report(path: Path) -> ReportFile:
    """Read a report. Raises ReportError, which names the file and what is wrong with it."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ReportError(
                f"{path} has {size} bytes, a report has at most {MAX_FILE_BYTES}; give the file "
                "that `tandem-agent selftest --out` wrote"
            )
        with zipfile.ZipFile(path) as archive:
            files = {
                entry.filename: _read(archive, entry, path) for entry in _entries(archive, path)
            }
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ReportError(f"{path} cannot be read as a report ({error}); copy it again") from error
    except (NotImplementedError, RuntimeError) as error:  # a compression or a password
        raise ReportError(f"{path} is not a report that a selftest wrote ({error})") from error
    data = files.pop(REPORT, None)
    if data is None:
        raise ReportError(f"{path} is not a report: it holds no {REPORT}")
    return ReportFile(_decode(data, path), files)


def _entries(archive: zipfile.ZipFile, path: Path) -> list[zipfile.ZipInfo]:
    """The entries, all of names that a report has, each once, none too large."""
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if len(entries) > MAX_ENTRIES or len(set(names)) != len(names):
        raise ReportError(
            f"{path} has {len(entries)} entries, {len(set(names))} of different names; a report "
            f"has at most {MAX_ENTRIES}, each once"
        )
    for name in names:
        if name not in (REPORT, TIMINGS) and not _is_recorded(name):
            raise ReportError(f"{path} is not a report: it holds {name[:80]!r}")
    return entries


def _is_recorded(name: str) -> bool:
    stem = name.removeprefix(RECORDED).removesuffix(".npz")
    plain = all(letter.isalnum() or letter in "-_" for letter in stem)
    return name == f"{RECORDED}{stem}.npz" and 0 < len(stem) <= 80 and plain


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> bytes:
    """Read an entry; its stated size is not believed."""
    with archive.open(entry) as file:
        data = file.read(MAX_ENTRY_BYTES + 1)
    if len(data) > MAX_ENTRY_BYTES:
        raise ReportError(
            f"{path}: {entry.filename} has more than {MAX_ENTRY_BYTES} bytes; it is no report"
        )
    return data


def _decode(data: bytes, path: Path) -> Report:
    try:
        major, _ = msgspec.json.decode(data, type=_Version).format
        if major == MAJOR:
            return msgspec.json.decode(data, type=Report)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(f"{path} is damaged: {error}; copy it again") from error
    remedy = "update Tandem" if major > MAJOR else "run the selftest of this Tandem"
    raise ReportError(f"{path} has format {major}, this Tandem reads {MAJOR}; {remedy}")


def as_builtins(report: Report) -> Any:  # noqa: ANN401  (JSON)
    """Return a report as plain values."""
    return msgspec.to_builtins(report)
