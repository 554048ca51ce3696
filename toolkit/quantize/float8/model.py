"""A model with products of FP8, as far as they and the outputs keep their limits.

With samples, products and outputs are judged as those with INT4 weights are
(`toolkit.quantize.loss.products`). Samples that judge give no range; the scales that are written
come from all of them. A table of ranges has no samples, so that nothing is judged.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.arrays import Sample
from toolkit.errors import BuildError
from toolkit.quantize.float8.graph import beside_name, check_opset, with_float8
from toolkit.quantize.float8.products import float8_products, why_half
from toolkit.quantize.loss.judge import Basis, Judgement, loss_text, samples_text
from toolkit.quantize.loss.metrics import powers
from toolkit.quantize.loss.products import (
    HeldOutSamples,
    OpenModel,
    Outputs,
    problem_of,
    relative_norm,
    sample_roles,
    within_limits,
)
from toolkit.quantize.quantize import calibrated_tensors

MAX_JUDGES = 8
_RESULT_BYTES = 2**29  # of results that are compared at once


@dataclass(frozen=True, slots=True)
class Float8Model:
    """A model with products of FP8, of `candidates`; `amax`: ranges of activations, of `samples`.

    `errors`: of products, each alone in FP8, the relative norm of the difference of its results.
    `floats`: products that stay in floating point, and why. `judgement`: by the targets of INT8, of
    what is left in FP8, of all if nothing is; None: there were no samples. `remarks`: what else a
    report says.
    """

    model: ir.Model
    products: int
    candidates: int
    amax: Mapping[str, float]
    floats: Mapping[str, str] = field(default_factory=dict)
    judgement: Judgement | None = None
    remarks: tuple[str, ...] = ()
    samples: int = 0
    errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report says."""
        count = f"{self.products} of {self.candidates} products"
        judged = "what that loses is not measured: a table has no samples"
        if self.judgement is not None:
            losses = [*map(loss_text, self.judgement.losses)]
            judged = f"{'; '.join(losses) or 'nothing to lose'} {samples_text(self.judgement)}"
        head = f"FP8 (E4M3): {count} read both operands in it"
        return (
            f"{head}; {judged}" if self.products else head,
            *(f"{node} stays FP16: {why}" for node, why in self.floats.items()),
            *self.remarks,
        )

    def check(self, name: str) -> None:
        """Raise BuildError if FP8 loses too much of every product of the model `name`."""
        if self.products or self.judgement is None or not self.judgement.broken:
            return
        raise BuildError(
            f"FP8 loses too much of {name}: {'; '.join(map(loss_text, self.judgement.broken))} "
            f"({samples_text(self.judgement)}). Build with --precision fp16; `tandem build "
            "--accept-loss` takes FP8 as it is."
        )


@dataclass(frozen=True, slots=True)
class _Product:
    """A product, and the relative norm of the difference of its results in FP8."""

    name: str
    error: float

    @property
    def problem(self) -> str:
        """Why the product stays in floating point whatever the outputs lose."""
        not_finite = "its results are not finite, or zero, on the samples that judge"
        return problem_of(self.error, not_finite)


@dataclass(frozen=True, slots=True)
class _Trial:
    """How many products are FP8, and what that loses."""

    products: int
    judgement: Judgement


@dataclass(frozen=True, slots=True)
class _Observed:
    """Magnitudes on all samples and on those that do not judge, and those that do."""

    amax: Mapping[str, float]
    fit: Mapping[str, float]
    held_out: HeldOutSamples
    samples: int


def float8_by_table(
    model: ir.Model, amax: Mapping[str, float], floats: Mapping[str, str]
) -> Float8Model:
    """Return the model with products of FP8 by given ranges, but for those in `floats`.

    Raises BuildError: no product can be FP8, an operand has no range, or the opset has no FP8.
    """
    nodes = _candidates(model)
    floats = _of(nodes, floats)
    floats = {**_by_range([n for n in nodes if str(n.name) not in floats], amax), **floats}
    return _written(model, nodes, amax, floats)


