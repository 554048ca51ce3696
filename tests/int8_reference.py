"""Q/DQ graphs in integers, node by node as ONNX writes them: the truth of INT8, bit by bit.

A tensor is an array of real numbers (float32), or integers on a symmetric grid with its scale.

    QuantizeLinear        q = clip(rint(x * (1 / s)), -128, 127), products in float32
    Conv, Gemm, MatMul    float32(sum of q_x q_w + b_q) * float32(s_x s_w), sums in int64
    all others            float32 of q * s
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper


@dataclass(frozen=True)
class Grid:
    """`q` in -128..127 (a bias: INT32) with a float32 scale, one or one along `axis`."""

    q: np.ndarray
    scale: np.ndarray
    axis: int = 0

    def real(self) -> np.ndarray:
        shape = [1] * self.q.ndim
        if self.scale.size > 1:
            shape[self.axis] = -1
        scale = self.scale.reshape(shape) if self.q.ndim else self.scale.reshape(())
        return self.q.astype(np.float32) * scale


Value = np.ndarray | Grid


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the outputs of a model with symmetric Q/DQ; UINT8 with the zero point 128 too."""
    values: dict[str, Value] = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    values |= dict(feeds)
    for node in model.graph.node:
        operands = [values.get(name) for name in node.input]
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        values[node.output[0]] = _OPERATORS[node.op_type](operands, attributes)
    return {out.name: _real(values[out.name]) for out in model.graph.output}


def quantized(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    steps = x.astype(np.float32) * (np.float32(1) / scale.astype(np.float32))
    return np.clip(np.rint(steps), -128, 127).astype(np.int64)


def _real(value: Value) -> np.ndarray:
    return value.real() if isinstance(value, Grid) else value


def _quantize(operands, _):
    x, scale, zero = operands
    return (quantized(_real(x), scale) + int(zero)).astype(zero.dtype)


def _dequantize(operands, attributes):
    stored, scale, zero = operands
    return Grid(
        stored.astype(np.int64) - int(zero.reshape(-1)[0]), scale, attributes.get("axis", 1)
    )


def _ended(sums, x, w, bias, axis, rank):
    """Sums in int64 [..., columns along axis, ...] -> real numbers."""
    factors = np.broadcast_to(np.float32(x.scale) * w.scale.reshape(-1), (sums.shape[axis],))
    shape = [1] * rank
    shape[axis] = -1
    if bias is not None:
        whole = bias.q if isinstance(bias, Grid) else np.rint(bias.astype(np.float64) / factors)
        sums = sums + whole.astype(np.int64).reshape(shape)
    return sums.astype(np.float32) * factors.reshape(shape)


def _conv(operands, attributes):
    x, w, bias = (*operands, None)[:3]
    group = attributes.get("group", 1)
    pads = attributes.get("pads", [0] * 4)
    strides, dilations = attributes.get("strides", [1, 1]), attributes.get("dilations", [1, 1])
    q = np.pad(x.q, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    taps = w.q.shape[2:]
    span = [(t - 1) * d + 1 for t, d in zip(taps, dilations, strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(q, span, (2, 3))
    windows = windows[:, :, :: strides[0], :: strides[1], :: dilations[0], :: dilations[1]]
    parts = [
        np.tensordot(part.astype(np.float64), filters, ([1, 4, 5], [1, 2, 3])).transpose(0, 3, 1, 2)
        for part, filters in zip(
            np.split(windows, group, 1), np.split(w.q.astype(np.float64), group, 0), strict=True
        )
    ]  # float64 holds these integers exactly
    return _ended(np.concatenate(parts, 1).astype(np.int64), x, w, bias, 1, 4)


def _gemm(operands, attributes):
    x, w, bias = (*operands, None)[:3]
    sums = x.q @ (w.q.T if attributes.get("transB", 0) else w.q)
    return _ended(sums, x, w, bias, 1, 2)


def _matmul(operands, _):
    x, w = operands
    return _ended(x.q @ w.q, x, w, None, -1, max(x.q.ndim, w.q.ndim))


def _windows(x, attributes, outside):
    pads = attributes.get("pads", [0] * 4)
    around = ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3]))
    padded = np.pad(x, around, constant_values=outside)
    strides = attributes.get("strides", [1, 1])
    found = np.lib.stride_tricks.sliding_window_view(padded, attributes["kernel_shape"], (2, 3))
    return found[:, :, :: strides[0], :: strides[1]]


def _max_pool(operands, attributes):
    return _windows(_real(operands[0]), attributes, -np.inf).max((4, 5)).astype(np.float32)


def _average(sums, count, scale):
    """The mean of integers in float32, then the scale: what the kernel does."""
    return (sums.astype(np.float32) / np.asarray(count, np.float32)) * np.float32(scale)


def _average_pool(operands, attributes):
    x = operands[0]
    counts = _windows(np.ones_like(x.q), attributes, 0).sum((4, 5))
    return _average(_windows(x.q, attributes, 0).sum((4, 5)), counts, x.scale)


def _global_average(operands, _):
    x = operands[0]
    return _average(x.q.sum((2, 3), keepdims=True), x.q.shape[2] * x.q.shape[3], x.scale)


def _resize(operands, _):
    x = _real(operands[0])
    sizes = operands[-1]  # or scales
    if sizes.dtype == np.int64:
        sizes = sizes // x.shape
    return x.repeat(int(sizes[2]), 2).repeat(int(sizes[3]), 3)


def _sizes(operands):
    shape = (operands[0].q if isinstance(operands[0], Grid) else operands[0]).shape
    return [shape[at] if n == 0 else n for at, n in enumerate(operands[1].tolist())]


_OPERATORS = {
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "Conv": _conv,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": _global_average,
    "Resize": _resize,
    "Relu": lambda o, _: np.maximum(_real(o[0]), np.float32(0)),
    "Clip": lambda o, _: np.clip(_real(o[0]), o[1], o[2]),
    "Add": lambda o, _: _real(o[0]) + _real(o[1]),
    "Mul": lambda o, _: _real(o[0]) * _real(o[1]),
    "Sum": lambda o, _: sum((_real(x) for x in o[1:]), _real(o[0])),
    "Concat": lambda o, a: np.concatenate([_real(x) for x in o], a["axis"]),
    "Sigmoid": lambda o, _: np.float32(1) / (np.float32(1) + np.exp(-_real(o[0]))),
    "Reshape": lambda o, _: _real(o[0]).reshape(_sizes(o)),
    "Flatten": lambda o, a: _real(o[0]).reshape(o[0].shape[0], -1),
    "Transpose": lambda o, a: _real(o[0]).transpose(a["perm"]),
}
