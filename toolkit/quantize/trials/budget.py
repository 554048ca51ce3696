"""Accuracy budget: find the nodes that must stay in floating point, on real samples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calibration.budget import Budget, BudgetResult, largest_int8_share
from calibration.errors import CalibrationError
from device.choices import list_choices
from pipelines.config import ModelConfig
from toolkit.quantize.trials.fit import FinalFit, Fit, trial_ranges
from toolkit.quantize.trials.metrics import METRICS, Material, int8_macs

if TYPE_CHECKING:
    from toolkit.quantize.trials.score import HeldOut


@dataclass(frozen=True, slots=True)
class BudgetSearch:
    """A request to find the nodes that an accuracy budget keeps in floating point.

    `keep_float`: nodes in floating point in any case.
    `detector` and `labels`: for mAP50, which is measured on the scenes that ship with Tandem.
    """

    budget: Budget
    keep_float: frozenset[str]
    detector: ModelConfig | None
    labels: tuple[str, ...]

    @property
    def held_out(self) -> "HeldOut | None":
        """The labelled scenes, if the metric needs them."""
        if self.budget.metric != "map50" or self.detector is None:
            return None
        from toolkit.quantize.trials.score import load_held_out  # the decoders of pipelines

        return load_held_out(self.labels)


def find_budget(
    fitted: Fit, search: BudgetSearch, on_progress: Callable[[int, int], None]
) -> BudgetResult:
    """Find the nodes that must stay in floating point, on the samples that do not judge.

    Raises CalibrationError: there is no such metric, or it cannot be measured on this model.
    """
    budget, always_float = search.budget, search.keep_float
    metric = METRICS.get(budget.metric)
    if metric is None:
        raise CalibrationError(
            f"there is no metric '{budget.metric}' for a budget: take one of "
            f"{list_choices(budget.metric, METRICS)}"
        )
    material = Material(fitted.noise, fitted.choosers, search.detector, search.held_out)
    ranges = trial_ranges(fitted.trial, fitted.amax)
    measure = metric.build(material)
    sqnr = METRICS["sqnr"].build(material)
    macs = {
        node: count for node, count in int8_macs(fitted.graph).items() if node not in always_float
    }
    return largest_int8_share(
        macs,
        lambda keep: measure(ranges, keep | always_float),
        budget,
        fine=lambda keep: sqnr(ranges, keep | always_float),
        on_progress=on_progress,
    )


def budget_violation(
    budget: BudgetResult, search: BudgetSearch, fitted: Fit, final: FinalFit
) -> str:
    """Return why `final` of `fitted` no longer meets a budget that was met, "" if it does."""
    metric = search.budget.metric
    material = Material(final.noise, fitted.choosers, search.detector, search.held_out)
    value = METRICS[metric].build(material)(final.ranges, final.keep_float)
    if value >= budget.limit:
        return ""
    return f"{metric} would be {value:.3f}, but the budget asks for {budget.limit:.3f}"
