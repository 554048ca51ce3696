"""A segment on one GPU: its kernels and weights, its workspace, and its arrays for the CPU.

Weights and kernels are shared by all sessions of the process on the same engine file; stream,
workspace and page-locked arrays belong to one segment of one session. Where CPU and GPU share their
memory, kernels read and write the arrays of the engine's inputs and outputs themselves: nothing is
copied, and the workspace has no place for them.
"""

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from device.engine.cuda_check import problems_at
from device.engine.cuda_manifest import Cuda, Tactic, WorkspaceTensor
from device.engine.cuda_sizes import Amount, evaluate
from device.engine.file import Engine
from device.engine.manifest import TensorInfo
from device.runtime.cuda.context import Bytes, Context, Stream
from device.runtime.cuda.driver import INTEGRATED, CudaError, device_attribute
from device.runtime.cuda.launcher import Launcher
from device.runtime.cuda.program import acquire_program, release_program
from device.runtime.cuda.tactics import tactic_key

Array = npt.NDArray[Any]

_HOST_ALIGNMENT = 256  # bytes; that of the workspace's tensors, which kernels rely on


@dataclass(frozen=True, slots=True)
class _Border:
    """An input or output of the segment: its page-locked bytes and its address on the GPU.

    `shape` may hold formulas. `mapped`: the address is that of the page-locked bytes.
    """

    dtype: str
    shape: Sequence[Amount]
    host: Bytes
    address: int
    mapped: bool

    def array(self, point: Sequence[int]) -> Array:
        """Return the page-locked bytes as an array, at these sizes of the dynamic dimensions."""
        shape = [evaluate(size, point) for size in self.shape]
        view: Array = np.ndarray(shape, np.dtype(self.dtype), self.host)
        return view


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """What one run needs: sizes, page-locked arrays, and the tactic of each operation."""

    point: tuple[int, ...]
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    tactics: tuple[int, ...]


