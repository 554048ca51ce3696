"""Weights rounded for the sums that they enter, not each to the nearest integer.

A layer computes W x, with W in steps of its channel. For the integers Q the expected error of a
channel is (w - q) H (w - q)^T, H = E[x x^T], x as INT8 feeds it. Weights are rounded one after the
other, and those not rounded yet make up for the error: nearest plane in the lattice of H (Babai
1986), which with the order "largest power first" is GPTQ (Frantar et al. 2022). Scales stay as they
are, so that the result is what TensorRT makes of the changed weights.

H is not centred: errors of one sign add up over all positions, and a mean is the largest part of
what a ReLU or SiLU puts out. Least squares against the float outputs, and biases that follow the
rounding, were tried: with both, positions are weighed by their number, and the scores of a
detector, rare among them, became worse.
"""

import base64
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.table import scale_of
from toolkit.errors import BuildError
from toolkit.graph.constant_weights import as_float32, set_constant
from toolkit.quantize.quantize import QUANTIZED_OPS, int8_reads, is_activation, weight_axis
from toolkit.quantize.trials.trial import TrialModel
from toolkit.quantize.weights import (
    INT8_MAX,
    bias_per_channel,
    constant_of,
    quantize_weight,
)

Sample = Mapping[str, NDArray[Any]]
Steps = NDArray[np.int8]
"""Integers to add to the nearest ones, in the shape of the weight."""

DAMPING = 0.01
"""Of the mean power of x, added to each; 0.001 to 0.1 gave the same error on other samples."""
POSITIONS = 4096
"""Positions of all samples that H is measured on."""
LARGEST = 4608
"""Products of one sum; above, H takes longer than it is worth."""
MAX_GRAM_BYTES = 1 << 28
"""Of the matrices H that are measured in one pass over the samples."""
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Int8:
    """What INT8 reads and computes: ranges of tensors, operands of nodes, and nodes left in float.

    `operands`: as in `toolkit.quantize.quantize.quantize`.
    """

    ranges: Mapping[str, float]
    operands: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    keep_float: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """A layer with a constant weight, and that as a `matrix` [groups, channels, products].

    `bias`: one number per channel, None: it stays in floating point.
    """

    node: ir.Node
    tensor: str
    weight: NDArray[np.float32]
    axis: int
    matrix: NDArray[np.float32]
    bias: NDArray[np.float32] | None

    @property
    def name(self) -> str:
        return str(self.node.name)


def round_weights(model: ir.Model, int8: Int8, samples: Sequence[Sample]) -> dict[str, str]:
    """Return the steps of each layer in INT8, encoded for a table.

    Layers are rounded in graph order, in groups; each group sees those before it rounded.
    """
    changed, rounded = model, dict[str, str]()
    for names in _groups(_layers(model, int8)):
        layers = [row for row in _layers(changed, int8) if row.name in names]
        grams = _grams(changed, layers, int8, samples)
        steps = {
            layer.name: encode_steps(_steps(layer, gram, int8.ranges.get(layer.tensor)))
            for layer, gram in zip(layers, grams, strict=True)
        }
        rounded |= steps
        changed = apply_steps(changed, steps)
    return rounded


def apply_steps(model: ir.Model, rounded: Mapping[str, str]) -> ir.Model:
    """Return a copy with weights on their grid, the given steps from the nearest integers.

    Raises BuildError: a node has no such weight.
    """
    if not rounded:
        return model
    changed = model.clone()
    layers = {layer.name: layer for layer in _layers(changed, Int8({}))}
    for name, text in rounded.items():
        layer = layers.get(name)
        size = 0 if layer is None else layer.weight.size
        steps = decode_steps(text, size)
        if layer is None or size != steps.size:
            count = f"more than {size}" if steps.size > size else str(steps.size)
            size_there = "no such weight" if layer is None else f"{size} weights"
            raise BuildError(
                f"The calibration table rounds {count} weights of node {name!r}, but this "
                f"model has {size_there} there; calibrate this model again."
            )
        nearest = quantize_weight(layer.weight, None, layer.axis, None)
        whole = nearest.stored + steps.reshape(layer.weight.shape)
        shape = [1] * layer.weight.ndim
        shape[layer.axis] = -1
        others = tuple(one for one in range(layer.weight.ndim) if one != layer.axis)
        changes = steps.reshape(layer.weight.shape).any(axis=others, keepdims=True)
        weight = as_float32(np.where(changes, whole * nearest.scale.reshape(shape), layer.weight))
        index = QUANTIZED_OPS[layer.node.op_type].weight
        assert index is not None
        set_constant(changed.graph, layer.node, index, weight, f"{name}_rounded")
    return changed


