"""What the session needs of a way to run segments: the executor, its loader and its profiler."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from device.dla_emulator.options import Emulation
from device.engine.file import Engine
from device.engine.manifest import Segment, TensorInfo
from device.errors import SessionError
from device.runtime.chain_steps import Format
from device.runtime.cuda.context import Stream

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Targets = Mapping[str, "Array | None"]  # of outputs; None: a new array
Sizes = Mapping[str, int]  # of the engine's dynamic dimensions
# What runs segments: the best there is, or OpenVINO on the CPU.
ExecutorName = Literal["auto", "openvino"]


@dataclass(frozen=True, slots=True)
class Phases:
    """The parts of one inference, in microseconds of the accelerator's clock.

    `enqueue_us` is the CPU's time to enqueue the kernels.
    """

    enqueue_us: float
    copy_in_us: float
    compute_us: float
    copy_out_us: float


@dataclass(frozen=True, slots=True)
class LayerTime:
    """The time of one operation by itself: tactic number `tactic` of `tactics`, its kernels."""

    nodes: tuple[str, ...]
    kernels: tuple[str, ...]
    tactic: int
    tactics: int
    time_us: float


class Profiler(Protocol):
    """Times of a segment by the accelerator's clock, at the sizes and on the data of the last run.

    Every method raises SessionError if the driver fails.
    """

    def compute_us(self, runs: int) -> Sequence[float]:
        """Return the time of the segment's kernels, without copies, run by run."""
        ...

    def phases(self, runs: int) -> Sequence[Phases]:
        """Return the times of copies in, kernels and copies out, run by run."""
        ...

    def layer_times(self, runs: int) -> Sequence[LayerTime]:
        """Return the median time of each operation by itself, in running order."""
        ...


Shapes = Mapping[str, tuple[tuple[int, ...], "np.dtype[Any]"]]
"""Shape and element type of tensors in C order, by name."""


class DeviceSegment(Protocol):
    """A loaded segment that runs on tensors in GPU memory, on any stream of the primary context.

    `captured`: its work can be a part of a CUDA graph. `largest_bytes`: of each input and output in
    C order, at the largest sizes. Methods raise SessionError or CudaError if the driver fails.
    """

    captured: bool
    largest_bytes: Mapping[str, int]

    def format(self, tensor: str) -> Format | None:
        """Return the format of an input or output, None for C order."""
        return None

    def address(self, tensor: str) -> int:
        """Return the address of an input or output in the segment's own memory."""
        ...

    def use(self, tensor: str, address: int) -> None:
        """Read an input at another address from now on; segments in C order cannot."""
        raise SessionError(
            f"tensor {tensor!r} of a GPU segment has its own place; it cannot be put at "
            f"0x{address:x}: copy it"
        )

    def convert(self, tensor: str, source: int, target: int, stream: Stream) -> None:
        """Enqueue the kernels of a port, from one address to the other."""
        raise SessionError(
            f"tensor {tensor!r} of a GPU segment is in C order; there is nothing to convert"
        )

    def shapes(self, sizes: Sizes) -> Shapes:
        """Get ready for these sizes, and return the shapes of inputs and outputs."""
        ...

    def enqueue(self, sizes: Sizes, stream: Stream) -> None:
        """Enqueue the segment's work. Raises SessionError: it is not taken."""
        ...


class LoadRefusedError(SessionError):
    """An implementation cannot be loaded here and now; another one may run."""


