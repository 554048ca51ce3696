"""Runs a segment's kernels on an NVIDIA GPU: cubins from the engine, the driver, nothing else.

All memory is taken when the segment is loaded, and its launches are recorded into one CUDA graph:
an inference is a copy in, one graph launch and a copy out.
"""

import ctypes
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from device.cuda.context import Bytes, Context, Parameter
from device.cuda.driver import CudaError, device_sm
from device.cuda_manifest import Argument, Cuda, Int32, Launch, Null, Place, Work, Workspace
from device.engine import Engine
from device.errors import SessionError
from device.manifest import Segment, TensorInfo

Array = npt.NDArray[Any]


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
class _Staged:
    """A tensor that crosses between CPU and GPU: page-locked bytes here, their place there."""

    host: Bytes
    address: int

    def array(self, like: Array) -> Array:
        """The bytes as an array of the shape and type of another."""
        view: Array = self.host.view(like.dtype).reshape(like.shape)
        return view


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
    ) -> None:
        """Load kernels and weights, take the workspace, record the launches.

        `tensors` and `threads` are for other executors. Raises SessionError if the driver refuses
        any of it.
        """
        self._where = f"{engine.path}: segment {segment.name!r}"
        self._implementation = implementation
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
        self.description = f"{context.name}, CUDA {context.driver_version}"
        weights = engine.entry(implementation.weights)
        self._weights = context.allocate(weights.nbytes)
        context.upload(self._weights, weights)
        self._workspace = context.allocate(implementation.workspace_bytes)
        context.fill(self._workspace, 0, implementation.workspace_bytes)
        modules = {
            name: context.load(engine.entry(name))
            for name in dict.fromkeys(kernel.cubin for kernel in implementation.kernels)
        }
        self._functions = [
            context.function(modules[one.cubin], one.function, one.shared_bytes)
            for one in implementation.kernels
        ]
        self._inputs = {one.tensor: self._stage(one) for one in implementation.inputs}
        self._outputs = {one.tensor: self._stage(one) for one in implementation.outputs}
        self._stream = context.stream()
        self._graph = self._stream.capture(self._launch_all)

    def run(
        self, inputs: Mapping[str, Array], outputs: Mapping[str, Array | None]
    ) -> dict[str, Array]:
        """Run the segment on contiguous arrays; every output is written into its array.

        Raises SessionError if the driver fails.
        """
        made: dict[str, Array] = {}
        try:
            self._context.activate()
            for name, array in inputs.items():
                staged = self._inputs[name]
                np.copyto(staged.array(array), array)
                self._stream.upload(staged.address, staged.host)
            self._graph.launch()
            for name in outputs:
                self._stream.download(self._outputs[name].host, self._outputs[name].address)
            self._stream.wait()
        except CudaError as error:
            raise SessionError(f"{self._where} failed: {error}") from error
        for name, target in outputs.items():
            assert target is not None  # the shapes of a cuda segment are known before running
            np.copyto(target, self._outputs[name].array(target))
            made[name] = target
        return made

    def time_us(self, runs: int) -> list[float]:
        """Return the GPU's time for the segment's kernels alone, run by run, in microseconds."""
        self._context.activate()
        return [self._stream.time_us(self._graph.launch) for _ in range(runs)]

    def time_works_us(self, runs: int) -> list[tuple[Work, float]]:
        """Return the fastest of `runs` of each piece of work by itself, in microseconds.

        A launch by itself pays for its own start, some microseconds that a graph hides.
        """
        self._context.activate()
        return [
            (one, min(self._stream.time_us(partial(self._do, one)) for _ in range(runs)))
            for one in self._implementation.works
        ]

    def _stage(self, place: Place) -> _Staged:
        host = self._context.allocate_host(place.bytes)
        return _Staged(host, self._workspace + place.offset)

    def _launch_all(self) -> None:
        for one in self._implementation.works:
            self._do(one)

    def _do(self, work: Work) -> None:
        for launch in work.tactics[0].launches:
            self._launch(launch)

    def _launch(self, one: Launch) -> None:
        kernel = self._implementation.kernels[one.kernel]
        self._stream.launch(
            self._functions[one.kernel],
            one.grid,
            kernel.threads,
            kernel.shared_bytes,
            [self._parameter(argument) for argument in one.arguments],
        )

    def _parameter(self, argument: Argument) -> Parameter:
        if isinstance(argument, Int32):
            return ctypes.c_int32(argument.value)
        if isinstance(argument, Null):
            return ctypes.c_uint64(0)
        base = self._workspace if isinstance(argument, Workspace) else self._weights
        return ctypes.c_uint64(base + argument.offset)
