"""What the methods of a network take and return."""

from dataclasses import dataclass

import onnx_ir as ir

from toolkit.errors import NetworkError

Shape = tuple[int | str, ...]
"""Sizes; a dynamic one is the name of its dimension."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tensor:
    """A tensor of a network.

    `dtype` is a numpy name, such as "float32". `shape`: None where it depends on the data.
    """

    dtype: str
    value: ir.Value

    @property
    def shape(self) -> Shape | None:
        """The sizes as they are now: a window that is set on the layer may change them."""
        if self.value.shape is None:
            return None
        sizes = [dim if isinstance(dim, int) else dim.value for dim in self.value.shape]
        return tuple("?" if size is None else size for size in sizes)

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


class Layer:
    """A layer of a network. Methods that take a tensor also take a layer, for its first output.

    A layer is complete once it is added: its arguments are those of the method. Those of a window
    can also be set afterwards (`WindowLayer`).
    """

    __slots__ = ("name", "outputs")
    name: str
    outputs: tuple[Tensor, ...]

    def __init__(self, name: str, outputs: tuple[Tensor, ...]) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "outputs", outputs)

    def __setattr__(self, name: str, value: object) -> None:
        """Set what the layer lets be set. Raises NetworkError: nothing of that name."""
        settable = getattr(type(self), name, None)
        if not isinstance(settable, property) or settable.fset is None:
            raise NetworkError(
                f"layer {self.name!r} has no {name} that can be set: pass {name} to the method "
                "that adds the layer, which checks it and infers the shapes"
            )
        object.__setattr__(self, name, value)

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