def weights_of(model: ir.Model, names: Collection[str]) -> dict[str, NDArray[np.float32]]:
    """The weights of some layers, by node."""
    layers = _layers(model, Int8({}))
    return {layer.name: layer.weight for layer in layers if layer.name in names}


def encode_steps(steps: Steps) -> str:
    """Return steps as text."""
    return base64.b64encode(zlib.compress(steps.tobytes(), 9)).decode("ascii")


def decode_steps(text: str, size: int) -> Steps:
    """Read `encode_steps`, at most `size` + 1 of them. Raises BuildError: it is damaged."""
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(base64.b64decode(text, validate=True), size + 1)
        if len(data) <= size and not stream.eof:
            raise ValueError("the end is missing")
        return np.frombuffer(data, np.int8)
    except (ValueError, zlib.error) as error:
        raise BuildError(
            f"The calibration table holds rounded weights that cannot be read ({error}); calibrate "
            "again."
        ) from error


def _layers(model: ir.Model, int8: Int8) -> tuple[_Layer, ...]:
    """The INT8 layers whose weight can be rounded so, in graph order."""
    layers = []
    for node, row in int8_reads(model, int8.keep_float, int8.operands):
        first, weight = node.inputs[0], constant_of(node, row.weight)
        if weight is None or weight.ndim < 2 or first is None or not is_activation(first):
            continue
        axis = weight_axis(node, row, weight)
        if axis is None or 0 not in (row.activations or ()):
            continue
        matrix = _matrix(node, weight, axis)
        if matrix is not None and matrix.shape[2] <= LARGEST:
            bias = bias_per_channel(constant_of(node, row.bias), weight, axis)
            layers.append(_Layer(node, str(first.name), weight, axis, matrix, bias))
    return tuple(layers)


