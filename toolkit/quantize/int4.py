"""Weights of large products -> 4 bits in blocks of the depth, for `tandem build --int4-weights`.

    w[k, n] s[k] ~ (q - zero) scale,    y = (x / s) (q - zero) scale,    s[k] = (mean |x[k]|)^a

A block's scale and zero point take its least and largest weight. What multiplies large activations
loses most by rounding, so it is made larger before (AWQ, Lin et al., 2023): a is the one of GRID
with the least error of y over samples, for all products of x together; 0 leaves weights as they
are. 1 / s goes into the normalization that makes x where only these products read it, else into
a product of its own, which kernels compute with what makes x.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.arrays import Sample
from toolkit.errors import BuildError
from toolkit.graph.block_weights import BlockTensor, BlockWeight
from toolkit.graph.constant_weights import set_constant
from toolkit.graph.rewriter import UniqueNames
from toolkit.quantize.loss.judge import Judgement, judge, loss_text, samples_text
from toolkit.quantize.loss.metrics import powers
from toolkit.quantize.loss.parts import output_parts, split_outputs

BLOCKS = (32, 128)
MIN_SIDE = 1024  # of a weight; smaller ones gain nothing
GRID = tuple(step / 20 for step in range(20))
MAX_SAMPLES = 16
_MAX_ROWS = 512  # of x, of all samples, by which a is chosen
_BLOCK_BYTES = 8  # of a scale and a zero point, as kernels read them
_LAST = 15  # of the integers from 0 on
_SMALLEST = 1e-4  # of a channel's mean to the largest: what is always 0 says nothing
_NORMALIZATIONS = ("LayerNormalization", "RMSNormalization")

Run = Callable[[Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]]
OpenModel = Callable[[ir.Model, Sequence[str]], Run]
Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Int4Model:
    """A model with weights of 4 bits; `plain_bytes`: of the same weights in FP16.

    `scaled`: products whose weights were made larger by channels. `losses`: of each output, the
    norm of the difference to floating point, relative. `judgement`: against the limits of INT8.
    """

    model: ir.Model
    products: int
    scaled: int
    plain_bytes: int
    bytes: int
    losses: Mapping[str, float]
    judgement: Judgement

    @property
    def note(self) -> str:
        """What a report says."""
        name = max(self.losses, key=self.losses.__getitem__)
        return (
            f"INT4 weights of {self.products} products: {self.bytes / 1e6:.1f} MB in the place of "
            f"{self.plain_bytes / 1e6:.1f}; channels scaled at {self.scaled}, where that lowers "
            f"the error; output {name!r} differs by {self.losses[name]:.2%} (norm) from floating "
            "point on the samples, the most of all"
        )

    def check(self, name: str) -> None:
        """Raise BuildError if an output of the model `name` loses more than its limit."""
        if self.judgement.broken:
            raise BuildError(
                f"INT4 weights lose too much of {name}: "
                f"{'; '.join(map(loss_text, self.judgement.broken))} "
                f"({samples_text(self.judgement)}). Try `tandem build --int4-weights 32`, or leave "
                "them out; `tandem build --accept-loss` takes them as they are."
            )


def quantize_int4(
    model: ir.Model, samples: Iterable[Sample], block: int, open_model: OpenModel
) -> Int4Model:
    """Quantize the weights of the products of at least MIN_SIDE x MIN_SIDE, in a copy.

    `open_model` returns what runs a model for some tensors. Raises BuildError: no product is that
    large, there is no sample, or a weight or a loss is not finite.
    """
    chosen = list(itertools.islice(samples, MAX_SAMPLES))
    copy = model.clone()
    groups = _products_by_operand(copy.graph)
    if not groups:
        raise BuildError(
            f"INT4 weights need a MatMul or Gemm with a constant float32 weight of at least "
            f"{MIN_SIDE} x {MIN_SIDE}, and the model has none; leave out `tandem build "
            "--int4-weights`."
        )
    if not chosen:
        raise BuildError("INT4 weights are chosen by samples, but the data hold none; give some.")
    outputs = [str(value.name) for value in model.graph.outputs]
    operands = [str(value.name) for value in groups]
    run = open_model(model, list(dict.fromkeys((*operands, *outputs))))
    rows: dict[str, list[Array]] = {name: [] for name in operands}
    truths: list[Mapping[str, NDArray[Any]]] = []
    for sample in chosen:
        results = run(sample)
        for name in operands:
            rows[name].append(_some_rows(results[name], _MAX_ROWS // len(chosen)))
        truths.append({name: np.array(results[name]) for name in outputs})
    names = UniqueNames(str(name) for name in ir.convenience.create_value_mapping(copy.graph))
    scaled, before, after = 0, 0, 0
    for value, products in groups.items():
        x = np.concatenate(rows[str(value.name)])
        weights = [_weight(product) for product in products]
        factors = _factors(x, weights, block)
        if factors is not None:
            scaled += len(products)
            _divide(copy.graph, value, products, factors, names)
        for product, weight in zip(products, weights, strict=True):
            stored = weight if factors is None else weight * factors[:, None]
            quantized = _quantized(stored, block)
            _set_weight(copy.graph, product, quantized, names)
            before += 2 * weight.size
            after += weight.size // 2 + _BLOCK_BYTES * quantized.scales.size
    run = open_model(copy, outputs)
    results_of = [{name: np.array(array) for name, array in run(one).items()} for one in chosen]
    parts = output_parts(model)
    exact, actual = ([split_outputs(parts, one) for one in each] for each in (truths, results_of))
    judgement = judge(parts, exact, actual, basis="int4")
    count = sum(len(products) for products in groups.values())
    return Int4Model(copy, count, scaled, before, after, _losses(truths, results_of), judgement)


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
            restored = _quantized(weight * factors[:, None], block).restored()
            error += float(np.square((x / factors) @ restored - truth).sum())
        if error < best[0]:
            best = error, None if power == 0 else factors
    return best[1]


def _quantized(weight: Array, block: int) -> BlockWeight:
    """Round a weight (depth, columns), each block between its least and largest number and 0."""
    depth, columns = weight.shape
    blocks = -(-depth // block)
    padded = np.zeros((blocks * block, columns), np.float32)
    padded[:depth] = weight
    cut = padded.reshape(blocks, block, columns)
    low, high = np.minimum(cut.min(1), 0), np.maximum(cut.max(1), 0)
    scales = ((high - low) / _LAST).astype(np.float32)
    scales = np.where(scales > 0, scales, np.float32(1))
    zeros = np.rint(-low / scales)
    integers = np.clip(np.rint(cut / scales[:, None]) + zeros[:, None], 0, _LAST)
    return BlockWeight(
        integers.reshape(-1, columns)[:depth].astype(np.uint8),
        scales,
        zeros.astype(np.uint8),
        block,
    )


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
