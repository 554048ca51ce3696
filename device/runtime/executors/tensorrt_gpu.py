"""Runs a GPU segment through TensorRT: a plan that was finished on this board.

Tensors are in C order, in memory of the segment, and all is enqueued on one stream. The plan is
captured into CUDA graphs if TensorRT lets it; the report says if not. Where the engine has kernels
for the segment, too, the plan runs only if it was faster when the board was prepared. TensorRT is
imported when a segment is loaded.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from device.board_files import tensorrt_version
from device.engine.cuda_manifest import Cuda
from device.engine.manifest import ITEM_BYTES, TensorInfo, largest_elements
from device.engine.tensorrt_manifest import TensorRTGpu
from device.errors import SessionError
from device.runtime.cuda.context import CudaGraph, Stream
from device.runtime.cuda.driver import CudaError, device_sm
from device.runtime.executors.plan import PlanExecutor, plan_of
from device.runtime.executors.protocol import (
    Array,
    Arrays,
    DeviceSegment,
    Executor,
    LayerTime,
    LoadRefusedError,
    Phases,
    Profiler,
    SegmentContext,
    Shapes,
    Sizes,
    Targets,
)
from device.runtime.tensorrt.plans import (
    Comparison,
    kernels_digest,
    why_unusable,
)
from device.runtime.tensorrt.releases import find_gpu_release

TAG = "tensorrt_gpu"  # of the implementation in the manifest


def why_not() -> str | None:
    """Return why no GPU segment can run through TensorRT here, or None if one can."""
    version = tensorrt_version()
    if not version:
        return "TensorRT is not installed"
    try:
        device_sm()
        release = find_gpu_release(version)
    except (CudaError, SessionError) as error:
        return str(error)
    return None if release.form else f"TensorRT {version} takes no segment: {release.why}"


def misfit(context: SegmentContext, implementation: TensorRTGpu) -> str | None:
    """Return why this segment has no plan that is worth running here, or None if it has one."""
    try:
        plan = plan_of(context, implementation)
    except SessionError as error:  # of this segment: no form of it is for this TensorRT
        return str(error)
    problem = why_unusable(plan, context.engine.path)
    compared = None if plan.record is None else plan.record.compared
    return problem or _slower(context, compared)


def _slower(context: SegmentContext, compared: Comparison | None) -> str | None:
    """Return why the kernels of a segment run in the place of its plan."""
    kernels = _kernels(context)
    if kernels is None:
        return None
    if compared is None or compared.kernels != kernels_digest(context.engine, kernels):
        return (
            "its plan was not timed against these kernels on this board: run `tandem-agent prepare"
            f" {context.engine.path}`"
        )
    return None if compared.tensorrt_is_faster else f"the kernels are faster: {_times(compared)}"


def load(context: SegmentContext, implementation: TensorRTGpu) -> Executor:
    """Load a segment's plan; see `TensorRTGpuExecutor`."""
    return TensorRTGpuExecutor(context, implementation)


