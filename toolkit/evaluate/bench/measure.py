"""Runs an engine repeatedly and records the times.

Latency is the time of `Session.infer` in the session's own arrays (`Session.arrays`), as a caller
sees it: copies to and from the GPU, kernels and everything around them. The GPU's own times are
taken afterwards by events, in runs of their own.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from device.engine.file import Engine
from device.engine.manifest import TensorInfo
from device.runtime.executors.protocol import ExecutorName, Profiler
from device.runtime.feeds import check_feeds
from device.runtime.session import Session
from toolkit.errors import BenchError
from toolkit.evaluate.bench.distribution import (
    Distribution,
    Histogram,
    distribution,
    histogram,
)

Array = npt.NDArray[Any]

_LEAST_RUNS = 10  # however long one takes
_GPU_RUNS = 200  # of the GPU's own times
_PROFILE_RUNS = 5  # of each operation, see device.runtime.cuda.timing
_LOAD_S = 0.5  # how long the engine runs before clocks are read beside it


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How long to run, on how many streams at once, and what to run on.

    `iterations` on each stream, or None: as many as `duration_s` holds, at least 10. `shapes` by
    input decide dynamic dimensions; others are at the size that the engine was built for.
    """

    duration_s: float = 3.0
    iterations: int | None = None
    warmup_s: float = 0.2
    streams: int = 1
    shapes: Mapping[str, tuple[int, ...]] | None = None
    batch: int | None = None
    profile: bool = False
    timing_cache: Path | None = None
    executor: ExecutorName = "auto"


class GpuTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU's times of one segment, and the CPU's for starting it (enqueue)."""

    segment: str
    enqueue: Distribution
    copy_in: Distribution
    compute: Distribution
    copy_out: Distribution


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A tunable operation on the GPU, or a whole segment elsewhere.

    `tactic` counts from 0, of `tactics`; `share` is of the times of all rows.
    """

    segment: str
    nodes: tuple[str, ...]
    kernels: tuple[str, ...]
    tactic: int
    tactics: int
    time_ms: float
    share: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured; `items` is the size of the inputs' first dimension."""

    streams: int
    items: int
    inferences: int
    wall_s: float
    throughput_qps: float
    latency: Distribution
    histogram: Histogram
    gpu: tuple[GpuTimes, ...]
    layers: tuple[Layer, ...]
    segments: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]


def measure(
    engine: Engine,
    options: BenchOptions,
    inputs: Mapping[str, Array] | None = None,
    under_load: Callable[[], None] | None = None,
) -> Measured:
    """Run an engine as asked; `under_load` is called once while the engine runs.

    Without `inputs` they are random. Raises TandemError.
    """
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(
                Session(engine, timing_cache=options.timing_cache, executor=options.executor)
            )
            for _ in range(options.streams)
        ]
        first = sessions[0]
        feeds = dict(inputs) if inputs is not None else random_feeds(first, options)
        runs = [_Run(session, feeds) for session in sessions]
        for run in runs:
            run.warm_up(options.warmup_s)
        wall_s = _together(runs, options)
        latencies = [time_ms for run in runs for time_ms in run.times_ms]
        gpu = _gpu_times(engine, first)
        layers = _layers(engine, first, feeds) if options.profile else ()
        if under_load is not None:
            _load(runs[0], under_load)
        return Measured(
            streams=options.streams,
            items=_items(feeds),
            inferences=len(latencies),
            wall_s=wall_s,
            throughput_qps=len(latencies) / wall_s,
            latency=distribution(latencies),
            histogram=histogram(latencies),
            gpu=gpu,
            layers=layers,
            segments=tuple(f"{report.segment}: {report.reason}" for report in first.reports),
            shapes={name: feed.shape for name, feed in feeds.items()},
        )


def random_feeds(session: Session, options: BenchOptions) -> dict[str, Array]:
    """Return inputs: normal floats, uniform 8-bit integers, zeros for other types.

    Wider integers are often indices, for which 0 is in range. Raises BenchError: a shape names no
    input, does not fit its input, or gives a dimension two sizes.
    """
    requested: dict[str, int] = {}
    shapes = dict(options.shapes or {})
    names = [tensor.name for tensor in session.inputs]
    for name in shapes:
        if name not in names:
            raise BenchError(
                f"--shape {name}: the engine has no such input; it has {', '.join(names)}"
            )
    for tensor in session.inputs:
        _read_sizes(tensor, shapes.get(tensor.name), options.batch, requested)
    sizes = {dim.name: dim.opt for dim in session.dims} | requested
    generator = np.random.default_rng(0)
    feeds: dict[str, Array] = {}
    for tensor in session.inputs:
        # The importer names every unknown dimension of an input, so None does not occur.
        shape = [sizes[dim] if isinstance(dim, str) else dim or 1 for dim in tensor.shape]
        feeds[tensor.name] = _random(generator, shape, np.dtype(tensor.dtype))
    return feeds


def _read_sizes(
    tensor: TensorInfo,
    shape: tuple[int, ...] | None,
    batch: int | None,
    requested: dict[str, int],
) -> None:
    """Add the requested sizes of dynamic dimensions to `requested`; the session checks ranges."""
    if shape is not None:
        fits = len(shape) == len(tensor.shape) and all(
            isinstance(dim, str) or dim == size
            for dim, size in zip(tensor.shape, shape, strict=True)
        )
        if not fits:
            takes = "x".join(map(str, tensor.shape))
            raise BenchError(
                f"--shape {tensor.name}={'x'.join(map(str, shape))}: the engine takes {takes}; "
                "build it with --dim to keep a dimension dynamic"
            )
        named = zip(tensor.shape, shape, strict=True)
        for dim, size in named:
            if isinstance(dim, str):
                _ask(dim, size, tensor, requested)
    if batch is None or not tensor.shape:
        return
    first = tensor.shape[0]
    if isinstance(first, str):
        _ask(first, batch, tensor, requested)
    elif first != batch:
        raise BenchError(
            f"--batch {batch}: input {tensor.name!r} has the fixed batch {first}; build with "
            f"--shape or --dim for others"
        )


