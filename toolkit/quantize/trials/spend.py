"""A budget of loss, spent on real samples: the nodes that must stay in floating point."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from calibration.budget import Budget, BudgetResult, largest_int8_share
from calibration.dataset import Sample
from calibration.errors import CalibrationError
from pipelines.config import ModelConfig
from toolkit.quantize.corrections.steps import End
from toolkit.quantize.ranges.fit import Fit, of_trial
from toolkit.quantize.trials.metrics import METRICS, Material, int8_macs
from toolkit.quantize.trials.score import HeldOut, load_held_out


@dataclass(frozen=True, slots=True)
class Spending:
    """What a budget is spent by.

    `validation`: the samples that metrics of outputs are measured on. `keep_float`: nodes in
    floating point in any case. `detector` and its `labels` are for mAP50, which is measured on the
    scenes that ship with Tandem.
    """

    budget: Budget
    validation: Sequence[Sample]
    keep_float: frozenset[str]
    detector: ModelConfig | None
    labels: tuple[str, ...]

    @property
    def held_out(self) -> HeldOut | None:
        """The scenes, where the metric needs them."""
        if self.budget.metric != "map50" or self.detector is None:
            return None
        return load_held_out(self.labels)


def spend(found: Fit, spending: Spending, on_progress: Callable[[int, int], None]) -> BudgetResult:
    """Find the nodes that must stay in floating point.

    Raises CalibrationError: there is no such metric, or it cannot be measured on this model.
    """
    budget, named = spending.budget, spending.keep_float
    metric = METRICS.get(budget.metric)
    if metric is None:
        raise CalibrationError(
            f"there is no metric '{budget.metric}' for a budget: take one of {', '.join(METRICS)}"
        )
    material = Material(found.trial, spending.validation, spending.detector, spending.held_out)
    ranges = of_trial(found.trial, found.amax)
    measure = metric.build(material)
    fine = METRICS["sqnr"].build(material)
    macs = {node: count for node, count in int8_macs(found.graph).items() if node not in named}
    return largest_int8_share(
        macs,
        lambda keep: measure(ranges, keep | named),
        budget,
        fine=lambda keep: fine(ranges, keep | named),
        on_progress=on_progress,
    )


def overspent(spent: BudgetResult, spending: Spending, end: End) -> str:
    """Whether a budget that was met is met still by `end`: why not, or ""."""
    metric = spending.budget.metric
    material = Material(
        end.trial, spending.validation, spending.detector, spending.held_out, end.noise.exact
    )
    value = METRICS[metric].build(material)(end.ranges, end.keep_float)
    if value >= spent.limit:
        return ""
    return f"{metric} would be {value:.3f}, but the budget asks for {spent.limit:.3f}"