class TensorRTGpuExecutor(PlanExecutor):
    """One segment on the GPU through TensorRT, with a stream and all its memory."""

    def __init__(self, context: SegmentContext, implementation: TensorRTGpu) -> None:
        """Load the plan and take memory for inputs and outputs at their largest sizes.

        Raises LoadRefusedError if TensorRT does not load it, or the driver refuses.
        """
        place = plan_of(context, implementation)
        super().__init__(context)
        self._nodes = context.segment.nodes
        self._inputs, self._outputs = context.segment.inputs, context.segment.outputs
        self._dynamic = tuple(n for n in self._inputs if _is_dynamic(self._tensors[n]))
        dims = context.engine.manifest.dims
        self._sizes = {dim.name: dim.opt for dim in dims}
        compared = None if place.record is None else place.record.compared
        self._times = "" if compared is None else f", {_times(compared)}"
        with self._loading():
            self._plans = (self._plan,) = self._load_plan(place, None)
            self._stream = self._cuda.stream()
            ranges = {dim.name: dim for dim in dims}
            self.largest_bytes = {
                name: (largest_elements(tensor.shape, ranges) or 0) * ITEM_BYTES[tensor.dtype]
                for name, tensor in self._tensors.items()
            }
            self._host = {n: self._cuda.allocate_host(s) for n, s in self.largest_bytes.items()}
            self._address = {n: self._cuda.allocate(s) for n, s in self.largest_bytes.items()}
            self._graph, self._why_enqueued = self._capture()

    @property
    def processors(self) -> tuple[str, ...]:
        """The GPU."""
        return ("gpu",)

    @property
    def description(self) -> str:
        """TensorRT's version, the GPU, graph or not, and the times if plan and kernels have any."""
        how = "in a CUDA graph" if self.captured else f"in no CUDA graph: {self._why_enqueued}"
        gpu = self._cuda.facts.name or "GPU"
        return f"TensorRT {tensorrt_version()}, {gpu}{self._times}, {how}"

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph can hold the plan."""
        return self._graph is not None

    @property
    def device(self) -> DeviceSegment:
        """The plan on tensors in GPU memory."""
        return _OnDevice(self)

    @property
    def profiler(self) -> Profiler:
        """Times at the sizes used last."""
        return _Profiler(self)

    def run(self, inputs: Arrays, outputs: Targets, sizes: Sizes) -> dict[str, Array]:
        """Enqueue copies in, the plan and copies out, and wait; see `Executor.run`."""
        self._check_open()
        arrays = self.arrays(sizes)
        try:
            self._cuda.activate()
            for name in self._inputs:
                if inputs[name] is not arrays[name]:
                    np.copyto(arrays[name], inputs[name])
            self.copy_in(sizes)
            self._compute(sizes)
            self.copy_out(sizes)
            self._stream.wait()
        except CudaError as error:
            raise SessionError(f"{self._where} failed: {error}") from error
        results: dict[str, Array] = {}
        for name, target in outputs.items():
            if target is None:
                results[name] = arrays[name].copy()
                continue
            if target is not arrays[name]:
                np.copyto(target, arrays[name])
            results[name] = target
        return results

    def arrays(self, sizes: Sizes) -> Mapping[str, Array]:
        """Return page-locked arrays of the inputs and outputs; see `Executor.arrays`."""
        return {
            name: np.ndarray(shape, dtype, self._host[name])
            for name, (shape, dtype) in self.shapes(sizes).items()
        }

    def shapes(self, sizes: Sizes) -> Shapes:
        """Return shapes and types of inputs and outputs."""
        return {
            name: (
                tuple(sizes[dim] if isinstance(dim, str) else dim or 0 for dim in tensor.shape),
                np.dtype(tensor.dtype),
            )
            for name, tensor in self._tensors.items()
        }

    def address(self, tensor: str) -> int:
        """Return the address of an input or output."""
        return self._address[tensor]

    def enqueue(self, stream: Stream, sizes: Sizes | None = None) -> None:
        """Enqueue the plan, at the sizes used last unless there are others.

        Raises SessionError: TensorRT does not take it.
        """
        self._sizes = dict(sizes) if sizes is not None else self._sizes
        shapes = self.shapes(self._sizes)
        self._plan.set_shapes({name: shapes[name][0] for name in self._dynamic})
        self._plan.enqueue(self._address, stream)

    def copy_in(self, sizes: Sizes | None = None) -> None:
        """Enqueue the copies of the page-locked inputs to the GPU."""
        for name in self._inputs:
            self._stream.upload(self._address[name], self._bytes(name, sizes))

    def copy_out(self, sizes: Sizes | None = None) -> None:
        """Enqueue the copies of the outputs to page-locked memory."""
        for name in self._outputs:
            self._stream.download(self._bytes(name, sizes), self._address[name])

    def laps_us(self, runs: int) -> list[Phases]:
        """Return the GPU's times of copies in, the plan and copies out, run by run."""
        self._cuda.activate()
        parts = (self.copy_in, self._compute, self.copy_out)
        return [Phases(0.0, *self._stream.laps_us(parts)) for _ in range(runs)]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the segment."""
        return self._nodes

    def _compute(self, sizes: Sizes | None = None) -> None:
        """Run the plan by itself on the segment's own stream, as a graph if it is one."""
        if self._graph is None:
            self.enqueue(self._stream, sizes)
        else:
            self._graph.launch()

    def _capture(self) -> tuple[CudaGraph | None, str]:
        """Return the plan as a graph, or None and why TensorRT lets no graph hold it.

        A graph refers to the memory and the shapes of TensorRT's context: with other shapes it
        would not be valid any more, so that plans of dynamic sizes are enqueued. TensorRT wants a
        plan enqueued once before it is captured. Raises LoadRefusedError: it does not take even
        that, CudaError if the driver fails.
        """
        for name in self._inputs:  # zeros, which every index may be
            self._cuda.fill(self._address[name], 0, self.largest_bytes[name])
        try:
            self.enqueue(self._stream)
        except CudaError:
            raise
        except SessionError as error:
            raise LoadRefusedError(str(error)) from error
        self._stream.wait()
        if self._dynamic:
            return None, "its sizes may change"
        try:
            return self._stream.capture(lambda: self.enqueue(self._stream)), ""
        except SessionError as error:
            return None, f"TensorRT cannot be captured ({error})"

    def _bytes(self, name: str, sizes: Sizes | None) -> npt.NDArray[np.uint8]:
        shape, dtype = self.shapes(self._sizes if sizes is None else sizes)[name]
        return self._host[name][: int(np.prod(shape, dtype=np.int64)) * dtype.itemsize]


