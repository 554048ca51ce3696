"""Runs an engine: picks the best implementation of each segment and passes tensors between them.

All tensors between segments live in one arena, laid out by the engine's memory plan: segments read
and write them there, nothing is copied on the way.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from device.engine.cuda_manifest import Cuda
from device.engine.file import Engine, PathLike, open_engine
from device.engine.manifest import (
    Buffer,
    DimRange,
    Portable,
    Processor,
    Segment,
    TensorInfo,
)
from device.errors import SessionError
from device.runtime.arrays import array_for, fresh_array, take_arena
from device.runtime.executors import cuda, emulated, portable
from device.runtime.executors.emulated import EmulatedExecutor, Emulation
from device.runtime.feeds import check_feeds, check_targets

Array = npt.NDArray[Any]


class Executor(Protocol):
    """One segment, loaded and ready to run."""

    description: str

    def run(
        self,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array | None],
        sizes: Mapping[str, int],
    ) -> dict[str, Array]:
        """Run on contiguous arrays; write each output into its array, or a new one for None.

        `sizes` are those of the engine's dynamic dimensions.
        """
        ...


def _fits(_: object) -> str | None:
    """Say of any implementation that a machine for its kind can run it."""
    return None


@dataclass(frozen=True, slots=True)
class ExecutorKind:
    """A way to run segments: the tag of its implementations, whether it works here, its loader.

    `misfit` says why one implementation of that tag cannot run here, though others could.
    """

    tag: str
    why_not: Callable[[], str | None]
    # Takes the implementation of its tag: Any, as each kind has a class of its own.
    load: Callable[[Engine, Segment, Any, Mapping[str, TensorInfo], "LoadOptions"], Executor]
    misfit: Callable[[Any], str | None] = _fits


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How segments are loaded: the CPU threads of each, and the file with times of GPU tactics."""

    threads: int | None = None
    timing_cache: Path | None = None


def _load_cuda(
    engine: Engine,
    segment: Segment,
    implementation: Cuda,
    tensors: Mapping[str, TensorInfo],
    options: LoadOptions,
) -> Executor:
    return cuda.CudaExecutor(
        engine,
        segment,
        implementation,
        tensors,
        options.threads,
        timing_cache=options.timing_cache,
    )


def _load_portable(
    engine: Engine,
    segment: Segment,
    implementation: Portable,
    tensors: Mapping[str, TensorInfo],
    options: LoadOptions,
) -> Executor:
    return portable.PortableExecutor(engine, segment, implementation, tensors, options.threads)


# Every tag, best first, and those that this version can run.
PREFERENCE: tuple[str, ...] = ("tensorrt", "cuda", "portable")
EXECUTORS: tuple[ExecutorKind, ...] = (
    ExecutorKind("cuda", cuda.why_not, _load_cuda, cuda.misfit),
    ExecutorKind("portable", portable.why_not, _load_portable),
)


# What stands in for the DLA: the implementation that a segment carries, or its arithmetic in
# software (device/runtime/dla), through every stage or on the proven short way; and how it holds
# scales.
Dla = Literal["portable", "exact", "fast"]
Scales = Literal["hardware", "ideal"]


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """How one segment runs: which implementation, and why not a better one."""

    segment: str
    processor: Processor
    implementation: str
    reason: str


