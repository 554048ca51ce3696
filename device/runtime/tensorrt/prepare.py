"""An engine -> plans for the DLA of this board, each segment in a child process with limits."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np

from device.engine.file import Engine
from device.engine.manifest import Segment
from device.engine.tensorrt_manifest import WEIGHTS_FILE, Form, TensorRT
from device.errors import SessionError
from device.runtime.tensorrt.board import Board
from device.runtime.tensorrt.messages import explain
from device.runtime.tensorrt.plans import (
    FORMAT,
    Plan,
    Record,
    digest,
    find_plan,
    form_for,
    keep_plan,
    note_use,
    read_plan,
    remove_unused,
    timing_cache,
)
from device.runtime.tensorrt.releases import find_release
from device.runtime.tensorrt.request import Answer, make_request
from device.start.child import guarded
from device.start.command import module_command

Progress = Callable[[str, float], None]
"""Gets the segment's name and the seconds that its build has taken."""

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one child process: its time, and its resident memory (None: no limit)."""

    seconds: float = 1800.0
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """One DLA segment. `problem`: why it has no plan; `cached`: nothing was built now."""

    segment: str
    cached: bool
    seconds: float
    refused_layers: tuple[str, ...]
    problem: str | None


@dataclass(frozen=True, slots=True)
class Job:
    """An engine to finish on a board. `folder`: where plans are kept."""

    engine: Engine
    folder: Path
    board: Board
    limits: Limits
    on_progress: Progress


def prepare_engine(job: Job, *, again: bool = False) -> tuple[Prepared, ...]:
    """Finish every DLA segment of an engine that has no plan for this board yet.

    `again`: also those that TensorRT refused before. What ended at a limit is built again with a
    larger one, and what the system ended, always. Raises SessionError: `folder` cannot be
    written.
    """
    prepared = []
    kept: set[str] = set()
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        for segment in job.engine.manifest.segments:
            for implementation in segment.implementations:
                if isinstance(implementation, TensorRT):
                    plan = _find(job, implementation)
                    if isinstance(plan, str):
                        prepared.append(Prepared(segment.name, False, 0.0, (), plan))
                        continue
                    prepared.append(_prepare(job, segment, implementation, plan, again=again))
                    kept.add(plan.key)
                    note_use(plan)
        remove_unused(job.folder, kept)
    except OSError as error:
        raise SessionError(f"{job.folder} cannot be written: {error.strerror}") from error
    return tuple(prepared)


def _find(job: Job, implementation: TensorRT) -> Plan | str:
    """Return a segment's place in the store, or why the board can have no plan of it."""
    try:
        return find_plan(job.folder, job.engine, implementation, job.board)
    except SessionError as error:  # no TensorRT, or one without a DLA
        return str(error)


def _prepare(
    job: Job, segment: Segment, implementation: TensorRT, plan: Plan, *, again: bool
) -> Prepared:
    ready = _ready(job, segment, plan, again=again)
    return ready or _build(job, segment, implementation, plan)


def _ready(job: Job, segment: Segment, plan: Plan, *, again: bool) -> Prepared | None:
    """Return what the store says of a segment, None if it must be built."""
    record = plan.record
    if record is None:
        return None
    if record.problem is not None and (again or _may_go_well(record, job.limits)):
        return None
    if record.problem is None and read_plan(plan) is None:
        return None
    return Prepared(segment.name, True, record.seconds, record.refused_layers, record.problem)


def _may_go_well(record: Record, limits: Limits) -> bool:
    """Whether a build that failed is worth another try within these limits."""
    memory = limits.memory_bytes
    more_time = 0 < record.limit_s < limits.seconds
    more_memory = record.limit_bytes > 0 and (memory is None or memory > record.limit_bytes)
    return record.passing or more_time or more_memory


def _build(job: Job, segment: Segment, implementation: TensorRT, plan: Plan) -> Prepared:
    """Build one segment, and keep its plan or the reason why there is none."""
    release = find_release(job.board.tensorrt)
    log = plan.path.with_suffix(".log")
    begin = time.monotonic()
    with _work_folder(plan.path.parent) as work:
        log.unlink(missing_ok=True)  # of an earlier build: a child may die before it writes one
        _write_form(job.engine, form_for(implementation, job.board), work)
        request = make_request(
            implementation,
            release,
            model=str(work / "model.onnx"),
            plan=str(work / "plan"),
            log=str(log),
            cache=str(timing_cache(job.folder, job.board)),
        )
        (work / "request.json").write_bytes(msgspec.json.encode(request))
        outcome = _run(job, work, log, segment.name)
        answer = outcome.answer
        seconds = time.monotonic() - begin
        record = Record(
            format=FORMAT,
            segment=segment.name,
            board=asdict(job.board),
            sha256="" if answer.problem else digest(work / "plan"),
            seconds=seconds,
            refused_layers=answer.refused_layers,
            problem=answer.problem,
            limit_s=outcome.limit_s,
            limit_bytes=outcome.limit_bytes,
            passing=outcome.passing,
        )
        keep_plan(plan, record, None if answer.problem else work / "plan")
    return Prepared(segment.name, False, seconds, answer.refused_layers, answer.problem)


