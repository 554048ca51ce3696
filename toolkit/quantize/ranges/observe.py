"""Run a graph with every activation as an output: what calibration observes."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.calibrate import Checkpoint, Observation, Progress, Run, observe_tensors
from calibration.dataset import Dataset
from calibration.observer import NUMBERS
from pipelines.vision import cv2
from toolkit.errors import BuildError, first_line
from toolkit.graph.extract import MAX_IR_VERSION, external_weights

THREADS = 2
"""Samples that are run and counted at a time; each takes the memory of its activations."""

_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}


def observe_graph(
    graph: ir.Model,
    samples: Dataset,
    tensors: Sequence[str],
    on_progress: Progress | None = None,
    keep: Checkpoint | None = None,
) -> Observation:
    """Observe tensors of a graph with all the speed that this machine has.

    Raises BuildError where the graph cannot be run, and what `observe_tensors` raises.
    """
    return observe_run(shared_run(graph, tensors), samples, tensors, on_progress, keep)


def shared_run(
    graph: ir.Model, tensors: Sequence[str]
) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
    """What `observe_run` needs: threads that call it share the cores and keep their arrays apart.

    Raises BuildError: onnxruntime cannot load the model.
    """
    return ActivationRunner(graph, tensors, usable_cores() // _threads()).lend


def observe_run(
    run: Run,
    samples: Dataset,
    tensors: Sequence[str],
    on_progress: Progress | None = None,
    keep: Checkpoint | None = None,
) -> Observation:
    """`observe_tensors` of what `shared_run` gave, or of what calls it, by several threads too."""
    return observe_tensors(
        run, samples, tensors, on_progress, keep, count=opencv_counts, threads=_threads()
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
        self._fed = [name for name in tensors if name in inputs]
        self._made = [name for name in tensors if name not in inputs]
        values = {str(value.name): value for node in observed.graph for value in node.outputs}
        observed.graph.outputs.extend(values[name] for name in self._made if name not in declared)
        weights = external_weights(observed.graph)
        # onnxruntime reads some weights in place: they must live as long as the session.
        self._weights = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        options = ort.SessionOptions()
        options.log_severity_level = 4  # what it says of errors, it raises too
        options.intra_op_num_threads = threads
        # A plan of all intermediate results would be memory beside that of the results themselves.
        options.enable_mem_pattern = False
        options.add_external_initializers(list(weights), self._weights)
        try:
            self._session = ort.InferenceSession(
                ir.to_proto(observed).SerializeToString(),
                options,
                providers=["CPUExecutionProvider"],
            )
        except Exception as err:  # onnxruntime has a type of its own for every status
            raise BuildError(
                f"onnxruntime cannot load the model for calibration: {first_line(err)}"
            ) from err

        self._own = threading.local()

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run one sample; raises BuildError if it does not fit the model."""
        try:
            arrays = self._session.run(self._made, dict(feeds)) if self._made else []
        except Exception as err:
            raise BuildError(
                f"onnxruntime cannot run the model on a calibration sample: {first_line(err)}"
            ) from err
        return self._with_fed(dict(zip(self._made, arrays, strict=True)), feeds)

    def lend(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The same in memory that the next call of this thread overwrites, which is faster.

        onnxruntime then writes where it is told, instead of being copied from.
        """
        lent = getattr(self._own, "lent", None) or self._lent()
        self._own.lent = lent
        if not lent.arrays:
            return self(feeds)
        try:
            for name, array in feeds.items():
                lent.binding.bind_cpu_input(name, np.ascontiguousarray(array))
            self._session.run_with_iobinding(lent.binding)
        except Exception:  # noqa: BLE001  (a shape other than declared, or a real error: told there)
            return self(feeds)
        return self._with_fed(dict(lent.arrays), feeds)

    def _lent(self) -> "_Lent":
        """Memory for all results, none if the shape of one is not known beforehand."""
        outputs = {output.name: output for output in self._session.get_outputs()}
        arrays: dict[str, np.ndarray] = {}
        binding = self._session.io_binding()
        for name in self._made:
            dtype, shape = _DTYPES.get(outputs[name].type), outputs[name].shape
            if dtype is None or not all(isinstance(size, int) for size in shape):
                return _Lent(binding, {})
            arrays[name] = array = np.empty(shape, dtype)
            binding.bind_output(name, "cpu", 0, dtype, array.shape, array.ctypes.data)
        return _Lent(binding, arrays)

    def _with_fed(
        self, result: dict[str, np.ndarray], feeds: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        result.update({name: np.asarray(feeds[name]) for name in self._fed})
        return result


@dataclass(frozen=True)
class _Lent:
    """What one thread's results are written to."""

    binding: Any  # onnxruntime.IOBinding; the package has no types
    arrays: dict[str, np.ndarray]


def opencv_counts(numbers: NDArray[np.uint16]) -> NDArray[np.int32]:
    """Count bin numbers with OpenCV: four times as fast as NumPy, to the same numbers.

    OpenCV counts in float32, which holds every whole number up to 2^24: more than are asked for.
    """
    found = cv2.calcHist([numbers.reshape(1, -1)], [0], None, [NUMBERS], [0, NUMBERS])
    return np.asarray(found, np.float32).reshape(-1).astype(np.int32)
