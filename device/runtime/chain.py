"""Segments that follow each other on a GPU and its DLA cores: one stream, no copy over the host.

What kernels and TensorRT's plans do on the GPU between two DLA tasks is one CUDA graph; the tasks
are enqueued between the graphs, and so are plans that TensorRT lets no graph hold.
The steps are planned by `device.runtime.chain_steps`.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from device.engine.manifest import DimRange, Segment
from device.errors import SessionError
from device.runtime.chain_steps import (
    CALLER,
    CHAIN,
    Borders,
    Member,
    Step,
    TensorBuffer,
    in_graphs,
    plan_steps,
)
from device.runtime.cuda.context import Bytes, Context, CudaGraph, Stream
from device.runtime.cuda.driver import CudaError
from device.runtime.executors.protocol import Array, Arrays, DeviceSegment, Shapes, Sizes, Targets

_MAX_BOUND = 16  # sets of sizes whose graphs are cached; the least recently used goes first


@dataclass(frozen=True, slots=True)
class _Bound:
    """The runs of steps at one set of sizes: graphs, tasks of the DLA, and steps of the caller's.

    The last get the caller's addresses.
    """

    parts: tuple[CudaGraph | Callable[[Stream, Mapping[str, int]], None], ...]
    shapes: Shapes


class SegmentChain:
    """A chain of segments, its stream, and memory for what the segments do not hold themselves.

    One call runs at a time.
    """

    def __init__(
        self,
        where: str,
        segments: Sequence[Segment],
        devices: Sequence[DeviceSegment],
        dims: Sequence[DimRange],
        needed: frozenset[str],
    ) -> None:
        """Bind the segments to each other. `needed`: outputs that others than these read.

        Raises SessionError if the driver refuses.
        """
        self._where = where
        self._dims = tuple(dim.name for dim in dims)
        self._devices = {s.name: d for s, d in zip(segments, devices, strict=True)}
        self._members = tuple(
            Member(
                segment.name,
                tuple((name, device.format(name)) for name in segment.inputs),
                tuple((name, device.format(name)) for name in segment.outputs),
                device.captured,
            )
            for segment, device in zip(segments, devices, strict=True)
        )
        results = {name for segment in segments for name in segment.outputs}
        inputs = (name for segment in segments for name in segment.inputs if name not in results)
        self.inputs = tuple(dict.fromkeys(inputs))
        self.outputs = tuple(
            name for segment in segments for name in segment.outputs if name in needed
        )
        self._memory: dict[str, int] = {}
        self._host: dict[str, Bytes] = {}
        self._bound: OrderedDict[tuple[object, ...], _Bound] = OrderedDict()
        self._context = Context()
        try:
            self._stream = self._context.stream()
            self._use_outputs()
        except CudaError as error:
            self._context.close()
            raise SessionError(f"{where} cannot be loaded: {error}") from error

    def run(self, inputs: Arrays, outputs: Targets, sizes: Sizes) -> dict[str, Array]:
        """Run on the host's arrays, as `Executor.run` does; `outputs` are those of the chain.

        An output for None is a new array. One that is not asked for is returned in page-locked
        memory, which the next run overwrites.
        """
        try:
            bound = self._bind((), (), sizes)
            for name in self.inputs:
                array = self._view(bound, name)
                if not _same_memory(array, inputs[name]):
                    np.copyto(array, inputs[name])
            self._start(bound, self._stream, {})
            self._stream.wait()
        except CudaError as error:
            raise SessionError(f"{self._where} failed: {error}") from error
        results: dict[str, Array] = {}
        for name in self.outputs:
            array, target = self._view(bound, name), outputs.get(name)
            if target is not None and target.shape != array.shape:
                raise SessionError(
                    f"{self._where}: output {name!r} has the shape {array.shape} at these sizes, "
                    f"the array for it {target.shape}; give none, or one of `Session.arrays`"
                )
            if target is not None and not _same_memory(array, target):
                np.copyto(target, array)
            if target is not None:
                results[name] = target
            else:
                results[name] = array.copy() if name in outputs else array
        return results

    def enqueue(
        self,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
        sizes: Sizes,
        stream: int | None = None,
    ) -> None:
        """Enqueue an inference on tensors at addresses on the GPU, and do not wait for it.

        `inputs`, `outputs`: the addresses of all of the chain's, which hold the tensors in C order
        and in the types of the manifest. `stream`: a CUstream of the primary context, None for the
        chain's own. Inferences of one chain must not overlap. Raises SessionError: the driver or
        TensorRT refuses.
        """
        try:
            chain_stream = self._stream
            bound = self._bind(inputs, outputs, sizes)
            queue = chain_stream if stream is None else chain_stream.borrowed(stream)
            self._start(bound, queue, {**inputs, **outputs})
        except CudaError as error:
            raise SessionError(f"{self._where} failed: {error}") from error

    def wait(self) -> None:
        """Wait until everything on the chain's own stream is done."""
        try:
            self._context.activate()
            self._stream.wait()
        except CudaError as error:
            raise SessionError(f"{self._where} failed: {error}") from error

    def arrays(self, sizes: Sizes) -> Mapping[str, Array]:
        """Return page-locked arrays of inputs and outputs; see `Executor.arrays`."""
        try:
            bound = self._bind((), (), sizes)
        except CudaError as error:
            raise SessionError(f"{self._where} failed: {error}") from error
        return {name: self._view(bound, name) for name in (*self.inputs, *self.outputs)}

    def close(self) -> None:
        """Release graphs, stream and memory; page-locked arrays stay while they are referred to."""
        self._bound.clear()
        self._context.close()

    def _use_outputs(self) -> None:
        """Tell DLA segments once which of their inputs lie where another wrote them."""
        for step in plan_steps(self._members, Borders(host_inputs=self.inputs)):
            if step.kind == "use":
                assert step.source is not None
                device = self._devices[step.segment]
                device.use(step.tensor, self._devices[step.source.owner].address(step.tensor))

    def _start(self, bound: _Bound, stream: Stream, caller: Mapping[str, int]) -> None:
        self._context.activate()
        for part in bound.parts:
            if isinstance(part, CudaGraph):
                part.launch(stream)
            else:
                part(stream, caller)

    def _bind(self, inputs: Collection[str], outputs: Collection[str], sizes: Sizes) -> _Bound:
        """Return the graphs for these sizes, captured now unless they are cached.

        `inputs`, `outputs`: those that are in the caller's memory.
        """
        point = tuple(sizes[name] for name in self._dims)
        key = (point, *inputs, None, *outputs)
        if key in self._bound:
            self._bound.move_to_end(key)
            return self._bound[key]
        self._context.activate()
        shapes = {
            name: shape
            for device in self._devices.values()
            for name, shape in device.shapes(sizes).items()
        }
        steps = plan_steps(
            self._members,
            Borders(
                host_inputs=tuple(name for name in self.inputs if name not in inputs),
                caller_inputs=tuple(inputs),
                host_outputs=tuple(name for name in self.outputs if name not in outputs),
                caller_outputs=tuple(outputs),
            ),
        )
        self._take_memory(steps)
        runs = in_graphs(steps, self._members)
        parts = tuple(self._part(run, shapes, dict(sizes)) for run in runs)
        self._bound[key] = _Bound(parts, shapes)
        if len(self._bound) > _MAX_BOUND:
            for part in self._bound.popitem(last=False)[1].parts:
                if isinstance(part, CudaGraph):
                    part.close()
        return self._bound[key]

    def _part(
        self, run: tuple[Step, ...], shapes: Shapes, sizes: Sizes
    ) -> CudaGraph | Callable[[Stream, Mapping[str, int]], None]:
        captured = {member.name: member.captured for member in self._members}
        first = run[0]
        if first.with_caller or (first.kind == "run" and not captured[first.segment]):
            return partial(self._enqueue, first, _bytes(shapes, first.tensor), sizes)

        def work() -> None:
            for step in run:
                self._enqueue(step, _bytes(shapes, step.tensor), sizes, self._stream, {})

        return self._stream.capture(work)

    def _enqueue(
        self,
        step: Step,
        size: int,
        sizes: Sizes,
        stream: Stream,
        caller: Mapping[str, int],
    ) -> None:
        """Enqueue one step; `size`: bytes of its tensor in C order."""
        if step.kind == "run":
            self._devices[step.segment].enqueue(sizes, stream)
            return
        source = 0 if step.source is None else self._address(step.source, caller)
        target = 0 if step.target is None else self._address(step.target, caller)
        if step.kind == "upload":
            stream.upload(target, self._host[step.tensor][:size])
        elif step.kind == "download":
            stream.download(self._host[step.tensor][:size], source)
        elif step.kind == "copy":
            stream.copy(target, source, size)
        else:
            self._devices[step.segment].convert(step.tensor, source, target, stream)

    def _address(self, place: TensorBuffer, caller: Mapping[str, int]) -> int:
        if place.owner == CALLER:
            return caller[place.tensor]
        if place.owner == CHAIN:
            return self._memory[place.tensor]
        return self._devices[place.owner].address(place.tensor)

    def _take_memory(self, steps: Sequence[Step]) -> None:
        """Take what is not there yet, for the largest sizes."""
        largest = {
            name: size
            for device in self._devices.values()
            for name, size in device.largest_bytes.items()
        }
        for step in steps:
            name = step.tensor
            on_gpu = any(place.owner == CHAIN for place in (step.source, step.target) if place)
            if on_gpu and name not in self._memory:
                self._memory[name] = self._context.allocate(largest[name])
            if step.kind in ("upload", "download") and name not in self._host:
                self._host[name] = self._context.allocate_host(largest[name])

    def _view(self, bound: _Bound, name: str) -> Array:
        shape, dtype = bound.shapes[name]
        view: Array = np.ndarray(shape, dtype, self._host[name])
        return view


def _bytes(shapes: Shapes, tensor: str) -> int:
    if not tensor:
        return 0
    shape, dtype = shapes[tensor]
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _same_memory(a: Array, b: Array) -> bool:
    return a.ctypes.data == b.ctypes.data and a.nbytes == b.nbytes
