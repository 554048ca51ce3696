"""A trial model: one session that tries INT8 tensor by tensor, without a new build.

Wherever `toolkit.quantize.quantize` quantizes an activation there is a switch:

    x' = clip(round(x / s), -128, 127) s   where it is on,   x' = x   where it is off,

with s = amax / 127 as an input. Weights and biases are inputs too, in floating point or quantized
and dequantized. So any choice of ranges and of nodes in floating point costs one forward pass. A
run computes what onnxruntime computes from the Q/DQ graph of the same choice, in one segment (no
INT8 crossings), without optimizations and weight packing.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.table import scale_of
from calibration.trials import Assignment
from toolkit.errors import BuildError, InferError, first_line
from toolkit.graph.extract import MAX_IR_VERSION, external_weights
from toolkit.graph.run_limit import limited_run
from toolkit.quantize.loss.parts import output_parts
from toolkit.quantize.trials.trial_graph import TrialGraph

Array = NDArray[Any]

_OPTIONS = (
    # Compute Q and DQ separately: fused kernels round elsewhere.
    ("session.disable_quant_qdq", "1"),
    ("session.intra_op.allow_spinning", "0"),
)
# The first IR version whose initializers need not be inputs.
MIN_IR_VERSION = 4
_OFF = np.array(False)
_ON = np.array(True)


class TrialModel:
    """A model in onnxruntime whose quantization is chosen at every run.

    `tensors`: the activations that INT8 quantizes, in the order of the graph. `nodes`: those that
    compute in INT8. `inputs`: what a sample has to feed. `outputs`: what a run returns; `parts`:
    what they hold.
    """

    def __init__(
        self,
        model: ir.Model,
        *,
        optimize: bool = True,
        operands: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
        rounded: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
    ) -> None:
        """`optimize` False also keeps onnxruntime from reordering float arithmetic.

        `operands`: as in `toolkit.quantize.quantize.quantize`. `rounded`: node -> the weight that
        it has in INT8, and not in floating point.

        Raises BuildError: onnxruntime cannot load the model.
        """
        self.inputs = tuple(str(value.name) for value in model.graph.inputs)
        self.operands = operands
        self.parts = output_parts(model)
        builder = TrialGraph(model.clone(), operands, rounded)
        known = max(model.ir_version, MIN_IR_VERSION)
        builder.model.ir_version = min(known, MAX_IR_VERSION)
        self.tensors = tuple(builder.scales)
        self.nodes = tuple(builder.nodes)
        self.outputs = tuple(str(value.name) for value in builder.graph.outputs)
        self._scales = builder.scales
        self._switches = tuple(builder.switches)
        self._weights = tuple(builder.weights)
        self._weights_fed: dict[str, tuple[bool, float | None]] = {}
        self._session, self._constants = _open(builder.model, optimize)
        self._binding = self._session.io_binding()
        for name in self.outputs:
            self._binding.bind_output(name, "cpu")
        # onnxruntime keeps the arrays of the first run; outputs whose size depends on the sample
        # (detections after NMS) are bound anew before each run, and so are those of unknown rank,
        # which onnxruntime shows as scalars.
        self._varying = tuple(
            value.name
            for value in self._session.get_outputs()
            if not value.shape or not all(isinstance(size, int) for size in value.shape)
        )
        self._fed: dict[str, Any] = {}  # a binding does not keep its inputs alive

    def __call__(
        self,
        assignment: Assignment,
        sample: Mapping[str, Array],
        keep_float: frozenset[str] = frozenset(),
    ) -> dict[str, Array]:
        """Run one sample with the assigned ranges; nodes in `keep_float` compute in float32.

        Weights are INT8 in every other node, whatever the ranges of its activations: `keep_float`
        with all `nodes` gives the float model.
        """
        self._feed_switches(assignment, keep_float)
        self._feed_weights(assignment, keep_float)
        for name, array in sample.items():
            self._feed(name, np.asarray(array, order="C"))
        for name in self._varying:
            self._binding.bind_output(name, "cpu")
        try:
            with limited_run() as options:
                self._session.run_with_iobinding(self._binding, options)
        except InferError:
            raise
        except Exception as err:  # onnxruntime has a type of its own for every status
            raise BuildError(
                f"onnxruntime cannot run the model for INT8 trials: {first_line(err)}"
            ) from err
        # Copied: the next run writes into the same memory.
        arrays = (value.numpy().copy() for value in self._binding.get_outputs())
        return dict(zip(self.outputs, arrays, strict=True))

    def _feed_switches(self, assignment: Assignment, keep_float: frozenset[str]) -> None:
        for tensor, name in self._scales.items():
            amax = assignment.get(tensor)
            self._feed_if_new(name, np.array(1.0 if amax is None else scale_of(amax), np.float32))
        on: set[str] = set()
        for switch in self._switches:
            if (
                assignment.get(switch.tensor) is not None
                and keep_float.isdisjoint(switch.readers)
                and switch.shared not in on
            ):
                on.add(switch.name)
            self._feed_if_new(switch.name, _ON if switch.name in on else _OFF)

    def _feed_weights(self, assignment: Assignment, keep_float: frozenset[str]) -> None:
        for weight in self._weights:
            amax = assignment.get(weight.tensor)
            quantized = weight.node not in keep_float
            activation_scale = scale_of(amax) if quantized and amax is not None else None
            if self._weights_fed.get(weight.node) != (quantized, activation_scale):
                self._weights_fed[weight.node] = (quantized, activation_scale)
                for name, array in weight.feeds(quantized, activation_scale).items():
                    self._feed(name, array)

    def _feed_if_new(self, name: str, scalar: Array) -> None:
        fed = self._fed.get(name)
        if fed is None or fed[0] != scalar:
            self._feed(name, scalar)

    def _feed(self, name: str, array: Array) -> None:
        import onnxruntime as ort

        value = ort.OrtValue.ortvalue_from_numpy(array)
        self._fed[name] = (array, value)
        self._binding.bind_ortvalue_input(name, value)


def _open(model: ir.Model, optimize: bool) -> tuple[Any, list[Any]]:
    """Return the session, and the constants that must outlive it."""
    import onnxruntime as ort

    weights = external_weights(model.graph)
    # onnxruntime reads some weights in place.
    constants = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for key, value in _OPTIONS:
        options.add_session_config_entry(key, value)
    options.add_external_initializers(list(weights), constants)
    try:
        session = ort.InferenceSession(
            ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as err:  # onnxruntime has a type of its own for every status
        raise BuildError(f"onnxruntime cannot run the model for INT8 trials: {err}") from err
    return session, constants
