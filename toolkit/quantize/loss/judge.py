"""Judge what INT8 loses: every part of the outputs by the metrics that fit it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import BuildError
from toolkit.quantize.loss.detections import by_class
from toolkit.quantize.loss.metrics import (
    MIN_CLASSES,
    Candidates,
    OutputLoss,
    class_loss,
    detection_losses,
    line_loss,
    mask_loss,
    matched_losses,
    score_error,
    score_losses,
    sqnr,
    value_error,
)
from toolkit.quantize.loss.parts import OutputPart

MIN_LOGITS_BELOW = 0.8  # the share of logits beside boxes that are below 0

Parts = Mapping[str, NDArray[Any]]
"""Name of a part -> its array in one sample."""

Basis = Literal["held out", "seen", "engine", "int4", "int4 seen", "bf16"]
_BASES: Mapping[Basis, str] = {
    "held out": "held out from the ranges",
    "seen": "that the ranges were measured on: there are none to hold out",
    "engine": "with the final ranges",
    "int4": "from which no weight was computed",
    "bf16": "with every tensor rounded to BF16, more often than kernels do",
    "int4 seen": "by which the weights were chosen: there are none to hold out",
}


@dataclass(frozen=True, slots=True)
class Judgement:
    """The losses of all outputs, measured on `samples` samples.

    `basis`: whether ranges were measured on these samples. `nothing_to_lose`: scores of which
    none is a detection, and probabilities of which none is certain, so that nothing is judged.
    `no_signal`: outputs that are zero or not finite in FP32 on all samples. `varying`: outputs
    whose size depends on the data, and that are no detections: there is nothing to compare.
    """

    losses: tuple[OutputLoss, ...]
    samples: int
    basis: Basis
    nothing_to_lose: tuple[str, ...] = ()
    no_signal: tuple[str, ...] = ()
    varying: tuple[str, ...] = ()

    @property
    def broken(self) -> tuple[OutputLoss, ...]:
        """The losses beyond their limits."""
        return tuple(loss for loss in self.losses if loss.broken)

    @property
    def missed(self) -> tuple[OutputLoss, ...]:
        """The losses beyond their targets."""
        return tuple(loss for loss in self.losses if loss.missed)

    @property
    def spent(self) -> float:
        """The largest share of its limit that a judged loss spends, 0 without any."""
        return max((loss.spent for loss in self.losses if loss.judged), default=0.0)

    @property
    def certain_spent(self) -> float:
        """As `spent`, where all but SQNR counts only beyond its target: on few samples a smaller
        change says nothing of others."""
        shares = (
            loss.spent
            for loss in self.losses
            if loss.missed or (loss.judged and loss.metric.unit == "dB")
        )
        return max(shares, default=0.0)

    @property
    def target_spent(self) -> float:
        """The largest share of its target that a judged loss spends, 0 without any."""
        return max((loss.target_spent for loss in self.losses if loss.judged), default=0.0)


def judge(
    parts: Sequence[OutputPart],
    reference: Sequence[Parts],
    candidate: Sequence[Parts],
    *,
    basis: Basis,
) -> Judgement:
    """Judge the parts that `reference` and `candidate` hold for each sample."""
    losses: list[OutputLoss] = []
    no_signal: list[str] = []
    varying = [part.name for part in parts if _varies(part, reference, candidate)]
    compared = [part for part in parts if part.name in reference[0] and part.name not in varying]
    for part in compared:
        exact = [outputs[part.name] for outputs in reference]
        actual = [outputs[part.name] for outputs in candidate]
        if part.kind == "detections":
            losses += _detected(part, exact, actual)
            continue
        is_judged = part.kind == "values" and not _are_logits(part, compared, reference)
        signal_to_noise = sqnr(part.name, exact, actual, judged=is_judged)
        if signal_to_noise is None:
            no_signal.append(part.name)
            continue
        losses += [signal_to_noise, *_fitting(part, compared, reference, candidate)]
    judged = {loss.part for loss in losses if loss.judged}
    unjudged = [part.name for part in compared if part.name not in judged.union(no_signal)]
    return Judgement(
        tuple(losses), len(reference), basis, tuple(unjudged), tuple(no_signal), tuple(varying)
    )


def at_targets(judgement: Judgement) -> Judgement:
    """Return the judgement with the targets as limits."""
    losses = (
        replace(loss, metric=replace(loss.metric, limit=loss.metric.target))
        for loss in judgement.losses
    )
    return replace(judgement, losses=tuple(losses))


def error_of(
    parts: Sequence[OutputPart], reference: Sequence[Parts], candidate: Sequence[Parts]
) -> float:
    """The error at the outputs in units of the targets, as one smooth number.

    The largest drop of a few scores changes by leaps; this mean tells nodes apart by it.
    """
    error = 0.0
    for part in parts:
        if part.name in reference[0]:
            exact = [outputs[part.name] for outputs in reference]
            actual = [outputs[part.name] for outputs in candidate]
            measure = score_error if part.kind in ("scores", "detections") else value_error
            if _are_logits(part, parts, reference):
                exact, actual, measure = _as_scores(exact), _as_scores(actual), score_error
            error += measure(exact, actual)
    return error


def check(judgement: Judgement, model: str, table: Path | None = None) -> None:
    """Raise BuildError if a loss is beyond its limit. `table`: where the refused ranges are."""
    if judgement.broken:
        where = f" The ranges are in {table}, marked as refused." if table is not None else ""
        raise BuildError(
            f"INT8 loses too much of {model}: {'; '.join(map(loss_text, judgement.broken))} "
            f"({samples_text(judgement)}). Try more data, `tandem build --method minmax`, or nodes "
            "in floating point (`tandem build --budget margin:0.3`, `tandem build --keep-float`); "
            "`tandem build --accept-loss` takes it as it is. `tandem calibrate` has them, too."
            f"{where}"
        )


def loss_text(loss: OutputLoss) -> str:
    """Return a loss in words: output, metric, value and limit."""
    unit = f" {loss.metric.unit}" if loss.metric.unit else ""
    digits = 1 if loss.metric.unit == "dB" else 3
    text = f"output {loss.part}: {loss.metric.name} {loss.value:.{digits}f}{unit}"
    if not loss.judged:
        return text
    bound = "at least" if loss.metric.larger_is_better else "at most"
    return f"{text} (limit: {bound} {loss.metric.limit:g}{unit})"


def samples_text(judgement: Judgement) -> str:
    """Return what the losses were measured on."""
    count = f"{judgement.samples} sample{'' if judgement.samples == 1 else 's'}"
    return f"on {count} {_BASES[judgement.basis]}"


def _varies(part: OutputPart, reference: Sequence[Parts], candidate: Sequence[Parts]) -> bool:
    """True if the arrays of a part cannot be compared, as the data decide their sizes."""
    if part.kind in ("varying", "detections"):
        return part.kind == "varying"
    pairs = zip(reference, candidate, strict=True)
    return part.name in reference[0] and any(
        r[part.name].shape != c[part.name].shape for r, c in pairs
    )


def _detected(
    part: OutputPart, exact: Sequence[NDArray[Any]], actual: Sequence[NDArray[Any]]
) -> tuple[OutputLoss, ...]:
    """The losses of detections: of those of the reference, and the largest scores of each class."""
    labels = np.unique(np.concatenate([rows["label"] for rows in (*exact, *actual)]))
    before, after = (
        [Candidates(rows["box"], by_class(rows, labels)) for rows in samples]
        for samples in (exact, actual)
    )
    losses = matched_losses(part.name, before, after)
    if not labels.size:
        return losses
    return losses + score_losses(part.name, _tops(before), _tops(after), class_axis=0)


def _tops(samples: Sequence[Candidates]) -> list[NDArray[Any]]:
    """The largest score of each class, 0 where there is none."""
    return [sample.scores.max(axis=0, initial=0.0) for sample in samples]


def _fitting(
    part: OutputPart,
    parts: Sequence[OutputPart],
    reference: Sequence[Parts],
    candidate: Sequence[Parts],
) -> tuple[OutputLoss, ...]:
    """The losses that fit the kind of a part, as far as the reference has something to lose."""
    exact = [outputs[part.name] for outputs in reference]
    actual = [outputs[part.name] for outputs in candidate]
    if _are_logits(part, parts, reference):
        return score_losses(part.name, _as_scores(exact), _as_scores(actual))
    boxes = _boxes_of(part, parts, reference[0])
    if boxes is not None:
        of_boxes, axis = boxes
        names = (of_boxes, part.name, axis)
        matched = detection_losses(
            part.name,
            [_candidates(outputs, *names) for outputs in reference],
            [_candidates(outputs, *names) for outputs in candidate],
        )
        return (*matched, *score_losses(part.name, exact, actual, axis))
    if part.kind == "scores":
        area = mask_loss(part.name, exact, actual) if exact[0].ndim == 4 else None
        return (area,) if area is not None else score_losses(part.name, exact, actual)
    class_axis = _class_axis(part, exact[0])
    if class_axis is None:
        return ()
    logits = part.kind == "values"
    classes = class_loss(part.name, exact, actual, class_axis, logits=logits)
    lines = None
    if _is_text(part, exact[0], class_axis):
        lines = line_loss(part.name, exact, actual)
    return tuple(loss for loss in (classes, lines) if loss is not None)


def _are_logits(part: OutputPart, parts: Sequence[OutputPart], reference: Sequence[Parts]) -> bool:
    """True for one column [N, A, 1] beside rows of boxes of as many candidates, [N, A, 4 or more],
    if nearly all of it is below 0: most candidates are no object.

    A decoder makes scores of them. Their SQNR is that of values far below 0, whose score is 0
    however far they are.
    """
    outputs = reference[0]
    shape = outputs[part.name].shape
    if part.kind != "values" or len(shape) != 3 or shape[1] < 2 or shape[2] != 1:
        return False
    others = [outputs[output.name].shape for output in parts if output.name in outputs]
    if not any(len(one) == 3 and one[:2] == shape[:2] and one[2] >= 4 for one in others):
        return False
    below = [float(np.mean(sample[part.name] < 0.0)) for sample in reference]
    return float(np.mean(below)) >= MIN_LOGITS_BELOW


def _as_scores(logits: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    return [
        1.0 / (1.0 + np.exp(-np.clip(array.astype(np.float64), -100.0, 100.0))) for array in logits
    ]


def _is_text(part: OutputPart, array: NDArray[Any], class_axis: int) -> bool:
    """True for probabilities of characters at the steps of a line: [N, steps, classes]."""
    return (
        part.kind == "probabilities"
        and array.ndim == 3
        and class_axis % 3 == 2
        and array.shape[1] > 1
        and array.shape[2] >= MIN_CLASSES
    )


def _class_axis(part: OutputPart, array: NDArray[Any]) -> int | None:
    """The axis of classes, None if a part holds no classes."""
    if part.kind == "probabilities":
        return part.class_axis
    return 1 if part.linear and array.ndim == 2 and array.shape[1] >= MIN_CLASSES else None


def _boxes_of(
    part: OutputPart, parts: Sequence[OutputPart], outputs: Parts
) -> tuple[str, int] | None:
    """The boxes that belong to scores, and the axis of both that holds coordinates and classes.

    They have four values where the scores have classes, and the same shape besides. Those of grids,
    [N, 4, H, W], are not matched: a decoder has to place them first.
    """
    shape = outputs[part.name].shape
    if part.kind == "values" or len(shape) != 3:
        return None
    for values in parts:
        if values.kind != "values" or values.name not in outputs:
            continue
        of_boxes = outputs[values.name].shape
        for axis in range(1, len(shape)):
            rest = shape[:axis] + shape[axis + 1 :]
            if of_boxes == (*shape[:axis], 4, *shape[axis + 1 :]) and np.prod(rest) > 1:
                return values.name, axis
    return None


def _candidates(outputs: Parts, boxes: str, scores: str, axis: int) -> Candidates:
    """Boxes and scores of a sample (batch and positions in one axis)."""
    return Candidates(_rows(outputs[boxes], axis), _rows(outputs[scores], axis))


def _rows(array: NDArray[Any], axis: int) -> NDArray[Any]:
    moved = np.moveaxis(array, axis, -1)
    return moved.reshape(-1, moved.shape[-1])
