"""Conv, ConvTranspose, Gemm and MatMul of a Q/DQ segment as kernels of the DLA.

A product of matrices is a convolution with a 1x1 kernel over one row of pixels, as the DLA runs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from device.dla_emulator.arithmetic import convolution, layers, scales
from device.dla_emulator.arithmetic.convolution import ConvKernel, Geometry
from device.dla_emulator.arithmetic.rounding import Floats, Ints
from device.dla_emulator.forms import Form, QuantizedBuffer, QuantizedConstant
from device.dla_emulator.segment_graph import Node
from device.padding import is_same

Array = NDArray[Any]
Kind = Literal["convolution", "deconvolution", "matrix"]


@dataclass(frozen=True, slots=True)
class Product:
    """A layer with weights. real = step (a + bias), both (outputs, 1, 1) or single numbers.

    With weights in floating point `step` is None, and `offset` the real bias.
    """

    kind: Kind
    kernel: ConvKernel
    step: Floats | None
    bias: Ints | None
    offset: Floats
    auto_pad: str
    output_padding: tuple[int, int]

    def finish(self, x: Array, path: layers.Path) -> Array:
        """Return the INT8 result of INT8 x through the output stages."""
        if self.kind == "deconvolution":
            sums = self.sums(x)
            return np.stack([layers.finish(image, path) for image in sums])
        if layers.by_position(path):
            whole = convolution.convolve_whole(self._image(x), self._fitted(x))
            return self._restored(np.stack([layers.finish(image, path) for image in whole]), x)
        image, kernel = self._image(x), self._fitted(x)
        rows, columns = kernel.geometry.positions(image.shape[2], image.shape[3])
        outputs = kernel.matrices.shape[0] * kernel.matrices.shape[1]
        result = np.empty((image.shape[0], outputs, rows, columns), np.int8)
        for block in convolution.convolve(image, kernel):
            block.put(result, lambda sums: layers.finished(sums, path))
        return self._restored(result, x)

    def real(self, x: Array) -> Array:
        """Return the real result in float32: of INT8 x, or of x in floating point."""
        sums = self.sums(x).astype(np.float64)
        if self.step is not None:
            sums = (sums + (0 if self.bias is None else self.bias)) * self.step
        return self._restored((sums + self.offset).astype(np.float32), x)

    def sums(self, x: Array) -> Array:
        """Return the accumulators (batch, outputs, rows, columns)."""
        kernel = self._fitted(x)
        if self.kind == "deconvolution":
            return convolution.deconvolve(x, kernel, self.output_padding)
        return convolution.convolve_whole(self._image(x), kernel)

    def _image(self, x: Array) -> Array:
        if self.kind != "matrix":
            return x
        return np.ascontiguousarray(x.reshape(-1, x.shape[-1]).T)[None, :, None, :]

    def _restored(self, result: Array, x: Array) -> Array:
        if self.kind != "matrix":
            return result
        return np.ascontiguousarray(result[0, :, 0].T).reshape(*x.shape[:-1], -1)

    def _fitted(self, x: Array) -> ConvKernel:
        """Return the kernel with the padding that `auto_pad` asks for at this size."""
        if not is_same(self.auto_pad):
            return self.kernel
        return replace(self.kernel, geometry=self.kernel.geometry.same(x.shape, self.auto_pad))


def product_of(
    node: Node,
    integers: Mapping[str, QuantizedConstant],
    constants: Mapping[str, Array],
    source: Form,
) -> Product | str:
    """Return a node as a layer with weights, or why it cannot be one."""
    weight = integers.get(node.inputs[1])
    if weight is None:
        stored = constants.get(node.inputs[1])
    else:
        stored = weight.stored if isinstance(source, QuantizedBuffer) else weight.real()
    if stored is None:
        return "the DLA needs constant weights"
    ready = _oriented(node, stored)
    if isinstance(ready, str):
        return ready
    kind, array, geometry, outputs_axis = ready
    bias = _bias(node, integers, constants)
    if weight is None or not isinstance(source, QuantizedBuffer):
        kernel = convolution.float_kernel(array.astype(np.float32), geometry)
        return _layer(node, kind, kernel, offset=_per_channel(bias))
    if weight.axis not in {None, outputs_axis}:
        return f"its weight scales run along axis {weight.axis}, outputs along {outputs_axis}"
    repeats = geometry.groups if kind == "deconvolution" and weight.scale.size > 1 else 1
    step = _per_channel(np.tile(weight.scale, repeats) * source.scale)
    kernel = convolution.make_kernel(array, geometry)
    return _layer(node, kind, kernel, step=step, bias=_bias_integers(node, integers, bias, step))


def _layer(
    node: Node,
    kind: Kind,
    kernel: ConvKernel,
    *,
    step: Floats | None = None,
    bias: Ints | None = None,
    offset: Floats | None = None,
) -> Product:
    padding = node.integers("output_padding", (0, 0))
    auto_pad = node.text("auto_pad", "NOTSET")
    added = np.zeros(()) if offset is None else offset
    return Product(kind, kernel, step, bias, added, auto_pad, (padding[0], padding[1]))


def _oriented(node: Node, weight: Array) -> tuple[Kind, Array, Geometry, int] | str:
    """Return kind, weights as (outputs, channels per group, rows, columns), geometry, output axis.

    The axis is that of the outputs in the weights as ONNX has them.
    """
    if node.op in ("Gemm", "MatMul"):
        return _matrix(node, weight)
    if weight.ndim != 4:
        return f"the DLA convolves in 2 dimensions, this one in {weight.ndim - 2}"
    groups = node.integer("group", 1)
    pads = node.integers("pads", (0, 0, 0, 0))
    strides, dilations = node.integers("strides", (1, 1)), node.integers("dilations", (1, 1))
    geometry = Geometry(
        (weight.shape[2], weight.shape[3]),
        (strides[0], strides[1]),
        (pads[0], pads[1], pads[2], pads[3]),
        (dilations[0], dilations[1]),
        groups,
    )
    if node.op == "Conv":
        return "convolution", weight, geometry, 0
    if "output_shape" in node.attributes or node.text("auto_pad", "NOTSET") != "NOTSET":
        return "deconvolution with output_shape or auto_pad; export it with pads"
    # ONNX has (channels, outputs per group, rows, columns).
    split = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    turned = split.transpose(0, 2, 1, 3, 4).reshape(
        -1, weight.shape[0] // groups, *weight.shape[2:]
    )
    return "deconvolution", np.ascontiguousarray(turned), geometry, 1


def _matrix(node: Node, weight: Array) -> tuple[Kind, Array, Geometry, int] | str:
    if weight.ndim != 2:
        return f"its weights have {weight.ndim} dimensions, the DLA multiplies by matrices"
    if node.integer("transA", 0) or node.number("alpha", 1.0) != 1.0:
        return "transA and alpha; fold them into the weights"
    if node.number("beta", 1.0) != 1.0:
        return "beta; fold it into the bias"
    turned = node.integer("transB", 0)
    rows = weight if turned else weight.T
    array = np.ascontiguousarray(rows)[:, :, None, None]
    return "matrix", array, Geometry((1, 1)), 0 if turned else 1


def _bias(
    node: Node, integers: Mapping[str, QuantizedConstant], constants: Mapping[str, Array]
) -> Floats | None:
    if len(node.inputs) < 3 or not node.inputs[2]:
        return None
    quantized = integers.get(node.inputs[2])
    real = constants[node.inputs[2]] if quantized is None else quantized.real()
    return real.astype(np.float64).reshape(-1)


def _bias_integers(
    node: Node, integers: Mapping[str, QuantizedConstant], bias: Floats | None, step: Floats
) -> Ints | None:
    """Return b32: as the model stores it where it has the layer's own step, else rounded to it."""
    if bias is None:
        return None
    quantized = integers.get(node.inputs[2])
    if quantized is not None and np.allclose(
        _per_channel(quantized.scale), step, rtol=1e-5, atol=0.0
    ):
        return quantized.stored.astype(np.int64).reshape(-1, 1, 1)
    return scales.bias_integers(_per_channel(bias), step)


def _per_channel(values: Floats | None) -> Floats:
    """Return numbers as (n, 1, 1), a single one without dimensions."""
    if values is None:
        return np.zeros(())
    flat = np.asarray(values, np.float64).reshape(-1)
    return flat.reshape(()) if flat.size == 1 else flat.reshape(-1, 1, 1)
