"""Runs a DLA segment through TensorRT: a plan that was finished on this board, on one DLA core.

Inputs are packed into the DLA's formats in page-locked memory, and everything is enqueued on one
stream: copies in, the DLA's task, copies out. TensorRT is imported when a segment is loaded.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from device.engine.manifest import Dim
from device.engine.tensorrt_manifest import Port, TensorRT
from device.errors import SessionError
from device.runtime.cuda.context import Context, Stream
from device.runtime.cuda.driver import CudaError, device_sm
from device.runtime.cuda.ports import PortKernels
from device.runtime.executors.protocol import DeviceSegment, Executor, SegmentContext, Shapes
from device.runtime.line_steps import Format, format_of
from device.runtime.tensorrt.board import read_board, tensorrt_version
from device.runtime.tensorrt.layout import pack, packed_shape, unpack
from device.runtime.tensorrt.plans import default_folder, find_plan, read_plan
from device.runtime.tensorrt.releases import find_release

Array = npt.NDArray[Any]

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
    folder = context.options.plans or default_folder()
    plan = find_plan(folder, context.engine, implementation, read_board())
    if plan.record is None:
        return f"it has no plan for this board: run `tandem-agent prepare {context.engine.path}`"
    if plan.record.problem is not None:
        return f"TensorRT refused it on this board: {plan.record.problem}"
    if read_plan(plan) is None:
        return f"its plan is damaged: run `tandem-agent prepare {context.engine.path}`"
    return None


def load(context: SegmentContext, implementation: TensorRT) -> Executor:
    """Load a segment's plan; see `TensorRTExecutor`."""
    return TensorRTExecutor(context, implementation)


