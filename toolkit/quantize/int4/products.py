"""Products with large constant weights -> their weights in 4 bits, by samples.

    w[k, n] s[k] ~ (q - zero) scale,    y = (x / s) (q - zero) scale,    s[k] = (mean |x[k]|)^a

What multiplies large activations loses most by rounding, so it is made larger before (AWQ, Lin et
al., 2023): a is the one of GRID with the least error of y over samples, for all products of x
together; 0 leaves weights as they are.

Each weight is rounded to nearest and by GPTQ (`toolkit.quantize.int4.rounding`), and the rounding
with the smaller error of y is kept. Samples from which no weight is computed decide that: GPTQ can
fit a few samples and be worse on others. Rows of x that are not finite choose and judge nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.arrays import Sample
from toolkit.errors import BuildError
from toolkit.graph.block_weights import BlockTensor, BlockWeight
from toolkit.quantize.int4.rounding import feedback_factor, round_to_nearest, round_with_feedback
from toolkit.quantize.loss.products import (
    HeldOutSamples,
    OpenModel,
    problem_of,
    relative_norm,
    sample_roles,
)

MIN_SIDE = 1024  # of a weight; smaller ones gain nothing
GRID = tuple(step / 20 for step in range(20))
_GRID_ROWS = 512  # of x, of all samples, by which a is chosen, and as many judge the rounding
_MAX_ROWS = 2048  # of x for GPTQ
_ROW_BYTES = 2**29  # of all x together
_SMALLEST = 1e-4  # of a channel's mean to the largest: what is always 0 says nothing

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A product in INT4, `place` in the graph. Those of one operand share its `factors`.

    `error`: relative norm of the difference of its results on rows that judge; NaN: there are none.
    """

    place: int
    name: str
    operand: str
    factors: Array | None
    weight: BlockWeight
    feedback: bool
    error: float

    @property
    def problem(self) -> str:
        """Why the product stays in floating point whatever the outputs lose."""
        if math.isnan(self.error):
            return f"{self.operand!r} is not finite on the samples that judge"
        return problem_of(self.error, "its results are not finite with INT4 weights")


@dataclass(frozen=True, slots=True)
class Observed:
    """What the model computes: rows of operands on samples that fit and that judge, and outputs.

    `skipped`: on how many samples an operand has rows that are not finite, and that are left out.
    """

    fit: Mapping[str, Array]
    judging: Mapping[str, Array]
    held_out: HeldOutSamples
    skipped: Mapping[str, int]


def products_by_operand(graph: ir.Graph) -> dict[ir.Value, list[ir.Node]]:
    """Return the products with large constant weights by what they multiply, in graph order.

    Raises BuildError: none has one of at least MIN_SIDE x MIN_SIDE.
    """
    groups: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        if node.op_type not in ("MatMul", "Gemm") or node.domain != "":
            continue
        left, right = node.inputs[:2]
        constant = None if right is None else right.const_value
        plain = constant is not None and not isinstance(constant, BlockTensor)
        if left is None or right is None or not plain or right.dtype != ir.DataType.FLOAT:
            continue
        shape = right.shape.numpy() if right.shape is not None else ()
        alone = len(list(right.uses())) == 1 and not right.is_graph_output()
        turned = node.attributes.get_int("transA", 0) or left.dtype != ir.DataType.FLOAT
        if len(shape) == 2 and min(shape) >= MIN_SIDE and alone and not turned:
            groups.setdefault(left, []).append(node)
    if not groups:
        raise BuildError(
            f"INT4 weights need a MatMul or Gemm with a constant float32 weight of at least "
            f"{MIN_SIDE} x {MIN_SIDE}, and the model has none; leave out `tandem build "
            "--int4-weights`."
        )
    return groups


