"""Keep the nodes in floating point whose INT8 costs most, where an output has scores or misses
its target.

The search is `calibration.least_loss`, with the metric `target` and the error of
`toolkit.quantize.loss.judge.error_of`. The nodes are chosen on the samples that do not judge
(`Fit.choosers`), with the ranges of the other half.

Few samples show few detections, and the largest drop of nine scores says little of the largest of
thirty: between halves of the same samples it differs by a factor of two. So the search begins also
where scores just meet their targets, and goes on until half of each target is left and, of all that
is counted, until the errors of the nodes left in INT8, each measured alone and added, leave half of
the target, too: a quarter of its power (`score_error`), or until the share of work is spent. Ratios
of powers are means over all samples, which need no such margin.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.budget import Budget, BudgetResult
from calibration.least_loss import least_loss
from toolkit.quantize.loss.judge import Judgement
from toolkit.quantize.loss.metrics import DETECTION_DROP, SCORE_DROP
from toolkit.quantize.trials.effort import affordable_runs
from toolkit.quantize.trials.fit import Fit, trial_ranges
from toolkit.quantize.trials.metrics import METRICS, Material, int8_macs

MOST_FLOAT = 0.15
"""The largest share of the multiplications in floating point, unless the user says another."""
AIM = Budget("target", "least", 0.5)
MOST_ADDED = (1.0 - AIM.amount) ** 2
"""The largest sum of the errors of scores, in units of the target's power."""
MAX_RUNS = 800
"""Runs of the model that measure nodes alone. One with many nodes, or whose runs take long, has
fewer samples for each node, and if there is not a run for each, neighbours are measured together
(`toolkit.quantize.trials.effort`)."""


@dataclass(frozen=True, slots=True)
class FloatNodes:
    """The nodes that stay in floating point, and why.

    `before`: the judgement with all nodes in INT8. `samples`: how many chose the nodes; `apart`:
    True if none of them judges. `most_float`: the share that was allowed.
    """

    search: BudgetResult
    before: Judgement
    samples: int
    apart: bool
    most_float: float

    @property
    def nodes(self) -> frozenset[str]:
        """The names of the nodes."""
        return self.search.keep_float

    @property
    def float_share(self) -> float:
        """Share of the multiplications in floating point, of those that could be INT8."""
        return 1.0 - self.search.share

    def error_shares(self) -> dict[str, float]:
        """Node -> its share of the error at the outputs, the largest first.

        Nodes whose error is infinite (NaN at an output) share all of it.
        """
        costs = {row.node: row.cost for row in self.search.costs}
        if math.inf in costs.values():
            costs = {node: float(math.isinf(cost)) for node, cost in costs.items()}
        total = sum(costs.values()) or 1.0
        ordered = sorted(self.nodes, key=lambda node: (-costs[node], node))
        return {node: costs[node] / total for node in ordered}

    def reasons(self) -> dict[str, str]:
        """Node -> why it stays in floating point."""
        return {
            node: f"its INT8 makes {100 * share:.1f} % of an error that may exceed a target"
            for node, share in self.error_shares().items()
        }


def needs_nodes(fitted: Fit, always_float: frozenset[str]) -> bool:
    """True if an output has scores or misses its target."""
    ranges = trial_ranges(fitted.trial, fitted.amax)
    judgement = fitted.noise.judged(ranges, always_float)
    scores = any(loss.metric in {DETECTION_DROP, SCORE_DROP} for loss in judgement.losses)
    return scores or judgement.target_spent > 1.0


def keep_best(
    fitted: Fit,
    always_float: frozenset[str],
    most_float: float,
    on_progress: Callable[[int, int], None],
) -> FloatNodes | None:
    """Find the nodes to keep; None if all outputs without scores meet their targets, or nothing is
    INT8.

    Raises CalibrationError: `most_float` is no share.
    """
    macs = {
        node: count for node, count in int8_macs(fitted.graph).items() if node not in always_float
    }
    noise, ranges = fitted.noise, trial_ranges(fitted.trial, fitted.amax)
    if not macs or not needs_nodes(fitted, always_float):
        return None
    judgement = noise.judged(ranges, always_float)
    counted = {loss.part for loss in judgement.losses if loss.judged and loss.metric.unit != "dB"}
    choosers, apart = _choosers(fitted, ranges, always_float)
    runs = affordable_runs(fitted.graph, MAX_RUNS)
    few = _worst(fitted, ranges, always_float, choosers, max(1, runs // len(macs)))
    measure = METRICS[AIM.metric].build(Material(noise, choosers))
    search = least_loss(
        macs,
        lambda keep: measure(ranges, keep | always_float),
        AIM,
        error=lambda keep: noise.error(ranges, keep | always_float, choosers),
        error_alone=lambda keep: noise.error(ranges, keep | always_float, few),
        most_float=most_float,
        added_alone=lambda keep: noise.error(ranges, keep | always_float, few, counted),
        most_added=MOST_ADDED if counted else math.inf,
        together=math.ceil(len(macs) / runs),
        on_progress=on_progress,
    )
    before = noise.judged(ranges, always_float, fitted.judges)
    return FloatNodes(search, before, choosers.size, apart, most_float)


def _choosers(
    fitted: Fit, ranges: Mapping[str, float], always_float: frozenset[str]
) -> tuple[NDArray[np.intp], bool]:
    """The samples to choose by, and whether none of them judges.

    All, if those that do not judge show nothing to lose.
    """
    choosers = fitted.choosers
    apart = fitted.halves is not None and choosers.size < fitted.noise.count
    if apart and not fitted.noise.judged(ranges, always_float, choosers).target_spent:
        return np.arange(fitted.noise.count), False
    return choosers, apart


def _worst(
    fitted: Fit,
    ranges: Mapping[str, float],
    always_float: frozenset[str],
    choosers: NDArray[np.intp],
    count: int,
) -> NDArray[np.intp]:
    """The samples in which INT8 has the largest error."""
    errors = [fitted.noise.error(ranges, always_float, np.array([number])) for number in choosers]
    return choosers[np.argsort(-np.nan_to_num(errors, nan=np.inf), kind="stable")[:count]]