def _matrix(node: ir.Node, weight: NDArray[np.float32], axis: int) -> NDArray[np.float32] | None:
    """The weight as [groups, channels, products]; None: no layer that is known here."""
    matrix: NDArray[np.float32] | None = None
    if node.op_type == "Conv" and weight.ndim == 4:
        groups = node.attributes.get_int("group", 1)
        matrix = weight.reshape(groups, weight.shape[0] // groups, -1)
    elif node.op_type == "MatMul" and weight.ndim == 2:
        matrix = weight.T[np.newaxis]
    elif node.op_type == "Gemm" and not node.attributes.get_int("transA", 0):
        matrix = (weight if axis == 0 else weight.T)[np.newaxis]
    return matrix


def _groups(layers: Sequence[_Layer]) -> Iterator[frozenset[str]]:
    """The names of neighbours whose matrices H fit into MAX_GRAM_BYTES together."""
    names, size = set[str](), 0
    for layer in layers:
        groups, _, products = layer.matrix.shape
        needed = groups * products * products * 4
        if names and size + needed > MAX_GRAM_BYTES:
            yield frozenset(names)
            names, size = set[str](), 0
        names.add(layer.name)
        size += needed
    if names:
        yield frozenset(names)


def _grams(
    model: ir.Model, layers: Sequence[_Layer], int8: Int8, samples: Sequence[Sample]
) -> list[NDArray[np.float32]]:
    """H of each layer times the number of positions, [groups, products, products]."""
    inputs = [str(value.name) for value in model.graph.inputs]
    computed = sorted({layer.tensor for layer in layers} - set(inputs))
    run = None
    if computed:
        graph = ir.convenience.extract(model.graph, inputs, computed)
        part = ir.Model(
            graph, ir_version=model.ir_version, functions=list(model.functions.values())
        )
        run = TrialModel(part, operands=int8.operands)
    rng = np.random.default_rng(0)
    shapes = [row.matrix.shape for row in layers]
    grams = [np.zeros((groups, products, products), np.float32) for groups, _, products in shapes]
    count = max(1, POSITIONS // len(samples))
    for sample in samples:
        values = dict(sample)
        if run is not None:
            ranges = {name: int8.ranges.get(name) for name in run.tensors}
            fed = {name: sample[name] for name in run.inputs}
            values |= run(ranges, fed, int8.keep_float)
        for number, layer in enumerate(layers):
            read = _as_read(values[layer.tensor], int8.ranges.get(layer.tensor))
            columns = _columns(layer, read, count, rng)
            grams[number] += columns @ columns.transpose(0, 2, 1)
    return grams


def _as_read(array: NDArray[Any], amax: float | None) -> NDArray[np.float32]:
    if amax is None:
        return np.asarray(array, np.float32)
    step = scale_of(amax)
    return np.asarray(np.clip(np.rint(array / step), -128, 127) * step, np.float32)


def _columns(
    layer: _Layer, array: NDArray[np.float32], count: int, rng: np.random.Generator
) -> NDArray[np.float32]:
    """What `count` random sums of a layer add up, [groups, products, sums]."""
    groups, _, products = layer.matrix.shape
    if layer.node.op_type != "Conv":
        rows: NDArray[np.float32] = array.reshape(-1, products)
        sums: NDArray[np.float32] = rows[rng.integers(0, len(rows), min(count, len(rows)))].T
        return sums[np.newaxis]
    node, kernel = layer.node, layer.weight.shape[2:]
    strides = node.attributes.get_ints("strides", [1, 1])
    dilations = node.attributes.get_ints("dilations", [1, 1])
    before, after = _pads(node, array.shape[2:], kernel, strides, dilations)
    padded = np.pad(array, ((0, 0), (0, 0), *zip(before, after, strict=True)))
    axes = []
    batch = rng.integers(0, array.shape[0], count)
    for axis in (0, 1):
        reach = (kernel[axis] - 1) * dilations[axis] + 1
        last = (padded.shape[2 + axis] - reach) // strides[axis]
        first = rng.integers(0, last + 1, count)[:, np.newaxis] * strides[axis]
        axes.append(first + np.arange(kernel[axis]) * dilations[axis])
    taken = padded[
        batch[:, np.newaxis, np.newaxis], :, axes[0][:, :, np.newaxis], axes[1][:, np.newaxis, :]
    ]  # [sums, rows, columns, channels]
    columns = taken.transpose(3, 1, 2, 0).reshape(groups, products, count)
    return np.ascontiguousarray(columns)


def _pads(
    node: ir.Node,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[list[int], list[int]]:
    """The zeros before and after the rows and the columns."""
    mode = node.attributes.get_string("auto_pad", "NOTSET")
    if not mode.startswith("SAME"):
        pads = list(node.attributes.get_ints("pads", [0, 0, 0, 0])) if mode == "NOTSET" else [0] * 4
        return pads[:2], pads[2:]
    before, after = [], []
    for size, extent, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        reach = (extent - 1) * dilation + 1
        total = max(0, (-(-size // stride) - 1) * stride + reach - size)
        small, large = total // 2, total - total // 2
        before.append(small if mode == "SAME_UPPER" else large)
        after.append(large if mode == "SAME_UPPER" else small)
    return before, after


def _steps(layer: _Layer, gram: NDArray[np.float32], amax: float | None) -> Steps:
    """The steps from the nearest integers that lessen the error of the sums; 0 in channels whose
    scale is that of the bias, where the integers are others."""
    nearest = quantize_weight(layer.weight, None, layer.axis, None)
    groups, channels, _ = layer.matrix.shape
    scales = nearest.scale.astype(np.float64).reshape(groups, channels)
    integers = np.stack(
        [
            _nearest_plane(matrix / scale[:, np.newaxis], one)
            for matrix, scale, one in zip(layer.matrix, scales, gram, strict=True)
        ]
    )
    # As the weight lies in memory.
    shape = layer.weight.shape
    flat = integers.reshape(-1, integers.shape[2])
    whole = flat.reshape(shape) if layer.axis == 0 else flat.T.reshape(shape)
    step = None if amax is None else scale_of(amax)
    built = quantize_weight(layer.weight, layer.bias, layer.axis, step)
    others = tuple(one for one in range(len(shape)) if one != layer.axis)
    same = np.expand_dims(built.scale == nearest.scale, others)
    return np.where(same, whole - nearest.stored, 0).astype(np.int8)


def _nearest_plane(weights: NDArray[np.float64], gram: NDArray[np.float32]) -> NDArray[np.float64]:
    """Round weights [channels, products], in steps, for H = `gram`; the largest of each channel
    keeps its integer, which the scale depends on."""
    products = len(gram)
    order = np.argsort(np.diag(gram), kind="stable")  # the last is rounded first
    damped = gram[np.ix_(order, order)].astype(np.float64)
    damped[np.diag_indices(products)] += DAMPING * np.trace(damped) / products + 1e-12
    lower = np.linalg.cholesky(damped)
    sorted_weights = weights[:, order].T
    target = lower.T @ sorted_weights
    fixed = np.abs(sorted_weights) == np.abs(sorted_weights).max(axis=0)
    limit = np.rint(sorted_weights)
    rounded = np.empty_like(sorted_weights)
    for end in range(products, 0, -_BLOCK):
        start = max(0, end - _BLOCK)
        rest = target[start:end] - lower[end:, start:end].T @ rounded[end:]
        for row in range(end - 1, start - 1, -1):
            inner = lower[row + 1 : end, row] @ rounded[row + 1 : end]
            exact = (rest[row - start] - inner) / lower[row, row]
            whole = np.clip(np.rint(exact), -INT8_MAX, INT8_MAX)
            rounded[row] = np.where(fixed[row], limit[row], whole)
    result = np.empty_like(weights)
    result[:, order] = rounded.T
    return result
