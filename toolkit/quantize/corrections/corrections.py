"""Optional corrections, off, on or by measured benefit: equalisation and bias correction.

Both change weights, and both can do harm: equalisation where a Clip clips other samples, bias
correction where a mean over all positions hides rare ones. So each is judged by the SQNR of the
worst output against the original float model, on samples that were not used to make it.
Equalisation by weights alone costs no time: it is left out only if its gain is too small by more
than chance, as for ranges (`calibration.auto`). With nodes the gain has to be more than chance.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.auto import SIGNIFICANT
from calibration.dataset import Sample
from calibration.table import Adjustments
from calibration.trials import ALL, significantly_less
from toolkit.quantize.corrections.adjust import adjust, short_changes, short_factors
from toolkit.quantize.corrections.bias import Run, correct_biases
from toolkit.quantize.corrections.channel_links import unlinked_depthwise
from toolkit.quantize.corrections.effect import Effect, effects_between, worst_of
from toolkit.quantize.corrections.equalise import channel_ranges, equalise, link_tensors
from toolkit.quantize.corrections.rounding import Int8, apply_steps, round_weights, weights_of
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.quantize import with_operands
from toolkit.quantize.trials.fit import FinalFit, Fit, trial_ranges, with_float
from toolkit.quantize.trials.metrics import NO_NODES
from toolkit.quantize.trials.trial import TrialModel

Switch = Literal["auto", "on", "off"]
Rows = Mapping[str, tuple[float, ...]]

EQUALISATION = "equalisation"
CORRECTION = "bias correction"
ROUNDING = "learnt rounding"
MIN_GAIN_OF_NODES = 2.0
"""In dB of SQNR; equalisation that adds nodes to the graph is not kept for less."""
WORTH = 1.25
"""The ratio of errors, 1 dB, that equalised weights may fail to show on few samples."""
MIN_GAIN_OF_ROUNDING = 1.0
"""In dB of SQNR: with activations in INT8 too, a smaller gain is lost on other samples."""
CHANCE = "the gain may be chance: it differs too much from sample to sample"
LEAST_ERROR = 1e-3
"""Of a sample, in means of all: 30 dB below."""
CORRECTION_SAMPLES = 16
"""Number of samples whose means correct the biases, or whose sums round the weights."""


@dataclass(frozen=True, slots=True)
class CorrectionOutcome:
    """The outcome of a correction.

    `requested`: "auto" or "on". `effects`: SQNR by output in dB without and with it, empty if not
    measured. `changed`: number of tensors or biases changed, `by_mul` of them by a Mul of their
    own. `reason`: why it was left out, if that is not its effect.
    """

    name: str
    requested: Switch
    applied: bool
    changed: int = 0
    effects: Mapping[str, Effect] = field(default_factory=dict)
    reason: str = ""
    by_mul: int = 0

    @property
    def worst(self) -> Effect | None:
        """The effect on the worst output."""
        return worst_of(self.effects) if self.effects else None


def try_equalisation(
    plain: Fit,
    samples: Iterable[Sample],
    refit: Callable[[ir.Model, Rows], Fit],
    requested: Switch,
    float_nodes: Callable[[], frozenset[str]] = lambda: NO_NODES,
) -> tuple[Fit, Rows, CorrectionOutcome]:
    """Equalise by the channel ranges of `samples`, calibrate again, and keep it unless it harms.

    Without the nodes that it adds, if it does not help with them. `refit` observes and fits the
    changed graph as `plain` was. `float_nodes`: of the plain graph, beside which both are compared
    if it does not help in INT8. Returns the better fit, its factors by tensor, and the outcome.
    """
    name = EQUALISATION
    tensors = link_tensors(plain.graph)
    if not tensors:
        reason = "no channels can be rescaled between layers"
        return plain, {}, CorrectionOutcome(name, requested, False, reason=reason)
    observed = channel_ranges(ActivationRunner(plain.graph, tensors), samples, tensors)
    rows = short_factors(equalise(plain.graph, observed).factors)
    if not rows:
        return (
            plain,
            {},
            CorrectionOutcome(name, requested, False, reason="all channels have one range already"),
        )
    by_weights = rows.keys() - unlinked_depthwise(plain.graph.graph).keys()
    weight_rows = {tensor: row for tensor, row in rows.items() if tensor in by_weights}
    for factors in (rows, weight_rows) if 0 < len(by_weights) < len(rows) else (rows,):
        changed = refit(adjust(plain.graph, Adjustments(equalised=dict(factors))), factors)
        by_mul = len(factors.keys() - by_weights)
        outcome = CorrectionOutcome(name, requested, False, len(factors), by_mul=by_mul)
        # Nodes in floating point hide what it mends in them, and nodes in INT8 hide the rest.
        outcome = _compared(outcome, plain, changed)
        if not outcome.applied and (nodes := float_nodes()):
            outcome = _compared(outcome, with_float(plain, nodes), with_float(changed, nodes))
        if outcome.applied:
            return changed, factors, outcome
    return plain, {}, outcome


def _compared(outcome: CorrectionOutcome, plain: Fit, changed: Fit) -> CorrectionOutcome:
    effects = effects_between(_mean_sqnr_db(plain), _mean_sqnr_db(changed))
    errors, reference = (
        np.array([one.noise.errors(ranges, ALL) for ranges in _ranges(one)])
        for one in (changed, plain)
    )
    reason = ""
    if outcome.requested == "on":
        applied = True
    elif not outcome.by_mul:
        measured = bool(effects and np.isfinite(errors).all())
        applied = measured and not less_error(reference / WORTH, errors)
    else:
        applied = worst_of(effects).helps(MIN_GAIN_OF_NODES)
        if applied and not less_error(errors, reference):
            applied, reason = False, CHANCE
    return replace(outcome, applied=applied, effects=effects, reason=reason)


def _mean_sqnr_db(fitted: Fit) -> dict[str, float]:
    """SQNR by output in dB, the mean over the methods: which is best on few samples is chance."""
    by_method = [
        fitted.noise.sqnr_db(ranges, frozenset(), fitted.judges) for ranges in _ranges(fitted)
    ]
    return {name: sum(row[name] for row in by_method) / len(by_method) for name in by_method[0]}


def less_error(errors: NDArray[np.float64], reference: NDArray[np.float64]) -> bool:
    """True if errors are significantly less, [methods, samples].

    In units of `reference`, by the gain of each sample in dB, at
    most 30 below the mean: one sample of large error hides a gain of decibels in all.
    """
    unit = reference.mean(axis=1, keepdims=True)
    if not np.isfinite(unit).all() or not unit.all():
        return bool((errors.mean(axis=1) < unit[:, 0]).all())
    after, before = (
        np.log(np.maximum((array / unit).mean(axis=0), LEAST_ERROR))
        for array in (errors, reference)
    )
    return significantly_less(after, before, SIGNIFICANT)


def _ranges(fitted: Fit) -> list[dict[str, float]]:
    """The ranges of every method."""
    complete = (with_operands(fitted.graph, amax) for amax in fitted.candidates.values())
    return [trial_ranges(fitted.trial, amax) for amax in complete]


def try_rounding(
    fitted: Fit,
    requested: Switch,
    *,
    samples: Sequence[Sample],
    keep_float: frozenset[str],
) -> tuple[Fit, Mapping[str, str], CorrectionOutcome]:
    """Round the weights by `samples` for the sums that they enter, and keep that if it helps.

    Nodes in floating point have the weights of the model. Returns the better fit, whose graph is
    unchanged, its steps by node, and the outcome.
    """
    name, ranges, operands = (
        ROUNDING,
        trial_ranges(fitted.trial, fitted.amax),
        fitted.trial.operands,
    )
    rounded = round_weights(fitted.graph, Int8(ranges, operands, keep_float), samples)
    if not rounded:
        reason = "no layer has a constant weight"
        return fitted, {}, CorrectionOutcome(name, requested, False, reason=reason)
    trial = TrialModel(
        fitted.graph,
        operands=operands,
        rounded=weights_of(apply_steps(fitted.graph, rounded), rounded.keys()),
    )
    noise = fitted.noise.of_model(trial)
    before, after = (
        one.sqnr_db(ranges, keep_float, fitted.judges) for one in (fitted.noise, noise)
    )
    effects = effects_between(before, after)
    used = requested == "on" or worst_of(effects).helps(MIN_GAIN_OF_ROUNDING)
    outcome = CorrectionOutcome(name, requested, used, len(rounded), effects)
    if not used:
        return fitted, {}, outcome
    return replace(fitted, trial=trial, noise=noise, sqnr_db=after), rounded, outcome


def with_rounded(fitted: Fit, rounded: Mapping[str, str]) -> Fit:
    """Return a fit whose graph has rounded weights."""
    if not rounded:
        return fitted
    graph = apply_steps(fitted.graph, rounded)
    trial = TrialModel(graph, operands=fitted.trial.operands)
    return replace(fitted, graph=graph, trial=trial, noise=fitted.noise.of_model(trial))


def try_bias_correction(
    fit: Fit,
    before: FinalFit,
    requested: Switch,
    *,
    samples: Sequence[Sample],
    forbidden: Callable[[FinalFit], str],
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[FinalFit, CorrectionOutcome]:
    """Correct the biases with `samples` for the ranges of `before`, and keep them if that helps.

    `forbidden`: why a result may not be used, "" if it may.
    """
    changes = bias_changes(fit, before.keep_float, samples, on_progress)
    if not changes:
        return before, CorrectionOutcome(
            CORRECTION, requested, False, reason="no layer has a bias to correct"
        )
    graph = adjust(before.graph, Adjustments(biases=dict(changes)))
    trial = TrialModel(graph, operands=fit.trial.operands)
    noise = before.noise.of_model(trial)
    figures = noise.sqnr_db(before.ranges, before.keep_float, fit.judges)
    after = FinalFit(graph, trial, before.ranges, before.keep_float, noise, figures, changes)
    effects = effects_between(before.sqnr_db, figures)
    helps = requested == "on" or worst_of(effects).helps()
    reason = forbidden(after) if helps else ""
    used = helps and not reason
    return after if used else before, CorrectionOutcome(
        CORRECTION, requested, used, len(changes), effects, reason
    )


def bias_changes(
    fit: Fit,
    keep_float: frozenset[str],
    samples: Sequence[Sample],
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, tuple[float, ...]]:
    """Bias changes for the ranges of a fit: node -> [channels]."""
    int8 = frozenset(fit.trial.nodes) - keep_float

    def open_int8(part: ir.Model, tensors: Sequence[str]) -> Run:
        trial = TrialModel(part, operands=fit.trial.operands)
        # A subgraph does not know which of its inputs are masks.
        float_nodes = frozenset(trial.nodes) - int8
        ranges = {name: fit.amax.get(name) for name in trial.tensors}

        def run(sample: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
            return trial(ranges, sample, float_nodes)

        return run

    corrected = correct_biases(fit.graph, samples, ActivationRunner, open_int8, on_progress)
    return short_changes(corrected.changes)


def corrected_graph(fit: Fit, samples: Sequence[Sample]) -> ir.Model:
    """The graph of a fit with biases corrected for its ranges."""
    changes = bias_changes(fit, fit.noise.always_float, samples)
    return adjust(fit.graph, Adjustments(biases=dict(changes))) if changes else fit.graph
