"""Runs an engine: picks the best implementation of each segment and passes tensors between them.

All tensors between segments are in one arena, laid out by the engine's memory plan: segments read
and write them there, without copies.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from device.choices import list_choices
from device.closing import Closing
from device.dla_emulator.options import Emulation
from device.engine.file import Engine, PathLike, open_engine
from device.engine.manifest import Buffer, DimRange, TensorInfo
from device.errors import SessionError
from device.runtime.arrays import array_for, fresh_array, take_arena
from device.runtime.cuda.device_array import DeviceArray
from device.runtime.cuda.sharing import CallersContext, undisturbed
from device.runtime.executors.protocol import Executor, ExecutorName, LoadOptions, SegmentContext
from device.runtime.executors.table import SegmentReport, load_segment
from device.runtime.feeds import check_feeds, check_targets
from device.runtime.on_device import OnDevice
from device.runtime.stages import open_stages, single_stages

Array = npt.NDArray[Any]

# How DLA segments run: with the implementation that the engine carries, or emulated in mode exact
# or fast; and the arithmetic of the emulation (device/dla_emulator/options.py).
Dla = Literal["portable", "exact", "fast"]
Scales = Literal["hardware", "ideal"]

_IN_CUDA = frozenset({"cuda", "tensorrt"})  # executors that make the primary context current


class Session(Closing):
    """An engine, ready to run. One call runs at a time; others wait.

    No call leaves another CUDA context current in the caller's thread than it found there.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        profile: str | None = None,
        threads: int | None = None,
        dla: Dla = "portable",
        scales: Scales = "hardware",
        timing_cache: Path | None = None,
        plans: Path | None = None,
        dla_core: int | None = None,
        turn: int | None = None,
        zero_copy: bool | None = None,
        executor: ExecutorName = "auto",
    ) -> None:
        """Load every segment and take the arena's memory.

        `profile` is the name of this device's profile; `threads` bounds the CPU threads of each
        segment. `dla` "exact" or "fast" runs DLA segments with the DLA's arithmetic in software,
        its scales of 16 bits (`scales` "hardware") or exact. `timing_cache` is a file with times of
        GPU tactics: the fastest run, and those that it lacks are timed and added to it, once.
        `plans` is the folder of `tandem-agent prepare`, None for the user's; `dla_core` puts all
        DLA segments on one core; `turn` puts those whose frames take turns on one of the cores, as
        `SessionPool` does. `zero_copy`: kernels read inputs and write outputs in the CPU's memory,
        None where the GPU has no memory of its own, as on a Jetson. `executor` "openvino" runs all
        segments in OpenVINO on the CPU. The engine stays the caller's to close, also before the
        session.
        Raises SessionError if the engine is for another profile or cannot be run here.
        """
        manifest = engine.manifest
        _check_profile(engine, profile)
        _check_choice("dla", dla, get_args(Dla))
        _check_choice("scales", scales, get_args(Scales))
        _check_choice("executor", executor, get_args(ExecutorName))
        if threads is not None and threads < 1:
            raise SessionError(f"the session was given {threads} threads; give at least 1")
        self._tensors = {tensor.name: tensor for tensor in manifest.tensors}
        self._outputs = manifest.outputs
        self._ranges = {dim.name: dim for dim in manifest.dims}
        self._buffers = {buffer.tensor: buffer for buffer in manifest.memory.buffers}
        self._arena = take_arena(manifest.memory.arena_bytes, str(engine.path))
        self._lock = threading.Lock()
        self.inputs: tuple[TensorInfo, ...] = tuple(self._tensors[n] for n in manifest.inputs)
        self.outputs: tuple[TensorInfo, ...] = tuple(self._tensors[n] for n in manifest.outputs)
        self.dims: tuple[DimRange, ...] = manifest.dims
        emulation = None if dla == "portable" else Emulation(dla, scales)
        options = LoadOptions(
            threads, timing_cache, emulation, plans, dla_core, turn, zero_copy, executor
        )
        self._segments = manifest.segments
        self._engine = engine
        self._on_device: OnDevice | None = None
        self._closed = False
        with undisturbed(), ExitStack() as stack:
            self._load(options, stack)
            self._close_executors = stack.pop_all().close

    def _load(self, options: LoadOptions, stack: ExitStack) -> None:
        """Load the segments and open the stages; `stack` closes them."""
        loaded = []
        with self._engine.checking_beside():
            for segment in self._segments:
                context = SegmentContext(self._engine, segment, self._tensors, options)
                executor, report = load_segment(context)
                stack.callback(executor.close)
                loaded.append((executor, report))
        self._executors: tuple[Executor, ...] = tuple(executor for executor, _ in loaded)
        self._stages = open_stages(self._engine, self._executors)
        for stage in self._stages:
            if stage.chain is not None:
                stack.callback(stage.chain.close)
        self.reports: tuple[SegmentReport, ...] = tuple(report for _, report in loaded)
        in_cuda = any(report.implementation in _IN_CUDA for report in self.reports)
        self._callers: Callable[[], AbstractContextManager[None]] = (
            CallersContext if in_cuda else nullcontext
        )

    @property
    def executors(self) -> tuple[Executor, ...]:
        """The executor of each segment, in running order; none once the session is closed."""
        return self._executors

    def infer(
        self, feeds: Mapping[str, Array], outputs: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Run the engine once and return its outputs by name.

        The feeds have the dtypes and shapes of `inputs`, with each dynamic dimension inside its
        range in `dims`. Outputs are written into the arrays of `outputs`, C order, and returned;
        those not given are new arrays, the caller's to keep. Raises SessionError if an array does
        not fit or a segment fails.
        """
        values = self._run(feeds, outputs or {})
        return {name: values[name] for name in self._outputs}

    def infer_on_device(
        self,
        feeds: Mapping[str, object],
        outputs: Mapping[str, object] | None = None,
        *,
        stream: object | None = None,
    ) -> dict[str, DeviceArray]:
        """Run the engine once on arrays in the GPU's memory and return its outputs there.

        Arrays are those of pycuda, CuPy or PyTorch, or any others on GPU 0 with DLPack or
        `__cuda_array_interface__`, in C order, in the types and shapes of `infer`; a raw address is
        a `DeviceArray`. Outputs are written into the arrays of `outputs`; those not given are new.
        `stream` is one of pycuda, PyTorch or CuPy, or the driver's handle: everything is enqueued
        there, after what wrote the arrays, and the caller keeps these until the stream is done.
        Without, the results are ready when this returns. Nothing is copied over the host, unless a
        segment has no GPU implementation (`reports`): then the CPU waits for the stream.

        Raises SessionError, naming the array: not on GPU 0, another type or shape, not contiguous,
        read-only, too small; another CUDA context than the primary one; no GPU.
        """
        with self._lock:
            if self._closed:
                raise SessionError("the session is closed; open a new one")
            if self._on_device is None:
                self._on_device = OnDevice(self._engine, self._executors)
            return self._on_device.infer(feeds, outputs or {}, stream)

    def arrays(
        self, sizes: Mapping[str, int] | None = None
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return arrays for feeds and for outputs, to fill and to pass to `infer` again and again.

        On a GPU they are page-locked, and nothing is copied on the CPU. `sizes` are those of the
        dynamic dimensions, or those that the engine was built for. Every inference overwrites the
        outputs; arrays for other sizes may lie in the same memory. All stay valid after the
        session. Outputs whose size is known only when run are left out. Raises SessionError: sizes
        that are not taken, or a session that is closed.
        """
        known = {dim.name: dim.opt for dim in self.dims}
        unknown = [name for name in sizes or {} if name not in known]
        if unknown:
            raise SessionError(
                f"the engine has no dynamic dimension {unknown[0]!r}; it has "
                f"{', '.join(map(repr, known)) or 'none'}"
            )
        known |= sizes or {}
        inputs, outputs = (
            {t.name: array_for(t, known) for t in tensors if None not in t.shape}
            for tensors in (self.inputs, self.outputs)
        )
        check_feeds(inputs, self.inputs, self._ranges)
        with self._lock:
            if self._closed:
                raise SessionError("the session is closed; open a new one")
            with self._callers():
                for stage in self._stages:
                    preferred = stage.arrays(known)
                    inputs.update({n: preferred[n] for n in inputs if n in preferred})
                    outputs.update({n: preferred[n] for n in self._outputs if n in preferred})
        return inputs, outputs

    def use_dla_core(self, core: int) -> None:
        """Run all DLA segments on this core from the next inference on.

        Raises SessionError: the core is not there or does not take a segment, which then stays
        where it was.
        """
        with self._lock:
            if self._closed:
                raise SessionError("the session is closed; open a new one")
            if self._on_device is not None:
                self._on_device.wait()  # its tasks may still run on the cores of before
            reports = list(self.reports)
            try:
                with undisturbed():
                    for number, executor in enumerate(self._executors):
                        before, report = executor.description, reports[number]
                        executor.use_dla_core(core)
                        reason = report.reason.replace(before, executor.description)
                        reports[number] = replace(
                            report, reason=reason, runs_on=executor.processors
                        )
            finally:  # those before one that is refused run there already
                self.reports = tuple(reports)

    def segment_times_ms(self, feeds: Mapping[str, Array]) -> dict[str, float]:
        """Run the engine once and return the time of each segment, in milliseconds.

        Each segment runs by itself, with its copies to and from the host.
        """
        times: dict[str, float] = {}

        def watch(segment: str, seconds: float) -> None:
            times[segment] = seconds * 1000

        self._run(feeds, {}, watch)
        return times

    def _run(
        self,
        feeds: Mapping[str, Array],
        targets: Mapping[str, Array],
        watch: Callable[[str, float], None] | None = None,
    ) -> dict[str, Array]:
        """Return the inputs and outputs of stages; `watch` gets the seconds of each segment.

        With `watch` every segment is a stage of its own.
        """
        sizes = check_feeds(feeds, self.inputs, self._ranges)
        check_targets(targets, self.outputs, sizes)
        values = {name: np.require(feeds[name], requirements=("C", "A")) for name in feeds}
        with self._lock:
            if self._closed:
                raise SessionError("the session is closed; open a new one")
            stages = self._stages
            if watch is not None:
                stages = single_stages(self._segments, self._executors)
            with self._callers():
                if self._on_device is not None:
                    self._on_device.wait()
                for stage in stages:
                    begin = time.perf_counter()
                    outputs = {
                        name: targets[name] if name in targets else self._array_of(name, sizes)
                        for name in stage.outputs
                        if stage.chain is None or name in self._outputs
                    }
                    inputs = {name: values[name] for name in stage.inputs}
                    values.update(stage.run(inputs, outputs, sizes))
                    if watch is not None:
                        watch(stage.name, time.perf_counter() - begin)
        return values

    def _array_of(self, name: str, sizes: Mapping[str, int]) -> Array | None:
        """Return the array for an output of a segment, None if only a run tells its size."""
        tensor = self._tensors[name]
        shape: list[int] = []
        for dim in tensor.shape:
            if dim is None:
                return None
            shape.append(sizes[dim] if isinstance(dim, str) else dim)
        if name in self._outputs:
            # The caller keeps it: in the arena the next run would overwrite it.
            return fresh_array(name, shape, tensor.dtype)
        buffer = self._buffers.get(name)
        return None if buffer is None else self._view(buffer, tensor.dtype, shape)

    def _view(self, buffer: Buffer, dtype: str, shape: list[int]) -> Array:
        view: Array = np.ndarray(shape, dtype, self._arena, buffer.offset)
        return view

    def close(self) -> None:
        """Close the executors and release the arena; arrays handed out stay valid."""
        with self._lock:
            self._closed = True
            self._executors, self._stages = (), ()
            on_device, self._on_device = self._on_device, None
            with undisturbed():
                try:
                    if on_device is not None:
                        on_device.close()
                finally:  # after a fault on the GPU the former fails
                    self._close_executors()
            self._arena = np.empty(0, np.uint8)


def open_session(
    path: PathLike,
    *,
    profile: str | None = None,
    threads: int | None = None,
    dla: Dla = "portable",
    scales: Scales = "hardware",
    timing_cache: Path | None = None,
    plans: Path | None = None,
    dla_core: int | None = None,
    executor: ExecutorName = "auto",
) -> Session:
    """Open an engine file and run it; see `open_engine` and `Session` for what they raise."""
    with open_engine(path) as engine:
        return Session(
            engine,
            profile=profile,
            threads=threads,
            dla=dla,
            scales=scales,
            timing_cache=timing_cache,
            plans=plans,
            dla_core=dla_core,
            executor=executor,
        )


def _check_profile(engine: Engine, profile: str | None) -> None:
    """Raise SessionError if an engine is not for the profile of this device."""
    target = engine.manifest.profile
    if profile is not None and profile != target:
        raise SessionError(
            f"engine {engine.path} is for {target}, this device is {profile}; "
            f"`tandem build --profile {profile}` makes one for it"
        )


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SessionError(
            f"the session was given {option} {value!r}: use one of {list_choices(value, choices)}"
        )