def observe(
    model: ir.Model, operands: Sequence[str], samples: Sequence[Sample], open_model: OpenModel
) -> Observed:
    """Run the model on all samples."""
    outputs = [str(value.name) for value in model.graph.outputs]
    roles = list(sample_roles(samples, len(samples)))
    held_out = [sample for sample, _, judges in roles if judges]
    fitting = sum(fits for _, fits, _ in roles)
    run = open_model(model, list(dict.fromkeys((*operands, *outputs))))
    fit: dict[str, list[Array]] = {name: [] for name in operands}
    judging: dict[str, list[Array]] = {name: [] for name in operands}
    truths, skipped = [], dict.fromkeys(operands, 0)
    rows = _GRID_ROWS
    for index, (sample, fits, judges) in enumerate(roles):
        results = run(sample)
        if index == 0:
            row_bytes = 4 * sum(results[name].shape[-1] for name in operands)
            rows = min(_MAX_ROWS, max(_ROW_BYTES // row_bytes, _GRID_ROWS // 4))
        for name in operands:
            x, complete = _finite_rows(results[name])
            skipped[name] += not complete
            if judges:
                judging[name].append(_some_rows(x, _GRID_ROWS // len(held_out)))
            if fits:
                fit[name].append(_some_rows(x, rows // fitting))
        if judges:
            truths.append({name: np.array(results[name]) for name in outputs})
    fitted, unseen = (
        {name: np.concatenate(part[name]) for name in operands} for part in (fit, judging)
    )
    skipped = {name: times for name, times in skipped.items() if times}
    return Observed(fitted, unseen, HeldOutSamples(held_out, truths, len(samples) > 1), skipped)


def _finite_rows(x: NDArray[Any]) -> tuple[NDArray[Any], bool]:
    """Return the rows without NaN and infinity, and whether these are all."""
    flat = x.reshape(-1, x.shape[-1])
    finite = np.isfinite(flat).all(1)
    return (flat, True) if finite.all() else (flat[finite], False)


def _some_rows(flat: NDArray[Any], count: int) -> Array:
    """Return `count` rows at most, spread evenly."""
    at = np.unique(np.linspace(0, len(flat) - 1, max(count, 1)).astype(int))[: len(flat)]
    return np.array(flat[at], np.float32)


def quantize_products(
    observed: Observed, operand: str, nodes: Mapping[int, ir.Node], block: int
) -> list[Product]:
    """Quantize the products of one operand, `nodes` by their places in the graph."""
    x, judges = observed.fit[operand], observed.judging[operand]
    weights = [_weight(node) for node in nodes.values()]
    products = []
    with np.errstate(over="ignore", invalid="ignore"):
        factors = _factors(_some_rows(x, _GRID_ROWS), weights, block)
        if factors is not None:
            x, judges = x / factors, judges / factors
        # One sample alone would judge what is fitted to it.
        upper = feedback_factor(x) if observed.held_out.apart else None
        for (place, node), plain in zip(nodes.items(), weights, strict=True):
            weight = plain if factors is None else plain * factors[:, None]
            truth = judges @ weight
            roundings = [round_to_nearest(weight, block)]
            if upper is not None:
                roundings.append(round_with_feedback(weight, upper, block))
            errors = [
                _relative_error(judges @ rounding.restored(), truth) for rounding in roundings
            ]
            best = int(np.argmin(np.nan_to_num(errors, nan=np.inf)))
            name = str(node.name)
            products.append(
                Product(place, name, operand, factors, roundings[best], best > 0, errors[best])
            )
    return products


def _weight(product: ir.Node) -> Array:
    """Return the weight of a product, (depth, columns). Raises BuildError: it is not finite."""
    value = product.inputs[1]
    assert value is not None
    assert value.const_value is not None
    array: Array = value.const_value.numpy()
    if not np.isfinite(array).all():
        raise BuildError(
            f"INT4 weights are finite, but {int((~np.isfinite(array)).sum())} numbers of "
            f"{value.name!r}, the weight of node {product.name!r}, are not; correct the model."
        )
    return array.T if product.attributes.get_int("transB", 0) else array


def _factors(x: Array, weights: Sequence[Array], block: int) -> Array | None:
    """Return the factors of the channels with the least error; None: none lower it.

    Errors are relative, so that each product counts, however small its results.
    """
    if not x.any():
        return None
    means = np.abs(x).mean(0, dtype=np.float64)
    means = np.maximum(means, _SMALLEST * means.max())
    truths = [x @ weight for weight in weights]
    best: tuple[float, Array | None] = (np.inf, None)
    for power in GRID:
        exact = means**power
        factors = (exact / np.sqrt(exact.max() * exact.min())).astype(np.float32)
        error = 0.0
        for weight, truth in zip(weights, truths, strict=True):
            restored = round_to_nearest(weight * factors[:, None], block).restored()
            error += _relative_error((x / factors) @ restored, truth) ** 2
        if error < best[0]:
            best = error, None if power == 0 else factors
    return best[1]


def _relative_error(results: NDArray[Any], truth: NDArray[Any]) -> float:
    """Return the relative norm of the difference, over rows that are finite in truth.

    NaN: there are none; infinity: the results are not finite, or the truth is 0.
    """
    finite = np.isfinite(truth).all(1)
    if not finite.any():
        return math.nan
    return relative_norm(_power(truth[finite]), _power(results[finite] - truth[finite]))


def _power(array: NDArray[Any]) -> float:
    """Return the sum of squares: float32 does not hold those of numbers beyond 1.8e19."""
    return float(np.square(array, dtype=np.float64).sum())