class LoadedSegment:
    """A segment loaded onto a GPU. A `point` holds the sizes of the engine's dynamic dimensions.

    Memory is released by `close` or with the last reference.
    """

    def __init__(self, engine: Engine, implementation: Cuda, zero_copy: bool | None = None) -> None:
        """Upload weights and take the workspace. Raises CudaError if the driver refuses.

        `zero_copy`: whether kernels use the CPU's memory for the engine's inputs and outputs, None
        where the GPU has no memory of its own. Engines for other GPUs have no place for that.
        """
        self.implementation = implementation
        self.context = Context()
        self._finalizer = weakref.finalize(self, _close_quietly, self.context)
        self.facts = self.context.facts
        key, self._program = acquire_program(engine, implementation)
        self.context.on_close(partial(release_program, key))
        places = (*implementation.inputs, *implementation.outputs)
        mapped = _mapped(engine, implementation, zero_copy)
        whole = len(mapped) < len(places) or implementation.borders_at is UNSET
        size = implementation.workspace_bytes if whole else implementation.borders_at
        assert size is not UNSET
        self._workspace = self.context.allocate(size)
        self.context.fill(self._workspace, 0, size)
        self._dims = engine.manifest.dims
        self._tensors = {tensor.name: tensor for tensor in engine.manifest.tensors}
        self._borders = self._take_borders(places, mapped)
        self._elsewhere = [place for place in places if place.tensor in mapped]
        self.device_outputs: frozenset[str] = frozenset()  # outputs that are not copied to the host
        self.sources: dict[str, int] = {}  # addresses on the GPU that inputs are copied from
        self.stream = self.context.stream()
        self._launcher = Launcher(implementation, self._program)

    def close(self) -> None:
        """Release everything on the GPU; page-locked arrays stay as long as they are referenced."""
        self._finalizer()

    def problem_at(self, point: tuple[int, ...]) -> str | None:
        """Return why the segment cannot run at these sizes, or None."""
        if not self._dims:
            return None
        weights_bytes = self._program.weights_bytes
        problems = problems_at(self.implementation, point, weights_bytes, self._tensors, self._dims)
        return next(problems, None)

    def prepare(self, point: tuple[int, ...], tactics: tuple[int, ...]) -> SegmentRun:
        """Return a run at these sizes, its kernels loaded.

        They are loaded now because old drivers cannot while a graph is captured.
        """
        for op, tactic in zip(self.implementation.works, tactics, strict=True):
            for launch in op.tactics[tactic].launches:
                self._program.function(launch.kernel)
        inputs, outputs = (
            {place.tensor: self._borders[place.tensor].array(point) for place in places}
            for places in (self.implementation.inputs, self.implementation.outputs)
        )
        return SegmentRun(point, inputs, outputs, tactics)

    def copy_in(self, run: SegmentRun) -> None:
        """Enqueue the copies of the inputs to their places, from the host or on the GPU."""
        for name, array in run.inputs.items():
            border = self._borders[name]
            if name in self.sources:
                self.stream.copy(border.address, self.sources[name], array.nbytes)
            elif not border.mapped:
                self.stream.upload(border.address, border.host[: array.nbytes])

    def copy_out(self, run: SegmentRun) -> None:
        """Enqueue the copies of the outputs to the host, but of those that stay on the GPU."""
        for name, array in run.outputs.items():
            border = self._borders[name]
            if name not in self.device_outputs and not border.mapped:
                self.stream.download(border.host[: array.nbytes], border.address)

    def launch_all(self, run: SegmentRun, stream: Stream | None = None) -> None:
        """Enqueue every operation, on the segment's own stream unless there is another."""
        for op, tactic in zip(self.implementation.works, run.tactics, strict=True):
            self.launch(op.tactics[tactic], run.point, stream)

    def launch(self, tactic: Tactic, point: tuple[int, ...], stream: Stream | None = None) -> None:
        """Enqueue the launches of one tactic."""
        self._launcher.start(tactic.launches, point, self._address, stream or self.stream)

    def address(self, tensor: str) -> int:
        """Return the address on the GPU of an input or output of the segment."""
        return self._borders[tensor].address

    def _address(self, offset: int) -> int:
        for place in self._elsewhere:
            if place.offset <= offset < place.offset + place.bytes:
                return self._borders[place.tensor].address + offset - place.offset
        return self._workspace + offset

    def tactic_key(self, tactic: Tactic, point: tuple[int, ...]) -> str:
        """Return the key of a tactic in the timing cache."""
        kernels, cubin_sha256 = self.implementation.kernels, self._program.cubin_sha256
        return tactic_key(tactic.launches, kernels, cubin_sha256, point)

    def _take_borders(
        self, places: tuple[WorkspaceTensor, ...], mapped: frozenset[str]
    ) -> dict[str, _Border]:
        """Take page-locked memory for all inputs and outputs, in one allocation."""
        starts, total = [], 0
        for place in places:
            starts.append(total)
            total += -(-place.bytes // _HOST_ALIGNMENT) * _HOST_ALIGNMENT
        host = self.context.allocate_host(total, mapped=bool(mapped))
        base = self.context.mapped_address(host) if mapped else 0
        return {
            place.tensor: _Border(
                self._tensors[place.tensor].dtype,
                _shape(place, self._tensors[place.tensor]),
                host[start : start + place.bytes],
                base + start if place.tensor in mapped else self._workspace + place.offset,
                place.tensor in mapped,
            )
            for place, start in zip(places, starts, strict=True)
        }


def _mapped(engine: Engine, implementation: Cuda, zero_copy: bool | None) -> frozenset[str]:
    """Return the inputs and outputs that kernels find in the CPU's memory."""
    if zero_copy is None:
        zero_copy = device_attribute(INTEGRATED) == 1
    if not zero_copy or implementation.borders_at is UNSET:
        return frozenset()
    # What other segments read and write stays in the GPU's memory, which it caches.
    manifest = engine.manifest
    inner = {name for segment in manifest.segments for name in segment.outputs} - {
        *manifest.outputs
    }
    places = (*implementation.inputs, *implementation.outputs)
    return frozenset(place.tensor for place in places if place.bytes) - inner


def _shape(place: WorkspaceTensor, tensor: TensorInfo) -> tuple[Amount, ...]:
    """Return the sizes of an input or output; all are numbers unless it has formulas."""
    if place.shape is not None:
        return place.shape
    return tuple(dim for dim in tensor.shape if isinstance(dim, int))


def _close_quietly(context: Context) -> None:
    """Close a context; what fails after a fault on the GPU was raised when the fault was seen."""
    with suppress(CudaError):
        context.close()
