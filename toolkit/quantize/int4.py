"""Weights of large products -> 4 bits in blocks of the depth, for `tandem build --int4-weights`.

    w[k, n] s[k] ~ (q - zero) scale,    y = (x / s) (q - zero) scale,    s[k] = (mean |x[k]|)^a

What multiplies large activations loses most by rounding, so it is made larger before (AWQ, Lin et
al., 2023): a is the one of GRID with the least error of y over samples, for all products of x
together; 0 leaves weights as they are. 1 / s goes into the normalization that makes x where only
these products read it, else into a product of its own, which kernels compute with what makes x.

Each weight is rounded to nearest and by GPTQ (`toolkit.quantize.int4_rounding`), and the rounding
with the smaller error of y is kept. Samples from which no weight is computed decide that: GPTQ can
fit a few samples and be worse on others. They also judge the outputs, by the targets of INT8. Where
these are missed, the products with the largest errors stay in floating point.
"""

import itertools
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
from toolkit.quantize.int4_rounding import feedback_factor, round_to_nearest, round_with_feedback
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
    products that stay in floating point, and why.
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
        )

    def check(self, name: str) -> None:
        """Raise BuildError if no product of the model `name` can have INT4 weights."""
        if self.products:
            return
        losses = [*map(loss_text, self.judgement.broken)]
        whys = losses or [f"{node}: {why}" for node, why in self.floats.items()]
        raise BuildError(
            f"INT4 weights lose too much of {name}: {'; '.join(whys)} "
            f"({samples_text(self.judgement)}). Try `tandem build --int4-weights 32`, or leave "
            "them out; `tandem build --accept-loss` takes them as they are."
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Products of one operand, in INT4. `products`: names by their places in the graph.

    `error`: relative norm of the difference of the results on samples that judge.
    """

    products: Mapping[int, str]
    factors: Array | None
    weights: tuple[BlockWeight, ...]
    feedback: int
    error: float


@dataclass(frozen=True, slots=True)
class _Observed:
    """What the model computes: rows of operands on the samples of each part, and the outputs.

    `apart`: no sample is in both parts. `truths`: the outputs on the samples that judge.
    """

    fit: Mapping[str, Array]
    judges: Mapping[str, Array]
    samples: Sequence[Sample]
    truths: Sequence[Mapping[str, NDArray[Any]]]
    apart: bool


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
    groups = [
        _quantized(observed, str(value.name), {places[node]: node for node in products}, block)
        for value, products in operands.items()
    ]
    # The first stay in floating point first.
    groups.sort(key=lambda group: -np.nan_to_num(group.error, nan=np.inf))
    least = sum(not group.error <= MAX_ERROR for group in groups)

    def tried(floats: Sequence[_Group]) -> Int4Model:
        int4 = [group for group in groups if group not in floats]
        return _applied(model, int4, observed, open_model)

    floats = [] if accept_loss else groups[:least]
    first = tried(floats)
    if accept_loss or not (first.judgement.broken and first.products):
        return _with_reasons(first, first, floats)
    result = first
    for _ in range(MAX_SEARCHES):
        rest = [group for group in groups if group not in floats]
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


def _some_rows(x: NDArray[Any], count: int) -> Array:
    """Return `count` rows at most, spread evenly."""
    flat = x.reshape(-1, x.shape[-1])
    at = np.unique(np.linspace(0, len(flat) - 1, max(count, 1)).astype(int))
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
    truths = []
    rows, count = _GRID_ROWS, len(samples) - len(at) * apart
    for index, sample in enumerate(samples):
        results = run(sample)
        if index == 0:
            row_bytes = 4 * sum(results[name].shape[-1] for name in operands)
            rows = min(_MAX_ROWS, max(_ROW_BYTES // row_bytes, _GRID_ROWS // 4))
        for name in operands:
            if index in at:
                judges[name].append(_some_rows(results[name], _GRID_ROWS // len(at)))
            if index not in at or not apart:
                fit[name].append(_some_rows(results[name], rows // count))
        if index in at:
            truths.append({name: np.array(results[name]) for name in outputs})
    fitted, unseen = (
        {name: np.concatenate(part[name]) for name in operands} for part in (fit, judges)
    )
    return _Observed(fitted, unseen, [samples[i] for i in at], truths, apart)


def _quantized(
    observed: _Observed, operand: str, products: Mapping[int, ir.Node], block: int
) -> _Group:
    """Quantize the products of one operand."""
    x, judges = observed.fit[operand], observed.judges[operand]
    weights = [_weight(product) for product in products.values()]
    factors = _factors(_some_rows(x, _GRID_ROWS), weights, block)
    if factors is not None:
        x, judges = x / factors, judges / factors
    # One sample alone would judge what is fitted to it.
    upper = feedback_factor(x) if observed.apart else None
    stored, feedback, noise, signal = [], 0, 0.0, 0.0
    for plain in weights:
        weight = plain if factors is None else plain * factors[:, None]
        truth = judges @ weight
        roundings = [round_to_nearest(weight, block)]
        if upper is not None:
            roundings.append(round_with_feedback(weight, upper, block))
        errors = [float(np.square(judges @ one.restored() - truth).sum()) for one in roundings]
        best = int(np.argmin(errors))
        stored.append(roundings[best])
        feedback, noise, signal = feedback + best, noise + errors[best], signal + _power(truth)
    names = {place: str(product.name) for place, product in products.items()}
    return _Group(names, factors, tuple(stored), feedback, (noise / max(signal, 1e-30)) ** 0.5)


def _power(array: NDArray[Any]) -> float:
    return float(np.square(array).sum())


def _applied(
    model: ir.Model, int4: Sequence[_Group], observed: _Observed, open_model: OpenModel
) -> Int4Model:
    """Give a copy of the model the weights of some groups, and judge it."""
    copy = model.clone()
    nodes = list(copy.graph)
    names = UniqueNames(str(name) for name in ir.convenience.create_value_mapping(copy.graph))
    for group in int4:
        products = [nodes[place] for place in group.products]
        value = products[0].inputs[0]
        assert value is not None
        if group.factors is not None:
            _divide(copy.graph, value, products, group.factors, names)
        for product, weight in zip(products, group.weights, strict=True):
            _set_weight(copy.graph, product, weight, names)
    run = open_model(copy, [str(value.name) for value in model.graph.outputs])
    results_of = [
        {name: np.array(array) for name, array in run(one).items()} for one in observed.samples
    ]
    parts = output_parts(model)
    exact, actual = (
        [split_outputs(parts, one) for one in each] for each in (observed.truths, results_of)
    )
    judgement = judge(parts, exact, actual, basis="int4" if observed.apart else "int4 seen")
    stored = [weight for group in int4 for weight in group.weights]
    return Int4Model(
        copy,
        len(stored),
        sum(len(group.weights) for group in int4 if group.factors is not None),
        sum(group.feedback for group in int4),
        sum(2 * weight.integers.size for weight in stored),
        sum(w.integers.size // 2 + _BLOCK_BYTES * w.scales.size for w in stored),
        _losses(observed.truths, results_of),
        at_targets(judgement),
    )


def _with_reasons(result: Int4Model, first: Int4Model, groups: Sequence[_Group]) -> Int4Model:
    """Return the model with the `groups` in floating point, and why each is.

    Some lose too much themselves, the others at the outputs, as `first` shows.
    """
    missed = "; ".join(map(loss_text, first.judgement.broken))
    floats = {
        name: f"its results differ by {group.error:.1%} (norm"
        + (f"), and with it {missed}" if group.error <= MAX_ERROR else f", limit {MAX_ERROR:.0%})")
        for group in groups
        for name in group.products.values()
    }
    judgement = result.judgement if result.products else first.judgement
    return replace(result, floats=floats, judgement=judgement)


def _factors(x: Array, weights: Sequence[Array], block: int) -> Array | None:
    """Return the factors of the channels with the least error; None: none lower it."""
    means = np.abs(x).mean(0)
    if not np.isfinite(means).all() or not means.any():
        return None
    means = np.maximum(means, _SMALLEST * means.max())
    truths = [x @ weight for weight in weights]
    best: tuple[float, Array | None] = (np.inf, None)
    for power in GRID:
        factors = (means**power).astype(np.float32)
        factors /= np.sqrt(factors.max() * factors.min())
        error = 0.0
        for weight, truth in zip(weights, truths, strict=True):
            restored = round_to_nearest(weight * factors[:, None], block).restored()
            error += float(np.square((x / factors) @ restored - truth).sum())
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
