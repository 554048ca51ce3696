"""Finished plans on disk, each under the digest of everything that it depends on.

    <key>.plan       TensorRT's plan
    <key>.json       its record: what it depends on, its SHA-256, or why there is none
    <key>.log        what TensorRT said
    timing-<board>   TensorRT's timing cache; times of another power mode or compiler do not count

A record is written after its plan, and a plan is used only with a record that has its digest: an
interrupted build leaves what was there in use. The time of a record is that of its last use; the
least recently used go beyond `MAX_PLANS`.
"""

import hashlib
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from device.engine.cuda_manifest import Cuda
from device.engine.file import Engine
from device.engine.manifest import Segment
from device.engine.tensorrt_manifest import Form, TensorRT, TensorRTGpu
from device.errors import SessionError
from device.files import open_to_read, read_regular, replace_file, sync_folder
from device.runtime.cuda.driver import CudaError
from device.runtime.cuda.facts import read_gpu
from device.runtime.tensorrt.board import Board
from device.runtime.tensorrt.releases import FormName, find_gpu_release, find_release
from device.runtime.tensorrt.request import OnDla, OnGpu, target_of

FORMAT = 1
MAX_RECORD_BYTES = 1024 * 1024
# Segments of two slots, of several models each, in two power modes.
MAX_PLANS = 128


