"""Runs a segment's kernels on an NVIDIA GPU: cubins from the engine, the driver, nothing else.

All memory is taken when the segment is loaded. The copies in, the launches and the copies out of
one set of sizes are captured into one CUDA graph: an inference launches it and waits.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from device.engine.cuda_manifest import Cuda
from device.engine.file import Engine
from device.engine.manifest import Segment
from device.errors import SessionError
from device.runtime.cuda.context import CudaGraph, Stream
from device.runtime.cuda.driver import CudaError, device_sm
from device.runtime.cuda.segment import LoadedSegment, SegmentRun
from device.runtime.cuda.tactics import fastest
from device.runtime.cuda.timing import repeated_us
from device.runtime.executors.cuda_profiler import CudaProfiler
from device.runtime.executors.protocol import (
    Array,
    Arrays,
    DeviceSegment,
    Executor,
    Profiler,
    SegmentContext,
    Shapes,
    Sizes,
    Targets,
)
from device.runtime.timing_cache import add_timings, read_timings

TAG = "cuda"  # of the implementation in the manifest
_MAX_GRAPHS = 16  # sets of sizes whose graphs are cached; the least recently used goes first


def why_not() -> str | None:
    """Return why no kernels can run here, or None if some can."""
    try:
        device_sm()
    except CudaError as error:
        return str(error)
    return None


def misfit(_: SegmentContext, implementation: Cuda) -> str | None:
    """Return why these kernels cannot run on this GPU, or None if they can."""
    sm = device_sm()
    if sm != implementation.sm:
        return (
            f"its kernels are for sm_{implementation.sm}, this GPU is sm_{sm}; "
            "build for the profile of this device"
        )
    return None


def load(context: SegmentContext, implementation: Cuda) -> Executor:
    """Load a segment; see `CudaExecutor`."""
    return CudaExecutor(
        context.engine,
        context.segment,
        implementation,
        timing_cache=context.options.timing_cache,
        zero_copy=context.options.zero_copy,
    )


@dataclass(frozen=True, slots=True)
class _Captured:
    """A run at one set of sizes, and its graph."""

    run: SegmentRun
    graph: CudaGraph


class _OnDevice(DeviceSegment):
    """The kernels of a segment: every input and output has its place in the workspace."""

    captured = True

    def __init__(
        self, gpu: LoadedSegment, ready: Callable[[Mapping[str, int]], SegmentRun]
    ) -> None:
        places = (*gpu.implementation.inputs, *gpu.implementation.outputs)
        self._gpu = gpu
        self._ready = ready
        self.largest_bytes = {place.tensor: place.bytes for place in places}

    def address(self, tensor: str) -> int:
        """Return an address in the workspace."""
        return self._gpu.address(tensor)

    def shapes(self, sizes: Sizes) -> Shapes:
        """Choose tactics and load kernels; see `DeviceSegment.shapes`."""
        run = self._ready(sizes)
        arrays = {**run.inputs, **run.outputs}
        return {name: (array.shape, array.dtype) for name, array in arrays.items()}

    def enqueue(self, sizes: Sizes, stream: Stream) -> None:
        """Enqueue every operation."""
        self._gpu.launch_all(self._ready(sizes), stream)


class CudaExecutor(Executor):
    """One segment on one GPU, with a stream and all its memory."""

    def __init__(
        self,
        engine: Engine,
        segment: Segment,
        implementation: Cuda,
        *,
        timing_cache: Path | None = None,
        zero_copy: bool | None = None,
    ) -> None:
        """Load kernels and weights, take the workspace, capture the launches.

        With `timing_cache` the fastest tactics run: those that the file lacks are timed and added
        to it. Without, the first of each. `zero_copy`: see `LoadedSegment`. Raises SessionError
        if the driver refuses any of it.
        """
        self._where = f"{engine.path}: segment {segment.name!r}"
        self._ops = implementation.works
        self._timing_cache = timing_cache
        self._dims = engine.manifest.dims
        self._closed = False
        self._captured: OrderedDict[tuple[int, ...], _Captured] = OrderedDict()
        try:
            self._gpu = LoadedSegment(engine, implementation, zero_copy)
            self._capture({dim.name: dim.opt for dim in self._dims})
        except CudaError as error:
            raise SessionError(f"{self._where} cannot be loaded: {error}") from error

    @property
    def processors(self) -> tuple[str, ...]:
        """The GPU."""
        return ("gpu",)

    @property
    def description(self) -> str:
        """The GPU and the driver's CUDA version."""
        return f"{self._gpu.facts.name}, CUDA {self._gpu.facts.cuda}"

    @property
    def tactics(self) -> tuple[int, ...]:
        """The tactic of each tunable operation at the sizes used last."""
        return self._latest.tactics

    @property
    def device(self) -> DeviceSegment:
        """The segment's kernels, on its workspace."""
        return _OnDevice(self._gpu, self._ready)

    @property
    def profiler(self) -> Profiler:
        """Times at the sizes used last."""
        return CudaProfiler(self._gpu, self._latest)

    def run(self, inputs: Arrays, outputs: Targets, sizes: Sizes) -> dict[str, Array]:
        """Launch the graph of these sizes and wait for it; see `Executor.run`."""
        self._check_open()
        try:
            self._gpu.context.activate()
            captured = self._capture(sizes)
            for name, array in inputs.items():
                if name not in self._gpu.sources and array is not captured.run.inputs[name]:
                    np.copyto(captured.run.inputs[name], array)
            captured.graph.launch()
            self._gpu.stream.wait()
        except CudaError as error:
            raise SessionError(f"{self._where} failed: {error}") from error
        results: dict[str, Array] = {}
        for name, target in outputs.items():
            output = captured.run.outputs[name]
            if name in self._gpu.device_outputs:
                results[name] = output
                continue
            if target is not None and target.shape != output.shape:
                raise SessionError(
                    f"{self._where}: output {name!r} has the shape {output.shape} at these sizes, "
                    f"the array for it {target.shape}; give none, or one of `Session.arrays`"
                )
            if target is not None and target is not output:
                np.copyto(target, output)
            results[name] = output.copy() if target is None else target
        return results

    @property
    def can_stay_on_gpu(self) -> bool:
        """True: inputs and outputs have their places in the workspace."""
        return True

    def stay_on_gpu(self, outputs: frozenset[str], sources: Mapping[str, int]) -> None:
        """Capture the launches again, with other copies; see `Executor.stay_on_gpu`."""
        self._check_open()
        self._gpu.device_outputs, self._gpu.sources = outputs, dict(sources)
        try:
            self._gpu.context.activate()
            for captured in self._captured.values():
                captured.graph.close()
            self._captured.clear()
            self._capture({dim.name: dim.opt for dim in self._dims})
        except CudaError as error:
            raise SessionError(f"{self._where} cannot be loaded: {error}") from error

    def arrays(self, sizes: Sizes) -> Mapping[str, Array]:
        """Return page-locked arrays of the inputs and outputs; see `Executor.arrays`.

        Raises SessionError if the driver fails.
        """
        self._check_open()
        try:
            self._gpu.context.activate()
            run = self._capture(sizes).run
        except CudaError as error:
            raise SessionError(f"{self._where} failed: {error}") from error
        return {**run.inputs, **run.outputs}

    def close(self) -> None:
        """Release the GPU's memory, the stream and the graphs."""
        self._captured.clear()
        self._closed = True
        self._gpu.close()

    @property
    def _latest(self) -> SegmentRun:
        self._check_open()
        return next(reversed(self._captured.values())).run

    def _check_open(self) -> None:
        if self._closed:
            raise SessionError(f"{self._where} is closed; open a new session")

    def _ready(self, sizes: Sizes) -> SegmentRun:
        """Return the run at these sizes, with its tactics chosen and its kernels loaded."""
        self._check_open()
        return self._capture(sizes).run

    def _capture(self, sizes: Sizes) -> _Captured:
        """Return the run and the graph of these sizes, captured now unless they are cached."""
        point = tuple(sizes[dim.name] for dim in self._dims)
        captured = self._captured.get(point)
        if captured is not None:
            if self._dims:
                self._captured.move_to_end(point)
            return captured
        problem = self._gpu.problem_at(point)
        if problem is not None:
            raise SessionError(f"{self._where} cannot run at these sizes: {problem}")
        run = self._gpu.prepare(point, self._choose(point))

        def enqueue() -> None:
            self._gpu.copy_in(run)
            self._gpu.launch_all(run)
            self._gpu.copy_out(run)

        captured = _Captured(run, self._gpu.stream.capture(enqueue))
        self._captured[point] = captured
        if len(self._captured) > _MAX_GRAPHS:
            self._captured.popitem(last=False)[1].graph.close()
        return captured

    def _choose(self, point: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tactic of each operation, timing those that the cache lacks."""
        if self._timing_cache is None:
            return (0,) * len(self._ops)
        gpu = self._gpu
        keys = [[gpu.tactic_key(tactic, point) for tactic in op.tactics] for op in self._ops]
        times_us = dict(read_timings(self._timing_cache).times_us(gpu.facts))
        measured_us = time_tactics(gpu, point, times_us)
        if measured_us:
            add_timings(self._timing_cache, gpu.facts, measured_us)
        return tuple(fastest(op_keys, times_us) for op_keys in keys)


def time_tactics(
    gpu: LoadedSegment,
    point: tuple[int, ...],
    times_us: dict[str, float],
    only: Collection[str] | None = None,
) -> dict[str, float]:
    """Time the tactics of operations that have several and are not in `times_us`, which gets their
    times, too; `only`: these keys alone. Returns what was timed. Raises CudaError."""
    measured_us: dict[str, float] = {}
    for op in gpu.implementation.works:
        op_keys = [gpu.tactic_key(tactic, point) for tactic in op.tactics]
        for tactic, key in zip(op.tactics, op_keys, strict=True):
            is_timed = len(op_keys) > 1 and (only is None or key in only)
            if is_timed and key not in times_us:
                time_us = repeated_us(gpu.stream, partial(gpu.launch, tactic, point))
                times_us[key] = measured_us[key] = time_us
        # The next operation is timed on this one's result.
        gpu.launch(op.tactics[fastest(op_keys, times_us)], point)
    gpu.stream.wait()
    return measured_us
