"""Layers that move, cut, join and convert tensors."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from toolkit.errors import NetworkError
from toolkit.network_definition.base import NetworkBase, rank_of
from toolkit.network_definition.draft import Attributes, onnx_type
from toolkit.network_definition.layers import Layer, Operand, Tensor, tensor_of
from toolkit.network_definition.operations import (
    COORDINATE_TRANSFORMATIONS,
    GATHERS,
    INTERPOLATIONS,
    NEAREST_ROUNDINGS,
    GatherMode,
    InterpolationMode,
)

_BEFORE_FIRST = np.iinfo(np.int64).min


class ShapingLayers(NetworkBase):
    """Shuffles, slices, concatenations, resizing, gathers, casts."""

    def add_shuffle(
        self,
        input: Operand,
        *,
        first_transpose: Sequence[int] | None = None,
        reshape_dims: Sequence[int] | None = None,
        second_transpose: Sequence[int] | None = None,
        zero_is_placeholder: bool = True,
        name: str | None = None,
    ) -> Layer:
        """Add a transposition, a reshape and a transposition, each where given.

        In `reshape_dims` -1 is what remains, and 0 the size of the input where
        `zero_is_placeholder`.
        """
        name, tensor = self._draft.claim(name, "shuffle"), tensor_of(input)
        if first_transpose is not None:
            tensor = self._transposed(f"{name}_first", tensor, first_transpose)
        if reshape_dims is not None:
            sizes = self._sizes(f"{name}_dims", reshape_dims)
            attributes: Attributes = {"allowzero": int(not zero_is_placeholder)}
            (tensor,) = self._draft.node(f"{name}_reshape", "Reshape", [tensor, sizes], attributes)
        if second_transpose is not None:
            tensor = self._transposed(f"{name}_second", tensor, second_transpose)
        return Layer(name, (tensor,))

    def add_squeeze(self, input: Operand, axes: Sequence[int], *, name: str | None = None) -> Layer:
        """Remove dimensions of size 1."""
        name = self._draft.claim(name, "squeeze")
        return self._layer(name, "Squeeze", [tensor_of(input), self._sizes(f"{name}_axes", axes)])

    def add_unsqueeze(
        self, input: Operand, axes: Sequence[int], *, name: str | None = None
    ) -> Layer:
        """Add dimensions of size 1, at these axes of the result."""
        name = self._draft.claim(name, "unsqueeze")
        return self._layer(name, "Unsqueeze", [tensor_of(input), self._sizes(f"{name}_axes", axes)])

    def add_concatenation(
        self, inputs: Sequence[Operand], axis: int, *, name: str | None = None
    ) -> Layer:
        """Join tensors along an axis."""
        tensors = [tensor_of(operand) for operand in inputs]
        return self._layer(
            self._draft.claim(name, "concatenation"), "Concat", tensors, {"axis": axis}
        )

    def add_slice(
        self,
        input: Operand,
        start: Sequence[int],
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
        *,
        name: str | None = None,
    ) -> Layer:
        """Cut out elements start, start + stride, ..., as many as `shape` says, per dimension."""
        name, source = self._draft.claim(name, "slice"), tensor_of(input)
        steps = [1] * len(start) if stride is None else list(stride)
        _check_slice(name, source, start, shape, steps)
        ends = [a + n * s for a, n, s in zip(start, shape, steps, strict=True)]
        words = {
            "start": list(start),
            "end": [_BEFORE_FIRST if end < 0 else end for end in ends],
            "axes": list(range(len(start))),
            "stride": steps,
        }
        operands = [self._sizes(f"{name}_{what}", values) for what, values in words.items()]
        return self._layer(name, "Slice", [source, *operands])

    def add_padding_nd(
        self,
        input: Operand,
        pre_padding: Sequence[int],
        post_padding: Sequence[int],
        *,
        name: str | None = None,
    ) -> Layer:
        """Pad the last dimensions with zeros; negative padding cuts off."""
        name, source = self._draft.claim(name, "padding"), tensor_of(input)
        before = [0] * (rank_of(name, source) - len(pre_padding))
        pads = self._sizes(f"{name}_pads", [*before, *pre_padding, *before, *post_padding])
        return self._layer(name, "Pad", [source, pads])

    def add_resize(
        self,
        input: Operand,
        *,
        shape: Sequence[int] | None = None,
        scales: Sequence[float] | None = None,
        resize_mode: InterpolationMode = InterpolationMode.NEAREST,
        coordinate_transformation: str = "asymmetric",
        nearest_rounding: str = "floor",
        name: str | None = None,
    ) -> Layer:
        """Resize to a shape or by scales, one for each dimension.

        `coordinate_transformation` (asymmetric, half_pixel, align_corners) and `nearest_rounding`
        (floor, ceil, round_prefer_floor, round_prefer_ceil) have TensorRT's defaults.
        """
        name, source = self._draft.claim(name, "resize"), tensor_of(input)
        for what, value, choices in (
            ("coordinate_transformation", coordinate_transformation, COORDINATE_TRANSFORMATIONS),
            ("nearest_rounding", nearest_rounding, NEAREST_ROUNDINGS),
        ):
            if value not in choices:
                raise NetworkError(
                    f"layer {name!r} has {what} {value!r}; it is one of {', '.join(choices)}"
                )
        if (shape is None) == (scales is None):
            raise NetworkError(f"layer {name!r} needs a shape or scales, one of the two")
        factors = shape if shape is not None else scales
        if factors is not None and len(factors) != rank_of(name, source):
            raise NetworkError(
                f"layer {name!r} has {len(factors)} {'sizes' if shape is not None else 'scales'}, "
                f"but its input {source.name!r} is {source.sizes()}; give one for each dimension"
            )
        attributes: dict[str, str | int | float | Sequence[int]] = {
            "mode": INTERPOLATIONS[resize_mode],
            "coordinate_transformation_mode": coordinate_transformation,
        }
        if resize_mode is InterpolationMode.NEAREST:
            attributes["nearest_mode"] = nearest_rounding
        if scales is not None:
            constant = self._draft.constant(f"{name}_scales", np.array(scales, np.float32))
            return self._layer(name, "Resize", [source, None, constant], attributes)
        assert shape is not None
        sizes = self._sizes(f"{name}_shape", shape)
        return self._layer(name, "Resize", [source, None, None, sizes], attributes)

    def add_gather(
        self,
        input: Operand,
        indices: Operand,
        axis: int = 0,
        *,
        mode: GatherMode = GatherMode.DEFAULT,
        name: str | None = None,
    ) -> Layer:
        """Take elements or slices by indices; see `GatherMode`."""
        attributes: Attributes = {} if mode is GatherMode.ND else {"axis": axis}
        operands = [tensor_of(input), tensor_of(indices)]
        name = self._draft.claim(name, "gather")
        return self._layer(name, GATHERS[mode], operands, attributes)

    def add_identity(self, input: Operand, *, name: str | None = None) -> Layer:
        """Add a copy."""
        return self._layer(self._draft.claim(name, "identity"), "Identity", [tensor_of(input)])

    def add_cast(self, input: Operand, to_type: npt.DTypeLike, *, name: str | None = None) -> Layer:
        """Convert to another type."""
        name = self._draft.claim(name, "cast")
        attributes: Attributes = {"to": onnx_type(name, to_type).value}
        return self._layer(name, "Cast", [tensor_of(input)], attributes)

    def add_shape(self, input: Operand, *, name: str | None = None) -> Layer:
        """Add the shape of a tensor, as int64."""
        return self._layer(self._draft.claim(name, "shape"), "Shape", [tensor_of(input)])

    def _transposed(self, name: str, tensor: Tensor, order: Sequence[int]) -> Tensor:
        return self._draft.node(name, "Transpose", [tensor], {"perm": list(order)})[0]


def _check_slice(
    layer: str, tensor: Tensor, start: Sequence[int], shape: Sequence[int], steps: Sequence[int]
) -> None:
    """Refuse a slice that leaves the tensor, as TensorRT does; ONNX would cut it short."""
    rank = rank_of(layer, tensor)
    if not len(start) == len(shape) == len(steps) == rank:
        raise NetworkError(
            f"layer {layer!r}: start, shape and stride have {len(start)}, {len(shape)} and "
            f"{len(steps)} values, but {tensor.name!r} has {rank} dimensions; give one for each"
        )
    for at, size in enumerate(tensor.shape or ()):
        last = start[at] + (shape[at] - 1) * steps[at]
        if isinstance(size, int) and not (0 <= start[at] < size and 0 <= last < size):
            raise NetworkError(
                f"layer {layer!r} reads elements {start[at]} to {last} of dimension {at}, but "
                f"{tensor.name!r} is {tensor.sizes()}; keep within 0 to {size - 1}"
            )
