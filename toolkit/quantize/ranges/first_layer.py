"""Whether the calibration's inputs look like those that the model was trained on.

The first batch normalization of a model remembers them: mean and variance, per channel, of what the
first convolution made of the training images. The same statistics of the calibration's inputs
differ where the preprocessing does: a wrong scale changes the standard deviation by its factor, a
missing mean moves the mean. Most exporters fuse the normalization into the convolution, whose bias
then is still of the size of its results. Colour orders, crops and borders hardly show in either.

The limits stand between what was measured of public models on photographs unlike their training
data: with batch normalization (5 models) shifts up to 0.92 and spreads of 0.41 to 1.0 if the
preprocessing is right, and spreads below 0.29 for 0..1 instead of ImageNet's statistics and above
24 for 0..255; against the bias (9 models) spreads of 0.26 to 7.7 if it is right, and below 0.013 or
above 280 if it is wrong by a factor of 60 to 255.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common as ir_passes

from calibration.arrays import Sample
from toolkit.errors import BuildError
from toolkit.quantize.observe import ActivationRunner

SAMPLES = 16  # more change the statistics of a few million pixels by less than a percent
_SMALLEST = 1e-5  # deviations below it are of channels that were dead in training
_MAX_NODES = 6  # from the input to the statistics, with transposes and normalisation
# What may lie between the input and the first batch normalization, beside one convolution.
_ON_THE_WAY = frozenset(
    {"Add", "Cast", "Div", "Identity", "Mul", "Pad", "Reshape", "Sub", "Transpose"}
)


@dataclass(frozen=True, slots=True)
class Basis:
    """What the inputs are compared with, and its limits for medians over channels.

    `max_shift`: difference of means in standard deviations; `max_spread`: ratio of standard
    deviations, either way.
    """

    name: str
    max_shift: float
    max_spread: float


NORM = Basis("the statistics of the first batch normalization", 1.5, 3.0)
BIAS = Basis("the bias of the first convolution", math.inf, 50.0)


@dataclass(frozen=True, slots=True, eq=False)
class FirstLayer:
    """The beginning of a model up to `tensor`, the results of its first convolution.

    `mean`, `deviation`: of the training as `basis` tells them, [channels].
    """

    model: ir.Model
    tensor: str
    basis: Basis
    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fit:
    """How inputs fit, as medians over channels.

    `shift`: |difference of means| in standard deviations of the training. `spread`: standard
    deviation over that of the training.
    """

    shift: float
    spread: float

    def holds(self, basis: Basis) -> bool:
        """True if both are within the limits."""
        spread = basis.max_spread
        return self.shift <= basis.max_shift and 1.0 / spread <= self.spread <= spread


def first_layer(model: ir.Model) -> FirstLayer | None:
    """Return the first layer of a model as it was imported; None if it has no statistics."""
    if len(model.graph.inputs) != 1:
        return None
    convolution, norm = _beginning_nodes(model.graph.inputs[0])
    if norm is not None:
        mean, variance = _constant(norm, 3), _constant(norm, 4)
        if mean is None or variance is None or norm.inputs[0] is None:
            return None
        return _first_layer(model, norm.inputs[0], NORM, mean, np.sqrt(variance))
    bias = None if convolution is None else _constant(convolution, 2)
    if convolution is None or bias is None:
        return None
    return _first_layer(model, convolution.outputs[0], BIAS, np.zeros_like(bias), np.abs(bias))


def _first_layer(
    model: ir.Model,
    value: ir.Value,
    basis: Basis,
    mean: NDArray[np.float64],
    deviation: NDArray[np.float64],
) -> FirstLayer | None:
    if not (deviation > _SMALLEST).any():
        return None
    return FirstLayer(_beginning(model, str(value.name)), str(value.name), basis, mean, deviation)


def fit_of(layer: FirstLayer, samples: Sequence[Sample]) -> Fit:
    """Run samples through the first layer and compare."""
    runner = ActivationRunner(layer.model, [layer.tensor])
    moments = _Moments(len(layer.mean))
    for sample in samples[:SAMPLES]:
        moments.add(runner(sample)[layer.tensor])
    alive = layer.deviation > _SMALLEST
    deviation = layer.deviation[alive]
    shift = _median(np.abs(moments.mean[alive] - layer.mean[alive]) / deviation)
    return Fit(shift, _median(moments.deviation[alive] / deviation))


def _median(values: NDArray[np.float64]) -> float:
    """The median; NumPy's own imports `numpy.ma`."""
    ordered, middle = np.sort(values), len(values) // 2
    return float(ordered[middle - 1 + len(values) % 2 : middle + 1].mean())