def quantize_float8(
    model: ir.Model,
    samples: Iterable[Sample],
    open_model: OpenModel,
    floats: Mapping[str, str],
    *,
    accept_loss: bool = False,
) -> Float8Model:
    """Return the model with products of FP8 by what it computes on samples.

    `floats`: products that stay in floating point anyway, and why. Others do where they or the
    outputs lose too much, unless `accept_loss`. Raises BuildError: no product can be FP8, there is
    no sample, or the opset has no FP8.
    """
    nodes = _candidates(model)
    floats = _of(nodes, floats)
    observed = _observe(model, samples, open_model)
    free = [node for node in nodes if str(node.name) not in floats]
    floats = {**_by_range(free, observed.amax), **floats}
    tried_nodes = [node for node in free if str(node.name) not in floats]
    products = _errors(model, tried_nodes, observed, open_model)

    def tried(in_float: Sequence[_Product]) -> _Trial:
        names = {*floats, *(product.name for product in in_float)}
        judged = _written(model, nodes, observed.fit, dict.fromkeys(names, ""))
        bases: tuple[Basis, Basis] = ("held out", "seen")
        _, judgement = observed.held_out.judged(judged.model, model, open_model, bases)
        return _Trial(judged.products, judgement)

    search = within_limits(products, tried, accept_loss=accept_loss)
    remark = f"FP8 loses more than its limits allow, as accepted: {search.excess}"
    written = _written(model, nodes, observed.amax, {**floats, **search.reasons()})
    return replace(
        written,
        judgement=search.judgement,
        remarks=(remark,) if search.excess else (),
        samples=observed.samples,
        errors={product.name: product.error for product in products},
    )


def _candidates(model: ir.Model) -> list[ir.Node]:
    check_opset(model)
    nodes = float8_products(model)
    if not nodes:
        raise BuildError(
            "FP8 needs a MatMul or Gemm with a constant float32 matrix, or a dense 2-D Conv of at "
            "least 16 channels, and the model has none; build with --precision fp16."
        )
    return nodes


def _of(nodes: Sequence[ir.Node], reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: reasons[name] for node in nodes if (name := str(node.name)) in reasons}


def _by_range(nodes: Sequence[ir.Node], amax: Mapping[str, float]) -> dict[str, str]:
    return {str(node.name): why for node in nodes if (why := why_half(node, amax))}


def _written(
    model: ir.Model,
    nodes: Sequence[ir.Node],
    amax: Mapping[str, float],
    floats: Mapping[str, str],
) -> Float8Model:
    count = sum(str(node.name) not in floats for node in nodes)
    return Float8Model(with_float8(model, amax, floats), count, len(nodes), amax, floats)


def _observe(model: ir.Model, samples: Iterable[Sample], open_model: OpenModel) -> _Observed:
    outputs = [str(value.name) for value in model.graph.outputs]
    tensors = calibrated_tensors(model)
    run = open_model(model, list(dict.fromkeys((*tensors, *outputs))))
    fit, judging = dict[str, float](), dict[str, float]()
    held_out: list[Sample] = []
    truths: list[Outputs] = []
    count = 0
    for sample, fits, judges in sample_roles(samples, MAX_JUDGES):
        results, count = run(sample), count + 1
        largest = {name: _largest(results[name]) for name in tensors}
        ranges = fit if fits else judging
        ranges.update({name: max(ranges.get(name, 0.0), largest[name]) for name in tensors})
        if judges:
            held_out.append(sample)
            truths.append({name: np.array(results[name]) for name in outputs})
    if not held_out:
        raise BuildError("FP8 is chosen by samples, but the data hold none; give some.")
    amax = {name: max(judging.get(name, 0.0), fit[name]) for name in fit}
    return _Observed(amax, fit, HeldOutSamples(held_out, truths, count > 1), count)


def _largest(array: NDArray[Any]) -> float:
    return float(np.abs(array).max(initial=0.0, where=np.isfinite(array)))


def _errors(
    model: ir.Model, nodes: Sequence[ir.Node], observed: _Observed, open_model: OpenModel
) -> list[_Product]:
    """Return the products with their errors, the largest first."""
    products = []
    for part in _parts(nodes, observed, open_model, model):
        names = [str(node.name) for node in part]
        keep = {str(node.name) for node in float8_products(model)} - set(names)
        pairs = {str(n.name): (str(n.outputs[0].name), beside_name(n)) for n in part}
        beside = with_float8(model, observed.fit, keep, beside=names)
        run = open_model(beside, [name for pair in pairs.values() for name in pair])
        totals = {name: np.zeros(2) for name in names}
        for sample in observed.held_out.samples:
            results = run(sample)
            for name, (exact, rounded) in pairs.items():
                totals[name] += powers(results[exact], results[rounded])
        products += [_Product(name, relative_norm(*totals[name])) for name in names]
    return sorted(products, key=lambda product: -np.nan_to_num(product.error, nan=np.inf))


def _parts(
    nodes: Sequence[ir.Node], observed: _Observed, open_model: OpenModel, model: ir.Model
) -> list[list[ir.Node]]:
    """Cut the products so that the results of each part fit into _RESULT_BYTES, twice."""
    if not nodes:
        return []
    run = open_model(model, [str(node.outputs[0].name) for node in nodes])
    sizes = run(observed.held_out.samples[0])
    parts: list[list[ir.Node]] = [[]]
    total = 0
    for node in nodes:
        size = 2 * sizes[str(node.outputs[0].name)].nbytes
        if parts[-1] and total + size > _RESULT_BYTES:
            parts.append([])
            total = 0
        parts[-1].append(node)
        total += size
    return parts