class Comparison(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The medians of a plan and of the kernels of its segment, on the same inputs.

    `kernels`: the digest of the kernels, whose time says nothing of others.
    """

    kernels: str
    tensorrt_us: float
    cuda_us: float

    @property
    def tensorrt_is_faster(self) -> bool:
        """Whether sessions take the plan."""
        return self.tensorrt_us < self.cuda_us


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What came of one segment on one board. `problem`: why it has no plan, then no `sha256`.

    `limit_s`, `limit_bytes`: of time or memory, if that ended the build. `passing`: something else
    than TensorRT ended it, such as a kill by the system or a full disk. `compared`: a segment on
    the GPU that has kernels, too. `fallback`: it was built with GPU fallback, and every layer is on
    the DLA.
    """

    format: int
    segment: str
    board: dict[str, str | int]
    sha256: str
    seconds: float
    refused_layers: tuple[str, ...] = ()
    problem: str | None = None
    limit_s: float = 0.0
    limit_bytes: int = 0
    passing: bool = False
    compared: Comparison | None = None
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A segment's place in the store, with its record if there is one."""

    key: str
    path: Path
    record: Record | None


def default_folder() -> Path:
    """Return $TANDEM_PLANS, which the agent sets, or $XDG_CACHE_HOME/tandem/plans (~/.cache)."""
    if os.environ.get("TANDEM_PLANS"):
        return Path(os.environ["TANDEM_PLANS"])
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tandem" / "plans"


def form_name(implementation: TensorRT | TensorRTGpu, version: str) -> FormName:
    """Return which form a TensorRT takes. Raises SessionError: it takes none, why."""
    if not version:
        raise SessionError("TensorRT is not installed; install JetPack's python3-libnvinfer")
    if isinstance(implementation, TensorRT):
        release = find_release(version)
        if release.form is None:
            raise SessionError(f"TensorRT {version} has no DLA here: {release.why}")
        return release.form
    gpu_release = find_gpu_release(version)
    if gpu_release.form is None:
        raise SessionError(f"TensorRT {version} takes no segment of an engine: {gpu_release.why}")
    return gpu_release.form


def form_for(implementation: TensorRT | TensorRTGpu, board: Board) -> Form:
    """Return the form that the board's TensorRT takes. Raises SessionError: it takes none, why."""
    ranged = form_name(implementation, board.tensorrt) == "ranged"
    problem = implementation.ranged_problem if ranged else implementation.typed_problem
    form = implementation.ranged if ranged else implementation.typed
    if problem or form is None:
        raise SessionError(problem)
    return form


def find_plan(
    folder: Path,
    engine: Engine,
    segment: Segment,
    implementation: TensorRT | TensorRTGpu,
    board: Board,
) -> Plan:
    """Return a segment's place in the store. Raises SessionError: no form fits the board."""
    form = form_for(implementation, board)
    key = _key(engine, implementation, target_for(engine, segment, implementation), form, board)
    path = folder / f"{key}.plan"
    return Plan(key, path, _record(path.with_suffix(".json")))


def read_records(folder: Path) -> tuple[Record, ...]:
    """Return the records of a store, the one used last first."""
    try:
        paths = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:  # another process removes some
        return ()
    records = (_record(path) for path in paths)
    return tuple(record for record in records if record is not None)


def _record(path: Path) -> Record | None:
    """Return a record, None where there is none, or an interrupted or older one: prepare again."""
    try:
        record = msgspec.json.decode(read_regular(path, MAX_RECORD_BYTES), type=Record)
    except (OSError, ValueError):
        return None
    return record if record.format == FORMAT else None


def target_for(
    engine: Engine, segment: Segment, implementation: TensorRT | TensorRTGpu
) -> OnDla | OnGpu:
    """Return what a segment of an engine is built for."""
    manifest = engine.manifest
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    return target_of(implementation, segment, tensors, {dim.name: dim for dim in manifest.dims})


def kernels_digest(engine: Engine, kernels: Cuda) -> str:
    """Return the SHA-256 of a segment's kernels and their launches."""
    total = hashlib.sha256(msgspec.json.encode(kernels, order="deterministic"))
    for kernel in kernels.kernels:
        total.update(engine.entry(kernel.cubin).tobytes())
    return total.hexdigest()


def read_plan(plan: Plan) -> bytes | None:
    """Return the bytes of a plan, None unless they are those of its record."""
    if plan.record is None or not plan.record.sha256:
        return None
    try:
        with open_to_read(plan.path) as file:
            data = file.read()
    except OSError:
        return None
    return data if hashlib.sha256(data).hexdigest() == plan.record.sha256 else None


def why_unusable(plan: Plan, engine: Path) -> str | None:
    """Return why a plan cannot run here and what to do, or None if it can."""
    prepare = f"run `tandem-agent prepare {engine}`"
    if plan.record is None:
        return f"it has no plan for this board: {prepare}"
    if plan.record.problem is not None:
        return f"TensorRT refused it on this board: {plan.record.problem}"
    return None if read_plan(plan) is not None else f"its plan is damaged: {prepare}"


def keep_plan(plan: Plan, record: Record, built: Path | None) -> None:
    """Move a plan that was built into its place, then write its record. Raises OSError."""
    if built is not None:
        os.replace(built, plan.path)
        sync_folder(plan.path.parent)
    replace_file(plan.path.with_suffix(".json"), msgspec.json.encode(record))


def note_use(plan: Plan) -> None:
    """Mark a plan as used now. Raises OSError."""
    os.utime(plan.path.with_suffix(".json"))


def remove_unused(folder: Path, used: Collection[str]) -> None:
    """Remove the least recently used plans beyond `MAX_PLANS`, such as those of an old JetPack.

    `used`: keys that stay. Another process may do the same. Raises OSError.
    """
    uses: list[tuple[int, Path]] = []
    for record in folder.glob("*.json"):
        with suppress(FileNotFoundError):
            uses.append((record.stat().st_mtime_ns, record))
    for _, record in sorted(uses, reverse=True)[MAX_PLANS:]:
        if record.stem not in used:
            for suffix in (".json", ".plan", ".log"):
                record.with_suffix(suffix).unlink(missing_ok=True)


def timing_cache(folder: Path, board: Board) -> Path:
    """Return the file with TensorRT's timings on a board as it is."""
    return folder / f"timing-{_board_digest(board).hexdigest()[:16]}"


def digest(path: Path) -> str:
    """Return the SHA-256 of a file. Raises OSError."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _key(
    engine: Engine,
    implementation: TensorRT | TensorRTGpu,
    target: OnDla | OnGpu,
    form: Form,
    board: Board,
) -> str:
    """Return the digest of the board and of all that the plan is made from."""
    total = _board_digest(board)
    if isinstance(target, OnDla):
        settings: tuple[object, ...] = (
            FORMAT, target.inputs, target.outputs, implementation.ranges
        )  # fmt: skip
    else:
        settings = (FORMAT, _gpu(), target, implementation.ranges)
    total.update(msgspec.json.encode(settings, order="deterministic"))
    total.update(msgspec.json.encode((form, implementation.half_nodes), order="deterministic"))
    total.update(engine.entry(form.model).tobytes())
    for weight in form.weights:
        total.update(engine.entry(weight.entry).tobytes())
        if weight.scales is not None:
            total.update(engine.entry(weight.scales).tobytes())
    return total.hexdigest()[:40]


def _gpu() -> dict[str, object]:
    """Return what a plan for the GPU depends on. Raises SessionError: there is no GPU."""
    try:
        return msgspec.structs.asdict(read_gpu())
    except CudaError as error:
        raise SessionError(str(error)) from error


def _board_digest(board: Board) -> "hashlib._Hash":
    return hashlib.sha256(msgspec.json.encode(asdict(board), order="deterministic"))