def remark(layer: FirstLayer | None, samples: Sequence[Sample]) -> str | None:
    """Return a sentence if the inputs do not fit the first layer or cannot be compared with it."""
    if layer is None or not samples:
        return None
    basis = layer.basis
    try:
        fit = fit_of(layer, samples)
    except BuildError as err:  # a remark ends no calibration
        return f"the inputs were not compared with {basis.name}: {err}"
    if fit.holds(basis):
        return None
    low, high = _range(array for sample in samples[:SAMPLES] for array in sample.values())
    shift = (
        ""
        if basis is BIAS
        else (f" and their means lie {fit.shift:.3g} deviations away (limit {basis.max_shift:g})")
    )
    return (
        f"the inputs, from {low:.4g} to {high:.4g}, do not fit {basis.name}: what the convolution "
        f"makes of them deviates {fit.spread:.3g} times as much (limits {1 / basis.max_spread:.2g} "
        f"and {basis.max_spread:g}){shift}; check scale, mean and std of the preprocessing"
    )


class _Moments:
    """Mean and standard deviation per channel (axis 1) over all samples."""

    def __init__(self, channels: int) -> None:
        self._count = 0
        self._sum = np.zeros(channels)
        self._squares = np.zeros(channels)

    def add(self, array: NDArray[Any]) -> None:
        rows = np.moveaxis(array.astype(np.float64), 1, 0).reshape(len(self._sum), -1)
        self._count += rows.shape[1]
        self._sum += rows.sum(axis=1)
        self._squares += np.square(rows).sum(axis=1)

    @property
    def mean(self) -> NDArray[np.float64]:
        return self._sum / self._count

    @property
    def deviation(self) -> NDArray[np.float64]:
        variance = self._squares / self._count - np.square(self.mean)
        return np.sqrt(np.maximum(variance, 0.0))


def _beginning_nodes(value: ir.Value) -> tuple[ir.Node | None, ir.Node | None]:
    """Follow the input's only way to a convolution and to the batch normalization after it."""
    convolution = None
    for _ in range(_MAX_NODES):
        readers = [node for node, _ in value.uses()]
        if len(readers) != 1:
            break
        (node,) = readers
        if node.op_type == "BatchNormalization" and node.inputs[0] is value:
            return convolution, node
        if convolution is None and node.op_type == "Conv" and node.inputs[0] is value:
            convolution = node
        elif convolution is not None or node.op_type not in _ON_THE_WAY:
            break
        value = node.outputs[0]
    return convolution, None


def _constant(node: ir.Node, index: int) -> NDArray[np.float64] | None:
    value = node.inputs[index] if index < len(node.inputs) else None
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy().astype(np.float64).reshape(-1)


def _beginning(model: ir.Model, tensor: str) -> ir.Model:
    """Return a model that computes a tensor and nothing after it."""
    beginning = model.clone()
    values = {str(out.name): out for node in beginning.graph for out in node.outputs}
    values |= {str(value.name): value for value in beginning.graph.inputs}
    beginning.graph.outputs[:] = [values[tensor]]
    ir_passes.RemoveUnusedNodesPass()(beginning)
    return beginning


def _range(arrays: Iterable[NDArray[Any]]) -> tuple[float, float]:
    ends = [(float(array.min()), float(array.max())) for array in arrays if array.size]
    return min(low for low, _ in ends), max(high for _, high in ends)
