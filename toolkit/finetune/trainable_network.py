"""The PyTorch network of a planned INT8 engine: parameters, and the graph they are put into."""

import hashlib
from collections.abc import Container, Mapping
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx_ir as ir
import torch
from msgspec import UNSET
from numpy.typing import NDArray

from calibration.table import CalibrationTable, format_of
from device.dla_emulator.options import Emulation
from device.dla_emulator.segment_graph import graph_of
from device.dla_emulator.translate import translate
from toolkit.engine.build import PlannedEngine
from toolkit.engine.segments import extract_quantized
from toolkit.errors import BuildError
from toolkit.finetune.segment import TorchSegment
from toolkit.graph.extract import ExtractedSegment
from toolkit.quantize.qdq.writer import QdqWriter
from toolkit.quantize.quantize import INTEGERS_OF

# operator -> operands that training changes, where they are constants
TRAINED: Mapping[str, tuple[int, ...]] = {
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "Gemm": (1, 2),
    "LayerNormalization": (1, 2),
    "MatMul": (0, 1),
    "PRelu": (1,),
}


class FakeQuantized(torch.nn.Module):
    """The graph of an INT8 engine with weights that can be trained.

    `forward` takes the inputs of the model in their order, float32 tensors, and returns its outputs
    (a tuple where there are several): the numbers of the engine. The batch may be any multiple of
    the model's own. `network` holds the parameters under the model's names, or the nearest that
    PyTorch takes; batch normalisation is part of the weights before it. `model()` and `table()` are
    what `tandem.build` takes.
    """

    def __init__(self, planned: PlannedEngine, parameters: frozenset[str] = frozenset()) -> None:
        """Make parameters of the weights. Raises BuildError: a node has no gradient."""
        super().__init__()
        front = planned.front
        assert front.table is not None
        self._planned = planned
        self._table = front.table
        self._graph = front.prepared.model
        self._inputs = [(str(value.name), _sizes(value)) for value in self._graph.graph.inputs]
        self._outputs = [str(value.name) for value in self._graph.graph.outputs]
        self._segments: tuple[TorchSegment, ...] = ()
        self._arrays: dict[str, NDArray[np.float32]] = {}
        self.network = torch.nn.Module()
        self._paths: dict[str, str] = {}  # name in the model -> name in `network`
        for name in _trained(self._graph, parameters):
            value = self._graph.graph.initializers[name].const_value
            assert value is not None
            parameter = torch.nn.Parameter(torch.tensor(value.numpy()))
            self._paths[name] = _register(self.network, name, parameter)
        with torch.no_grad():
            self(*(torch.zeros(sizes) for _, sizes in self._inputs))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the network on inputs in the model's order. Raises BuildError: they do not fit."""
        self._quantize()
        parts = [self._run(part) for part in self._batches(inputs)]
        outputs = tuple(parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True)))
        return outputs[0] if len(outputs) == 1 else outputs

    def model(self) -> onnx.ModelProto:
        """Return the model in floating point with the weights as they are now."""
        self._quantize()
        proto: onnx.ModelProto = ir.to_proto(self._graph)
        return proto

    def table(self) -> CalibrationTable:
        """Return the ranges for `model()`: those that the training has seen."""
        return msgspec.structs.replace(
            self._table,
            format=format_of(UNSET, self._table.preprocessing),
            model_sha256=hashlib.sha256(self.model().SerializeToString()).hexdigest(),
            adjusted=UNSET,
            refused=UNSET,
        )

    def _parameters_by_name(self) -> dict[str, torch.Tensor]:
        return {name: self.network.get_parameter(path) for name, path in self._paths.items()}

    def _quantize(self) -> None:
        """Quantize the weights anew, as a build does, where any has changed."""
        arrays = {
            name: parameter.detach().cpu().numpy().astype(np.float32)
            for name, parameter in self._parameters_by_name().items()
        }
        if self._segments and all(
            np.array_equal(array, self._arrays[name]) for name, array in arrays.items()
        ):
            return
        for name, array in arrays.items():
            self._graph.graph.initializers[name].const_value = ir.tensor(array.copy(), name=name)
        plan = self._planned.shared.plans[0]
        quantized, pieces = extract_quantized(plan, self._planned.quantizer(), QdqWriter)
        integers_of = {
            name: value.meta[INTEGERS_OF]
            for name, value in quantized.model.graph.initializers.items()
            if INTEGERS_OF in value.meta
        }
        processors = {segment.name: segment.processor for segment in plan.segments}
        self._segments = tuple(
            _segment(piece, processors[piece.name], quantized.scales, integers_of)
            for piece in pieces
        )
        self._arrays = {name: array.copy() for name, array in arrays.items()}

    def _batches(self, inputs: tuple[torch.Tensor, ...]) -> list[list[torch.Tensor]]:
        """Return the inputs in batches of the model's own size."""
        shapes = [tuple(x.shape) for x in inputs]
        sizes = [shape for _, shape in self._inputs]
        counts = {
            shape[0] // size[0] if shape[1:] == size[1:] and shape[0] % size[0] == 0 else 0
            for shape, size in zip(shapes, sizes, strict=False)
            if shape and size
        }
        if len(shapes) != len(sizes) or len(counts) > 1 or 0 in counts:
            raise BuildError(
                f"The inputs have the shapes {shapes}, but {[name for name, _ in self._inputs]} "
                f"take {sizes}, or whole multiples of these in the first dimension."
            )
        count = max(counts, default=1)
        return [list(part) for part in zip(*(x.chunk(count) for x in inputs), strict=True)]

    def _run(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        parameters = self._parameters_by_name()
        values = {name: x for (name, _), x in zip(self._inputs, inputs, strict=True)}
        for segment in self._segments:
            values |= segment.run({name: values[name] for name in segment.inputs}, parameters)
        return tuple(values[name] for name in self._outputs)


def _segment(
    piece: ExtractedSegment,
    processor: str,
    scales: Mapping[str, float],
    integers_of: Mapping[str, str],
) -> TorchSegment:
    graph = graph_of(ir.to_proto(piece.model), lambda name: piece.weights[name])
    where = f"segment {piece.name!r}"
    on_dla = processor.startswith("dla")
    return TorchSegment(
        piece.name,
        graph,
        piece.inputs,
        piece.outputs,
        {name: scales[name] for name in piece.inputs if name in scales},
        integers_of,
        translate(graph, where, Emulation()) if on_dla else None,
    )


def _trained(model: ir.Model, parameters: frozenset[str]) -> tuple[str, ...]:
    """Return the names of the constants that training changes."""
    names: dict[str, None] = {}
    for node in model.graph:
        rows = TRAINED.get(node.op_type, ()) if node.domain == "" else ()
        for index, value in enumerate(node.inputs):
            if value is None or not value.is_initializer() or value.dtype != ir.DataType.FLOAT:
                continue
            if index in rows or str(value.name) in parameters:
                names[str(value.name)] = None
    return tuple(names)


def _register(owner: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> str:
    """Give a parameter its dotted name, with "_" where PyTorch refuses it; return that name.

    No part may be empty or an attribute that the module has, such as `training`.
    """
    *modules, last = (part or "_" for part in name.split("."))
    path: list[str] = []
    for part in modules:
        path.append(_free_name(owner, part, owner._modules))
        if path[-1] not in owner._modules:
            owner.add_module(path[-1], torch.nn.Module())
        owner = owner.get_submodule(path[-1])
    path.append(_free_name(owner, last))
    owner.register_parameter(path[-1], parameter)
    return ".".join(path)


def _free_name(owner: torch.nn.Module, name: str, shared: Container[str] = ()) -> str:
    """Return the name with as many "_" as make it free, or one of those that are `shared`."""
    while name not in shared and hasattr(owner, name):
        name += "_"
    return name


def _sizes(value: ir.Value) -> tuple[int, ...]:
    sizes: Any = () if value.shape is None else value.shape
    return tuple(int(size) for size in sizes)