class TensorRTExecutor(Executor):
    """One segment on one DLA core, with a stream and all its memory."""

    def __init__(self, context: SegmentContext, implementation: TensorRT) -> None:
        """Load the plan on its core and take memory for the ports.

        Raises SessionError if TensorRT or the driver refuses.
        """
        import tensorrt

        self._where = context.where
        self._closed = False
        core = context.options.dla_core
        self._core = int(context.segment.processor.removeprefix("dla")) if core is None else core
        self._version = str(tensorrt.__version__)
        data = self._plan(context, implementation)
        try:
            self._cuda = Context()
        except CudaError as error:
            raise SessionError(f"{self._where} cannot be loaded: {error}") from error
        try:
            self._cuda.activate()
            self._stream = self._cuda.stream()
            self._load(tensorrt, data)
            shapes = {
                name: _static(tensor.shape) for name, tensor in context.tensors.items()
                if None not in tensor.shape
            }  # fmt: skip
            self._ports = {
                port.tensor: (port, *self._take(port, shapes[port.tensor]))
                for port in (*implementation.inputs, *implementation.outputs)
            }
            self._kernels = _port_kernels(self._cuda, context, implementation)
        except CudaError as error:
            self._cuda.close()
            raise SessionError(f"{self._where} cannot be loaded: {error}") from error
        except BaseException:
            self._cuda.close()
            raise
        self._shapes = shapes
        self._inputs = tuple(port.tensor for port in implementation.inputs)
        self._outputs = tuple(port.tensor for port in implementation.outputs)

    @property
    def description(self) -> str:
        """TensorRT's version, the core, and who brings tensors into its formats if not the GPU."""
        by_cpu = "" if self._kernels else ", formats by the CPU"
        return f"TensorRT {self._version}, DLA core {self._core}{by_cpu}"

    @property
    def device(self) -> DeviceSegment | None:
        """The plan on tensors in GPU memory, None without kernels for its formats."""
        return _OnDevice(self) if self._kernels else None

    def run(
        self,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array | None],
        sizes: Mapping[str, int],
    ) -> dict[str, Array]:
        """Enqueue copies and the DLA's task, and wait; see `Executor.run`."""
        if self._closed:
            raise SessionError(f"{self._where} is closed; open a new session")
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
            target = np.empty(self._shapes[name], self._dtypes[name]) if array is None else array
            unpack(port, memory, target)
            results[name] = target
        return results

    def enqueue(self, stream: Stream, addresses: Mapping[str, int]) -> None:
        """Enqueue the DLA's task. `addresses`: of inputs that lie elsewhere than in own memory.

        Raises SessionError: TensorRT does not take it.
        """
        for name, (_, _, own) in self._ports.items():
            self._execution.set_tensor_address(name, addresses.get(name, own))
        if not self._execution.execute_async_v3(stream.handle.value or 0):
            raise SessionError(
                f"{self._where} failed: TensorRT does not enqueue it on DLA core {self._core}"
            )

    def port(self, tensor: str) -> tuple[Port, int]:
        """Return a port and the address of its own memory."""
        port, _, address = self._ports[tensor]
        return port, address

    def convert(self, tensor: str, source: int, target: int, stream: Stream) -> None:
        """Enqueue the kernels of a port, from one address to the other."""
        self._kernels[tensor].enqueue(source, target, stream)

    def shape(self, tensor: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return the shape and the type of a port's tensor in C order."""
        return self._shapes[tensor], np.dtype(self._dtypes[tensor])

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of inputs and outputs."""
        return (*self._inputs, *self._outputs)

    def close(self) -> None:
        """Release the plan, then the memory and the stream."""
        if self._closed:
            return
        self._closed = True
        del self._execution, self._engine, self._runtime
        self._cuda.close()

    def _plan(self, context: SegmentContext, implementation: TensorRT) -> bytes:
        self._dtypes = {name: tensor.dtype for name, tensor in context.tensors.items()}
        folder = context.options.plans or default_folder()
        data = read_plan(find_plan(folder, context.engine, implementation, read_board()))
        if data is None:  # it was there when `misfit` looked
            raise SessionError(f"{self._where}: its plan is gone; prepare the engine again")
        return data

    def _load(self, trt: Any, data: bytes) -> None:  # noqa: ANN401
        """Deserialize the plan on the core."""
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
        cores = self._runtime.num_DLA_cores
        if self._core >= cores:
            raise SessionError(
                f"{self._where} is for DLA core {self._core}, and this board has {cores}"
            )
        self._runtime.DLA_core = self._core
        self._engine = self._runtime.deserialize_cuda_engine(data)
        if self._engine is None:
            raise SessionError(
                f"{self._where}: TensorRT {self._version} does not load its plan: run "
                "`tandem-agent prepare --again`"
            )
        self._execution = self._engine.create_execution_context()
        if self._execution is None:
            raise SessionError(
                f"{self._where}: DLA core {self._core} has no room for its plan; a core holds 16 "
                "loadables, of all programs together"
            )

    def _take(self, port: Port, shape: tuple[int, ...]) -> tuple[Array, int]:
        """Take memory for a port and tell TensorRT where it is."""
        packed = packed_shape(port, shape)
        size = int(np.prod(packed)) * np.dtype(port.dtype).itemsize
        memory = self._cuda.allocate_host(size).view(port.dtype).reshape(packed)
        address = self._cuda.allocate(size)
        self._cuda.fill(address, 0, size)  # channels beyond the tensor's stay 0
        if not self._execution.set_tensor_address(port.tensor, address):
            raise SessionError(f"{self._where}: its plan has no input or output {port.tensor!r}")
        return memory, address


class _OnDevice(DeviceSegment):
    """A plan in a line: its ports lie in its own memory, but for inputs that another wrote."""

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

    def shapes(self, sizes: Mapping[str, int]) -> Shapes:
        """Return the shapes, which are fixed on a DLA."""
        return {name: self._executor.shape(name) for name in self._executor.tensors}

    def enqueue(self, sizes: Mapping[str, int], stream: Stream) -> None:
        """Enqueue the DLA's task."""
        self._executor.enqueue(stream, self._used)


def _port_kernels(
    cuda: Context, context: SegmentContext, implementation: TensorRT
) -> dict[str, PortKernels]:
    """Load the kernels of all ports; none where the engine has none for this GPU."""
    ports = (*implementation.inputs, *implementation.outputs)
    programs = (*implementation.enter, *implementation.leave)
    if len(programs) != len(ports) or any(program.sm != device_sm() for program in programs):
        return {}
    return {
        port.tensor: PortKernels(cuda, context.engine, program)
        for port, program in zip(ports, programs, strict=True)
    }


def _static(shape: tuple[Dim, ...]) -> tuple[int, ...]:
    """The shape of a tensor at the DLA's border, where every size is a number."""
    return tuple(dim for dim in shape if isinstance(dim, int))
