"""Run a graph with every activation as an output, for calibration."""

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.calibrate import Checkpoint, Observation, Run, observe_tensors
from calibration.dataset import Dataset
from calibration.observer import FINE_BINS
from calibration.progress import Progress
from device.runtime.exact_products import exact_session
from pipelines.vision import cv2
from toolkit.errors import BuildError, InferError, first_line
from toolkit.graph.extract import MAX_IR_VERSION, external_weights
from toolkit.graph.run_limit import limited_run

THREADS = 2
"""Samples run at the same time; each takes the memory of its activations."""

_ALIGNED = 64  # bytes
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


def shared_runner(
    graph: ir.Model, tensors: Sequence[str]
) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
    """Return a runner for `observe_run`; its threads share the cores and own their result arrays.

    Raises BuildError: onnxruntime cannot load the model.
    """
    return ActivationRunner(graph, tensors, usable_cores() // _threads()).run_shared


def observe_run(
    run: Run,
    samples: Dataset,
    tensors: Sequence[str],
    on_progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
) -> Observation:
    """`observe_tensors` with a runner of `shared_runner`, in several threads."""
    return observe_tensors(
        run, samples, tensors, on_progress, checkpoint, count=opencv_counts, threads=_threads()
    )


def _threads() -> int:
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
        self._computed = [name for name in tensors if name not in inputs]
        values = {str(value.name): value for node in observed.graph for value in node.outputs}
        observed.graph.outputs.extend(
            values[name] for name in self._computed if name not in declared
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
            self._session = exact_session(ir.to_proto(observed).SerializeToString(), options)
        except Exception as err:  # onnxruntime has a type of its own for every status
            raise BuildError(
                f"onnxruntime cannot load the model for calibration: {first_line(err)}"
            ) from err

        self._thread_local = threading.local()

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run one sample; raises BuildError if it does not fit the model."""
        try:
            with limited_run() as options:
                arrays = (
                    self._session.run(self._computed, dict(feeds), options)
                    if self._computed
                    else []
                )
        except InferError:
            raise
        except Exception as err:
            raise BuildError(
                f"onnxruntime cannot run the model on a calibration sample: {first_line(err)}"
            ) from err
        return self._with_fed(dict(zip(self._computed, arrays, strict=True)), feeds)

    def run_shared(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run one sample; the next call of this thread overwrites the results.

        Faster than a call: onnxruntime writes into preallocated arrays, without a copy.
        """
        preallocated = getattr(self._thread_local, "preallocated", None) or self._preallocate()
        self._thread_local.preallocated = preallocated
        if not preallocated.arrays:
            return self(feeds)
        try:
            for name, array in feeds.items():
                preallocated.binding.bind_cpu_input(name, np.asarray(array, order="C"))
            with limited_run() as options:
                self._session.run_with_iobinding(preallocated.binding, options)
        except InferError:
            raise
        except Exception:  # noqa: BLE001  (an undeclared shape, or an error that self() raises again)
            return self(feeds)
        return self._with_fed(dict(preallocated.arrays), feeds)

    def _preallocate(self) -> "_Preallocated":
        """Preallocate all results in one block, of large pages; nothing if a shape is dynamic."""
        outputs = {output.name: output for output in self._session.get_outputs()}
        arrays: dict[str, np.ndarray] = {}
        binding = self._session.io_binding()
        sizes: dict[str, tuple[np.dtype[Any], list[int], int]] = {}
        for name in self._computed:
            dtype, shape = _DTYPES.get(outputs[name].type), outputs[name].shape
            if dtype is None or not all(isinstance(size, int) and size >= 0 for size in shape):
                return _Preallocated(binding, {})
            sizes[name] = (np.dtype(dtype), shape, math.prod(shape) * np.dtype(dtype).itemsize)
        ends = [*accumulate(-(-size // _ALIGNED) * _ALIGNED for *_, size in sizes.values())]
        block = np.empty(ends[-1] if ends else 0, np.uint8)
        for (name, (kind, shape, size)), start in zip(sizes.items(), [0, *ends], strict=False):
            array = block[start : start + size].view(kind).reshape(shape)
            arrays[name] = array
            binding.bind_output(name, "cpu", 0, kind.type, array.shape, array.ctypes.data)
        return _Preallocated(binding, arrays)

    def _with_fed(
        self, result: dict[str, np.ndarray], feeds: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        result.update({name: np.asarray(feeds[name]) for name in self._input_names})
        return result


@dataclass(frozen=True)
class _Preallocated:
    """The preallocated results of one thread."""

    binding: Any  # onnxruntime.IOBinding; the package has no types
    arrays: dict[str, np.ndarray]


def opencv_counts(numbers: NDArray[np.uint16]) -> NDArray[np.int32]:
    """Count bin numbers with OpenCV: the same counts as NumPy, four times as fast.

    OpenCV counts in float32, exact up to 2^24: more than one call counts.
    """
    counts = cv2.calcHist([numbers.reshape(1, -1)], [0], None, [FINE_BINS], [0, FINE_BINS])
    return np.asarray(counts, np.float32).reshape(-1).astype(np.int32)
