"""Inference on arrays that are in the GPU's memory, on a stream of the caller.

Segments on the GPU and its DLA cores read and write the caller's memory. A segment that runs on the
host's arrays alone (`portable`) has its inputs and outputs copied, and the CPU waits for them.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from device.engine.file import Engine
from device.engine.manifest import DimRange, Segment
from device.errors import SessionError
from device.runtime.chain import SegmentChain
from device.runtime.cuda.context import Context, Stream
from device.runtime.cuda.device_array import DeviceArray, stream_handle
from device.runtime.cuda.driver import CudaError
from device.runtime.cuda.interchange import (
    Operand,
    check_current,
    check_extent,
    check_memory,
    check_stream,
    read_operand,
)
from device.runtime.cuda.sharing import CallersContext, DeviceMemory, Event
from device.runtime.executors.protocol import DeviceSegment, Executor, Shapes
from device.runtime.feeds import check_feeds, check_names, check_target_names, check_targets
from device.runtime.stages import open_chain

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class OnGpu:
    """Segments that follow each other in the GPU's memory."""

    chain: SegmentChain
    devices: tuple[DeviceSegment, ...]

    def shapes(self, sizes: Mapping[str, int]) -> Shapes:
        """Return the shapes of all inputs and outputs at these sizes."""
        rows = (device.shapes(sizes) for device in self.devices)
        return {name: shape for row in rows for name, shape in row.items()}


@dataclass(frozen=True, slots=True)
class OnHost:
    """A segment that runs on the host's arrays."""

    segment: Segment
    executor: Executor


Part = OnGpu | OnHost


class OnDevice:
    """The device arrays of one session. One call runs at a time; the session sees to that."""

    def __init__(self, engine: Engine, executors: Sequence[Executor]) -> None:
        """Take a stream. Raises SessionError without a GPU."""
        manifest = engine.manifest
        self._tensors = {tensor.name: tensor for tensor in manifest.tensors}
        self._inputs = tuple(self._tensors[name] for name in manifest.inputs)
        self._outputs = tuple(self._tensors[name] for name in manifest.outputs)
        self._ranges: dict[str, DimRange] = {dim.name: dim for dim in manifest.dims}
        self._memory: dict[str, DeviceMemory] = {}
        self._in_use: list[object] = []
        self._sizes: dict[str, int] = {}  # of the last inference
        try:
            with CallersContext():
                self._open(engine, executors)
        except CudaError as error:
            raise SessionError(
                f"{engine.path} cannot run on device arrays here: {error}; use `Session.infer`"
            ) from error

    def _open(self, engine: Engine, executors: Sequence[Executor]) -> None:
        self._context = Context()
        try:
            self._stream = self._context.stream()
            self._done = Event(self._context)
            self._parts = _parts(engine, executors)
        except BaseException:
            self._context.close()
            raise

    def infer(
        self, feeds: Mapping[str, object], targets: Mapping[str, object], stream: object | None
    ) -> dict[str, DeviceArray]:
        """Enqueue one inference; see `Session.infer_on_device`."""
        with CallersContext():
            check_current(self._context)
            self._context.activate()
            handle = None if stream is None else stream_handle(stream)
            if handle is not None:
                check_stream(self._context, handle)
            queue = self._stream if handle is None else self._stream.borrowed(handle)
            inputs, outputs, sizes = self._read(feeds, targets, queue.handle.value or 0)
            if sizes != self._sizes:
                # Tactics may be timed in the memory of the last inference, and its graph freed.
                self._done.wait()
                self._sizes = sizes
            self._done.precede(queue)  # the last inference uses the same memory
            writer = _Writer(handle, stream)
            run = _Run(self, queue, sizes, inputs=inputs, targets=outputs, writer=writer)
            try:
                results = run.results()
            except BaseException:
                with suppress(CudaError):  # the first error is the cause
                    self._end(queue, wait=handle is None)  # a part of it may be enqueued
                raise
            self._end(queue, wait=handle is None)
            return results

    def _end(self, queue: Stream, *, wait: bool) -> None:
        self._done.record(queue)
        if wait:
            try:
                queue.wait()
            finally:
                self._in_use.clear()

    def wait(self) -> None:
        """Wait until the last inference is done."""
        self._context.activate()
        self._done.wait()

    def close(self) -> None:
        """Wait for the last inference and release memory, stream and chains; results stay valid."""
        try:
            with CallersContext():
                self._context.activate()
                self._done.wait()
                for part in self._parts:
                    if isinstance(part, OnGpu):
                        part.chain.close()
        finally:
            self._memory.clear()
            self._in_use.clear()
            self._context.close()

    def _read(
        self, feeds: Mapping[str, object], targets: Mapping[str, object], stream: int
    ) -> tuple[dict[str, DeviceArray], dict[str, DeviceArray], dict[str, int]]:
        """Return the arrays of the caller, checked, and the sizes of the dynamic dimensions."""
        check_names(feeds, self._inputs)
        check_target_names(targets, self._outputs)
        read = {name: read_operand(f"input {name!r}", feeds[name], stream) for name in feeds}
        written = {
            name: read_operand(f"the array for output {name!r}", value, stream)
            for name, value in targets.items()
        }
        inputs = {name: operand.array for name, operand in read.items()}
        outputs = {name: operand.array for name, operand in written.items()}
        sizes = check_feeds(inputs, self._inputs, self._ranges, DeviceArray)
        check_targets(outputs, self._outputs, sizes, DeviceArray)
        labelled = [(f"input {name!r}", operand) for name, operand in read.items()]
        labelled += [(f"the array for output {n!r}", operand) for n, operand in written.items()]
        for where, operand in labelled:
            check_memory(where, operand.array, self._context)
            if operand.raw:
                check_extent(where, operand.array)
        for name, operand in written.items():
            if operand.read_only:
                raise SessionError(f"the array for output {name!r} is read-only; give another")
        _check_apart(labelled, len(read))
        self._in_use = [operand.array for _, operand in labelled]
        return inputs, outputs, sizes

    def scratch(self, name: str, size: int) -> int:
        """Return the address of memory for a tensor between segments, kept for later inferences."""
        if name not in self._memory or self._memory[name].bytes < size:
            self._memory[name] = DeviceMemory(size)
        return self._memory[name].address

    @property
    def parts(self) -> tuple[Part, ...]:
        """What runs one after the other."""
        return self._parts

    @property
    def output_names(self) -> tuple[str, ...]:
        """The outputs of the engine, in order."""
        return tuple(tensor.name for tensor in self._outputs)