class _OnDevice(DeviceSegment):
    """A plan in a chain: inputs and outputs lie in its own memory, in C order."""

    def __init__(self, executor: TensorRTGpuExecutor) -> None:
        self._executor = executor
        self.captured = executor.captured
        self.largest_bytes = executor.largest_bytes

    def address(self, tensor: str) -> int:
        """Return an address of the segment's own memory."""
        return self._executor.address(tensor)

    def shapes(self, sizes: Sizes) -> Shapes:
        """Return the shapes at these sizes."""
        return self._executor.shapes(sizes)

    def enqueue(self, sizes: Sizes, stream: Stream) -> None:
        """Enqueue the plan."""
        self._executor.enqueue(stream, sizes)


class _Profiler:
    """Times of a plan; TensorRT gives none of single operations."""

    def __init__(self, executor: TensorRTGpuExecutor) -> None:
        self._executor = executor

    def compute_us(self, runs: int) -> list[float]:
        """Return the GPU's time for the plan, run by run."""
        return [phases.compute_us for phases in self._executor.laps_us(runs)]

    def phases(self, runs: int) -> Sequence[Phases]:
        """Return the GPU's times for copies in, the plan and copies out, run by run."""
        return self._executor.laps_us(runs)

    def layer_times(self, runs: int) -> list[LayerTime]:
        """Return the median time of the segment as one operation."""
        time_us = float(np.median(self.compute_us(runs)))
        return [LayerTime(self._executor.nodes, ("TensorRT",), 0, 1, time_us)]


def _kernels(context: SegmentContext) -> Cuda | None:
    """Return the kernels that could run here in the place of the plan."""
    kernels = next((i for i in context.segment.implementations if isinstance(i, Cuda)), None)
    return kernels if kernels is not None and kernels.sm == device_sm() else None


def _is_dynamic(tensor: TensorInfo) -> bool:
    return any(isinstance(dim, str) for dim in tensor.shape)


def _times(compared: Comparison) -> str:
    return f"TensorRT {compared.tensorrt_us:.0f} us, kernels {compared.cuda_us:.0f} us"
