"""Runs a DLA segment through TensorRT: a plan that was finished on this board.

In a chain (`device.runtime.chain`) kernels bring tensors into the DLA's formats on the GPU. By
itself inputs are packed in page-locked memory, and all is enqueued on one stream: copies in, the
DLA's task, copies out. TensorRT is imported when a segment is loaded.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from device.board_files import tensorrt_version
from device.engine.manifest import Dim
from device.engine.tensorrt_manifest import Port, TensorRT
from device.errors import SessionError
from device.runtime.chain_steps import Format, format_of
from device.runtime.cuda.context import Context, Stream
from device.runtime.cuda.driver import CudaError, device_sm
from device.runtime.cuda.ports import PortKernels
from device.runtime.executors.loaded import core_count
from device.runtime.executors.plan import PlanExecutor, plan_of
from device.runtime.executors.protocol import (
    Array,
    Arrays,
    DeviceSegment,
    Executor,
    LoadRefusedError,
    SegmentContext,
    Shapes,
    Sizes,
    Targets,
)
from device.runtime.tensorrt.layout import pack, packed_shape, unpack
from device.runtime.tensorrt.plans import why_unusable
from device.runtime.tensorrt.releases import find_release

TAG = "tensorrt"  # of the implementation in the manifest


def why_not() -> str | None:
    """Return why no DLA segment can run through TensorRT here, or None if one can."""
    version = tensorrt_version()
    if not version:
        return "TensorRT is not installed"
    try:
        release = find_release(version)
    except SessionError as error:
        return str(error)
    return None if release.form else f"TensorRT {version} has no DLA here: {release.why}"


def misfit(context: SegmentContext, implementation: TensorRT) -> str | None:
    """Return why this segment has no plan for this board, or None if it has one."""
    try:
        plan = plan_of(context, implementation)
    except SessionError as error:  # of this segment: no form of it is for this TensorRT
        return str(error)
    return why_unusable(plan, context.engine.path)


def load(context: SegmentContext, implementation: TensorRT) -> Executor:
    """Load a segment's plan; see `TensorRTExecutor`."""
    return TensorRTExecutor(context, implementation)


