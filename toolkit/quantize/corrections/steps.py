"""Optional steps, off, on or by measured benefit: equalisation and bias correction.

Both change weights, and both can do harm: equalisation where a Clip cuts off other samples, bias
correction where a mean over all positions says little about rare ones. So each is judged by the
SQNR of the worst output, on samples that it was not made with, against the float model as it came.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import onnx_ir as ir
from numpy.typing import NDArray

from calibration.dataset import Sample
from calibration.table import Adjustments
from toolkit.quantize.corrections.adjust import adjust, short_changes, short_factors
from toolkit.quantize.corrections.bias import Run, correct_biases
from toolkit.quantize.corrections.effect import Effect, effects_between, worst_of
from toolkit.quantize.corrections.equalise import channel_ranges, equalise, link_tensors
from toolkit.quantize.ranges.fit import Fit, of_trial
from toolkit.quantize.ranges.observe import ActivationRunner
from toolkit.quantize.trials.metrics import OutputNoise
from toolkit.quantize.trials.trial import TrialModel

Switch = Literal["auto", "on", "off"]
Rows = Mapping[str, tuple[float, ...]]

EQUALISATION = "equalisation"
CORRECTION = "bias correction"
CORRECTION_SAMPLES = 16
"""Means over all positions of so many samples; the model is run over them once for each layer."""


@dataclass(frozen=True, slots=True)
class Step:
    """What became of a step.

    `asked` "auto" or "on". `effects`: SQNR by output in dB without and with it, empty where it was
    not measured. `changed`: how many tensors or biases it changes. `reason`: why it was left out,
    where that is not its effect.
    """

    name: str
    asked: Switch
    kept: bool
    changed: int = 0
    effects: Mapping[str, Effect] = field(default_factory=dict)
    reason: str = ""

    @property
    def worst(self) -> Effect | None:
        """The effect on the worst output."""
        return worst_of(self.effects) if self.effects else None


def equalised(
    plain: Fit,
    samples: Iterable[Sample],
    refit: Callable[[ir.Model, Rows], Fit],
    asked: Switch,
) -> tuple[Fit, Rows, Step]:
    """Equalise by the channels seen in `samples`, and keep it if it is better with ranges anew.

    `refit` observes and fits the changed graph just as `plain` was. Returns the fit to go on with,
    its factors by tensor, and what became of the step.
    """
    name = EQUALISATION
    tensors = link_tensors(plain.graph)
    if not tensors:
        reason = "no convolution hands its channels to one other layer alone"
        return plain, {}, Step(name, asked, False, reason=reason)
    seen = channel_ranges(ActivationRunner(plain.graph, tensors), samples, tensors)
    rows = short_factors(equalise(plain.graph, "activations", seen).factors)
    if not rows:
        return plain, {}, Step(name, asked, False, reason="all channels have one range already")
    changed = refit(adjust(plain.graph, Adjustments(equalised=dict(rows))), rows)
    effects = effects_between(plain.sqnr_db, changed.sqnr_db)
    kept = asked == "on" or worst_of(effects).helps()
    step = Step(name, asked, kept, len(rows), effects)
    return (changed, rows, step) if kept else (plain, {}, step)


@dataclass(frozen=True)
class End:
    """What a table is made of: a graph, its ranges as a trial takes them, and what INT8 costs.

    `changes`: node -> what was added to its bias. `sqnr_db`: by output, on the samples of `noise`.
    """

    graph: ir.Model
    trial: TrialModel
    ranges: Mapping[str, float]
    keep_float: frozenset[str]
    noise: OutputNoise
    sqnr_db: Mapping[str, float]
    changes: Rows = field(default_factory=dict)


def end_of(found: Fit, keep_float: frozenset[str]) -> End:
    """A fit as it is, with some nodes in floating point."""
    ranges = of_trial(found.trial, found.amax)
    figures = found.sqnr_db
    if keep_float:
        figures = found.noise.sqnr_db(ranges, keep_float, found.judges)
    return End(found.graph, found.trial, ranges, keep_float, found.noise, figures)


def corrected(
    found: Fit,
    before: End,
    asked: Switch,
    *,
    samples: Sequence[Sample],
    forbidden: Callable[[End], str],
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[End, Step]:
    """Correct the biases with `samples` for the ranges of `before`, and keep what is better.

    `forbidden`: why a result is out of the question, "" if it is not.
    """
    changes = corrections(found, before.keep_float, samples, on_progress)
    if not changes:
        return before, Step(CORRECTION, asked, False, reason="no layer has a bias to correct")
    graph = adjust(before.graph, Adjustments(biases=dict(changes)))
    trial = TrialModel(graph, operands=found.trial.operands)
    noise = before.noise.of_model(trial)
    figures = noise.sqnr_db(before.ranges, before.keep_float, found.judges)
    after = End(graph, trial, before.ranges, before.keep_float, noise, figures, changes)
    effects = effects_between(before.sqnr_db, figures)
    wanted = asked == "on" or worst_of(effects).helps()
    reason = forbidden(after) if wanted else ""
    kept = wanted and not reason
    return after if kept else before, Step(CORRECTION, asked, kept, len(changes), effects, reason)


def corrections(
    found: Fit,
    keep_float: frozenset[str],
    samples: Sequence[Sample],
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, tuple[float, ...]]:
    """What to add to the biases for the ranges of `found`: node -> [channels]."""
    int8 = frozenset(found.trial.nodes) - keep_float

    def open_int8(part: ir.Model, tensors: Sequence[str]) -> Run:
        trial = TrialModel(part, operands=found.trial.operands)
        # A piece does not know of the masks that come into it.
        kept = frozenset(trial.nodes) - int8
        ranges = {name: found.amax.get(name) for name in trial.tensors}

        def run(sample: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
            return trial(ranges, sample, kept)

        return run

    done = correct_biases(found.graph, samples, ActivationRunner, open_int8, on_progress)
    return short_changes(done.changes)


def corrected_graph(found: Fit, samples: Sequence[Sample]) -> ir.Model:
    """The graph of `found` with biases corrected for its ranges."""
    changes = corrections(found, frozenset(), samples)
    return adjust(found.graph, Adjustments(biases=dict(changes)))