def _ask(dim: str, size: int, tensor: TensorInfo, requested: dict[str, int]) -> None:
    if requested.setdefault(dim, size) != size:
        raise BenchError(
            f"dimension {dim!r} is asked to be {requested[dim]} and, for input {tensor.name!r}, "
            f"{size}; give --shape and --batch the same size"
        )


def _random(generator: np.random.Generator, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    if dtype.kind == "f":
        return generator.standard_normal(shape, np.float32).astype(dtype)
    if dtype.itemsize == 1 and dtype.kind in "iu":
        return generator.integers(0, 256, shape).astype(dtype)
    return np.zeros(shape, dtype)


def _items(feeds: Mapping[str, Array]) -> int:
    sizes = {feed.shape[0] if feed.ndim else 1 for feed in feeds.values()}
    return sizes.pop() if len(sizes) == 1 else 1


class _Run:
    """One session that infers again and again in its own arrays, on one stream."""

    def __init__(self, session: Session, feeds: Mapping[str, Array]) -> None:
        sizes = check_feeds(feeds, session.inputs, {dim.name: dim for dim in session.dims})
        self._session = session
        self._feeds, self._outputs = session.arrays(sizes)
        for name, array in self._feeds.items():
            array[...] = feeds[name]
        session.infer(self._feeds, self._outputs)
        self.times_ms: list[float] = []
        self.error: Exception | None = None

    def once(self) -> float:
        """Infer once; returns how long it took, in milliseconds."""
        begin = time.perf_counter()
        self._session.infer(self._feeds, self._outputs)
        return (time.perf_counter() - begin) * 1000

    def warm_up(self, seconds: float) -> None:
        """Infer for some time, which is not counted."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.once()

    def count(self, options: BenchOptions, start: threading.Barrier) -> None:
        """Infer as long as asked, from when all others are ready; keeps an error."""
        try:
            start.wait()
            end = time.perf_counter() + options.duration_s
            while not self._done(options, end):
                self.times_ms.append(self.once())
        except Exception as error:  # noqa: BLE001  (raised again in the thread that started this)
            self.error = error

    def _done(self, options: BenchOptions, end: float) -> bool:
        if options.iterations is not None:
            return len(self.times_ms) >= options.iterations
        return len(self.times_ms) >= _LEAST_RUNS and time.perf_counter() >= end


def _together(runs: Sequence[_Run], options: BenchOptions) -> float:
    """Run all streams at once, a thread each; return the seconds until the last ends."""
    start = threading.Barrier(len(runs) + 1)
    threads = [threading.Thread(target=run.count, args=(options, start)) for run in runs]
    for thread in threads:
        thread.start()
    start.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    wall_s = time.perf_counter() - begin
    for run in runs:
        if run.error is not None:
            raise run.error
    return wall_s


def _load(run: _Run, under_load: Callable[[], None]) -> None:
    """Call a function while an engine runs, so that it sees the clocks under load."""
    run.warm_up(_LOAD_S)
    thread = threading.Thread(target=under_load)
    thread.start()
    while thread.is_alive():
        run.once()
    thread.join()


def _gpu_times(engine: Engine, session: Session) -> tuple[GpuTimes, ...]:
    """Time the GPU segments with events, on the data of the last inference."""
    rows = []
    for segment, executor in zip(engine.manifest.segments, session.executors, strict=True):
        if executor.profiler is not None:
            phases = executor.profiler.phases(_GPU_RUNS)
            rows.append(
                GpuTimes(
                    segment=segment.name,
                    enqueue=distribution([phase.enqueue_us / 1000 for phase in phases]),
                    copy_in=distribution([phase.copy_in_us / 1000 for phase in phases]),
                    compute=distribution([phase.compute_us / 1000 for phase in phases]),
                    copy_out=distribution([phase.copy_out_us / 1000 for phase in phases]),
                )
            )
    return tuple(rows)


def _layers(engine: Engine, session: Session, feeds: Mapping[str, Array]) -> tuple[Layer, ...]:
    """Time each operation where the executor has a profiler, else the whole segment."""
    runs = [session.segment_times_ms(feeds) for _ in range(_LEAST_RUNS)]
    rows: list[Layer] = []
    for segment, executor in zip(engine.manifest.segments, session.executors, strict=True):
        if executor.profiler is not None:
            rows += _profiled_layers(segment.name, executor.profiler)
            continue
        times_ms = [run[segment.name] for run in runs]
        rows.append(
            Layer(
                segment=segment.name,
                nodes=segment.nodes,
                kernels=(executor.description,),
                tactic=0,
                tactics=1,
                time_ms=distribution(times_ms).median_ms,
                share=0.0,
            )
        )
    total = sum(row.time_ms for row in rows) or 1.0
    return tuple(msgspec.structs.replace(row, share=row.time_ms / total) for row in rows)


def _profiled_layers(segment: str, profiler: Profiler) -> list[Layer]:
    return [
        Layer(
            segment=segment,
            nodes=layer.nodes,
            kernels=layer.kernels,
            tactic=layer.tactic,
            tactics=layer.tactics,
            time_ms=layer.time_us / 1000,
            share=0.0,
        )
        for layer in profiler.layer_times(_PROFILE_RUNS)
    ]
