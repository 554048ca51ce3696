"""Run a graph with every activation as an output, for calibration."""

import math
import os
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.arrays import Sample
from calibration.calibrate import Checkpoint, Observation, observe_tensors
from calibration.dataset import Dataset
from calibration.observer import FINE_BINS
from calibration.progress import Progress
from calibration.runs import BLOCK_BYTES, Arrays, Run
from device.runtime.exact_products import exact_session
from pipelines.vision import cv2
from toolkit.errors import BuildError, InferError, first_line
from toolkit.graph.extract import MAX_IR_VERSION, external_weights
from toolkit.graph.run_limit import limited_run

THREADS = 2
"""Samples, or blocks of them, run at the same time; each takes the memory of its activations."""

MAX_BLOCK = 32

_ALIGNED = 64  # bytes; the order of sums may depend on where an array begins
_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}


def observe_graph(
    graph: ir.Model,
    samples: Dataset,
    tensors: Sequence[str],
    on_progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
) -> Observation:
    """Observe tensors of a graph on all cores.

    Raises BuildError where the graph cannot be run, and what `observe_tensors` raises.
    """
    return observe_run(shared_runner(graph, tensors), samples, tensors, on_progress, checkpoint)


def shared_runner(graph: ir.Model, tensors: Sequence[str]) -> "SharedRunner":
    """Return a runner for `observe_run`, whose threads share the cores.

    Raises BuildError: onnxruntime cannot load the model.
    """
    return SharedRunner(ActivationRunner(graph, tensors, usable_cores() // sample_threads()))


def observe_run(
    run: Run,
    samples: Dataset,
    tensors: Sequence[str],
    on_progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
    *,
    threads: int | None = None,
    hash_inputs: bool = True,
) -> Observation:
    """`observe_tensors` with a runner of `shared_runner`, in several threads; None: as many as
    `sample_threads`."""
    return observe_tensors(
        run, samples, tensors, on_progress, checkpoint,
        count=opencv_counts, threads=threads or sample_threads(), hash_inputs=hash_inputs,
    )  # fmt: skip


def sample_threads() -> int:
    """How many samples run at a time, also where others share the cores: they may end, and the last
    one takes what they leave."""
    return min(THREADS, usable_cores())


def usable_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class ActivationRunner:
    """A graph in onnxruntime; calling it with the inputs gives the named float32 activations."""

    def __init__(self, model: ir.Model, tensors: Sequence[str], threads: int = 0) -> None:
        """`tensors` may name inputs too. `threads` run one sample, 0: as many as there are cores.

        Raises BuildError: onnxruntime cannot load the model.
        """
        import onnxruntime as ort

        observed = model.clone()
        observed.ir_version = min(model.ir_version, MAX_IR_VERSION)
        inputs = {str(value.name) for value in observed.graph.inputs}
        declared = {str(value.name) for value in observed.graph.outputs}
        self._input_names = [name for name in tensors if name in inputs]
        self.computed = [name for name in tensors if name not in inputs]
        values = {str(value.name): value for node in observed.graph for value in node.outputs}
        observed.graph.outputs.extend(
            values[name] for name in self.computed if name not in declared
        )
        weights = external_weights(observed.graph)
        # onnxruntime reads some weights in place: they must live as long as the session.
        self._weights = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        options = ort.SessionOptions()
        options.log_severity_level = 4  # errors are raised too
        options.intra_op_num_threads = threads
        # All intermediate results are outputs; a memory plan would allocate them twice.
        options.enable_mem_pattern = False
        options.add_external_initializers(list(weights), self._weights)
        try:
            self.session = exact_session(ir.to_proto(observed).SerializeToString(), options)
        except Exception as err:  # onnxruntime has a type of its own for every status
            raise BuildError(
                f"onnxruntime cannot load the model for calibration: {first_line(err)}"
            ) from err

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run one sample; raises BuildError if it does not fit the model."""
        try:
            with limited_run() as options:
                arrays = (
                    self.session.run(self.computed, dict(feeds), options) if self.computed else []
                )
        except InferError:
            raise
        except Exception as err:
            raise BuildError(
                f"onnxruntime cannot run the model on a calibration sample: {first_line(err)}"
            ) from err
        return self.with_fed(dict(zip(self.computed, arrays, strict=True)), feeds)

    def with_fed(
        self, result: dict[str, np.ndarray], feeds: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Add the observed inputs to computed arrays."""
        result.update({name: np.asarray(feeds[name]) for name in self._input_names})
        return result

    @cached_property
    def layout(self) -> dict[str, tuple[np.dtype[Any], list[int]]]:
        """Type and shape of each computed tensor; nothing if one depends on the data."""
        outputs = {output.name: output for output in self.session.get_outputs()}
        layout = {}
        for name in self.computed:
            dtype, shape = _DTYPES.get(outputs[name].type), outputs[name].shape
            if dtype is None or not all(isinstance(size, int) and size >= 0 for size in shape):
                return {}
            layout[name] = (np.dtype(dtype), shape)
        return layout


class SharedRunner:
    """A runner for several threads; the next call of a thread overwrites its results.

    Faster than `ActivationRunner`: onnxruntime writes into preallocated arrays, without a copy, and
    those of the samples of a block lie side by side. Each sample is a run of its own: products of
    a larger batch may have other bits.
    """

    def __init__(self, runner: ActivationRunner) -> None:
        self._runner = runner
        self._thread_local = threading.local()
        sample_bytes = sum(_stride(*kind) for kind in runner.layout.values())
        self.block = (
            max(1, min(MAX_BLOCK, BLOCK_BYTES // max(1, sample_bytes))) if runner.layout else 1
        )

    def __call__(self, feeds: Sample) -> Arrays:
        """Run one sample; raises BuildError if it does not fit the model."""
        buffers = self._own()
        if buffers is None or not buffers.run(0, feeds):
            return self._runner(feeds)
        return self._runner.with_fed(
            {name: array[0] for name, array in buffers.arrays.items()}, feeds
        )

    def run_block(self, feeds: Arrays) -> Arrays | None:
        """Run the samples of a block, [samples, *shape]; None: they must be run one by one."""
        buffers, count = self._own(), len(next(iter(feeds.values())))
        if buffers is None:
            return None
        for at in range(count):
            if not buffers.run(at, {name: _aligned(array, at) for name, array in feeds.items()}):
                return None
        arrays = {name: array[:count] for name, array in buffers.arrays.items()}
        return self._runner.with_fed(arrays, feeds)

    def _own(self) -> "_Preallocated | None":
        """What this thread has preallocated; None if a shape is dynamic."""
        if not self._runner.layout:
            return None
        if not hasattr(self._thread_local, "preallocated"):
            self._thread_local.preallocated = _Preallocated(self._runner, self.block)
        preallocated: _Preallocated = self._thread_local.preallocated
        return preallocated


class _Preallocated:
    """The results of one thread, in one block of memory, of large pages.

    `arrays`: [block, *shape]. Where a sample begins is a multiple of `_ALIGNED` bytes.
    """

    def __init__(self, runner: ActivationRunner, block: int) -> None:
        self._session, self._layout = runner.session, runner.layout
        self._bindings: list[Any] = []  # onnxruntime.IOBinding of each sample, once it is run
        strides = [_stride(*kind) for kind in self._layout.values()]
        ends = [*accumulate(block * stride for stride in strides)]
        memory = np.empty(ends[-1] + _ALIGNED, np.uint8)
        memory = memory[-memory.ctypes.data % _ALIGNED :]
        self.arrays = {
            name: np.ndarray(
                (block, *shape),
                kind,
                memory.data,
                start,
                (stride, *np.empty(shape, kind).strides),
            )
            for (name, (kind, shape)), stride, start in zip(
                self._layout.items(), strides, [0, *ends], strict=False
            )
        }

    def run(self, at: int, feeds: Sample) -> bool:
        """Run a sample as number `at` of a block; False if it fails, or a shape is not declared.

        Raises InferError: it took too long.
        """
        try:
            while len(self._bindings) <= at:
                self._bindings.append(self._binding(len(self._bindings)))
            binding = self._bindings[at]
            for name, array in feeds.items():
                binding.bind_cpu_input(name, np.asarray(array, order="C"))
            with limited_run() as options:
                self._session.run_with_iobinding(binding, options)
        except InferError:
            raise
        except Exception:  # noqa: BLE001  (whoever runs it without a binding raises it again)
            return False
        return True

    def _binding(self, at: int) -> Any:  # noqa: ANN401  (onnxruntime has no types)
        binding = self._session.io_binding()
        for name, (kind, shape) in self._layout.items():
            address = self.arrays[name][at].ctypes.data
            binding.bind_output(name, "cpu", 0, kind.type, shape, address)
        return binding


def _stride(kind: np.dtype[Any], shape: Sequence[int]) -> int:
    """Bytes from one sample of a tensor to the next."""
    return -(-math.prod(shape) * kind.itemsize // _ALIGNED) * _ALIGNED


def _aligned(array: NDArray[Any], at: int) -> NDArray[Any]:
    """An input of sample `at` of a block, which begins where the input of any sample may."""
    sample: NDArray[Any] = array[at]
    return sample if array.strides[0] % _ALIGNED == 0 else sample.copy()


def opencv_counts(numbers: NDArray[np.uint16]) -> NDArray[np.int32]:
    """Count bin numbers with OpenCV: the same counts as NumPy, four times as fast.

    OpenCV counts in float32, exact up to 2^24: more than one call counts.
    """
    counts = cv2.calcHist([numbers.reshape(1, -1)], [0], None, [FINE_BINS], [0, FINE_BINS])
    return np.asarray(counts, np.float32).reshape(-1).astype(np.int32)
