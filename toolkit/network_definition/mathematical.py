"""Layers that compute on elements, windows and axes, without weights."""

from collections.abc import Sequence

import numpy as np

from toolkit.errors import NetworkError
from toolkit.network_definition.base import NetworkBase, axes_of, one_axis_of, rank_of
from toolkit.network_definition.draft import Attributes
from toolkit.network_definition.layers import Layer, Operand, tensor_of
from toolkit.network_definition.operations import (
    ACTIVATIONS,
    ELEMENTWISE,
    POOLINGS,
    REDUCTIONS,
    UNARY,
    ActivationType,
    ElementWiseOperation,
    PoolingType,
    ReduceOperation,
    TopKOperation,
    UnaryOperation,
)
from toolkit.network_definition.windows import PaddingMode, Window, WindowLayer


class MathLayers(NetworkBase):
    """Activations, element-wise layers, poolings, reductions."""

    def add_activation(
        self,
        input: Operand,
        type: ActivationType,
        *,
        alpha: float | None = None,
        beta: float | None = None,
        name: str | None = None,
    ) -> Layer:
        """Add an activation. `alpha` and `beta` as in TensorRT: CLIP keeps alpha <= x <= beta."""
        name, source = self._draft.claim(name, "activation"), tensor_of(input)
        row = ACTIVATIONS[type]
        if type is ActivationType.CLIP:
            limits = (("min", alpha), ("max", beta))
            operands = [
                None if value is None
                else self._draft.constant(f"{name}_{what}", np.array(value, source.dtype))
                for what, value in limits
            ]  # fmt: skip
            return self._layer(name, "Clip", [source, *operands])
        attributes: dict[str, str | int | float | Sequence[int] | Sequence[float]] = dict(
            row.attributes
        )
        for what, attribute, value in (("alpha", row.alpha, alpha), ("beta", row.beta, beta)):
            if value is not None:
                if attribute is None:
                    raise NetworkError(
                        f"layer {name!r}: {type.name} has no {what}, but got {value}; leave it out"
                    )
                attributes[attribute] = float(value)
        return self._layer(name, row.op_type, [source], attributes)

    def add_parametric_relu(
        self, input: Operand, slopes: Operand, *, name: str | None = None
    ) -> Layer:
        """Add x where x > 0, else slopes * x; `slopes` is broadcast to x."""
        name = self._draft.claim(name, "parametric_relu")
        return self._layer(name, "PRelu", [tensor_of(input), tensor_of(slopes)])

    def add_elementwise(
        self,
        input1: Operand,
        input2: Operand,
        op: ElementWiseOperation,
        *,
        name: str | None = None,
    ) -> Layer:
        """Add an operation on two tensors, broadcast as in NumPy."""
        name = self._draft.claim(name, "elementwise")
        return self._layer(name, ELEMENTWISE[op], [tensor_of(input1), tensor_of(input2)])

    def add_unary(self, input: Operand, op: UnaryOperation, *, name: str | None = None) -> Layer:
        """Add an operation on each element."""
        return self._layer(self._draft.claim(name, "unary"), UNARY[op], [tensor_of(input)])

    def add_select(
        self,
        condition: Operand,
        then_input: Operand,
        else_input: Operand,
        *,
        name: str | None = None,
    ) -> Layer:
        """Add a choice between two tensors by a boolean one."""
        operands = [tensor_of(one) for one in (condition, then_input, else_input)]
        return self._layer(self._draft.claim(name, "select"), "Where", operands)

    def add_pooling_nd(
        self,
        input: Operand,
        type: PoolingType,
        window_size: Sequence[int],
        *,
        stride_nd: Sequence[int] | None = None,
        padding_nd: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
        padding_mode: PaddingMode = PaddingMode.EXPLICIT_ROUND_DOWN,
        average_count_excludes_padding: bool = True,
        name: str | None = None,
    ) -> WindowLayer:
        """Add a pooling; strides are 1 unless given."""
        name = self._draft.claim(name, "pooling")
        window = Window(
            name, window_size, stride_nd, padding_nd, post_padding,
            padding_mode=padding_mode, rounds_up=True,
        )  # fmt: skip
        others: dict[str, int] = {}
        if type is PoolingType.AVERAGE:
            others["count_include_pad"] = int(not average_count_excludes_padding)
        return WindowLayer(*self._windowed(POOLINGS[type], [tensor_of(input)], window, others))

    def add_lrn(
        self,
        input: Operand,
        window: int,
        alpha: float,
        beta: float,
        k: float,
        *,
        name: str | None = None,
    ) -> Layer:
        """Add a local response normalization over `window` channels."""
        attributes: Attributes = {"size": window, "alpha": alpha, "beta": beta, "bias": k}
        return self._layer(self._draft.claim(name, "lrn"), "LRN", [tensor_of(input)], attributes)

    def add_softmax(
        self, input: Operand, axes: int | Sequence[int], *, name: str | None = None
    ) -> Layer:
        """Add a softmax along one axis. TensorRT's default axis is none here."""
        name, source = self._draft.claim(name, "softmax"), tensor_of(input)
        axis = one_axis_of(name, axes, rank_of(name, source))
        return self._layer(name, "Softmax", [source], {"axis": axis})

    def add_reduce(
        self,
        input: Operand,
        op: ReduceOperation,
        axes: int | Sequence[int],
        keep_dims: bool,
        *,
        name: str | None = None,
    ) -> Layer:
        """Add a reduction over axes."""
        name, source = self._draft.claim(name, "reduce"), tensor_of(input)
        indices = self._sizes(f"{name}_axes", axes_of(name, axes, rank_of(name, source)))
        attributes: Attributes = {"keepdims": int(keep_dims)}
        return self._layer(name, REDUCTIONS[op], [source, indices], attributes)

    def add_topk(
        self,
        input: Operand,
        op: TopKOperation,
        k: int,
        axes: int | Sequence[int],
        *,
        name: str | None = None,
    ) -> Layer:
        """Add the k largest or smallest elements along one axis: values, and indices in int64."""
        name, source = self._draft.claim(name, "topk"), tensor_of(input)
        attributes: Attributes = {
            "axis": one_axis_of(name, axes, rank_of(name, source)),
            "largest": int(op is TopKOperation.MAX),
        }
        count = self._sizes(f"{name}_k", [k])
        return self._layer(name, "TopK", [source, count], attributes, outputs=2)
