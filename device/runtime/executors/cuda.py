"""Runs a segment's kernels on an NVIDIA GPU: cubins from the engine, the driver, nothing else.

All memory is taken when the segment is loaded. The launches for one set of sizes, with the copies
in and out, are recorded into one CUDA graph: an inference starts it and waits. Weights and kernels
are shared by all sessions of the process on the same engine file; each session has its own stream,
workspace and graphs.
"""

import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from device.engine.cuda_check import problems_at
from device.engine.cuda_manifest import Cuda, Launch, Place, Tactic, Work
from device.engine.cuda_sizes import Amount, evaluate
from device.engine.file import Engine
from device.engine.manifest import Segment, TensorInfo
from device.errors import SessionError
from device.runtime.cuda.context import Bytes, Context, Graph
from device.runtime.cuda.driver import CudaError, device_sm
from device.runtime.cuda.launcher import Launcher
from device.runtime.cuda.program import borrow_program, give_back_program
from device.runtime.cuda.tactics import fastest, tactic_key
from device.runtime.cuda.timing import repeated_us
from device.runtime.timing_cache import add_timings, read_timings

Array = npt.NDArray[Any]

_KEPT_GRAPHS = 16  # sets of sizes whose graphs stay; the one used longest ago goes first
_HOST_ALIGNMENT = 64  # bytes; a cache line of the CPU


def why_not() -> str | None:
    """Return why no kernels can run here, or None if some can."""
    try:
        device_sm()
    except CudaError as error:
        return str(error)
    return None


def misfit(implementation: Cuda) -> str | None:
    """Return why these kernels cannot run on this GPU, or None if they can."""
    sm = device_sm()
    if sm != implementation.sm:
        return (
            f"its kernels are for sm_{implementation.sm}, this GPU is sm_{sm}; "
            "build for the profile of this device"
        )
    return None


@dataclass(frozen=True, slots=True)
class Phases:
    """The GPU's time for the parts of an inference, in microseconds.

    `enqueue_us` is the CPU's time to put the kernels into the stream, as one graph.
    """

    enqueue_us: float
    copy_in_us: float
    compute_us: float
    copy_out_us: float


@dataclass(frozen=True, slots=True)
class _Border:
    """A tensor that crosses between CPU and GPU: page-locked bytes here, their place there.

    `shape` may hold formulas.
    """

    dtype: str
    shape: Sequence[Amount]
    host: Bytes
    address: int

    def array(self, point: Sequence[int]) -> Array:
        """The bytes here as an array, at these sizes of the dynamic dimensions."""
        shape = [evaluate(size, point) for size in self.shape]
        view: Array = np.ndarray(shape, np.dtype(self.dtype), self.host)
        return view


@dataclass(frozen=True, slots=True)
class _Binding:
    """The segment for one set of sizes: arrays that the graph copies from and to, and the graph.

    `point`: the sizes; `tactics`: the chosen one of each piece of work.
    """

    point: tuple[int, ...]
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    tactics: tuple[int, ...]
    graph: Graph


