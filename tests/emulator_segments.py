"""Builds small Q/DQ segments of a DLA, and runs them in onnxruntime and in the emulation."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from engine_fixtures import Network, Piece, node, whole_model, write_network

from device.dla_emulator.options import Emulation
from device.engine.file import open_engine
from device.engine.manifest import TensorInfo
from device.runtime.executors.emulated import EmulatedExecutor

Arrays = dict[str, np.ndarray]


class SegmentBuilder:
    """Nodes of one DLA segment, in running order; each method returns the name of its result."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: Arrays = {}
        self.inputs: list[TensorInfo] = []
        self.outputs: list[TensorInfo] = []

    def constant(self, value: object, kind: type) -> str:
        name = f"constant{len(self.weights)}"
        self.weights[name] = np.array(value, kind)
        return name

    def op(self, op: str, *inputs: str, **attributes: object) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(node(op, inputs, name, **attributes))
        return name

    def grid(self, scale: float, stored: type = np.uint8) -> tuple[str, str]:
        zero = 128 if stored is np.uint8 else 0
        return self.constant(scale, np.float32), self.constant(zero, stored)

    def input(self, shape: tuple[int, ...], scale: float) -> str:
        """An INT8 input of the segment, behind its DQ."""
        name = f"x{len(self.inputs)}"
        self.inputs.append(TensorInfo(name=name, dtype="int8", shape=shape, scale=scale))
        return self.op("DequantizeLinear", name, *self.grid(scale, np.int8))

    def rounded(self, name: str, scale: float) -> str:
        """Q and DQ as the build writes them within a segment."""
        grid = self.grid(scale)
        return self.op("DequantizeLinear", self.op("QuantizeLinear", name, *grid), *grid)

    def weight(self, value: np.ndarray, scale: np.ndarray | float, axis: int = 0) -> str:
        """Integers (INT8 or INT32) behind their DQ."""
        scales = np.asarray(scale, np.float32)
        zero = self.constant(np.zeros(scales.shape), value.dtype.type)
        stored = self.constant(value, value.dtype.type)
        return self.op(
            "DequantizeLinear", stored, self.constant(scales, np.float32), zero, axis=axis
        )

    def output(self, name: str, scale: float) -> str:
        """An INT8 output of the segment."""
        stored = self.op("QuantizeLinear", name, *self.grid(scale, np.int8))
        rank = (None,) * 4
        self.outputs.append(TensorInfo(name=stored, dtype="int8", shape=rank, scale=scale))
        return stored

    def real_output(self, name: str) -> str:
        self.outputs.append(TensorInfo(name=name, dtype="float32", shape=(None,) * 4))
        return name

    def network(self) -> Network:
        inputs = tuple(one.name for one in self.inputs)
        outputs = tuple(one.name for one in self.outputs)
        piece = Piece("dla0.0", "dla0", tuple(self.nodes), inputs, outputs)
        tensors = (*self.inputs, *self.outputs)
        return Network((piece,), self.weights, tensors, (), inputs, outputs)

    def feeds(self, rng: np.random.Generator) -> Arrays:
        return {one.name: rng.integers(-128, 128, one.shape).astype(np.int8) for one in self.inputs}

    def engine(self, folder: Path) -> Path:
        return write_network(folder / "segment.engine", self.network())

    def reference(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """The outputs in onnxruntime without rewrites; what Q rounds, half away from zero.

        So it is a reference of one layer: numbers that Q nodes in the middle round are to even.
        """
        model = whole_model(self.network())
        last = {one.output[0]: one for one in model.graph.node if one.op_type == "QuantizeLinear"}
        names = [last[o.name].input[0] if o.name in last else o.name for o in self.outputs]
        del model.graph.output[:]
        model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(n) for n in names)
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = ort.InferenceSession(model.SerializeToString(), options)
        made = session.run(names, dict(feeds))
        return {
            one.name: value if one.scale is None else half_away(value, one.scale)
            for one, value in zip(self.outputs, made, strict=True)
        }


def half_away(real: np.ndarray, scale: float) -> np.ndarray:
    steps = real.astype(np.float64) / scale
    rounded = np.sign(steps) * np.floor(np.abs(steps) + 0.5)
    return np.clip(rounded, -128, 127).astype(np.int8)


def emulate(path: Path, feeds: Mapping[str, np.ndarray], emulation: Emulation) -> Arrays:
    with open_engine(path) as engine:
        (segment,) = engine.manifest.segments
        (implementation,) = segment.implementations
        executor = EmulatedExecutor(engine, segment, implementation, emulation, None)
        return executor.run(feeds, dict.fromkeys(segment.outputs), {})
