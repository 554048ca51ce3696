"""What the methods of a network take and return."""

from dataclasses import dataclass

import onnx_ir as ir

Shape = tuple[int | str, ...]
"""Sizes; a dynamic one is the name of its dimension."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tensor:
    """A tensor of a network.

    `dtype` is a numpy name, such as "float32". `shape`: None where it depends on the data.
    """

    dtype: str
    shape: Shape | None
    value: ir.Value

    @property
    def name(self) -> str:
        """The name, which `mark_output` can change."""
        assert self.value.name is not None
        return self.value.name

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.dtype}, {self.sizes()})"

    def sizes(self) -> str:
        """Return the shape for messages, such as "1x3x224x224"."""
        return "of unknown shape" if self.shape is None else "x".join(map(str, self.shape)) or "()"


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A layer of a network. Methods that take a tensor also take a layer, for its first output."""

    name: str
    outputs: tuple[Tensor, ...]

    @property
    def num_outputs(self) -> int:
        """The number of outputs."""
        return len(self.outputs)

    def get_output(self, index: int) -> Tensor:
        """Return an output; raises IndexError if there is none of this index."""
        return self.outputs[index]


Operand = Tensor | Layer


def tensor_of(operand: Operand) -> Tensor:
    """Return a tensor, or the first output of a layer."""
    return operand.outputs[0] if isinstance(operand, Layer) else operand