class Session:
    """An engine, ready to run. One call runs at a time; others wait."""

    def __init__(
        self,
        engine: Engine,
        *,
        profile: str | None = None,
        threads: int | None = None,
        dla: Dla = "portable",
        scales: Scales = "hardware",
        timing_cache: Path | None = None,
    ) -> None:
        """Load every segment and take the arena's memory.

        `profile` is the name of this device's profile; `threads` bounds the CPU threads of each
        segment. `dla` "exact" or "fast" runs DLA segments with the DLA's arithmetic in software,
        its scales of 16 bits (`scales` "hardware") or exact. `timing_cache` is a file with times of
        GPU tactics: the fastest run, and those that it lacks are timed and added to it, once. The
        engine stays the caller's to close, also before the session. Raises SessionError if the
        engine is for another profile or cannot be run here.
        """
        manifest = engine.manifest
        if profile is not None and profile != manifest.profile:
            raise SessionError(
                f"engine {engine.path} is for {manifest.profile}, this device is {profile}; "
                f"build with --profile {profile}"
            )
        if threads is not None and threads < 1:
            raise SessionError(f"the session was given {threads} threads; give at least 1")
        self._tensors = {tensor.name: tensor for tensor in manifest.tensors}
        self._outputs = manifest.outputs
        self._ranges = {dim.name: dim for dim in manifest.dims}
        self._buffers = {buffer.tensor: buffer for buffer in manifest.memory.buffers}
        self._arena = take_arena(manifest.memory.arena_bytes, str(engine.path))
        self._lock = threading.Lock()
        emulation = None if dla == "portable" else Emulation(dla, scales)
        loaded = [
            _load(engine, segment, self._tensors, LoadOptions(threads, timing_cache))
            if emulation is None or not segment.processor.startswith("dla")
            else _emulate(engine, segment, emulation, threads)
            for segment in manifest.segments
        ]
        self._steps = tuple(
            (segment, executor)
            for segment, (executor, _) in zip(manifest.segments, loaded, strict=True)
        )
        self._closed = False
        self.reports: tuple[SegmentReport, ...] = tuple(report for _, report in loaded)
        self.inputs: tuple[TensorInfo, ...] = tuple(self._tensors[one] for one in manifest.inputs)
        self.outputs: tuple[TensorInfo, ...] = tuple(self._tensors[one] for one in manifest.outputs)
        self.dims: tuple[DimRange, ...] = manifest.dims

    @property
    def executors(self) -> tuple[Executor, ...]:
        """What runs the segments, in their order; nothing once the session is closed."""
        return tuple(executor for _, executor in self._steps)

    def infer(
        self, feeds: Mapping[str, Array], outputs: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Run the engine once and return its outputs by name.

        The feeds have the dtypes and shapes of `inputs`, with each dynamic dimension inside its
        range in `dims`. Outputs are written into the arrays of `outputs`, C order, and returned;
        those not given are new arrays, the caller's to keep. Raises SessionError if an array does
        not fit or a segment fails.
        """
        values = self._run(feeds, outputs or {}, _ignore)
        return {name: values[name] for name in self._outputs}

    def arrays(
        self, sizes: Mapping[str, int] | None = None
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return arrays for feeds and for outputs, to fill and to pass to `infer` again and again.

        On a GPU they are page-locked, and nothing is copied on the CPU. `sizes` are those of the
        dynamic dimensions, or those that the engine was built for. Every inference overwrites the
        outputs; arrays for other sizes may lie in the same memory. All stay valid after the
        session. Outputs whose size is known only when run are left out. Raises SessionError: sizes
        that are not taken, or a session that is closed.
        """
        known = {dim.name: dim.opt for dim in self.dims}
        unknown = [name for name in sizes or {} if name not in known]
        if unknown:
            raise SessionError(
                f"the engine has no dynamic dimension {unknown[0]!r}; it has "
                f"{', '.join(map(repr, known)) or 'none'}"
            )
        known |= sizes or {}
        inputs, outputs = (
            {one.name: array_for(one, known) for one in tensors if None not in one.shape}
            for tensors in (self.inputs, self.outputs)
        )
        check_feeds(inputs, self.inputs, self._ranges)
        with self._lock:
            if self._closed:
                raise SessionError("the session is closed; open a new one")
            for _, executor in self._steps:
                if isinstance(executor, cuda.CudaExecutor):
                    found = executor.arrays(known)
                    inputs.update({name: found[name] for name in inputs if name in found})
                    outputs.update({name: found[name] for name in self._outputs if name in found})
        return inputs, outputs

    def segment_times_ms(self, feeds: Mapping[str, Array]) -> dict[str, float]:
        """Run the engine once and return the time of each segment, in milliseconds."""
        times: dict[str, float] = {}

        def watch(segment: str, seconds: float) -> None:
            times[segment] = seconds * 1000

        self._run(feeds, {}, watch)
        return times

    def _run(
        self,
        feeds: Mapping[str, Array],
        targets: Mapping[str, Array],
        watch: Callable[[str, float], None],
    ) -> dict[str, Array]:
        """Return all tensors at the borders of segments; `watch` hears the seconds of each."""
        sizes = check_feeds(feeds, self.inputs, self._ranges)
        given = check_targets(targets, self.outputs, sizes)
        values = {name: np.require(feeds[name], requirements=("C", "A")) for name in feeds}
        with self._lock:
            if self._closed:
                raise SessionError("the session is closed; open a new one")
            for segment, executor in self._steps:
                begin = time.perf_counter()
                made = executor.run(
                    {name: values[name] for name in segment.inputs},
                    {
                        name: given[name] if name in given else self._place(name, sizes)
                        for name in segment.outputs
                    },
                    sizes,
                )
                values.update(made)
                watch(segment.name, time.perf_counter() - begin)
        return values

    def _place(self, name: str, sizes: Mapping[str, int]) -> Array | None:
        """Return where an output of a segment goes, None if its size is not known beforehand."""
        tensor = self._tensors[name]
        shape: list[int] = []
        for dim in tensor.shape:
            if dim is None:
                return None
            shape.append(sizes[dim] if isinstance(dim, str) else dim)
        if name in self._outputs:
            # Straight into an array of the caller's: in the arena the next run would overwrite it.
            return fresh_array(name, shape, tensor.dtype)
        buffer = self._buffers.get(name)
        return None if buffer is None else self._view(buffer, tensor.dtype, shape)

    def _view(self, buffer: Buffer, dtype: str, shape: list[int]) -> Array:
        view: Array = np.ndarray(shape, dtype, self._arena, buffer.offset)
        return view

    def close(self) -> None:
        """Let go of the segments and the arena; arrays handed out stay valid."""
        with self._lock:
            self._closed = True
            self._steps = ()
            self._arena = np.empty(0, np.uint8)

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_session(
    path: PathLike,
    *,
    profile: str | None = None,
    threads: int | None = None,
    dla: Dla = "portable",
    scales: Scales = "hardware",
    timing_cache: Path | None = None,
) -> Session:
    """Open an engine file and run it; see `open_engine` and `Session` for what they raise."""
    with open_engine(path) as engine:
        return Session(
            engine,
            profile=profile,
            threads=threads,
            dla=dla,
            scales=scales,
            timing_cache=timing_cache,
        )


def _emulate(
    engine: Engine, segment: Segment, emulation: Emulation, threads: int | None
) -> tuple[Executor, SegmentReport]:
    """Load a DLA segment with its arithmetic in software, as asked."""
    graph = next((one for one in segment.implementations if isinstance(one, Portable)), None)
    problem = emulated.why_not() if graph else "the engine carries no portable form of it"
    if graph is None or problem is not None:
        raise SessionError(
            f"{engine.path}: segment {segment.name!r} cannot be emulated here: {problem}"
        )
    executor = EmulatedExecutor(engine, segment, graph, emulation, threads)
    reason = f"emulated ({executor.description}): asked for; silicon may differ"
    return executor, SegmentReport(segment.name, segment.processor, "emulated", reason)


def _load(
    engine: Engine, segment: Segment, tensors: Mapping[str, TensorInfo], options: LoadOptions
) -> tuple[Executor, SegmentReport]:
    """Load the best implementation of a segment that this machine can run."""
    carried = {str(one.__struct_config__.tag): one for one in segment.implementations}
    kinds = {kind.tag: kind for kind in EXECUTORS}
    refused: list[str] = []
    for place, tag in enumerate(PREFERENCE):
        if tag not in carried:
            continue
        problem: str | None = "this version of Tandem cannot run it"
        if tag in kinds:
            problem = kinds[tag].why_not() or kinds[tag].misfit(carried[tag])
        if problem is not None:
            refused.append(f"{tag}: {problem}")
            continue
        executor = kinds[tag].load(engine, segment, carried[tag], tensors, options)
        absent = [better for better in PREFERENCE[:place] if better not in carried]
        reasons = list(refused)
        if absent:
            reasons.append(f"the engine carries no {' or '.join(absent)} implementation of it")
        why = "; ".join(reasons) or "the best there is"
        reason = f"{tag} ({executor.description}): {why}"
        return executor, SegmentReport(segment.name, segment.processor, tag, reason)
    raise SessionError(
        f"{engine.path}: segment {segment.name!r} cannot be run here: "
        + ("; ".join(refused) or "it carries no implementation that is known")
    )


def _ignore(segment: str, seconds: float) -> None:
    """Hear of no times."""
