"""What the steps that run engines share: feeds, sessions, segments as rows."""

import io
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from device.array_files import read_npz
from device.engine.file import Engine
from device.engine.manifest import TensorInfo
from device.engine.tensorrt_manifest import TensorRT
from device.errors import ArrayFileError
from device.runtime.session import Session
from device.selftest.kit import KitError, unpack
from device.selftest.report import TIMINGS, SegmentRow
from device.start.command import module_command

Array = npt.NDArray[Any]

PLANS = "plans"
INPUT, OUTPUT = "in:", "out:"
_SEED = 17
_MAX_GOLDEN_BYTES = 1 << 29  # of a reference engine


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A segment as `tandem-agent prepare --json` reports it."""

    segment: str
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    refused_layers: tuple[str, ...] = ()
    problem: str | None = None


def unpack_engine(kit_folder: Path, folder: Path, name: str) -> Path:
    """Unpack an engine of the kit; return its path."""
    unpack(kit_folder, (f"engines/{name}.engine",), folder)
    return folder / "engines" / f"{name}.engine"


def golden(kit_folder: Path, folder: Path, name: str) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the inputs and the known outputs of a reference engine."""
    unpack(kit_folder, (f"golden/{name}.npz",), folder)
    path = folder / "golden" / f"{name}.npz"
    try:
        with path.open("rb") as file:
            arrays = read_npz(file, _MAX_GOLDEN_BYTES)
    except ArrayFileError as error:
        raise KitError(f"golden/{name}.npz of the kit cannot be read: {error}") from error
    return (
        {key.removeprefix(INPUT): a for key, a in arrays.items() if key.startswith(INPUT)},
        {key.removeprefix(OUTPUT): a for key, a in arrays.items() if key.startswith(OUTPUT)},
    )


def npz(arrays: Mapping[str, Array]) -> bytes:
    """Return arrays as a .npz file, whatever their names."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w") as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
    return data.getvalue()


def random_feeds(inputs: Sequence[TensorInfo]) -> dict[str, Array]:
    """Return inputs of static sizes, the same on every board; times do not depend on them."""
    random = np.random.default_rng(_SEED)
    feeds: dict[str, Array] = {}
    for tensor in inputs:
        shape = tuple(dim for dim in tensor.shape if isinstance(dim, int))
        if len(shape) != len(tensor.shape):
            raise KitError(f"input {tensor.name!r} of the kit's engine has a dynamic shape")
        if np.dtype(tensor.dtype).kind == "f":
            feeds[tensor.name] = random.standard_normal(shape).astype(tensor.dtype)
        else:
            feeds[tensor.name] = np.zeros(shape, tensor.dtype)
    return feeds


def finish(engine: Engine, folder: Path, seconds: float) -> dict[str, Finished]:
    """Finish the DLA segments of an engine with this board's TensorRT; return them by name."""
    segments = engine.manifest.segments
    if not any(isinstance(i, TensorRT) for s in segments for i in s.implementations):
        return {}
    command = module_command(
        "device.runtime.prepare", str(engine.path), "--plans", str(folder / PLANS),
        "--timeout-s", f"{seconds:.0f}", "--json",
    )  # fmt: skip
    done = subprocess.run(command, capture_output=True, check=False)
    try:
        rows = msgspec.json.decode(done.stdout.splitlines()[-1], type=tuple[Finished, ...])
    except (msgspec.DecodeError, IndexError):
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        problem = last[0] if last else f"prepare ended with status {done.returncode}"
        sys.stderr.write(f"{problem}\n")
        return {s.name: Finished(segment=s.name, problem=problem) for s in segments
                if any(isinstance(i, TensorRT) for i in s.implementations)}  # fmt: skip
    return {row.segment: row for row in rows}


def open_on_board(engine: Engine, folder: Path) -> Session:
    """Open a session with this selftest's timings and plans. Raises SessionError."""
    return Session(engine, timing_cache=folder / TIMINGS, plans=folder / PLANS)


def segment_rows(
    engine: Engine,
    session: Session,
    times_us: Mapping[str, float],
    finished: Mapping[str, Finished],
) -> tuple[SegmentRow, ...]:
    """Return how each segment ran."""
    reports = {report.segment: report for report in session.reports}
    rows = []
    for segment in engine.manifest.segments:
        report, end = reports[segment.name], finished.get(segment.name)
        rows.append(
            SegmentRow(
                name=segment.name,
                processor=segment.processor,
                implementation=report.implementation,
                reason=report.reason,
                nodes=segment.nodes,
                time_us=times_us.get(segment.name, 0.0),
                finished_s=end.seconds if end else 0.0,
                refused_layers=end.refused_layers if end else (),
                problem=(end.problem or "") if end else "",
            )
        )
    return tuple(rows)
