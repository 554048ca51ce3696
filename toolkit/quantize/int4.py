"""Weights of large products -> 4 bits in blocks of the depth, for `tandem build --int4-weights`.

    w[k, n] s[k] ~ (q - zero) scale,    y = (x / s) (q - zero) scale,    s[k] = (mean |x[k]|)^a

What multiplies large activations loses most by rounding, so it is made larger before (AWQ, Lin et
al., 2023): a is the one of GRID with the least error of y over samples, for all products of x
together; 0 leaves weights as they are. 1 / s goes into the normalization that makes x where only
these products read it, else into a product of its own, which kernels compute with what makes x.

Each weight is rounded to nearest and by GPTQ (`toolkit.quantize.int4_rounding`), and the rounding
with the smaller error of y is kept. Samples from which no weight is computed decide that: GPTQ can
fit a few samples and be worse on others. They also judge the outputs, by the targets of INT8. Where
these are missed, the products with the largest errors stay in floating point. Rows of x that are
not finite choose and judge nothing.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.arrays import Sample
from toolkit.errors import BuildError
from toolkit.graph.block_weights import BlockTensor, BlockWeight
from toolkit.graph.constant_weights import set_constant
from toolkit.graph.rewriter import UniqueNames
from toolkit.quantize.int4_rounding import (
    MAX_DEPTH,
    feedback_factor,
    round_to_nearest,
    round_with_feedback,
)
from toolkit.quantize.loss.judge import Judgement, at_targets, judge, loss_text, samples_text
from toolkit.quantize.loss.metrics import powers
from toolkit.quantize.loss.parts import output_parts, split_outputs

BLOCKS = (32, 128)
MIN_SIDE = 1024  # of a weight; smaller ones gain nothing
GRID = tuple(step / 20 for step in range(20))
MAX_SAMPLES = 32
JUDGE_EVERY = 4  # of the samples one judges, and no weight is computed from it
MAX_ERROR = 0.3  # of a product's results (norm), relative; a trained network lost classes at 0.45
MAX_SEARCHES = 8  # each finds a product that must stay in floating point for the outputs
_GRID_ROWS = 512  # of x, of all samples, by which a is chosen, and as many judge the rounding
_MAX_ROWS = 2048  # of x for GPTQ
_ROW_BYTES = 2**29  # of all x together
_BLOCK_BYTES = 8  # of a scale and a zero point, as kernels read them
_SMALLEST = 1e-4  # of a channel's mean to the largest: what is always 0 says nothing
_NORMALIZATIONS = ("LayerNormalization", "RMSNormalization")

Run = Callable[[Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]]
OpenModel = Callable[[ir.Model, Sequence[str]], Run]
Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Int4Model:
    """A model with weights of 4 bits; `plain_bytes`: of the same weights in FP16.

    `scaled`: products whose weights were made larger by channels; `feedback`: those rounded by
    GPTQ. `losses`: of each output, the norm of the difference to floating point, relative.
    `judgement`: by the targets of INT8, of what is left in INT4; of all if nothing is. `floats`:
    products that stay in floating point, and why. `remarks`: what else a report says.
    """

    model: ir.Model
    products: int
    scaled: int
    feedback: int
    plain_bytes: int
    bytes: int
    losses: Mapping[str, float]
    judgement: Judgement
    floats: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report says."""
        name = max(self.losses, key=self.losses.__getitem__)
        return (
            f"INT4 weights of {self.products} products: {self.bytes / 1e6:.1f} MB in the place of "
            f"{self.plain_bytes / 1e6:.1f}; channels scaled at {self.scaled}, rounded by GPTQ at "
            f"{self.feedback}, where that lowers the error; output {name!r} differs by "
            f"{self.losses[name]:.2%} (norm) from floating point "
            f"{samples_text(self.judgement)}, the most of all",
            *(f"weights of {node} stay FP16: {why}" for node, why in self.floats.items()),
            *self.remarks,
        )

    def check(self, name: str, block: int) -> None:
        """Raise BuildError if no product of the model `name` can have weights in these blocks."""
        if self.products:
            return
        losses = [*map(loss_text, self.judgement.broken)]
        whys = losses or [f"{node}: {why}" for node, why in self.floats.items()]
        smaller = (
            f"Try `tandem build --int4-weights {BLOCKS[0]}`, or leave" if block > BLOCKS[0] else ""
        )
        raise BuildError(
            f"INT4 weights lose too much of {name}: {'; '.join(whys)} "
            f"({samples_text(self.judgement)}). {smaller or 'Leave'} them out; "
            "`tandem build --accept-loss` takes them as they are."
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
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
        """Why the product stays in floating point whatever the outputs lose; "": it need not."""
        if self.error <= MAX_ERROR:
            return ""
        if math.isnan(self.error):
            return f"{self.operand!r} is not finite on the samples that judge"
        if math.isinf(self.error):
            return "its results are not finite with INT4 weights"
        return f"its results differ by {self.error:.1%} (norm, limit {MAX_ERROR:.0%})"


@dataclass(frozen=True, slots=True)
class _Observed:
    """What the model computes: rows of operands on the samples of each part, and the outputs.

    `apart`: no sample is in both parts. `truths`: the outputs on the samples that judge. `skipped`:
    on how many samples an operand has rows that are not finite, and that are left out.
    """

    fit: Mapping[str, Array]
    judges: Mapping[str, Array]
    samples: Sequence[Sample]
    truths: Sequence[Mapping[str, NDArray[Any]]]
    apart: bool
    skipped: Mapping[str, int]


def quantize_int4(
    model: ir.Model,
    samples: Iterable[Sample],
    block: int,
    open_model: OpenModel,
    *,
    accept_loss: bool = False,
) -> Int4Model:
    """Quantize the weights of the products of at least MIN_SIDE x MIN_SIDE, in a copy.

    Products stay in floating point where they or the outputs lose too much, unless `accept_loss`.
    `open_model` returns what runs a model for some tensors. Raises BuildError: no product is that
    large, there is no sample, or a weight or a loss is not finite.
    """
    chosen = list(itertools.islice(samples, MAX_SAMPLES))
    operands = _products_by_operand(model.graph)
    if not operands:
        raise BuildError(
            f"INT4 weights need a MatMul or Gemm with a constant float32 weight of at least "
            f"{MIN_SIDE} x {MIN_SIDE}, and the model has none; leave out `tandem build "
            "--int4-weights`."
        )
    if not chosen:
        raise BuildError("INT4 weights are chosen by samples, but the data hold none; give some.")
    observed = _observe(model, [str(value.name) for value in operands], chosen, open_model)
    places = {node: place for place, node in enumerate(model.graph)}
    products = [
        product
        for value, nodes in operands.items()
        for product in _quantized(
            observed, str(value.name), {places[node]: node for node in nodes}, block
        )
    ]
    # The first stay in floating point first.
    products.sort(key=lambda product: -np.nan_to_num(product.error, nan=np.inf))
    remarks = _remarks(observed, len(chosen), products)

    def tried(floats: Sequence[_Product]) -> Int4Model:
        int4 = [product for product in products if product not in floats]
        return replace(_applied(model, int4, observed, open_model), remarks=remarks)

    if accept_loss:
        return _with_excess(tried([]), products)
    return _within_limits(products, tried)


def _within_limits(
    products: Sequence[_Product], tried: Callable[[Sequence[_Product]], Int4Model]
) -> Int4Model:
    """Leave products in floating point until those in INT4 and the outputs keep their limits.

    `products`: those with the largest errors first; `tried`: the model with some of them in float.
    """
    floats = [product for product in products if product.problem]
    first = tried(floats)
    if not (first.judgement.broken and first.products):
        return _with_reasons(first, first, floats)
    result = first
    for _ in range(MAX_SEARCHES):
        rest = [product for product in products if product not in floats]
        enough, too_few = len(rest), 0
        while enough - too_few > 1:  # Fewer in INT4 lose less.
            middle = (enough + too_few) // 2
            if tried([*floats, *rest[:middle]]).judgement.broken:
                too_few = middle
            else:
                enough = middle
        # The last of them is needed; the others perhaps not.
        before, floats = floats, [*floats, rest[enough - 1]]
        result = tried(floats)
        if not result.judgement.broken or not result.products:
            return _with_reasons(result, first, floats)
    floats = [*before, *rest[:enough]]
    return _with_reasons(tried(floats), first, floats)


def _remarks(observed: _Observed, count: int, products: Sequence[_Product]) -> tuple[str, ...]:
    """Return what of `count` samples was left out, and where GPTQ was not tried."""
    remarks = []
    if observed.skipped:
        name = max(observed.skipped, key=observed.skipped.__getitem__)
        others = len(observed.skipped) - 1
        more = f", and of {others} more operands" if others else ""
        remarks.append(
            f"rows that are not finite in floating point neither choose nor judge INT4 weights: of "
            f"{name!r} on {observed.skipped[name]} of {count} samples{more}"
        )
    depths = [len(product.weight.integers) for product in products]
    if max(depths) > MAX_DEPTH:
        remarks.append(
            f"GPTQ rounds weights up to a depth of {MAX_DEPTH}: products deeper than that, which "
            f"are rounded to nearest: {sum(depth > MAX_DEPTH for depth in depths)}"
        )
    return tuple(remarks)


def _products_by_operand(graph: ir.Graph) -> dict[ir.Value, list[ir.Node]]:
    """Return the products with large constant weights by what they multiply, in graph order."""
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
    return groups


def _weight(product: ir.Node) -> Array:
    """Return the weight of a product, (depth, columns). Raises BuildError: it is not finite."""
    value = product.inputs[1]
    assert value is not None
    assert value.const_value is not None
    array: Array = value.const_value.numpy()
    if not np.isfinite(array).all():
        raise BuildError(
            f"INT4 weights are finite, but {int((~np.isfinite(array)).sum())} numbers of "
            f"{value.name!r}, the weight of node {product.name!r}, are not; mend the model."
        )
    return array.T if product.attributes.get_int("transB", 0) else array


def _finite_rows(x: NDArray[Any]) -> tuple[NDArray[Any], bool]:
    """Return the rows without NaN and infinity, and whether these are all."""
    flat = x.reshape(-1, x.shape[-1])
    finite = np.isfinite(flat).all(1)
    return (flat, True) if finite.all() else (flat[finite], False)


def _some_rows(flat: NDArray[Any], count: int) -> Array:
    """Return `count` rows at most, spread evenly."""
    at = np.unique(np.linspace(0, len(flat) - 1, max(count, 1)).astype(int))[: len(flat)]
    return np.array(flat[at], np.float32)


def _observe(
    model: ir.Model, operands: Sequence[str], samples: Sequence[Sample], open_model: OpenModel
) -> _Observed:
    """Run the model on all samples; every JUDGE_EVERY-th, or the last of fewer, judges."""
    outputs = [str(value.name) for value in model.graph.outputs]
    last = len(samples) - 1
    few, apart = len(samples) < JUDGE_EVERY, last > 0
    at = [i for i in range(last + 1) if (i == last if few else i % JUDGE_EVERY == JUDGE_EVERY - 1)]
    run = open_model(model, list(dict.fromkeys((*operands, *outputs))))
    fit: dict[str, list[Array]] = {name: [] for name in operands}
    judges: dict[str, list[Array]] = {name: [] for name in operands}
    truths, skipped = [], dict.fromkeys(operands, 0)
    rows, count = _GRID_ROWS, len(samples) - len(at) * apart
    for index, sample in enumerate(samples):
        results = run(sample)
        if index == 0:
            row_bytes = 4 * sum(results[name].shape[-1] for name in operands)
            rows = min(_MAX_ROWS, max(_ROW_BYTES // row_bytes, _GRID_ROWS // 4))
        for name in operands:
            x, complete = _finite_rows(results[name])
            skipped[name] += not complete
            if index in at:
                judges[name].append(_some_rows(x, _GRID_ROWS // len(at)))
            if index not in at or not apart:
                fit[name].append(_some_rows(x, rows // count))
        if index in at:
            truths.append({name: np.array(results[name]) for name in outputs})
    fitted, unseen = (
        {name: np.concatenate(part[name]) for name in operands} for part in (fit, judges)
    )
    skipped = {name: times for name, times in skipped.items() if times}
    return _Observed(fitted, unseen, [samples[i] for i in at], truths, apart, skipped)


def _quantized(
    observed: _Observed, operand: str, nodes: Mapping[int, ir.Node], block: int
) -> list[_Product]:
    """Quantize the products of one operand, `nodes` by their places in the graph."""
    x, judges = observed.fit[operand], observed.judges[operand]
    weights = [_weight(node) for node in nodes.values()]
    products = []
    with np.errstate(over="ignore", invalid="ignore"):
        factors = _factors(_some_rows(x, _GRID_ROWS), weights, block)
        if factors is not None:
            x, judges = x / factors, judges / factors
        # One sample alone would judge what is fitted to it.
        upper = feedback_factor(x) if observed.apart else None
        for (place, node), plain in zip(nodes.items(), weights, strict=True):
            weight = plain if factors is None else plain * factors[:, None]
            truth = judges @ weight
            roundings = [round_to_nearest(weight, block)]
            if upper is not None:
                roundings.append(round_with_feedback(weight, upper, block))
            errors = [_relative_error(judges @ one.restored(), truth) for one in roundings]
            best = int(np.argmin(np.nan_to_num(errors, nan=np.inf)))
            name = str(node.name)
            products.append(
                _Product(place, name, operand, factors, roundings[best], best > 0, errors[best])
            )
    return products


def _relative_error(results: NDArray[Any], truth: NDArray[Any]) -> float:
    """Return the relative norm of the difference, over rows that are finite in truth.

    NaN: there are none; infinity: the results are not finite, or the truth is 0.
    """
    finite = np.isfinite(truth).all(1)
    if not finite.any():
        return math.nan
    noise, signal = _power(results[finite] - truth[finite]), _power(truth[finite])
    if not math.isfinite(noise) or noise > 0 == signal:
        return math.inf
    return math.sqrt(noise / signal) if noise else 0.0


def _power(array: NDArray[Any]) -> float:
    """Return the sum of squares: float32 does not hold those of numbers beyond 1.8e19."""
    return float(np.square(array, dtype=np.float64).sum())


def _applied(
    model: ir.Model, int4: Sequence[_Product], observed: _Observed, open_model: OpenModel
) -> Int4Model:
    """Give a copy of the model the weights of some products, and judge it."""
    copy = model.clone()
    nodes = list(copy.graph)
    names = UniqueNames(str(name) for name in ir.convenience.create_value_mapping(copy.graph))
    by_operand: dict[str, list[_Product]] = {}
    for product in sorted(int4, key=lambda product: product.place):
        by_operand.setdefault(product.operand, []).append(product)
    for products in by_operand.values():
        factors, readers = products[0].factors, [nodes[product.place] for product in products]
        value = readers[0].inputs[0]
        assert value is not None
        if factors is not None:
            _divide(copy.graph, value, readers, factors, names)
        for product, node in zip(products, readers, strict=True):
            _set_weight(copy.graph, node, product.weight, names)
    run = open_model(copy, [str(value.name) for value in model.graph.outputs])
    results_of = [
        {name: np.array(array) for name, array in run(one).items()} for one in observed.samples
    ]
    parts = output_parts(model)
    exact, actual = (
        [split_outputs(parts, one) for one in each] for each in (observed.truths, results_of)
    )
    judgement = judge(parts, exact, actual, basis="int4" if observed.apart else "int4 seen")
    stored = [product.weight for product in int4]
    return Int4Model(
        copy,
        len(stored),
        sum(product.factors is not None for product in int4),
        sum(product.feedback for product in int4),
        sum(2 * weight.integers.size for weight in stored),
        sum(w.integers.size // 2 + _BLOCK_BYTES * w.scales.size for w in stored),
        _losses(observed.truths, results_of),
        at_targets(judgement),
    )


def _with_reasons(result: Int4Model, first: Int4Model, products: Sequence[_Product]) -> Int4Model:
    """Return the model with the `products` in floating point, and why each is.

    Some lose too much themselves, the others at the outputs, as `first` shows.
    """
    missed = "; ".join(map(loss_text, first.judgement.broken))
    floats = {
        product.name: product.problem
        or f"its results differ by {product.error:.1%} (norm), and with it {missed}"
        for product in products
    }
    judgement = result.judgement if result.products else first.judgement
    return replace(result, floats=floats, judgement=judgement)


def _with_excess(result: Int4Model, products: Sequence[_Product]) -> Int4Model:
    """Return the model with a remark on the limits that it misses."""
    excess = [f"{product.name}: {product.problem}" for product in products if product.problem]
    excess += map(loss_text, result.judgement.broken)
    if not excess:
        return result
    remark = f"INT4 weights lose more than their limits allow, as accepted: {'; '.join(excess)}"
    return replace(result, remarks=(*result.remarks, remark))


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


def _divide(
    graph: ir.Graph,
    value: ir.Value,
    products: Sequence[ir.Node],
    factors: Array,
    names: UniqueNames,
) -> None:
    """Let products read `value` divided by the factors of its channels."""
    inverse = (1 / factors).astype(np.float32)
    maker = value.producer()
    uses = list(value.uses())
    constants = [] if maker is None else [v.const_value if v else None for v in maker.inputs[1:]]
    if (
        maker is not None
        and maker.op_type in _NORMALIZATIONS
        and {use.node for use in uses} == set(products)
        and all(use.idx == 0 for use in uses)
        and not value.is_graph_output()
        and all(c is not None and c.shape.numpy() == inverse.shape for c in constants)
    ):
        for index, constant in enumerate(constants, 1):
            assert constant is not None
            set_constant(graph, maker, index, constant.numpy() * inverse, f"{maker.name}_int4")
        return
    name = names.take(f"{value.name}_by_channel")
    constant_value = ir.Value(name=name, const_value=ir.tensor(inverse, name=name))
    constant_value.shape = ir.Shape(inverse.shape)
    constant_value.type = ir.TensorType(ir.DataType.FLOAT)
    graph.register_initializer(constant_value)
    divided = ir.Node("", "Mul", [value, constant_value], name=names.take(f"{value.name}_divide"))
    result = divided.outputs[0]
    result.name = names.take(f"{value.name}_divided")
    result.type, result.shape = value.type, value.shape
    graph.insert_before(products[0], divided)
    for product in products:
        product.replace_input_with(0, result)


def _set_weight(graph: ir.Graph, product: ir.Node, weight: BlockWeight, names: UniqueNames) -> None:
    transposed = bool(product.attributes.get_int("transB", 0))
    old = product.inputs[1]
    assert old is not None
    name = names.take(f"{product.name}_int4")
    tensor = BlockTensor(weight, ir.DataType.FLOAT, name, transposed=transposed)
    value = ir.Value(name=name, shape=ir.Shape(tensor.shape.numpy()), const_value=tensor)
    value.type = ir.TensorType(tensor.dtype)
    graph.register_initializer(value)
    product.replace_input_with(1, value)
    if old.is_initializer() and not list(old.uses()):
        graph.initializers.pop(str(old.name))


def _losses(
    truths: Sequence[Mapping[str, NDArray[Any]]], results_of: Sequence[Mapping[str, NDArray[Any]]]
) -> dict[str, float]:
    """Return the relative norm of the difference of each output over all samples.

    Elements that are not finite in floating point are left out. Raises BuildError: others are not
    with the weights.
    """
    losses = {}
    for name in truths[0]:
        pairs = zip(truths, results_of, strict=True)
        signal, noise = np.sum([powers(truth[name], result[name]) for truth, result in pairs], 0)
        losses[name] = float(noise / max(signal, 1e-30)) ** 0.5
        if not np.isfinite(losses[name]):
            raise BuildError(
                f"Output {name!r} is finite in floating point, but not with INT4 weights (loss "
                f"{losses[name]}); leave out `tandem build --int4-weights`."
            )
    return losses