class CudaExecutor:
    """One segment on one GPU, with a stream and all its memory.

    The memory goes back with the last reference to the executor.
    """

    def __init__(
        self,
        engine: Engine,
        segment: Segment,
        implementation: Cuda,
        tensors: Mapping[str, TensorInfo],
        threads: int | None,
        *,
        timing_cache: Path | None = None,
    ) -> None:
        """Load kernels and weights, take the workspace, record the launches.

        With `timing_cache` the fastest tactics run: those that the file lacks are timed and added
        to it. Without, the first of each. `tensors` and `threads` are for other executors. Raises
        SessionError if the driver refuses any of it.
        """
        self._where = f"{engine.path}: segment {segment.name!r}"
        self._implementation = implementation
        self._timing_cache = timing_cache
        self._dims = engine.manifest.dims
        try:
            self._context = Context()
        except CudaError as error:
            raise SessionError(f"{self._where} cannot be loaded: {error}") from error
        weakref.finalize(self, self._context.close)
        try:
            self._load(engine)
        except CudaError as error:
            raise SessionError(f"{self._where} cannot be loaded: {error}") from error

    def _load(self, engine: Engine) -> None:
        context, implementation = self._context, self._implementation
        self._facts = context.facts
        self.description = f"{self._facts.name}, CUDA {self._facts.cuda}"
        key, self._program = borrow_program(engine, implementation)
        context.on_close(partial(give_back_program, key))
        self._workspace = context.allocate(implementation.workspace_bytes)
        context.fill(self._workspace, 0, implementation.workspace_bytes)
        self._tensors = {one.name: one for one in engine.manifest.tensors}
        places = (*implementation.inputs, *implementation.outputs)
        self._borders = self._take_borders(places, self._tensors)
        self._stream = context.stream()
        self._launcher = Launcher(implementation, self._program, self._workspace, self._stream)
        self._bindings: OrderedDict[tuple[int, ...], _Binding] = OrderedDict()
        self._bind({dim.name: dim.opt for dim in self._dims})

    def run(
        self,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array | None],
        sizes: Mapping[str, int],
    ) -> dict[str, Array]:
        """Run the segment on contiguous arrays; an output without an array gets a new one.

        `sizes` are those of the engine's dynamic dimensions. Raises SessionError if the driver
        fails.
        """
        try:
            self._context.activate()
            binding = self._bind(sizes)
            for name, array in inputs.items():
                if array is not binding.inputs[name]:
                    np.copyto(binding.inputs[name], array)
            binding.graph.launch()
            self._stream.wait()
        except CudaError as error:
            raise SessionError(f"{self._where} failed: {error}") from error
        made: dict[str, Array] = {}
        for name, target in outputs.items():
            found = binding.outputs[name]
            if target is not None and target.shape != found.shape:
                raise SessionError(
                    f"{self._where}: output {name!r} has the shape {found.shape} at these sizes, "
                    f"the array for it {target.shape}; give none, or one of `Session.arrays`"
                )
            if target is not None and target is not found:
                np.copyto(target, found)
            made[name] = found.copy() if target is None else target
        return made

    def arrays(self, sizes: Mapping[str, int]) -> Mapping[str, Array]:
        """Return page-locked arrays of the inputs and outputs, which `run` does not copy.

        They look into the same memory at each call, whatever the sizes, and stay valid after the
        executor. Raises SessionError if the driver fails.
        """
        try:
            self._context.activate()
            binding = self._bind(sizes)
        except CudaError as error:
            raise SessionError(f"{self._where} failed: {error}") from error
        return {**binding.inputs, **binding.outputs}

    @property
    def tactics(self) -> tuple[int, ...]:
        """Which tactic each piece of work runs, at the sizes used last."""
        return self._latest.tactics

    def time_us(self, runs: int) -> list[float]:
        """Return the GPU's time for the segment's kernels alone, run by run, in microseconds.

        It runs at the sizes used last, on what the last inference left in memory.
        """
        self._context.activate()
        graph = self._stream.capture(self._start_all)
        try:
            return [self._stream.time_us(graph.launch) for _ in range(runs)]
        finally:
            graph.close()

    def time_phases_us(self, runs: int) -> list[Phases]:
        """Return the GPU's time for copies in, kernels and copies out, run by run."""
        self._context.activate()
        graph = self._stream.capture(self._start_all)
        latest = self._latest
        enqueued_us: list[float] = []

        def launch() -> None:
            begin = time.perf_counter()
            graph.launch()
            enqueued_us.append((time.perf_counter() - begin) * 1e6)

        parts = (
            partial(self._copy_in, latest.inputs),
            launch,
            partial(self._copy_out, latest.outputs),
        )
        try:
            laps = [self._stream.laps_us(parts) for _ in range(runs)]
        finally:
            graph.close()
        return [Phases(us, *lap) for us, lap in zip(enqueued_us, laps, strict=True)]

    def functions(self, tactic: Tactic) -> tuple[str, ...]:
        """Return the names of the kernels that a tactic starts, in order."""
        kernels = self._implementation.kernels
        return tuple(kernels[launch.kernel].function for launch in tactic.launches)

    def time_works_us(self, runs: int) -> list[tuple[Work, float]]:
        """Return the time of each piece of work by itself, the median of `runs`, in microseconds.

        See `device.runtime.cuda.timing` for what stands in the L2 cache then.
        """
        self._context.activate()
        works, latest = self._implementation.works, self._latest
        return [
            (
                one,
                repeated_us(
                    self._stream, partial(self._start, one.tactics[at], latest.point), runs
                ),
            )
            for one, at in zip(works, latest.tactics, strict=True)
        ]

    @property
    def _latest(self) -> _Binding:
        return next(reversed(self._bindings.values()))

    def _bind(self, sizes: Mapping[str, int]) -> _Binding:
        """Return the binding for these sizes, recorded now unless it is kept from before."""
        point = tuple(sizes[dim.name] for dim in self._dims)
        found = self._bindings.get(point)
        if found is None:
            found = self._record(point)
            self._bindings[point] = found
            if len(self._bindings) > _KEPT_GRAPHS:
                self._bindings.popitem(last=False)[1].graph.close()
        elif self._dims:
            self._bindings.move_to_end(point)
        return found

    def _record(self, point: tuple[int, ...]) -> _Binding:
        one = self._implementation
        weights, dims = self._program.weights_bytes, self._dims
        for problem in problems_at(one, point, weights, self._tensors, dims) if dims else ():
            raise SessionError(f"{self._where} cannot run at these sizes: {problem}")
        inputs = {p.tensor: self._borders[p.tensor].array(point) for p in one.inputs}
        outputs = {p.tensor: self._borders[p.tensor].array(point) for p in one.outputs}
        tactics = self._choose(point)
        for piece, at in zip(one.works, tactics, strict=True):
            for launch in piece.tactics[at].launches:
                # Not while recording: old drivers refuse to load a module then.
                self._program.function(launch.kernel)

        def work() -> None:
            self._copy_in(inputs)
            self._start_chosen(tactics, point)
            self._copy_out(outputs)

        return _Binding(point, inputs, outputs, tactics, self._stream.capture(work))

    def _choose(self, point: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tactic of each piece of work, timing those that the cache lacks."""
        works = self._implementation.works
        if self._timing_cache is None:
            return (0,) * len(works)
        keys = [[self._key(tactic.launches, point) for tactic in one.tactics] for one in works]
        times = dict(read_timings(self._timing_cache).times_us(self._facts))
        measured: dict[str, float] = {}
        for work, named in zip(works, keys, strict=True):
            for tactic, key in zip(work.tactics, named, strict=True):
                if len(named) > 1 and key not in times:
                    took = repeated_us(self._stream, partial(self._start, tactic, point))
                    times[key] = measured[key] = took
            # The next work is timed on this one's result.
            self._start(work.tactics[fastest(named, times)], point)
        self._stream.wait()
        if measured:
            add_timings(self._timing_cache, self._facts, measured)
        return tuple(fastest(named, times) for named in keys)

    def _key(self, launches: tuple[Launch, ...], point: tuple[int, ...]) -> str:
        kernels = self._implementation.kernels
        return tactic_key(launches, kernels, self._program.cubin_sha256, point)

    def _take_borders(
        self, places: tuple[Place, ...], infos: Mapping[str, TensorInfo]
    ) -> dict[str, _Border]:
        """Take page-locked memory for all tensors at the borders, in one allocation."""
        starts, total = [], 0
        for place in places:
            starts.append(total)
            total += -(-place.bytes // _HOST_ALIGNMENT) * _HOST_ALIGNMENT
        host = self._context.allocate_host(total)
        return {
            place.tensor: _Border(
                infos[place.tensor].dtype,
                _shape(place, infos[place.tensor]),
                host[start : start + place.bytes],
                self._workspace + place.offset,
            )
            for place, start in zip(places, starts, strict=True)
        }

    def _copy_in(self, inputs: Mapping[str, Array]) -> None:
        for name, array in inputs.items():
            border = self._borders[name]
            self._stream.upload(border.address, border.host[: array.nbytes])

    def _copy_out(self, outputs: Mapping[str, Array]) -> None:
        for name, array in outputs.items():
            border = self._borders[name]
            self._stream.download(border.host[: array.nbytes], border.address)

    def _start_all(self) -> None:
        self._start_chosen(self._latest.tactics, self._latest.point)

    def _start_chosen(self, tactics: tuple[int, ...], point: tuple[int, ...]) -> None:
        for work, at in zip(self._implementation.works, tactics, strict=True):
            self._start(work.tactics[at], point)

    def _start(self, tactic: Tactic, point: tuple[int, ...]) -> None:
        self._launcher.start(tactic.launches, point)


def _shape(place: Place, tensor: TensorInfo) -> tuple[Amount, ...]:
    """Return the sizes of a tensor at the border; all are numbers unless its place has formulas."""
    if place.shape is not None:
        return place.shape
    return tuple(dim for dim in tensor.shape if isinstance(dim, int))
