"""Layers with weights, and products."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from toolkit.errors import NetworkError
from toolkit.network_definition.base import NetworkBase, axes_of, one_axis_of, rank_of
from toolkit.network_definition.draft import Attributes
from toolkit.network_definition.layers import Layer, Operand, Tensor, tensor_of
from toolkit.network_definition.operations import MatrixOperation
from toolkit.network_definition.windows import DilatedLayer, PaddingMode, Window, WindowLayer


class WeightedLayers(NetworkBase):
    """Convolutions, products, scales and normalizations."""

    def add_convolution_nd(
        self,
        input: Operand,
        num_output_maps: int,
        kernel_shape: Sequence[int],
        kernel: npt.ArrayLike,
        bias: npt.ArrayLike | None = None,
        *,
        stride_nd: Sequence[int] | None = None,
        padding_nd: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
        dilation_nd: Sequence[int] | None = None,
        padding_mode: PaddingMode = PaddingMode.EXPLICIT_ROUND_DOWN,
        num_groups: int = 1,
        name: str | None = None,
    ) -> DilatedLayer:
        """Add a convolution: (N, C, ...) -> (N, num_output_maps, ...).

        `kernel`: (num_output_maps, C / num_groups, *kernel_shape).
        """
        name, source = self._draft.claim(name, "convolution"), tensor_of(input)
        channels = channels_of(name, source, num_output_maps, num_groups)
        shape = (num_output_maps, channels // num_groups, *kernel_shape)
        window = Window(
            name, kernel_shape, stride_nd, padding_nd, post_padding, dilation_nd, padding_mode
        )
        weight = self._weight(name, "kernel", kernel, shape, source)
        operands = [source, weight, *self._bias(name, bias, num_output_maps, source)]
        return DilatedLayer(*self._windowed("Conv", operands, window, {"group": num_groups}))

    def add_deconvolution_nd(
        self,
        input: Operand,
        num_output_maps: int,
        kernel_shape: Sequence[int],
        kernel: npt.ArrayLike,
        bias: npt.ArrayLike | None = None,
        *,
        stride_nd: Sequence[int] | None = None,
        padding_nd: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
        num_groups: int = 1,
        name: str | None = None,
    ) -> WindowLayer:
        """Add a transposed convolution; `kernel`: (C, num_output_maps / num_groups, ...)."""
        name, source = self._draft.claim(name, "deconvolution"), tensor_of(input)
        channels = channels_of(name, source, num_output_maps, num_groups)
        shape = (channels, num_output_maps // num_groups, *kernel_shape)
        window = Window(name, kernel_shape, stride_nd, padding_nd, post_padding)
        weight = self._weight(name, "kernel", kernel, shape, source)
        operands = [source, weight, *self._bias(name, bias, num_output_maps, source)]
        return WindowLayer(
            *self._windowed("ConvTranspose", operands, window, {"group": num_groups})
        )

    def add_fully_connected(
        self,
        input: Operand,
        num_outputs: int,
        kernel: npt.ArrayLike,
        bias: npt.ArrayLike | None = None,
        *,
        name: str | None = None,
    ) -> Layer:
        """Add a fully connected layer: (N, ...) -> (N, num_outputs); `kernel`: (num_outputs, K)."""
        name, source = self._draft.claim(name, "fully_connected"), tensor_of(input)
        (flat,) = self._draft.node(f"{name}_flatten", "Flatten", [source], {"axis": 1})
        width = flat.shape[1] if flat.shape is not None else None
        if not isinstance(width, int):
            raise NetworkError(
                f"layer {name!r} has one weight for each input value, but its input "
                f"{source.name!r} is {source.sizes()}; fix all sizes but the first"
            )
        weight = self._weight(name, "kernel", kernel, (num_outputs, width), source)
        operands = [flat, weight, *self._bias(name, bias, num_outputs, source)]
        return self._layer(name, "Gemm", operands, {"transB": 1})

    def add_matrix_multiply(
        self,
        input0: Operand,
        op0: MatrixOperation,
        input1: Operand,
        op1: MatrixOperation,
        *,
        name: str | None = None,
    ) -> Layer:
        """Add a product of matrices in the last two dimensions; those before are batches."""
        name = self._draft.claim(name, "matrix_multiply")
        first = self._matrix(f"{name}_0", tensor_of(input0), op0, vector_axis=-2)
        second = self._matrix(f"{name}_1", tensor_of(input1), op1, vector_axis=-1)
        vectors = [axis for op, axis in ((op0, -2), (op1, -1)) if op is MatrixOperation.VECTOR]
        if not vectors:
            return self._layer(name, "MatMul", [first, second])
        (product,) = self._draft.node(f"{name}_product", "MatMul", [first, second])
        return self._layer(name, "Squeeze", [product, self._sizes(f"{name}_axes", vectors)])

    def add_einsum(
        self, inputs: Sequence[Operand], equation: str, *, name: str | None = None
    ) -> Layer:
        """Add a sum of products by Einstein's convention, such as "bij,bjk->bik"."""
        tensors = [tensor_of(operand) for operand in inputs]
        name = self._draft.claim(name, "einsum")
        return self._layer(name, "Einsum", tensors, {"equation": equation})

    def add_scale(
        self,
        input: Operand,
        shift: npt.ArrayLike | None = None,
        scale: npt.ArrayLike | None = None,
        power: npt.ArrayLike | None = None,
        *,
        channel_axis: int = 1,
        name: str | None = None,
    ) -> Layer:
        """Add (input * scale + shift) ^ power.

        Each is one value, one for each channel of `channel_axis`, or an array of the input's rank.
        """
        name, tensor = self._draft.claim(name, "scale"), tensor_of(input)
        rank = rank_of(name, tensor)
        for what, op_type, values in (
            ("scale", "Mul", scale), ("shift", "Add", shift), ("power", "Pow", power),
        ):  # fmt: skip
            if values is not None:
                array = np.asarray(values, tensor.dtype)
                if array.ndim == 1 and array.size > 1:
                    axis = one_axis_of(name, [channel_axis], rank)
                    array = array.reshape([-1 if at == axis else 1 for at in range(rank)])
                operand = self._draft.constant(f"{name}_{what}", array)
                (tensor,) = self._draft.node(f"{name}_{op_type}", op_type, [tensor, operand])
        return Layer(name, (tensor,))

    def add_normalization(
        self,
        input: Operand,
        scale: Operand,
        bias: Operand,
        axes: int | Sequence[int],
        *,
        epsilon: float = 1e-5,
        name: str | None = None,
    ) -> Layer:
        """Add (input - mean) / sqrt(variance + epsilon) * scale + bias, the mean over `axes`."""
        name, source = self._draft.claim(name, "normalization"), tensor_of(input)
        rank = rank_of(name, source)
        indices = axes_of(name, axes, rank)
        last = list(range(rank - len(indices), rank))
        factors = [tensor_of(scale), tensor_of(bias)]
        normalized = (source.shape or ())[last[0] :]
        if indices == last and all(factor.shape == normalized for factor in factors):
            attributes: Attributes = {"axis": last[0], "epsilon": epsilon}
            return self._layer(name, "LayerNormalization", [source, *factors], attributes)
        over = self._sizes(f"{name}_axes", indices)
        (mean,) = self._draft.node(f"{name}_mean", "ReduceMean", [source, over])
        (centred,) = self._draft.node(f"{name}_centred", "Sub", [source, mean])
        (square,) = self._draft.node(f"{name}_square", "Mul", [centred, centred])
        (variance,) = self._draft.node(f"{name}_variance", "ReduceMean", [square, over])
        least = self._draft.constant(f"{name}_epsilon", np.array(epsilon, source.dtype))
        (shifted,) = self._draft.node(f"{name}_shifted", "Add", [variance, least])
        (deviation,) = self._draft.node(f"{name}_deviation", "Sqrt", [shifted])
        (unit,) = self._draft.node(f"{name}_unit", "Div", [centred, deviation])
        (scaled,) = self._draft.node(f"{name}_scaled", "Mul", [unit, factors[0]])
        return self._layer(name, "Add", [scaled, factors[1]])

    def _matrix(self, name: str, tensor: Tensor, op: MatrixOperation, vector_axis: int) -> Tensor:
        """Return an operand of a product, transposed or with the dimension that a vector lacks."""
        if op is MatrixOperation.NONE:
            return tensor
        if op is MatrixOperation.VECTOR:
            axes = self._sizes(f"{name}_axis", [vector_axis])
            return self._draft.node(f"{name}_matrix", "Unsqueeze", [tensor, axes])[0]
        rank = rank_of(name, tensor)
        order = [*range(rank - 2), rank - 1, rank - 2]
        return self._draft.node(f"{name}_transposed", "Transpose", [tensor], {"perm": order})[0]


def channels_of(layer: str, tensor: Tensor, output_maps: int, groups: int) -> int:
    """Return the channels of (N, C, ...). Raises NetworkError: unknown, or not a multiple."""
    shape = tensor.shape or ()
    channels = shape[1] if len(shape) > 2 else None
    if not isinstance(channels, int) or channels % groups:
        raise NetworkError(
            f"layer {layer!r}: its input {tensor.name!r} is {tensor.sizes()}; it must be (N, C, "
            f"...) with C fixed and a multiple of num_groups ({groups})"
        )
    if output_maps % groups:
        raise NetworkError(
            f"layer {layer!r}: num_output_maps is {output_maps}; it must be a multiple of "
            f"num_groups ({groups})"
        )
    return channels