class Executor(Protocol):
    """One segment, loaded and ready to run. Implementations inherit what they do not have."""

    @property
    def description(self) -> str:
        """The runtime and the processor, for reports."""
        ...

    @property
    def tactics(self) -> tuple[int, ...]:
        """The tactic of each tunable operation at the sizes of the last run."""
        return ()

    @property
    def profiler(self) -> Profiler | None:
        """The accelerator's own times; None where only the caller's clock can tell."""
        return None

    @property
    def processors(self) -> tuple[str, ...]:
        """Where it runs: "cpu", "gpu", or DLA cores such as "dla0", one after the other."""
        return ("cpu",)

    @property
    def device(self) -> DeviceSegment | None:
        """The segment on tensors in GPU memory; None where it runs on the host's alone."""
        return None

    def arrays(self, sizes: Sizes) -> Mapping[str, Array]:
        """Return arrays of inputs and outputs that `run` reads and writes without a copy.

        `sizes` are those of the engine's dynamic dimensions. Each call returns the same memory,
        which stays valid after `close`. A tensor that is not among them may lie anywhere.
        """
        return {}

    def run(self, inputs: Arrays, outputs: Targets, sizes: Sizes) -> dict[str, Array]:
        """Run on C-contiguous arrays and return the outputs by name.

        Each output is written into its array, or a new one for None. `sizes` are those of the
        engine's dynamic dimensions. Raises SessionError if the segment fails or an output has
        another shape than its array.
        """
        ...

    @property
    def can_stay_on_gpu(self) -> bool:
        """Whether `stay_on_gpu` may be called."""
        return False

    def stay_on_gpu(self, outputs: frozenset[str], sources: Mapping[str, int]) -> None:
        """Copy these outputs to the host no more, and read inputs at these addresses on the GPU.

        `run` leaves the arrays of both as they are. Nothing can stay by default.
        """
        return

    def use_dla_core(self, core: int) -> None:
        """Run on another DLA core from now on; what runs on no DLA stays where it is.

        Raises SessionError: the core is not there or does not take it, and nothing changes.
        """
        return

    def close(self) -> None:
        """Release memory and handles; the executor cannot run afterwards."""
        return  # without this line the method is abstract


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How segments are loaded.

    `threads`: CPU threads of each, None for the executor's default. `timing_cache`: the file with
    times of tactics. `emulation`: how to emulate DLA segments, None for not at all. `plans`: the
    folder with TensorRT's plans of DLA segments, None for that of the user. `dla_core`: the core
    of all DLA segments, None for those of the plan. `turn`: of the session among those that share
    the cores, None for one that has all in turn. `zero_copy`: whether kernels use the CPU's memory
    for inputs and outputs, None where the GPU has no memory of its own. `executor`: "openvino" runs
    every segment on the CPU, in OpenVINO.
    """

    threads: int | None = None
    timing_cache: Path | None = None
    emulation: Emulation | None = None
    plans: Path | None = None
    dla_core: int | None = None
    turn: int | None = None
    zero_copy: bool | None = None
    executor: ExecutorName = "auto"


@dataclass(frozen=True, slots=True)
class SegmentContext:
    """What a loader gets: a segment of an engine, the engine's tensors by name, the options."""

    engine: Engine
    segment: Segment
    tensors: Mapping[str, TensorInfo]
    options: LoadOptions

    @property
    def where(self) -> str:
        """The segment's name in errors."""
        return f"{self.engine.path}: segment {self.segment.name!r}"


def runs_here() -> str | None:
    """Return no problem: `ExecutorKind.why_not` of what runs on every machine."""
    return None


def always_fits(_context: SegmentContext, _: object) -> str | None:
    """Return no problem: `ExecutorKind.misfit` of what runs every implementation of its tag."""
    return None


@dataclass(frozen=True, slots=True)
class ExecutorKind:
    """A way to run segments, as a row of `device.runtime.executors.table.EXECUTORS`.

    `name` stands in reports; `tag` is the implementation in the manifest that it runs. `load` takes
    that implementation (Any: each tag has a class of its own). `why_not`
    says why this machine cannot run it, `misfit` why it cannot run one segment. A kind
    with `requested` is taken only for segments for which that is true, and then alone. `remark`
    is the reason in the report where no better kind was refused.
    """

    name: str
    tag: str
    load: Callable[[SegmentContext, Any], Executor]
    why_not: Callable[[], str | None] = runs_here
    misfit: Callable[[SegmentContext, Any], str | None] = always_fits
    requested: Callable[[SegmentContext], bool] | None = None
    remark: str = "the best there is"
