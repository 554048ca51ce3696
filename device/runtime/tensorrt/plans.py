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

from device.engine.file import Engine
from device.engine.tensorrt_manifest import Form, TensorRT
from device.errors import SessionError
from device.files import replacing, sync_folder
from device.runtime.tensorrt.board import Board
from device.runtime.tensorrt.releases import find_release

FORMAT = 1
MAX_PLANS = 64  # segments of two slots in two power modes, each with all the loadables of a core


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What came of one segment on one board. `problem`: why it has no plan, then no `sha256`.

    `limit_s`, `limit_bytes`: of time or memory, if that ended the build. `passing`: something else
    than TensorRT ended it, such as a kill by the system or a full disk.
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


def form_for(implementation: TensorRT, board: Board) -> Form:
    """Return the form that the board's TensorRT takes. Raises SessionError: it takes none, why."""
    if not board.tensorrt:
        raise SessionError("TensorRT is not installed; install JetPack's python3-libnvinfer")
    release = find_release(board.tensorrt)
    if release.form is None:
        raise SessionError(f"TensorRT {board.tensorrt} has no DLA here: {release.why}")
    ranged = release.form == "ranged"
    problem = implementation.ranged_problem if ranged else implementation.typed_problem
    if problem:
        raise SessionError(problem)
    return implementation.ranged if ranged else implementation.typed


def find_plan(folder: Path, engine: Engine, implementation: TensorRT, board: Board) -> Plan:
    """Return a segment's place in the store. Raises SessionError: no form fits the board."""
    key = _key(engine, implementation, form_for(implementation, board), board)
    path = folder / f"{key}.plan"
    try:
        record = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Record)
    except (OSError, ValueError):  # there is none, or an interrupted or older one: prepare again
        return Plan(key, path, None)
    return Plan(key, path, record if record.format == FORMAT else None)


def read_plan(plan: Plan) -> bytes | None:
    """Return the bytes of a plan, None unless they are those of its record."""
    if plan.record is None or not plan.record.sha256:
        return None
    try:
        data = plan.path.read_bytes()
    except OSError:
        return None
    return data if hashlib.sha256(data).hexdigest() == plan.record.sha256 else None


def keep_plan(plan: Plan, record: Record, built: Path | None) -> None:
    """Move a plan that was built into its place, then write its record. Raises OSError."""
    if built is not None:
        os.replace(built, plan.path)
        sync_folder(plan.path.parent)
    with replacing(plan.path.with_suffix(".json")) as file:
        file.write(msgspec.json.encode(record))


def note_use(plan: Plan) -> None:
    """Mark a plan as used now. Raises OSError."""
    os.utime(plan.path.with_suffix(".json"))


def remove_unused(folder: Path, kept: Collection[str]) -> None:
    """Remove the least recently used plans beyond `MAX_PLANS`, such as those of an old JetPack.

    `kept`: keys that stay. Another process may do the same. Raises OSError.
    """
    uses: list[tuple[int, Path]] = []
    for record in folder.glob("*.json"):
        with suppress(FileNotFoundError):
            uses.append((record.stat().st_mtime_ns, record))
    for _, record in sorted(uses, reverse=True)[MAX_PLANS:]:
        if record.stem not in kept:
            for suffix in (".json", ".plan", ".log"):
                record.with_suffix(suffix).unlink(missing_ok=True)


def timing_cache(folder: Path, board: Board) -> Path:
    """Return the file with TensorRT's timings on a board as it is."""
    return folder / f"timing-{_board_digest(board).hexdigest()[:16]}"


def digest(path: Path) -> str:
    """Return the SHA-256 of a file. Raises OSError."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _key(engine: Engine, implementation: TensorRT, form: Form, board: Board) -> str:
    """Return the digest of the board and of all that the plan is made from."""
    total = _board_digest(board)
    settings = (FORMAT, implementation.inputs, implementation.outputs, implementation.ranges)
    total.update(msgspec.json.encode(settings, order="deterministic"))
    total.update(msgspec.json.encode((form, implementation.half_nodes), order="deterministic"))
    total.update(engine.entry(form.model).tobytes())
    for weight in form.weights:
        total.update(engine.entry(weight.entry).tobytes())
        if weight.scales is not None:
            total.update(engine.entry(weight.scales).tobytes())
    return total.hexdigest()[:40]


def _board_digest(board: Board) -> "hashlib._Hash":
    return hashlib.sha256(msgspec.json.encode(asdict(board), order="deterministic"))
