"""What a build has measured of its engine, as the engine's provenance records it."""

import math
from collections.abc import Iterator, Mapping

from calibration.budget import BudgetResult
from device.engine.manifest import Measurement
from toolkit.errors import printable
from toolkit.quantize.loss.judge import Judgement, samples_text
from toolkit.quantize.loss.metrics import (
    AGREEMENT,
    DETECTION_DROP,
    LINES,
    MASK_IOU,
    RANKING,
    SCORE_DROP,
    SCORE_RISE,
    SQNR,
    OutputLoss,
)

TASK_SCORE, TASK_SCORE_DROP = "task_score", "task_score_drop"
SCORED_BY = "map50"  # the metric of a budget that is a score of the task
# Figure of merit -> its name in a release, by which gates of rollouts ask for it.
NAMES: Mapping[str, str] = {
    SQNR.name: "sqnr_db",
    SCORE_DROP.name: "score_drop",
    SCORE_RISE.name: "score_rise",
    DETECTION_DROP.name: "detection_drop",
    RANKING.name: "ranking",
    AGREEMENT.name: "agreement",
    LINES.name: "lines",
    MASK_IOU.name: "mask_iou",
}


def loss_measurements(judgement: Judgement) -> tuple[Measurement, ...]:
    """Return the worst value of each figure over all outputs; none that is not finite."""
    worst: dict[str, OutputLoss] = {}
    for loss in judgement.losses:
        known = worst.get(loss.metric.name)
        if math.isfinite(loss.value) and (known is None or _is_worse(loss, known)):
            worst[loss.metric.name] = loss
    basis = samples_text(judgement)
    return tuple(
        Measurement(
            name=NAMES[name],
            value=_rounded(loss.value),
            how=f"{name} of output {printable(loss.part)}, INT8 against FP32, {basis}",
        )
        for name, loss in worst.items()
    )


def score_measurements(metric: str, budget: BudgetResult) -> Iterator[Measurement]:
    """Yield the task's score, where the search for an accuracy budget has measured one."""
    if metric != SCORED_BY or not (math.isfinite(budget.value) and budget.met):
        return
    how = "mAP50, 0 to 1, on the scenes that ship with Tandem, in a trial of the INT8 ranges"
    yield Measurement(name=TASK_SCORE, value=_rounded(budget.value / 100.0), how=how)
    if math.isfinite(budget.float_value):
        drop = _rounded((budget.float_value - budget.value) / 100.0)
        yield Measurement(name=TASK_SCORE_DROP, value=drop, how=f"FP32 less INT8: {how}")


def _is_worse(loss: OutputLoss, other: OutputLoss) -> bool:
    if loss.metric.larger_is_better:
        return loss.value < other.value
    return loss.value > other.value


def _rounded(value: float) -> float:
    """Return six digits: more differ from one machine to the next."""
    return float(f"{value:.6g}")
