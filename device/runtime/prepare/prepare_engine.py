"""An engine -> plans of TensorRT for this board, each segment in a child process with limits.

A segment on the GPU that has kernels, too, is then timed with both; sessions take the faster.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from device.engine.cuda_manifest import Cuda
from device.engine.file import Engine
from device.engine.manifest import Segment
from device.engine.tensorrt_manifest import WEIGHTS_FILE, Form, TensorRT, TensorRTGpu
from device.errors import SessionError
from device.files import FULL_DISK, disk_problem
from device.runtime.cuda.driver import CudaError, device_sm
from device.runtime.prepare.children import (
    BUILD,
    TIMING,
    Ended,
    Limits,
    Watch,
    run_child,
    total_limit_problem,
)
from device.runtime.tensorrt.board import Board
from device.runtime.tensorrt.plans import (
    FORMAT,
    Comparison,
    Plan,
    Record,
    digest,
    find_plan,
    form_for,
    form_name,
    keep_plan,
    kernels_digest,
    note_use,
    read_plan,
    remove_unused,
    target_for,
    timing_cache,
)
from device.runtime.tensorrt.request import Answer, Times, TimesRequest, make_request

Progress = Callable[[str, float], None]
"""Gets the segment's name and the seconds that its build has taken."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """One segment. `problem`: why it has no plan, or one that cannot be timed.

    `cached`: nothing was built or timed now. `tensorrt_us`, `cuda_us`: the medians of a segment on
    the GPU that has kernels, too; `kernels_run`: they are faster than its plan. `fallback`: it was
    built with GPU fallback, and every layer is on the DLA.
    """

    segment: str
    cached: bool
    seconds: float
    refused_layers: tuple[str, ...]
    problem: str | None
    tensorrt_us: float | None = None
    cuda_us: float | None = None
    kernels_run: bool = False
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """An engine to finish on a board. `folder`: where plans are kept; `begin_s`: when the first of
    several began, on the clock of `time.monotonic()`."""

    engine: Engine
    folder: Path
    board: Board
    limits: Limits
    on_progress: Progress
    begin_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment to finish, as one of its implementations, with its place in the store.

    `kernels`: those that the plan is timed against. `end_s`: when the time of all is over.
    """

    segment: Segment
    implementation: TensorRT | TensorRTGpu
    plan: Plan
    kernels: Cuda | None
    end_s: float | None


def prepare_engine(job: Job, *, again: bool = False) -> tuple[Prepared, ...]:
    """Finish every segment of an engine for TensorRT that has no plan for this board yet.

    `again`: also those that TensorRT refused before. What ended at a limit is built again with a
    larger one, and what the system ended, always. Raises SessionError: `folder` cannot be
    written.
    """
    total_s = job.limits.total_seconds
    begin_s = time.monotonic() if job.begin_s is None else job.begin_s
    end_s = None if total_s is None else begin_s + total_s
    prepared = []
    used: set[str] = set()
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        for segment in job.engine.manifest.segments:
            for implementation in segment.implementations:
                if not isinstance(implementation, (TensorRT, TensorRTGpu)):
                    continue
                plan = _find(job, segment, implementation)
                if isinstance(plan, str):
                    prepared.append(Prepared(segment.name, False, 0.0, (), plan))
                    continue
                kernels = _kernels(segment, implementation)
                part = _Part(segment, implementation, plan, kernels, end_s)
                prepared.append(_prepare_on_disk(job, part, again=again))
                used.add(plan.key)
                if plan.path.with_suffix(".json").exists():
                    note_use(plan)
        remove_unused(job.folder, used)
    except OSError as error:
        raise SessionError(f"{job.folder} cannot be written: {error.strerror}") from error
    return tuple(prepared)


def _find(job: Job, segment: Segment, implementation: TensorRT | TensorRTGpu) -> Plan | str:
    """Return a segment's place in the store, or why the board can have no plan of it."""
    try:
        return find_plan(job.folder, job.engine, segment, implementation, job.board)
    except SessionError as error:  # no TensorRT, or one without a DLA
        return str(error)


def _kernels(segment: Segment, implementation: TensorRT | TensorRTGpu) -> Cuda | None:
    """Return the kernels that run in the place of a plan for the GPU, None where none can."""
    if isinstance(implementation, TensorRT):
        return None
    kernels = next((i for i in segment.implementations if isinstance(i, Cuda)), None)
    try:
        return kernels if kernels is not None and device_sm() == kernels.sm else None
    except CudaError:
        return None


def _prepare_on_disk(job: Job, part: _Part, *, again: bool) -> Prepared:
    """Prepare a segment; a full disk is its problem alone, and nothing is kept of it."""
    try:
        return _prepare(job, part, again=again)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        problem = disk_problem(part.plan.path, error)
        return Prepared(part.segment.name, False, 0.0, (), problem)


def _prepare(job: Job, part: _Part, *, again: bool) -> Prepared:
    """Return what the store says of a segment; build and time what it lacks."""
    begin_s = time.monotonic()
    record = _usable(job, part.plan, again=again)
    compared = _compared(job, part, record)
    if record is not None and (record.problem is not None or not _is_missing(part, compared)):
        return _prepared(part, record, compared, seconds=record.seconds, cached=True)
    if part.end_s is not None and begin_s > part.end_s:
        return Prepared(part.segment.name, False, 0.0, (), total_limit_problem(job.limits))
    with _work_folder(part.plan.path.parent) as work:
        if record is None:
            record = _build(job, part, work)
            compared = None
        if record.problem is None and _is_missing(part, compared):
            record = _time(job, part, record, work)
            compared = record.compared
    return _prepared(part, record, compared, seconds=time.monotonic() - begin_s, cached=False)