@dataclass(frozen=True, slots=True)
class _Writer:
    """The caller's stream, which results keep: they name its handle. None: they are ready."""

    handle: int | None
    stream: object | None


class _Run:
    """One inference: where each tensor is, on the GPU or on the host or on both."""

    def __init__(
        self,
        session: OnDevice,
        queue: Stream,
        sizes: Mapping[str, int],
        *,
        inputs: dict[str, DeviceArray],
        targets: dict[str, DeviceArray],
        writer: _Writer,
    ) -> None:
        self._session = session
        self._queue = queue
        self._sizes = sizes
        self._targets = targets
        self._writer = writer
        self._on_gpu = dict(inputs)
        self._on_host: dict[str, Array] = {}

    def results(self) -> dict[str, DeviceArray]:
        """Enqueue every part and return the outputs."""
        for part in self._session.parts:
            if isinstance(part, OnGpu):
                self._enqueue(part)
            else:
                self._run_on_host(part)
        return {name: self._result(name) for name in self._session.output_names}

    def _enqueue(self, part: OnGpu) -> None:
        shapes = part.shapes(self._sizes)
        outputs = {name: self._place(name, *shapes[name]) for name in part.chain.outputs}
        part.chain.enqueue(
            {name: self._device(name).address for name in part.chain.inputs},
            {name: array.address for name, array in outputs.items()},
            self._sizes,
            self._queue.handle.value or 0,
        )
        self._on_gpu.update(outputs)

    def _run_on_host(self, part: OnHost) -> None:
        inputs = {name: self._host(name) for name in part.segment.inputs}
        outputs = dict.fromkeys(part.segment.outputs)
        self._on_host.update(part.executor.run(inputs, outputs, self._sizes))

    def _host(self, name: str) -> Array:
        if name not in self._on_host:
            array = self._on_gpu[name]
            values = np.empty(array.shape, array.dtype)
            if values.nbytes:
                self._queue.download(values.reshape(-1).view(np.uint8), array.address)
                self._queue.wait()
            self._on_host[name] = values
        return self._on_host[name]

    def _device(self, name: str) -> DeviceArray:
        if name not in self._on_gpu:
            values = np.ascontiguousarray(self._on_host[name])
            array = self._place(name, values.shape, values.dtype)
            if values.nbytes:
                self._queue.upload(array.address, values.reshape(-1).view(np.uint8))
                self._queue.wait()  # the values are freed with this run
            self._on_gpu[name] = array
        return self._on_gpu[name]

    def _result(self, name: str) -> DeviceArray:
        array, target = self._device(name), self._targets.get(name)
        if target is None or target.address == array.address:
            return array
        self._queue.copy(target.address, array.address, array.nbytes)  # it is an input, too
        return target.written_by(self._writer.handle, self._writer.stream)

    def _place(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        """Return memory for a tensor: the caller's, the caller's to keep, or the session's."""
        target = self._targets.get(name)
        if target is not None:
            if target.shape != shape:
                raise SessionError(
                    f"output {name!r} has the shape {shape} at these sizes, the array for it "
                    f"{target.shape}; give one of {shape}, or none"
                )
            return target.written_by(self._writer.handle, self._writer.stream)
        size = math.prod(shape) * dtype.itemsize
        if name in self._session.output_names:
            memory = DeviceMemory(size)
            owner = (memory, self._writer.stream)
            return DeviceArray.within(owner, memory.address, shape, dtype, self._writer.handle)
        return DeviceArray(self._session.scratch(name, size), shape, dtype)


def _parts(engine: Engine, executors: Sequence[Executor]) -> tuple[Part, ...]:
    """Return what runs one after the other; nothing stays open if the driver refuses."""
    parts: list[Part] = []
    rows = zip(engine.manifest.segments, executors, strict=True)
    try:
        for on_gpu, group in groupby(rows, lambda row: row[1].device is not None):
            run = list(group)
            if not on_gpu:
                parts += [OnHost(segment, executor) for segment, executor in run]
                continue
            segments = [segment for segment, _ in run]
            devices = tuple(d for _, executor in run if (d := executor.device) is not None)
            parts.append(OnGpu(open_chain(engine, segments, devices), devices))
    except BaseException:
        for part in parts:
            if isinstance(part, OnGpu):
                part.chain.close()
        raise
    return tuple(parts)


def _check_apart(labelled: Sequence[tuple[str, Operand]], inputs: int) -> None:
    """Raise SessionError if an array for an output shares bytes with another array."""
    for at, (label, operand) in enumerate(labelled):
        for neighbour_label, neighbour in labelled[max(at + 1, inputs) :]:
            first, second = operand.array, neighbour.array
            begin = max(first.address, second.address)
            if begin < min(first.address + first.nbytes, second.address + second.nbytes):
                raise SessionError(
                    f"{label} and {neighbour_label} share memory at 0x{begin:x}; give each its own"
                )