class TensorRTExecutor(PlanExecutor):
    """One segment on a DLA core, or on all in turn, with a stream and all its memory."""

    def __init__(self, context: SegmentContext, implementation: TensorRT) -> None:
        """Load the plan on its cores and take memory for the ports.

        Raises LoadRefusedError if TensorRT does not load it or the driver refuses, SessionError if
        the caller wants a core that is not there.
        """
        self._place = plan_of(context, implementation)
        self._frame = 0
        super().__init__(context)
        with self._loading():
            chosen, count = context.options.dla_core, core_count()
            if chosen is not None and chosen >= count:
                raise self._no_core(chosen, count)
            cores = _cores(context, implementation, count) if chosen is None else (chosen,)
            self._plans = self._load_plan(self._place, *cores)
            self._lacks_cores = chosen is None and implementation.take_turns and count < 2
            self._stream = self._cuda.stream()
            self._ports = {
                port.tensor: (port, *self._take(port))
                for port in (*implementation.inputs, *implementation.outputs)
            }
            self._kernels, self._why_by_cpu = _port_kernels(self._cuda, context, implementation)
        self._inputs = tuple(port.tensor for port in implementation.inputs)
        self._outputs = tuple(port.tensor for port in implementation.outputs)

    @property
    def description(self) -> str:
        """TensorRT's version, its cores, and what is slower than planned.

        Frames that should take turns on cores but have one; formats that the CPU makes, and why.
        """
        cores = [str(plan.core) for plan in self._plans]
        which = f"core {cores[0]}" if len(cores) == 1 else f"cores {', '.join(cores)} in turn"
        alone = ", the only one here: frames take no turns" if self._lacks_cores else ""
        by_cpu = f", formats by the CPU: {self._why_by_cpu}" if self._why_by_cpu else ""
        record = self._place.record
        folded = record is not None and record.fallback
        how = ", built with GPU fallback, all layers on the DLA" if folded else ""
        return f"TensorRT {tensorrt_version()}, DLA {which}{alone}{by_cpu}{how}"

    @property
    def processors(self) -> tuple[str, ...]:
        """Its cores."""
        return tuple(f"dla{plan.core}" for plan in self._plans)

    @property
    def device(self) -> DeviceSegment | None:
        """The plan on tensors in GPU memory, None without kernels for its formats."""
        return _OnDevice(self) if self._kernels else None

    def run(self, inputs: Arrays, outputs: Targets, sizes: Sizes) -> dict[str, Array]:
        """Enqueue copies and the DLA's task, and wait; see `Executor.run`."""
        self._check_open()
        results: dict[str, Array] = {}
        try:
            self._cuda.activate()
            for name in self._inputs:
                port, memory, address = self._ports[name]
                pack(port, inputs[name], memory)
                self._stream.upload(address, memory.reshape(-1).view(np.uint8))
            self.enqueue(self._stream, {})
            for name in outputs:
                _, memory, address = self._ports[name]
                self._stream.download(memory.reshape(-1).view(np.uint8), address)
            self._stream.wait()
        except CudaError as error:
            raise SessionError(f"{self._where} failed: {error}") from error
        for name, array in outputs.items():
            port, memory, _ = self._ports[name]
            target = np.empty(*self.shape(name)) if array is None else array
            unpack(port, memory, target)
            results[name] = target
        return results

    def enqueue(self, stream: Stream, addresses: Mapping[str, int]) -> None:
        """Enqueue the DLA's task. `addresses`: of inputs that lie elsewhere than in own memory.

        Raises SessionError: TensorRT does not take it.
        """
        plan = self._plans[self._frame % len(self._plans)]
        self._frame += 1
        port_addresses = {name: address for name, (_, _, address) in self._ports.items()}
        plan.enqueue({**port_addresses, **addresses}, stream)

    def use_dla_core(self, core: int) -> None:
        """Load the plan on this core alone, and release it on the others."""
        self._cuda.activate()
        try:
            plans = self._load_plan(self._place, core)
        except LoadRefusedError as error:
            raise SessionError(f"{self._where}: {error}") from error
        for plan in self._plans:
            plan.close()
        self._plans = plans

    def port(self, tensor: str) -> tuple[Port, int]:
        """Return a port and the address of its own memory."""
        port, _, address = self._ports[tensor]
        return port, address

    def convert(self, tensor: str, source: int, target: int, stream: Stream) -> None:
        """Enqueue the kernels of a port, from one address to the other."""
        self._kernels[tensor].enqueue(source, target, stream)

    def shape(self, tensor: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return the shape and the type of a port's tensor in C order."""
        info = self._tensors[tensor]
        return _static(info.shape), np.dtype(info.dtype)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of inputs and outputs."""
        return (*self._inputs, *self._outputs)

    def _no_core(self, core: int, count: int) -> SessionError:
        return SessionError(f"{self._where}: it is for DLA core {core}, and this board has {count}")

    def _take(self, port: Port) -> tuple[Array, int]:
        """Take memory for a port, on the host and on the GPU."""
        packed = packed_shape(port, _static(self._tensors[port.tensor].shape))
        size = int(np.prod(packed)) * np.dtype(port.dtype).itemsize
        memory = self._cuda.allocate_host(size).view(port.dtype).reshape(packed)
        address = self._cuda.allocate(size)
        self._cuda.fill(address, 0, size)  # channels beyond the tensor's stay 0
        return memory, address


class _OnDevice(DeviceSegment):
    """A plan in a chain: its ports lie in its own memory, but for inputs that another wrote."""

    captured = False  # TensorRT's tasks for a DLA cannot be captured

    def __init__(self, executor: TensorRTExecutor) -> None:
        self._executor = executor
        self._used: dict[str, int] = {}
        self.largest_bytes = {
            name: int(np.prod(shape)) * dtype.itemsize
            for name in executor.tensors
            for shape, dtype in (executor.shape(name),)
        }

    def format(self, tensor: str) -> Format:
        """Return the port's format."""
        return format_of(self._executor.port(tensor)[0])

    def address(self, tensor: str) -> int:
        """Return the address of the port's own memory."""
        return self._executor.port(tensor)[1]

    def use(self, tensor: str, address: int) -> None:
        """Read an input where another segment wrote it in the same format."""
        self._used[tensor] = address

    def convert(self, tensor: str, source: int, target: int, stream: Stream) -> None:
        """Enqueue the kernels of a port."""
        self._executor.convert(tensor, source, target, stream)

    def shapes(self, sizes: Sizes) -> Shapes:
        """Return the shapes, which are fixed on a DLA."""
        return {name: self._executor.shape(name) for name in self._executor.tensors}

    def enqueue(self, sizes: Sizes, stream: Stream) -> None:
        """Enqueue the DLA's task."""
        self._executor.enqueue(stream, self._used)


def _cores(context: SegmentContext, implementation: TensorRT, count: int) -> tuple[int, ...]:
    """Return the cores to load a plan on: all in turn, that of a session's turn, or of the plan."""
    if implementation.take_turns:
        cores = tuple(range(max(1, count)))
        turn = context.options.turn
        return cores if turn is None else (cores[turn % len(cores)],)
    return (int(context.segment.processor.removeprefix("dla")),)


def _port_kernels(
    cuda: Context, context: SegmentContext, implementation: TensorRT
) -> tuple[dict[str, PortKernels], str]:
    """Load the kernels of all ports; or return none, and why the GPU cannot make the formats."""
    ports = (*implementation.inputs, *implementation.outputs)
    programs = (*implementation.enter, *implementation.leave)
    if len(programs) != len(ports):
        return {}, "the engine has no kernels for them"
    sm = device_sm()
    built = next((program.sm for program in programs if program.sm != sm), sm)
    if built != sm:
        return {}, f"their kernels are for sm_{built}, this GPU is sm_{sm}"
    return {
        port.tensor: PortKernels(cuda, context.engine, program)
        for port, program in zip(ports, programs, strict=True)
    }, ""


def _static(shape: tuple[Dim, ...]) -> tuple[int, ...]:
    """The shape of a tensor at the DLA's border, where every size is a number."""
    return tuple(dim for dim in shape if isinstance(dim, int))
