"""A model with weights of 4 bits, as far as its products and its outputs keep their limits.

The outputs are judged by the targets of INT8, over samples from which no weight is computed. Where
these are missed, the products with the largest errors stay in floating point.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from calibration.arrays import Sample
from toolkit.errors import BuildError
from toolkit.quantize.int4.graph import write_weights
from toolkit.quantize.int4.products import (
    Observed,
    Product,
    observe,
    products_by_operand,
    quantize_products,
)
from toolkit.quantize.int4.rounding import MAX_DEPTH
from toolkit.quantize.loss.judge import Judgement, loss_text, samples_text
from toolkit.quantize.loss.metrics import powers
from toolkit.quantize.loss.products import OpenModel, Outputs, within_limits

BLOCKS = (32, 128)
MAX_SAMPLES = 32
_BLOCK_BYTES = 8  # of a scale and a zero point, as kernels read them


@dataclass(frozen=True, slots=True)
class Int4Model:
    """A model with weights of 4 bits; `plain_bytes`: of the same weights in FP16.

    `scaled`: products whose weights were made larger by channels; `feedback`: those rounded by
    GPTQ. `losses`: of each output, the norm of the difference to floating point, relative.
    `judgement`: by the targets of INT8, of what is left in INT4; of all if nothing is. `floats`:
    products that stay in floating point, and why. `errors`: of all products, the relative norm of
    the difference of their results. `remarks`: what else a report says.
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
    errors: Mapping[str, float] = field(default_factory=dict)

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


def quantize_int4(
    model: ir.Model,
    samples: Iterable[Sample],
    block: int,
    open_model: OpenModel,
    *,
    accept_loss: bool = False,
) -> Int4Model:
    """Quantize the weights of large products, in a copy.

    Products stay in floating point where they or the outputs lose too much, unless `accept_loss`.
    `open_model` returns what runs a model for some tensors. Raises BuildError: no product is that
    large, there is no sample, or a weight or a loss is not finite.
    """
    chosen = list(itertools.islice(samples, MAX_SAMPLES))
    operands = products_by_operand(model.graph)
    if not chosen:
        raise BuildError("INT4 weights are chosen by samples, but the data hold none; give some.")
    observed = observe(model, [str(value.name) for value in operands], chosen, open_model)
    places = {node: place for place, node in enumerate(model.graph)}
    products = [
        product
        for value, nodes in operands.items()
        for product in quantize_products(
            observed, str(value.name), {places[node]: node for node in nodes}, block
        )
    ]
    # The first stay in floating point first.
    products.sort(key=lambda product: -np.nan_to_num(product.error, nan=np.inf))
    remarks = _remarks(observed, len(chosen), products)

    def tried(floats: Sequence[Product]) -> Int4Model:
        int4 = [product for product in products if product not in floats]
        errors = {product.name: product.error for product in products}
        return replace(_applied(model, int4, observed, open_model), errors=errors)

    search = within_limits(products, tried, accept_loss=accept_loss)
    remark = f"INT4 weights lose more than their limits allow, as accepted: {search.excess}"
    return replace(
        search.result,
        floats=search.reasons(),
        judgement=search.judgement,
        remarks=(*remarks, remark) if search.excess else remarks,
    )


def _applied(
    model: ir.Model, int4: Sequence[Product], observed: Observed, open_model: OpenModel
) -> Int4Model:
    """Give a copy of the model the weights of some products, and judge it."""
    copy = write_weights(model, int4)
    results, judgement = observed.held_out.judged(copy, model, open_model, ("int4", "int4 seen"))
    stored = [product.weight for product in int4]
    return Int4Model(
        copy,
        len(stored),
        sum(product.factors is not None for product in int4),
        sum(product.feedback for product in int4),
        sum(2 * weight.integers.size for weight in stored),
        sum(w.integers.size // 2 + _BLOCK_BYTES * w.scales.size for w in stored),
        _losses(observed.held_out.truths, results),
        judgement,
    )


def _remarks(observed: Observed, count: int, products: Sequence[Product]) -> tuple[str, ...]:
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


def _losses(truths: Sequence[Outputs], results: Sequence[Outputs]) -> dict[str, float]:
    """Return the relative norm of the difference of each output over all samples.

    Elements that are not finite in floating point are left out. Raises BuildError: others are not
    with the weights.
    """
    losses = {}
    for name in truths[0]:
        pairs = zip(truths, results, strict=True)
        signal, noise = np.sum([powers(truth[name], result[name]) for truth, result in pairs], 0)
        losses[name] = float(noise / max(signal, 1e-30)) ** 0.5
        if not np.isfinite(losses[name]):
            raise BuildError(
                f"Output {name!r} is finite in floating point, but not with INT4 weights (loss "
                f"{losses[name]}); leave out `tandem build --int4-weights`."
            )
    return losses
