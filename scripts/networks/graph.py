"""Write a network as an ONNX graph, layer by layer, with static shapes and lazy weights.

Weights are random with a seed from their name, and are generated only when a file is written or a
session is opened: the planner needs only their shapes, and 138 million of them cost nothing.
"""

import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

OPSET = 17
Pair = tuple[int, int]
Attributes = Mapping[str, int | float | str | Sequence[int]]


def _attribute(name: str, value: int | float | str | Sequence[int]) -> ir.Attr:
    if isinstance(value, int):
        return ir.AttrInt64(name, value)
    if isinstance(value, float):
        return ir.AttrFloat32(name, value)
    if isinstance(value, str):
        return ir.AttrString(name, value)
    return ir.AttrInt64s(name, tuple(value))


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else value


def dims(value: ir.Value) -> tuple[int, ...]:
    """Return the shape of a tensor of fixed sizes."""
    assert value.shape is not None
    return value.shape.numpy()


def channels(value: ir.Value) -> int:
    """Return the channels of a tensor (N, C, ...)."""
    return dims(value)[1]


def size(value: ir.Value) -> tuple[int, ...]:
    """Return the spatial size of a tensor (N, C, ...)."""
    return dims(value)[2:]


class Net:
    """A graph builder: every method adds nodes and returns their output, float32."""

    def __init__(self, name: str, shape: Sequence[int]) -> None:
        self.name = name
        self.image = ir.Value(
            name="image", shape=ir.Shape(tuple(shape)), type=ir.TensorType(ir.DataType.FLOAT)
        )
        self._nodes: list[ir.Node] = []
        self._weights: list[ir.Value] = []

    def model(self, *outputs: ir.Value) -> ir.Model:
        """Return the finished model."""
        graph = ir.Graph(
            [self.image],
            list(outputs),
            nodes=self._nodes,
            initializers=self._weights,
            name=self.name,
            opset_imports={"": OPSET, "trt.plugins": 1},
        )
        return ir.Model(graph, ir_version=8)

    def weight(self, *shape: int) -> ir.Value:
        """Return random weights scaled to keep activations in range."""
        name = f"w{len(self._weights)}"
        spread = 1 / math.sqrt(max(1, math.prod(shape[1:])))

        def make() -> ir.TensorProtocol:
            random = np.random.default_rng(zlib.crc32(name.encode()))
            return ir.Tensor(random.normal(0, spread, shape).astype(np.float32), name=name)

        lazy = ir.LazyTensor(make, ir.DataType.FLOAT, ir.Shape(shape), name=name)
        return self._initializer(name, lazy)

    def constant(self, values: Sequence[float] | Sequence[int]) -> ir.Value:
        """Return a small constant vector."""
        floats = any(isinstance(value, float) for value in values)
        name = f"c{len(self._weights)}"
        array = np.array(values, np.float32 if floats else np.int64)
        return self._initializer(name, ir.Tensor(array, name=name))

    def _initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        value = ir.Value(
            name=name,
            shape=ir.Shape(tensor.shape.numpy()),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self._weights.append(value)
        return value

    def op(
        self,
        kind: str,
        inputs: Sequence[ir.Value | None],
        shape: Sequence[int],
        *,
        domain: str = "",
        **attributes: int | float | str | Sequence[int],
    ) -> ir.Value:
        """Add one node with one output of `shape`."""
        return self.ops(kind, inputs, [shape], domain=domain, attributes=attributes)[0]

    def ops(
        self,
        kind: str,
        inputs: Sequence[ir.Value | None],
        shapes: Sequence[Sequence[int]],
        *,
        domain: str = "",
        attributes: Attributes | None = None,
    ) -> list[ir.Value]:
        """Add one node with an output for each of `shapes`."""
        name = f"{kind}_{len(self._nodes)}"
        outputs = [
            ir.Value(
                name=f"{name}.{index}" if index else name,
                shape=ir.Shape(tuple(shape)),
                type=ir.TensorType(ir.DataType.FLOAT),
            )
            for index, shape in enumerate(shapes)
        ]
        attribute_list = [_attribute(name, value) for name, value in (attributes or {}).items()]
        self._nodes.append(
            ir.Node(domain, kind, inputs, attribute_list, outputs=outputs, name=name)
        )
        return outputs

    def conv(
        self,
        x: ir.Value,
        maps: int,
        kernel: int | Pair = 1,
        stride: int = 1,
        *,
        pad: int | Pair | None = None,
        group: int = 1,
        bias: bool = False,
        dilation: int = 1,
    ) -> ir.Value:
        """Convolve; `pad` None keeps the size at stride 1."""
        (high, wide), spatial = _pair(kernel), size(x)
        if pad is None:
            pad = (dilation * (high - 1) // 2, dilation * (wide - 1) // 2)
        pads = _pair(pad)
        spans = [dilation * (k - 1) + 1 for k in (high, wide)]
        sizes = [
            (s + 2 * p - k) // stride + 1 for s, p, k in zip(spatial, pads, spans, strict=True)
        ]
        operands = [x, self.weight(maps, channels(x) // group, high, wide)]
        if bias:
            operands.append(self.weight(maps))
        return self.op(
            "Conv",
            operands,
            (dims(x)[0], maps, *sizes),
            group=group,
            kernel_shape=(high, wide),
            strides=(stride, stride),
            dilations=(dilation, dilation),
            pads=pads + pads,
        )

    def shared_conv(self, x: ir.Value, weight: ir.Value, bias: ir.Value) -> ir.Value:
        """Convolve 3x3 with weights that other convolutions share; the size stays."""
        shape = (dims(x)[0], dims(weight)[0], *size(x))
        return self.op("Conv", [x, weight, bias], shape, kernel_shape=(3, 3), pads=(1, 1, 1, 1))

    def norm(self, x: ir.Value) -> ir.Value:
        """Normalise by statistics of the batch."""
        count = channels(x)
        weights = [self.weight(count) for _ in range(3)]
        name = f"variance{len(self._weights)}"
        ones = ir.LazyTensor(
            lambda: ir.Tensor(np.ones(count, np.float32), name=name),
            ir.DataType.FLOAT,
            ir.Shape((count,)),
            name=name,
        )
        return self.op("BatchNormalization", [x, *weights, self._initializer(name, ones)], dims(x))

    def unary(
        self, kind: str, x: ir.Value, **attributes: int | float | str | Sequence[int]
    ) -> ir.Value:
        """Apply an operator that keeps the shape."""
        return self.ops(kind, [x], [dims(x)], attributes=attributes)[0]

    def relu(self, x: ir.Value) -> ir.Value:
        """Rectify."""
        return self.unary("Relu", x)

    def relu6(self, x: ir.Value) -> ir.Value:
        """Rectify and clip at 6."""
        return self.op("Clip", [x, self._scalar(0.0), self._scalar(6.0)], dims(x))

    def _scalar(self, value: float) -> ir.Value:
        name = f"c{len(self._weights)}"
        return self._initializer(name, ir.Tensor(np.array(value, np.float32), name=name))

    def leaky(self, x: ir.Value) -> ir.Value:
        """Rectify with a slope of 0.1 below zero."""
        return self.unary("LeakyRelu", x, alpha=0.1)

    def silu(self, x: ir.Value) -> ir.Value:
        """Multiply by its own sigmoid."""
        return self.mul(x, self.unary("Sigmoid", x))

    def mish(self, x: ir.Value) -> ir.Value:
        """Multiply by the hyperbolic tangent of its softplus."""
        return self.mul(x, self.unary("Tanh", self.unary("Softplus", x)))

    def add(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Add; the result has the shape of `x`."""
        return self.op("Add", [x, y], dims(x))

    def mul(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Multiply; the result has the shape of `x`."""
        return self.op("Mul", [x, y], dims(x))

    def pool(
        self,
        x: ir.Value,
        kernel: int,
        stride: int = 1,
        *,
        pad: int = 0,
        kind: str = "MaxPool",
        ceil: bool = False,
    ) -> ir.Value:
        """Pool by maximum or average."""
        spans = [s + 2 * pad - kernel for s in size(x)]
        sizes = [(-(-span // stride) if ceil else span // stride) + 1 for span in spans]
        attributes: dict[str, int | float | str | Sequence[int]] = {
            "kernel_shape": (kernel, kernel),
            "strides": (stride, stride),
            "pads": (pad,) * 4,
            "ceil_mode": int(ceil),
        }
        if kind == "AveragePool" and pad:
            attributes["count_include_pad"] = 1
        return self.ops(kind, [x], [(*dims(x)[:2], *sizes)], attributes=attributes)[0]

    def mean(self, x: ir.Value) -> ir.Value:
        """Average over all positions."""
        return self.op("GlobalAveragePool", [x], (*dims(x)[:2], 1, 1))

    def concat(self, *parts: ir.Value, axis: int = 1) -> ir.Value:
        """Join along an axis."""
        shape = list(dims(parts[0]))
        shape[axis] = sum(dims(part)[axis] for part in parts)
        return self.op("Concat", list(parts), shape, axis=axis)

    def split(self, x: ir.Value, *sizes: int, axis: int = 1) -> list[ir.Value]:
        """Cut along an axis."""
        shapes = [tuple(s if i == axis else d for i, d in enumerate(dims(x))) for s in sizes]
        return self.ops("Split", [x, self.constant(sizes)], shapes, attributes={"axis": axis})

    def strided(self, x: ir.Value, rows: int, columns: int) -> ir.Value:
        """Take every second row and column, from an offset on."""
        batch, maps, high, wide = dims(x)
        spec = [(rows, columns), (2**31, 2**31), (2, 3), (2, 2)]
        return self.op(
            "Slice",
            [x, *[self.constant(values) for values in spec]],
            (batch, maps, high // 2, wide // 2),
        )

    def upsample(self, x: ir.Value, factor: int = 2) -> ir.Value:
        """Repeat every pixel."""
        batch, maps, high, wide = dims(x)
        scales = self.constant([1.0, 1.0, float(factor), float(factor)])
        shape = (batch, maps, high * factor, wide * factor)
        return self.op(
            "Resize",
            [x, None, scales],
            shape,
            mode="nearest",
            nearest_mode="floor",
            coordinate_transformation_mode="asymmetric",
        )

    def deconv(self, x: ir.Value, maps: int, kernel: int, stride: int) -> ir.Value:
        """Convolve transposed, without padding."""
        batch, count, high, wide = dims(x)
        weights = self.weight(count, maps, kernel, kernel)
        sizes = [(s - 1) * stride + kernel for s in (high, wide)]
        return self.op(
            "ConvTranspose",
            [x, weights, self.weight(maps)],
            (batch, maps, *sizes),
            kernel_shape=(kernel, kernel),
            strides=(stride, stride),
        )

    def reshape(self, x: ir.Value, *shape: int) -> ir.Value:
        """Rename the dimensions."""
        return self.op("Reshape", [x, self.constant(shape)], shape)

    def transpose(self, x: ir.Value, *order: int) -> ir.Value:
        """Reorder the dimensions."""
        return self.op("Transpose", [x], [dims(x)[i] for i in order], perm=order)

    def matmul(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Multiply two computed matrices."""
        return self.op("MatMul", [x, y], (*dims(x)[:-1], dims(y)[-1]))

    def flatten(self, x: ir.Value) -> ir.Value:
        """Return (N, everything else)."""
        shape = dims(x)
        return self.op("Flatten", [x], (shape[0], math.prod(shape[1:])))

    def linear(self, x: ir.Value, maps: int) -> ir.Value:
        """Multiply (N, K) by a matrix and add a bias."""
        batch, count = dims(x)
        weights = [self.weight(maps, count), self.weight(maps)]
        return self.op("Gemm", [x, *weights], (batch, maps), transB=1)

    def softmax(self, x: ir.Value, axis: int = -1) -> ir.Value:
        """Normalise exponentials along an axis."""
        return self.unary("Softmax", x, axis=axis)

    def plugin(self, kind: str, inputs: Sequence[ir.Value], *shapes: Sequence[int]) -> ir.Value:
        """Add a TensorRT plugin, such as its fused non-maximum suppression."""
        return self.ops(kind, inputs, shapes, domain="trt.plugins")[0]
