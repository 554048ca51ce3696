"""One segment of a quantized graph in PyTorch: the engine's values, and gradients.

Every value is a real number: what the engine stores as INT8 q stands as q s. Each node computes in
floating point, which gives the gradient. Then the engine's own number takes the place of what is
rounded (`Substitute`): on a DLA that of the emulation, elsewhere that of Q, clip(round(x / s)) with
halves to even.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from device.dla_emulator.builder import EmulatedSegment
from device.dla_emulator.forms import scale_of
from device.dla_emulator.segment_graph import Node, SegmentGraph
from device.errors import SessionError
from toolkit.errors import BuildError
from toolkit.finetune.operators import OPERATORS
from toolkit.quantize.weights import dequantized

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class TorchSegment:
    """A segment with Q/DQ, its weights in integers.

    `int8_inputs`: input that is stored as INT8 -> its scale. `integers_of`: constant in integers ->
    name of the parameter that it was made of. `emulated`: the operations of the DLA, None on other
    processors.
    """

    name: str
    graph: SegmentGraph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    int8_inputs: Mapping[str, float]
    integers_of: Mapping[str, str]
    emulated: EmulatedSegment | None

    def __post_init__(self) -> None:
        """Raise BuildError naming the first node that has no row."""
        for node in self.graph.nodes:
            if node.op not in OPERATORS and node.op not in {"QuantizeLinear", "DequantizeLinear"}:
                raise BuildError(
                    f"Node {node.name!r} ({node.op}) has no gradient here; fine-tuning knows "
                    f"{', '.join(sorted(OPERATORS))}. Cut the model before it "
                    "(`tandem surgeon extract`)."
                )

    def run(
        self, inputs: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the outputs of the segment in real numbers, by name."""
        device = next(iter(inputs.values())).device
        exact = {
            name: (torch.from_numpy(numbers).to(device), scale)
            for name, (numbers, scale) in self._emulate(inputs).items()
        }
        constants = {
            name: torch.from_numpy(np.array(array)).to(device)
            for name, array in self.graph.constants.items()
        }
        values = {**constants, **parameters, **inputs}
        for node in self.graph.nodes:
            results = self._node(node, values, parameters)
            for name, value in zip(node.outputs, results, strict=False):
                key = f"{node.inputs[0]} at {name}" if node.op == "QuantizeLinear" else name
                values[name] = _substituted(value, *exact[key]) if key in exact else value
        return {name: values[name] for name in self.outputs}

    def _node(
        self,
        node: Node,
        values: Mapping[str, torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        if node.op == "QuantizeLinear":
            return (self._quantized(node, values),)
        if node.op == "DequantizeLinear":
            return (self._dequantized(node, values, parameters),)
        operands = [values[name] if name else None for name in node.inputs]
        try:
            results = OPERATORS[node.op](node, operands)
        except (RuntimeError, ValueError, IndexError) as error:
            raise BuildError(
                f"Node {node.name!r} ({node.op}) cannot be computed by PyTorch: {error}"
            ) from error
        return results if isinstance(results, tuple) else (results,)

    def _quantized(self, node: Node, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        scale = scale_of(node, self.graph.constants)
        assert scale is not None  # a build gives activations one scale each
        x = values[node.inputs[0]]
        rounded = torch.clamp(torch.round(x.detach() / scale), -128, 127) * scale
        return _substituted(x, rounded, scale)

    def _dequantized(
        self,
        node: Node,
        values: Mapping[str, torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """DQ: of an activation nothing; of a weight its integers, with the parameter's gradient."""
        stored = self.graph.constants.get(node.inputs[0])
        if stored is None:
            return values[node.inputs[0]]
        scale = self.graph.constants[node.inputs[1]]
        axis = node.integer("axis", 1) % stored.ndim if scale.ndim else None
        source = values[node.inputs[0]]
        exact = torch.from_numpy(dequantized(stored, scale, axis)).to(source.device)
        parameter = parameters.get(self.integers_of.get(node.inputs[0], ""))
        return exact if parameter is None else _substituted(parameter.reshape(exact.shape), exact)

    def _emulate(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, tuple[Array, float | None]]:
        """Return tensor -> its real numbers in float32 on the DLA, and its scale in INT8."""
        if self.emulated is None:
            return {}
        buffers = {name: self._stored(name, inputs[name]) for name in self.inputs}
        results: dict[str, tuple[Array, float | None]] = {}
        for step in self.emulated.operations:
            try:
                numbers = step.run([buffers[name] for name in step.inputs])
            except (ValueError, IndexError) as error:
                raise SessionError(
                    f"segment {self.name!r}: node {step.node!r} ({step.op}) failed in the "
                    f"emulation: {error}"
                ) from error
            buffers[step.output] = numbers
            if step.op != "Cast":  # the same tensor once more
                scale = 1.0 if step.scale is None else step.scale
                real = numbers.astype(np.float32) * np.float32(scale)
                results[step.tensor] = real, step.scale
        return results

    def _stored(self, name: str, value: torch.Tensor) -> Array:
        array: Array = value.detach().cpu().numpy()
        if name not in self.int8_inputs:
            return array
        stored: Array = np.rint(array / np.float32(self.int8_inputs[name])).astype(np.int8)
        return stored


class Substitute(torch.autograd.Function):
    """Put an exact value in the place of a computed one; gradients pass from `low` to `high`."""

    @staticmethod
    def forward(
        context: Any,  # noqa: ANN401
        computed: torch.Tensor,
        exact: torch.Tensor,
        low: float,
        high: float,
    ) -> torch.Tensor:
        """Return `exact`."""
        context.save_for_backward((computed >= low) & (computed <= high))
        return exact.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Return the gradient of `computed`, 0 where INT8 clips it."""
        (inside,) = context.saved_tensors
        return gradient * inside, None, None, None


def _substituted(
    computed: torch.Tensor, exact: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Return `exact`, of INT8 with a scale where there is one, with the gradient of `computed`."""
    limits = (-np.inf, np.inf) if scale is None else (-128.5 * scale, 127.5 * scale)
    result: torch.Tensor = Substitute.apply(computed, exact, *limits)
    return result