@contextmanager
def _work_folder(parent: Path) -> Iterator[Path]:
    """Yield a folder on the disk of the store, so that a plan can be moved into its place."""
    _remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=f".build-{os.getpid()}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of builds whose process was killed; they hold the weights of a segment."""
    for folder in parent.glob(".build-*-*"):
        if not Path("/proc", folder.name.split("-")[1]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _write_form(engine: Engine, form: Form, folder: Path) -> None:
    """Write a form as ONNX with its weights beside it, restored to floating point."""
    (folder / "model.onnx").write_bytes(engine.entry(form.model).tobytes())
    with (folder / WEIGHTS_FILE).open("wb") as file:
        for weight in form.weights:
            array = engine.entry(weight.entry)
            if weight.scales is not None:
                scales = engine.entry(weight.scales)
                if weight.axis is not None:
                    shape = [-1 if axis == weight.axis else 1 for axis in range(array.ndim)]
                    scales = scales.reshape(shape)
                array = array.astype(np.float32) * scales
            file.seek(weight.offset)
            file.write(np.ascontiguousarray(array, dtype=weight.dtype).tobytes())


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a build gave; the limit that ended it, or whether the system did (see `Record`)."""

    answer: Answer
    limit_s: float = 0.0
    limit_bytes: int = 0
    passing: bool = False


def _run(job: Job, work: Path, log: Path, segment: str) -> _Outcome:
    """Run the child; a child that dies, hangs or takes too much memory is a problem of its own."""
    build = module_command("device.runtime.tensorrt.build", str(work / "request.json"))
    begin = time.monotonic()
    with (
        (work / "stderr").open("wb") as errors,
        (work / "stdout").open("wb") as output,
        subprocess.Popen(
            guarded(build), stdout=output, stderr=errors, start_new_session=True
        ) as child,
    ):
        limited = _watch(job, child, begin, segment)
    if limited is not None:
        return limited
    if child.returncode != 0:
        problem = _death(child.returncode, work / "stderr", log)
        # TensorRT crashes with another signal; one that ends in order has answered.
        passing = child.returncode > 0 or child.returncode == -signal.SIGKILL
        return _Outcome(_failed(job, problem), passing=passing)
    try:
        answer = (work / "stdout").read_bytes().splitlines()[-1]
        return _Outcome(msgspec.json.decode(answer, type=Answer))
    except (ValueError, IndexError) as error:
        return _Outcome(_failed(job, f"the build gave no answer ({error})"), passing=True)


def _failed(job: Job, problem: str) -> Answer:
    return Answer(tensorrt=job.board.tensorrt, problem=problem)


def _watch(job: Job, child: subprocess.Popen[bytes], begin: float, segment: str) -> _Outcome | None:
    """Wait for the child; end it beyond a limit, and return that limit."""
    limits = job.limits
    try:
        while child.poll() is None:
            seconds = time.monotonic() - begin
            job.on_progress(segment, seconds)
            if seconds > limits.seconds:
                problem = (
                    f"the build took longer than {limits.seconds:.0f} s; give more with "
                    "`tandem-agent prepare --again --timeout-s`"
                )
                return _Outcome(_failed(job, problem), limit_s=limits.seconds)
            resident = _resident_bytes(child.pid)
            if limits.memory_bytes is not None and resident > limits.memory_bytes:
                problem = (
                    f"the build took {resident / 2**20:.0f} MiB of memory, the limit is "
                    f"{limits.memory_bytes / 2**20:.0f}; give more with "
                    "`tandem-agent prepare --again --max-memory-mb`"
                )
                return _Outcome(_failed(job, problem), limit_bytes=limits.memory_bytes)
            with suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_S)
        return None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _resident_bytes(pid: int) -> int:
    """The resident memory of a process, 0 once it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _death(status: int, errors: Path, log: Path) -> str:
    """Why the child ended without an answer."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    if status < 0:
        name = signal.Signals(-status).name
        last = f", after: {lines[-1]}" if lines else ""
        reason = f"TensorRT crashed ({name}) while it built the segment{last}"
        known = explain(lines)
        return f"{reason}; {known}" if known else reason
    text = errors.read_text(errors="replace").strip().splitlines()
    return f"the build failed: {text[-1] if text else f'exit status {status}'}"
