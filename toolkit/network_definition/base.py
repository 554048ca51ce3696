"""Inputs, constants and outputs of a network, and what the methods of all layers share."""

import operator
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from toolkit.errors import NetworkError
from toolkit.network_definition.draft import Attributes, Draft
from toolkit.network_definition.layers import Layer, Operand, Tensor, tensor_of
from toolkit.network_definition.windows import Window, weights_as
from toolkit.plugins import Plugin


class NetworkBase:
    """A graph that grows by one layer at a time."""

    def __init__(self, name: str = "network") -> None:
        self.name = name
        self.plugins: tuple[Plugin, ...] = ()
        self._draft = Draft()

    def add_input(self, name: str, dtype: npt.DTypeLike, shape: Sequence[int | str]) -> Tensor:
        """Add an input. A size of -1 or a name is dynamic; BuildOptions(dims=...) bounds it."""
        name = self._draft.claim(name, "input")
        sizes = (f"{name}_{at}" if size == -1 else size for at, size in enumerate(shape))
        return self._draft.input(name, dtype, tuple(sizes))

    def add_constant(
        self, shape: Sequence[int], weights: npt.ArrayLike, *, name: str | None = None
    ) -> Layer:
        """Add a constant of a shape; its type is that of the array, float32 for Python floats."""
        name = self._draft.claim(name, "constant")
        values = np.asarray(weights)
        if not isinstance(weights, np.ndarray | np.generic) and values.dtype == np.float64:
            values = values.astype(np.float32)
        array = weights_as(name, "value", values, shape, values.dtype.name)
        return Layer(name, (self._draft.constant(name, array),))

    def mark_output(self, tensor: Operand, name: str | None = None) -> Tensor:
        """Make a tensor an output of the network, under a name of yours; return the output.

        An input or a constant keeps its name: the output is a copy of it. Raises NetworkError: the
        tensor is an output already, or the name is taken.
        """
        source = tensor_of(tensor)
        if self._draft.is_computed(source):
            return self._draft.output(source, name)
        layer = self._draft.claim(None, "identity")
        (copy,) = self._draft.node(layer, "Identity", [source])
        return self._draft.output(copy, name)

    def serialize(self) -> bytes:
        """Return the network as an ONNX file. Raises NetworkError: it has no output."""
        return ir.to_proto(self._draft.model(self.name)).SerializeToString()

    # --- for the methods of layers --------------------------------------------------------------

    def _layer(
        self,
        name: str,
        op_type: str,
        inputs: Sequence[Tensor | None],
        attributes: Attributes | None = None,
        *,
        outputs: int = 1,
    ) -> Layer:
        return Layer(name, self._draft.node(name, op_type, inputs, attributes, outputs=outputs))

    def _windowed(
        self,
        op_type: str,
        inputs: Sequence[Tensor],
        window: Window,
        others: Mapping[str, int],
    ) -> tuple[Layer, Window, Callable[[Window], None]]:
        """Return a layer with a window, and what gives it another one."""
        layer = self._layer(window.layer, op_type, inputs, {**window.attributes(), **others})

        def change(to: Window) -> None:
            self._draft.set_attributes(layer.outputs[0], {**to.attributes(), **others})

        return layer, window, change

    def _weight(
        self, layer: str, what: str, values: npt.ArrayLike, shape: Sequence[int], like: Tensor
    ) -> Tensor:
        """Add weights of a layer, in the type of its input."""
        array = weights_as(layer, what, values, shape, like.dtype)
        return self._draft.constant(f"{layer}_{what}", array)

    def _bias(
        self, layer: str, values: npt.ArrayLike | None, outputs: int, like: Tensor
    ) -> list[Tensor]:
        """Add the bias of a layer, if it has one."""
        return [] if values is None else [self._weight(layer, "bias", values, (outputs,), like)]

    def _sizes(self, name: str, values: Sequence[int]) -> Tensor:
        """Add a list of sizes or axes."""
        return self._draft.constant(name, np.array(values, np.int64))


def rank_of(layer: str, tensor: Tensor) -> int:
    """Return the number of dimensions; raises NetworkError if it is unknown."""
    if tensor.shape is None:
        raise NetworkError(
            f"layer {layer!r} needs the rank of {tensor.name!r}, which depends on the data; "
            "reshape it before"
        )
    return len(tensor.shape)


def axes_of(layer: str, axes: int | Sequence[int], rank: int) -> list[int]:
    """Return sorted axes, from a bit mask or a sequence. Raises NetworkError: there is no such."""
    if isinstance(axes, int | np.integer) and axes < 0:
        raise NetworkError(
            f"layer {layer!r} has the axes {axes}, but one number is a bit mask, and that is not "
            f"negative; give the axis as a sequence: [{axes}]"
        )
    try:
        if isinstance(axes, int | np.integer):
            indices = [axis for axis in range(int(axes).bit_length()) if int(axes) >> axis & 1]
        else:
            indices = [operator.index(axis) for axis in axes]
    except TypeError as error:
        raise NetworkError(
            f"layer {layer!r} has the axes {axes!r}; give a bit mask, such as 1 << 1, or a "
            "sequence of integers, such as [1]"
        ) from error
    wrong = [axis for axis in indices if not -rank <= axis < rank]
    if wrong or not indices:
        raise NetworkError(
            f"layer {layer!r} has the axes {indices}, but its input has {rank} "
            "dimensions; give a bit mask, such as 1 << 1, or a sequence, such as [1]"
        )
    return sorted({axis % rank for axis in indices})


def one_axis_of(layer: str, axes: int | Sequence[int], rank: int) -> int:
    """Return the only axis; raises NetworkError if there are several."""
    indices = axes_of(layer, axes, rank)
    if len(indices) > 1:
        raise NetworkError(f"layer {layer!r} works along one axis, but has {indices}; give one")
    return indices[0]
