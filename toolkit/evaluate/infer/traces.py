"""Runs the segments of an engine and returns every tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.dla_emulator import segment_graph
from device.dla_emulator.forms import scale_of
from device.dla_emulator.options import Emulation
from device.dla_emulator.segment_graph import Node, SegmentGraph
from device.engine.file import Engine
from device.engine.manifest import Portable, Segment
from device.runtime.executors import emulated
from device.runtime.executors.emulated import EmulatedExecutor, LayerResult
from toolkit.errors import BuildError, first_line

Array = NDArray[Any]
Arrays = dict[str, Array]
QDQ = frozenset({"QuantizeLinear", "DequantizeLinear"})


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor in floating point that a layer reads, and its scale where it is INT8."""

    tensor: str
    scale: float | None


@dataclass(frozen=True, slots=True)
class Layer:
    """The nodes of the Q/DQ graph that one operation of the emulation computes.

    `tensor` is the result of both; `head` is the result that is rounded, before a rectifier behind
    Q and DQ (`rectified`); `ops` are its operators and `operands` its inputs.
    """

    tensor: str
    head: str
    rectified: bool
    ops: frozenset[str]
    operands: tuple[Operand, ...]


class SegmentTrace:
    """A segment's Q/DQ graph in onnxruntime, without rewrites, every tensor an output."""

    def __init__(self, engine: Engine, segment: Segment) -> None:
        """Load it. Raises BuildError: the engine carries no portable form of the segment."""
        self.segment = segment
        self._where = f"{engine.path}: segment {segment.name!r}"
        self.portable = portable_of(engine, segment)
        self.graph: SegmentGraph = segment_graph.read_graph(engine, self.portable, self._where)
        self.nodes: tuple[Node, ...] = tuple(n for n in self.graph.nodes if n.op not in QDQ)
        self._producers = {name: node for node in self.graph.nodes for name in node.outputs}
        self.leaving = frozenset(self._real(name) for name in segment.outputs)
        self._load(engine)

    def _load(self, engine: Engine) -> None:
        import onnx
        import onnxruntime as ort

        model = onnx.load_from_string(engine.entry(self.portable.model).tobytes())
        declared = {output.name for output in model.graph.output}
        hidden = [
            name
            for node in self.graph.nodes
            for name in node.outputs
            if name and name not in declared
        ]
        model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(n) for n in hidden)
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4  # what it says of errors, it raises too
        weights = list(self.portable.weights)
        self._weights = [ort.OrtValue.ortvalue_from_numpy(engine.entry(name)) for name in weights]
        options.add_external_initializers(weights, self._weights)
        try:
            self._session = ort.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime has a type of its own for every status
            raise BuildError(
                f"{self._where} cannot be loaded by onnxruntime with all its tensors: "
                f"{first_line(error)}; build the engine again"
            ) from error
        self._names = [output.name for output in self._session.get_outputs()]

    def run(self, values: Mapping[str, Array]) -> Arrays:
        """Return every tensor that the segment computes. Raises BuildError if onnxruntime fails."""
        feeds = {name: values[name] for name in self.segment.inputs}
        try:
            return dict(zip(self._names, self._session.run(self._names, feeds), strict=True))
        except Exception as error:
            raise BuildError(
                f"{self._where} failed in onnxruntime: {first_line(error)}; give other data"
            ) from error

    def layer_of(self, result: LayerResult) -> Layer:
        """Return the layer of this graph that an operation of the emulation computes."""
        tensor = tensor_of(result)
        node = self._producers.get(tensor)
        if node is None or result.op == "QuantizeLinear":
            return Layer(tensor, tensor, False, frozenset({result.op}), ())
        ops, head, rectified = {node.op}, tensor, False
        while node.name != result.node:  # back over activation, and Q and DQ before a rectifier
            producer = self._producers.get(node.inputs[0])
            if producer is None:
                break
            if producer.op in QDQ:
                rectified = True
            else:
                ops.add(producer.op)
            if rectified and producer.op not in QDQ:
                head = producer.outputs[0]
            node = producer
        operands = tuple(self._operand(name) for name in node.inputs if name)
        return Layer(tensor, head, rectified, frozenset(ops), operands)

    def _real(self, name: str) -> str:
        """Return the tensor that a result of the segment holds in INT8, or itself."""
        node = self._producers.get(name)
        while node is not None and node.op in QDQ:
            name = node.inputs[0]
            node = self._producers.get(name)
        return name

    def _operand(self, name: str) -> Operand:
        restored = self._producers.get(name)
        if restored is None or restored.op != "DequantizeLinear":
            return Operand(name, None)
        scale = scale_of(restored, self.graph.constants)
        stored = self._producers.get(restored.inputs[0])
        return Operand(name if stored is None else stored.inputs[0], scale)


class Emulations:
    """A DLA segment in the emulation: as requested, with exact biases, and with exact scales."""

    def __init__(self, engine: Engine, trace: SegmentTrace, emulation: Emulation) -> None:
        """Load all three. Raises SessionError naming the node that has no arithmetic."""
        why = emulated.why_not()
        if why is not None:
            raise BuildError(f"{engine.path}: the DLA cannot be emulated here: {why}")
        ideal = Emulation(emulation.mode, "ideal")

        def load(how: Emulation) -> EmulatedExecutor:
            return EmulatedExecutor(engine, trace.segment, trace.portable, how, None)

        self.requested = load(emulation)
        self.ideal = self.requested if emulation == ideal else load(ideal)
        exact_bias = Emulation(emulation.mode, "exact bias")
        self.exact_bias = self.requested if emulation == ideal else load(exact_bias)


def tensor_of(result: LayerResult) -> str:
    """Return the ONNX tensor of a result; that of a Q alone is named after both sides of it."""
    return result.tensor.rpartition(" at ")[0] if result.op == "QuantizeLinear" else result.tensor


def portable_of(engine: Engine, segment: Segment) -> Portable:
    """Return a segment's portable form; BuildError where the engine carries none."""
    portable = next((i for i in segment.implementations if isinstance(i, Portable)), None)
    if portable is None:
        raise BuildError(
            f"{engine.path}: segment {segment.name!r} carries no portable form to compare with; "
            "build the engine again"
        )
    return portable


def exact_result(layer: Layer, values: Mapping[str, Array]) -> Array:
    """Return a layer's result before any rounding, from the Q/DQ graph's own INT8 inputs."""
    result = values[layer.head]
    return np.maximum(result, 0) if layer.rectified else result
