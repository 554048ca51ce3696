"""The operations of an emulated segment, and the state of each tensor while they are added."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.dla_emulator import float_ops
from device.dla_emulator.arithmetic import layers
from device.dla_emulator.arithmetic.layers import Path, Sums
from device.dla_emulator.epilogue import Epilogue
from device.dla_emulator.forms import (
    FloatBuffer,
    Form,
    QuantizedBuffer,
    QuantizedConstant,
    scale_of,
)
from device.dla_emulator.options import Emulation
from device.dla_emulator.segment_graph import Node, SegmentGraph
from device.errors import SessionError

Array = NDArray[Any]
Function = Callable[[Sequence[Array]], Array]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: reads buffers, writes one. `scale` is that of an INT8 result, else None.

    `tensor` is the ONNX tensor that the buffer holds, `node` the first node that it computes.
    """

    node: str
    op: str
    tensor: str
    inputs: tuple[str, ...]
    output: str
    scale: float | None
    run: Function


@dataclass(frozen=True, slots=True)
class EmulatedSegment:
    """A segment: operations in running order, the forms of its outputs, zero points by tensor."""

    operations: tuple[Operation, ...]
    outputs: Mapping[str, Form]
    zero_points: Mapping[str, int]


class OperationBuilder:
    """Collects the operations of one graph, node by node."""

    def __init__(self, graph: SegmentGraph, where: str, emulation: Emulation) -> None:
        """Start without operations; `where` names the segment in errors."""
        self.graph = graph
        self.quantized_constants: dict[str, QuantizedConstant] = {}
        self._where = where
        self._mode = emulation.mode
        self.arithmetic = emulation.arithmetic
        self._operations: list[Operation] = []
        self._forms: dict[str, Form] = {}
        self._quantized: dict[str, QuantizedBuffer] = {}
        self._zero_points: dict[str, int] = {}
        self._absorbed: set[int] = set()

    def result(self) -> EmulatedSegment:
        """Return the segment as far as it was added."""
        outputs: dict[str, Form] = {}
        for name in self.graph.outputs:
            outputs[name] = self._quantized[name] if name in self._quantized else self._forms[name]
        return EmulatedSegment(tuple(self._operations), outputs, self._zero_points)

    def is_absorbed(self, node: Node) -> bool:
        """Return whether the epilogue of an earlier operation computes this node."""
        return id(node) in self._absorbed

    def refusal(self, node: Node, why: str) -> SessionError:
        """Return the error for a node that cannot be emulated."""
        return SessionError(
            f"{self._where}: node {node.name!r} ({node.op}) cannot be emulated: {why}; "
            "run it with the portable implementation"
        )

    def form(self, name: str) -> Form:
        """Return the form of a tensor; an input of the segment that no DQ reads is a float one."""
        return self._forms.setdefault(name, FloatBuffer(name))

    def constant(self, name: str) -> Array | None:
        """Return a constant in floating point, dequantized if it is stored as integers."""
        quantized = self.quantized_constants.get(name)
        return self.graph.constants.get(name) if quantized is None else quantized.real()

    def quantized_inputs(self, node: Node) -> list[QuantizedBuffer] | None:
        """Return the forms of all inputs if they are INT8, else None."""
        if any(self.constant(name) is not None for name in node.inputs):
            return None
        forms = [self.form(name) for name in node.inputs]
        quantized = [form for form in forms if isinstance(form, QuantizedBuffer)]
        return quantized if len(quantized) == len(forms) else None

    def path(self, sums: Sums, epilogue: Epilogue, largest_sum: int) -> Path:
        """Return the output stages of a layer, merged into one step where that is exact."""
        path = layers.make_path(sums, epilogue.activation, epilogue.scale, self.arithmetic)
        if isinstance(path, layers.IdealPath):
            return layers.ideal_in_one_step(path) or path
        ways = (layers.fast_path, layers.integer_path, layers.table_path)
        tried = (way(path, largest_sum) for way in ways[self._mode == "exact" :])
        return next((merged for merged in tried if merged is not None), path)

    def add_rounded(
        self, node: Node, inputs: tuple[str, ...], epilogue: Epilogue, run: Function
    ) -> None:
        """Add an operation that an epilogue rounds; the nodes it absorbs get none of their own."""
        self._add(
            node, inputs, epilogue.tensor, QuantizedBuffer(epilogue.tensor, epilogue.scale), run
        )
        for reader in epilogue.absorbed:
            self._absorbed.add(id(reader))
            if reader.op == "QuantizeLinear":
                self._zero_points[reader.outputs[0]] = self.zero_point(reader)
        for stored in epilogue.stored:
            self._quantized[stored] = QuantizedBuffer(epilogue.tensor, epilogue.scale)

    def add_same_scale(
        self, node: Node, inputs: tuple[str, ...], scale: float | None, run: Function
    ) -> None:
        """Add an operation whose result has the scale of its inputs, None in floating point."""
        name = node.outputs[0]
        form = FloatBuffer(name) if scale is None else QuantizedBuffer(name, scale)
        self._add(node, inputs, name, form, run)

    def add_float(self, node: Node, inputs: tuple[str, ...], run: Function) -> None:
        """Add an operation in floating point whose result is rounded to FP16."""
        name = node.outputs[0]
        half = float_ops.to_half
        self._add(node, inputs, name, FloatBuffer(name), lambda arrays: half(run(arrays)))

    def float_input(self, node: Node, name: str) -> str:
        """Return a buffer that holds a tensor in float32; add a cast where it needs one."""
        constant = self.constant(name)
        form = self.form(name)
        if constant is None and isinstance(form, FloatBuffer):
            return form.buffer
        buffer = f"{name} in float32"
        if all(operation.output != buffer for operation in self._operations):
            inputs: tuple[str, ...] = ()
            if constant is not None:
                run = _constant(constant.astype(np.float32))
            else:
                assert isinstance(form, QuantizedBuffer)
                run, inputs = _dequantizer(form.scale), (form.buffer,)
            self._operations.append(Operation(node.name, "Cast", name, inputs, buffer, None, run))
        return buffer

    def note_quantized(self, node: Node, name: str, buffer: QuantizedBuffer) -> None:
        """Note that the output of a Q node is in this buffer."""
        self._zero_points[name] = self.zero_point(node)
        self._quantized[name] = buffer

    def note_dequantized(self, node: Node, scale: float) -> None:
        """Note a DQ of a quantized tensor, or of an INT8 input of the segment."""
        source, zero = node.inputs[0], self.zero_point(node)
        if zero != self._zero_points.get(source, 0):
            raise self.refusal(node, f"its zero point is {zero}, that of its input is not")
        buffer = self._quantized[source].buffer if source in self._quantized else source
        self._forms[node.outputs[0]] = QuantizedBuffer(buffer, scale)

    def scale(self, node: Node) -> float:
        """Return the one scale of a Q or DQ."""
        scale = scale_of(node, self.graph.constants)
        if scale is None:
            raise self.refusal(node, "the DLA has one scale for a tensor, and a constant one")
        return scale

    def zero_point(self, node: Node) -> int:
        """Return the zero point of a Q or DQ; UINT8 with 128 equals INT8 with 0."""
        name = node.inputs[2] if len(node.inputs) > 2 else ""
        if not name and node.op == "QuantizeLinear":
            raise self.refusal(node, "without a zero point it makes UINT8 from 0 on")
        point = self.graph.constants.get(name, np.zeros((), np.uint8))
        zero = int(point.reshape(-1)[0])
        if zero != (128 if name and point.dtype == np.uint8 else 0):
            raise self.refusal(node, f"zero point {zero}; the DLA quantizes symmetrically about 0")
        return zero

    def _add(
        self, node: Node, inputs: tuple[str, ...], name: str, form: Form, run: Function
    ) -> None:
        scale = form.scale if isinstance(form, QuantizedBuffer) else None
        self._operations.append(
            Operation(node.name, node.op, name, inputs, form.buffer, scale, run)
        )
        self._forms[name] = form


def _dequantizer(scale: float) -> Function:
    return lambda arrays: arrays[0].astype(np.float32) * np.float32(scale)


def _constant(array: Array) -> Function:
    return lambda _: array