def _prepared(
    part: _Part, record: Record, compared: Comparison | None, *, seconds: float, cached: bool
) -> Prepared:
    return Prepared(
        segment=part.segment.name,
        cached=cached,
        seconds=seconds,
        refused_layers=record.refused_layers,
        problem=record.problem,
        tensorrt_us=None if compared is None else compared.tensorrt_us,
        cuda_us=None if compared is None else compared.cuda_us,
        kernels_run=compared is not None and not compared.tensorrt_is_faster,
        fallback=record.fallback,
    )


def _usable(job: Job, plan: Plan, *, again: bool) -> Record | None:
    """Return the record of a segment in the store, None if it must be built."""
    record = plan.record
    if record is None:
        return None
    if record.problem is not None and (again or _may_go_well(record, job.limits)):
        return None
    if record.problem is None and read_plan(plan) is None:
        return None
    return record


def _may_go_well(record: Record, limits: Limits) -> bool:
    """Whether a build that failed is worth another try within these limits."""
    memory = limits.memory_bytes
    more_time = 0 < record.limit_s < limits.seconds
    more_memory = record.limit_bytes > 0 and (memory is None or memory > record.limit_bytes)
    return record.passing or more_time or more_memory


def _is_missing(part: _Part, compared: Comparison | None) -> bool:
    return part.kernels is not None and compared is None


def _compared(job: Job, part: _Part, record: Record | None) -> Comparison | None:
    """Return the times of a plan and of these kernels, None where they were not taken."""
    if record is None or record.compared is None or part.kernels is None:
        return None
    same = record.compared.kernels == kernels_digest(job.engine, part.kernels)
    return record.compared if same else None


def _build(job: Job, part: _Part, work: Path) -> Record:
    """Build one segment, and keep its plan or the reason why there is none."""
    plan, implementation = part.plan, part.implementation
    log = plan.path.with_suffix(".log")
    begin_s = time.monotonic()
    log.unlink(missing_ok=True)  # of an earlier build: a child may die before it writes one
    _write_form(job.engine, form_for(implementation, job.board), work)
    request = make_request(
        implementation,
        form_name(implementation, job.board.tensorrt),
        target_for(job.engine, part.segment, implementation),
        model=str(work / "model.onnx"),
        plan=str(work / "plan"),
        log=str(log),
        cache=str(timing_cache(job.folder, job.board)),
    )
    path = work / "request.json"
    path.write_bytes(msgspec.json.encode(request))
    ended = run_child(BUILD, path, log, _watch(job, part))
    answer = _answer(job, ended, work / "plan")
    record = Record(
        format=FORMAT,
        segment=part.segment.name,
        board=asdict(job.board),
        sha256=answer.plan_sha256,
        seconds=time.monotonic() - begin_s,
        refused_layers=answer.refused_layers,
        problem=answer.problem,
        limit_s=ended.limit_s,
        limit_bytes=ended.limit_bytes,
        passing=answer.passing,
        fallback=answer.fallback,
    )
    keep_plan(plan, record, None if answer.problem else work / "plan")
    if ended.late:
        with suppress(OSError), log.open("a") as file:
            file.write(f"[W] after the answer was complete: {ended.late}\n")
    return record


def _time(job: Job, part: _Part, record: Record, work: Path) -> Record:
    """Time a plan against the kernels of its segment, and keep both figures."""
    assert part.kernels is not None
    log = part.plan.path.with_suffix(".log")
    request = TimesRequest(
        engine=str(job.engine.path), segment=part.segment.name, plans=str(job.folder)
    )
    path = work / "times.json"
    path.write_bytes(msgspec.json.encode(request))
    ended = run_child(TIMING, path, log, _watch(job, part))
    try:
        times = Times() if ended.problem else msgspec.json.decode(ended.answer, type=Times)
    except ValueError as error:
        times = Times(problem=f"the timing gave no answer ({error})")
    problem = ended.problem or times.problem
    if not problem:
        compared = Comparison(
            kernels=kernels_digest(job.engine, part.kernels),
            tensorrt_us=times.tensorrt_us,
            cuda_us=times.cuda_us,
        )
        record = msgspec.structs.replace(record, compared=compared)
        keep_plan(part.plan, record, None)
        return record
    failed = msgspec.structs.replace(
        record,
        problem=f"its plan was not timed against its kernels: {problem}",
        limit_s=ended.limit_s,
        limit_bytes=ended.limit_bytes,
    )
    if ended.problem and not ended.passing:  # else the plan stays, and is timed another time
        keep_plan(part.plan, failed, None)
    return failed


def _watch(job: Job, part: _Part) -> Watch:
    return Watch(job.limits, part.end_s, partial(job.on_progress, part.segment.name))


def _answer(job: Job, ended: Ended, plan: Path) -> Answer:
    """Return what a build answered, or how it ended in the place of an answer.

    A plan that is not whole, such as one of a child that died as it wrote, is none.
    """
    if ended.problem:
        return Answer(tensorrt=job.board.tensorrt, problem=ended.problem, passing=ended.passing)
    answer = msgspec.json.decode(ended.answer, type=Answer)
    if answer.problem is None and (not plan.exists() or digest(plan) != answer.plan_sha256):
        problem = "the build's plan is not whole; run `tandem-agent prepare` again"
        return msgspec.structs.replace(answer, problem=problem, passing=True, plan_sha256="")
    return answer


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
