"""Metrics of one part of the outputs: reference and candidate arrays -> figures with limits.

Arrays are [N, ...], one for each sample. Figures are judged only where the reference has something
to lose: a score that is a detection, a class that is certain. The limits are where INT8 no longer
does the task of the model; the targets, which are stricter, are what a calibration tries to reach.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.error_figures import sqnr_db
from pipelines.stages.accuracy import iou_matrix
from toolkit.quantize.loss.detections import MIN_IOU, as_corners, comparable, have_corners

Arrays = Sequence[NDArray[Any]]

DETECTION = 0.25
"""A score of this or more is a detection."""
COUNTED = 0.01
"""Scores of this or more count in the error of scores."""
SPREAD = 3.0
"""The largest of some tens of changes is about three times their root mean square."""
CERTAIN = 0.5
"""A class of this probability or more is certain."""
MIN_CLASSES = 10  # fewer logits may be coordinates
MIN_MARGIN = 0.1  # of the spread of the logits: closer ones are a tie
MIN_RANKED_GAP = 0.2  # detections whose scores are closer have no order
MAX_DETECTIONS = 20  # of a sample
MAX_QUERIES = 300  # candidates of heads without a grid: queries, or detections in order of score
MIN_PLACE_SHARE = 0.8
"""Of the variance of centres; measured: 0.99 for boxes, 0.2 to 0.5 for offsets."""
MASK_LEVEL = 0.5
MIN_MASK_SHARE = 0.01  # of all positions; fewer are peaks, not areas


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of merit.

    `limit`: the least value, or the largest if smaller is better; `target`: the one to reach.
    """

    name: str
    unit: str
    limit: float
    target: float
    larger_is_better: bool = True


SQNR = Metric("SQNR", "dB", 3.0, 10.0)
SCORE_DROP = Metric("largest drop of a top score", "", 0.1, 0.05, larger_is_better=False)
SCORE_RISE = Metric("largest rise of a top score", "", 0.25, 0.15, larger_is_better=False)
DETECTION_DROP = Metric(
    "largest drop of a detection's score", "", 0.1, 0.05, larger_is_better=False
)
RANKING = Metric("detections in the same order", "", 0.9, 0.95)
AGREEMENT = Metric("same class where FP32 is certain", "", 0.8, 0.95)
LINES = Metric("lines with the same text", "", 0.7, 0.9)
MASK_IOU = Metric("overlap of the areas above 0.5", "IoU", 0.7, 0.85)

METRICS = (SQNR, SCORE_DROP, SCORE_RISE, DETECTION_DROP, RANKING, AGREEMENT, LINES, MASK_IOU)


@dataclass(frozen=True, slots=True)
class OutputLoss:
    """A metric of one part of the outputs.

    `of`: how many detections, classes, pairs or samples it is about. `judged`: False if it is
    reported without a limit, because others fit this part better.
    """

    part: str
    metric: Metric
    value: float
    of: int
    judged: bool = True

    @property
    def broken(self) -> bool:
        """True if the value is beyond the limit; NaN is."""
        return self.judged and not self._reaches(self.metric.limit)

    @property
    def missed(self) -> bool:
        """True if the value is beyond the target; NaN is."""
        return self.judged and not self._reaches(self.metric.target)

    @property
    def spent(self) -> float:
        """Share of the limit that is spent: 0 where nothing is lost, more than 1 beyond the limit.

        Of SQNR it is a ratio of noise powers, 10^((limit - value) / 10). Infinite for NaN.
        """
        return self._share_of(self.metric.limit)

    @property
    def target_spent(self) -> float:
        """Share of the target that is spent, as `spent` of the limit."""
        return self._share_of(self.metric.target)

    def _reaches(self, bound: float) -> bool:
        return self.value >= bound if self.metric.larger_is_better else self.value <= bound

    def _share_of(self, bound: float) -> float:
        if math.isnan(self.value):
            return math.inf
        if self.metric.unit == "dB":
            return math.inf if self.value == -math.inf else 10.0 ** ((bound - self.value) / 10)
        if self.metric.larger_is_better:
            return (1.0 - self.value) / (1.0 - bound)
        return self.value / bound


def sqnr(part: str, reference: Arrays, candidate: Arrays, *, judged: bool) -> OutputLoss | None:
    """10 log10(sum r^2 / sum (c - r)^2) dB over all samples as one vector.

    Elements that are not finite in the reference are left out. None: the reference holds nothing
    else but zeros, and the candidate other values, so that there is no signal.
    """
    signal = noise = 0.0
    for r, c in zip(reference, candidate, strict=True):
        signal_power, noise_power = powers(r, c)
        signal, noise = signal + signal_power, noise + noise_power
    finite = any(np.isfinite(comparable(r, r)[0]).any() for r in reference)
    if not finite or (not signal and 0.0 < noise < math.inf):
        return None
    return OutputLoss(part, SQNR, sqnr_db(signal, noise), len(reference), judged)


def powers(reference: NDArray[Any], candidate: NDArray[Any]) -> tuple[float, float]:
    """Return sum r^2 and sum (c - r)^2 over the elements that are finite in the reference.

    Of detections r and c are their scores (`toolkit.quantize.loss.detections`).
    """
    exact, actual = comparable(reference, candidate)
    finite = np.isfinite(exact)
    if not finite.all():
        exact, actual = exact[finite], actual[finite]
    error = actual - exact
    return _dot(exact, exact), _dot(error, error)


def _dot(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """A dot product in this thread: BLAS starts its threads for one, which takes longer."""
    return float(np.einsum("i,i->", first, second))


def score_error(reference: Arrays, candidate: Arrays) -> float:
    """Mean square of the changes of scores of `COUNTED` or more, in either of the two.

    In units of the target: at 1 the largest of some tens of changes is about the target. A change
    of a logit counts as that of a score of 0.5, a quarter of it: samples show few detections, and
    the many scores below have the same noise. 0 without such scores.
    """
    squares, count = 0.0, 0
    for r, c in zip(reference, candidate, strict=True):
        exact, actual = comparable(r, c)
        counted = np.asarray(~((exact < COUNTED) & (actual < COUNTED)) & np.isfinite(exact))
        change = (_logits(actual[counted]) - _logits(exact[counted])) / 4.0
        squares, count = squares + float(change @ change), count + change.size
    return squares / count * (SPREAD / DETECTION_DROP.target) ** 2 if count else 0.0


def _logits(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    bounded = np.clip(scores, COUNTED / 10.0, 1.0 - COUNTED / 10.0)
    return np.log(bounded / (1.0 - bounded))


def value_error(reference: Arrays, candidate: Arrays) -> float:
    """Power of the noise as a share of that of the signal, in units of the target of SQNR."""
    loss = sqnr("", reference, candidate, judged=True)
    return 0.0 if loss is None else loss.target_spent


def score_losses(
    part: str, reference: Arrays, candidate: Arrays, class_axis: int | None = None
) -> tuple[OutputLoss, ...]:
    """Compare the largest score of each sample and class.

    `class_axis`: one row of scores for each class, None: all scores are of one class.
    """
    drops, rises = [], []
    for r, c in zip(reference, candidate, strict=True):
        for exact, actual in zip(_top(r, class_axis), _top(c, class_axis), strict=True):
            if math.isnan(exact):
                continue
            if exact >= DETECTION:
                drops.append(exact - actual)
            if max(exact, actual) >= DETECTION or math.isnan(actual):
                rises.append(actual - exact)
    losses = []
    if drops:
        losses.append(OutputLoss(part, SCORE_DROP, _largest(drops), len(drops)))
    if rises:
        losses.append(OutputLoss(part, SCORE_RISE, _largest(rises), len(rises)))
    return tuple(losses)


def mask_loss(part: str, reference: Arrays, candidate: Arrays) -> OutputLoss | None:
    """Overlap of the areas above `MASK_LEVEL`; None if the reference has peaks but no areas."""
    both = either = area = positions = 0
    for r, c in zip(reference, candidate, strict=True):
        exact, actual = np.asarray(r) >= MASK_LEVEL, np.asarray(c) >= MASK_LEVEL
        both += int((exact & actual).sum())
        either += int((exact | actual).sum())
        area, positions = area + int(exact.sum()), positions + exact.size
    if not area or area < MIN_MASK_SHARE * positions:
        return None
    return OutputLoss(part, MASK_IOU, both / either, area)


def class_loss(
    part: str, reference: Arrays, candidate: Arrays, axis: int, *, logits: bool
) -> OutputLoss | None:
    """Share of certain classes that stay; None if the reference is certain of none."""
    same = certain = 0
    for r, c in zip(reference, candidate, strict=True):
        exact = np.moveaxis(np.asarray(r, np.float64), axis, -1)
        actual = np.moveaxis(np.asarray(c, np.float64), axis, -1)
        exact = exact.reshape(-1, exact.shape[-1])
        actual = actual.reshape(exact.shape)
        rows = _certain(exact, logits=logits)
        certain += int(rows.sum())
        stays = exact.argmax(axis=1) == actual.argmax(axis=1)
        same += int((stays & ~np.isnan(actual).any(axis=1))[rows].sum())
    return OutputLoss(part, AGREEMENT, same / certain, certain) if certain else None


def line_loss(part: str, reference: Arrays, candidate: Arrays) -> OutputLoss | None:
    """Share of lines whose text stays, of probabilities [N, steps, classes] of a recogniser.

    A line has some tens of steps, and one other class among them changes its text: the share of
    classes that stay says little. Text is what CTC reads: repeats count once, blanks not at all;
    the blank is the most frequent class. None: the reference reads no line for certain.
    """
    best = [np.asarray(r).argmax(axis=-1) for r in reference]
    blank = int(np.bincount(np.concatenate([steps.ravel() for steps in best])).argmax())
    same = lines = 0
    for r, c in zip(reference, candidate, strict=True):
        actual = np.asarray(c)
        for exact, read in zip(np.asarray(r), actual, strict=True):
            steps = exact.argmax(axis=-1)
            text = _text(steps, blank)
            if not text or exact.max(axis=-1)[steps != blank].mean() < CERTAIN:
                continue
            lines += 1
            same += text == _text(read.argmax(axis=-1), blank) and not np.isnan(read).any()
    return OutputLoss(part, LINES, same / lines, lines) if lines else None


def _text(steps: NDArray[np.intp], blank: int) -> list[int]:
    """The classes of a line by CTC: those of a run count once."""
    starts = np.flatnonzero(np.diff(steps, prepend=-1))
    return [int(kind) for kind in steps[starts] if kind != blank]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Boxes [A, 4], and scores [A, C], of one sample."""

    boxes: NDArray[Any]
    scores: NDArray[Any]


def detection_losses(
    part: str, reference: Sequence[Candidates], candidate: Sequence[Candidates]
) -> tuple[OutputLoss, ...]:
    """Compare detections: each of the reference with the best candidate of its class and place.

    A candidate is at the place of a detection if their boxes overlap by an IoU of `MIN_IOU`. Empty
    if the values are no boxes in one frame but offsets that a decoder still has to place.
    """
    boxes_of = [frame.boxes for frame in reference]
    if not all(map(_are_boxes, boxes_of)) or not _stay_in_place(boxes_of):
        return ()
    return matched_losses(part, reference, candidate)


def matched_losses(
    part: str, reference: Sequence[Candidates], candidate: Sequence[Candidates]
) -> tuple[OutputLoss, ...]:
    """`detection_losses` of boxes that are known to be boxes in one frame."""
    pairs: list[tuple[float, float]] = []
    corners = all(have_corners(frame.boxes) for frame in reference)
    for r, c in zip(reference, candidate, strict=True):
        exact_boxes, boxes = as_corners(r.boxes, corners), as_corners(c.boxes, corners)
        for anchor, class_id in _detections(exact_boxes, r.scores):
            there = iou_matrix(exact_boxes[anchor][None], boxes)[0] >= MIN_IOU
            actual = float(c.scores[there, class_id].max(initial=0.0))
            pairs.append((float(r.scores[anchor, class_id]), actual))
    if not pairs:
        return ()
    drop = _largest([exact - actual for exact, actual in pairs])
    losses = [OutputLoss(part, DETECTION_DROP, drop, len(pairs))]
    ordered = [
        low[1] < high[1] for low in pairs for high in pairs if high[0] - low[0] >= MIN_RANKED_GAP
    ]
    if ordered:
        losses.append(OutputLoss(part, RANKING, sum(ordered) / len(ordered), len(ordered)))
    return tuple(losses)


def _largest(changes: Sequence[float]) -> float:
    """The largest change above 0; NaN if any is, which Python's own max would drop."""
    return float(np.max([0.0, *changes]))


def _top(scores: NDArray[Any], class_axis: int | None) -> list[float]:
    """The largest score of each class."""
    array = np.asarray(scores, np.float64)
    if class_axis is None:
        return [float(array.max())]
    rows = np.moveaxis(array, class_axis, 0).reshape(array.shape[class_axis], -1)
    return [float(top) for top in rows.max(axis=1)]


def _certain(rows: NDArray[np.float64], *, logits: bool) -> NDArray[np.bool_]:
    """Whether the first class of each row is certain."""
    unknown = np.isnan(rows) | np.isposinf(rows)
    usable = np.asarray(~unknown.any(axis=1) & np.isfinite(rows).any(axis=1))
    ordered = np.sort(np.where(usable[:, None], rows, 0.0), axis=1)
    if not logits:
        return np.asarray(usable & (ordered[:, -1] >= CERTAIN))
    # A class that is masked out, -inf, has no share and no part in the spread.
    lowest = np.where(np.isfinite(ordered), ordered, np.inf).min(axis=1)
    spread = ordered[:, -1] - lowest
    margin = ordered[:, -1] - ordered[:, -2]
    share = 1.0 / np.exp(ordered - ordered[:, -1:]).sum(axis=1)
    return np.asarray(usable & (share >= CERTAIN) & (margin >= MIN_MARGIN * spread) & (spread > 0))


def _detections(boxes: NDArray[np.float64], scores: NDArray[Any]) -> list[tuple[int, int]]:
    """(anchor, class) of the detections of one sample: the best first, without their neighbours."""
    anchors, classes = np.nonzero(scores >= DETECTION)
    best_first = np.argsort(-scores[anchors, classes], kind="stable")
    detections: list[tuple[int, int]] = []
    for index in best_first:
        anchor, class_id = int(anchors[index]), int(classes[index])
        others = [known for known, of_class in detections if of_class == class_id]
        if not others or float(iou_matrix(boxes[anchor][None], boxes[others]).max()) < MIN_IOU:
            detections.append((anchor, class_id))
        if len(detections) == MAX_DETECTIONS:
            break
    return detections


def _are_boxes(boxes: NDArray[Any]) -> bool:
    """True if no box has a negative size and centres lie farther apart than boxes are large."""
    low, high = np.split(as_corners(boxes, have_corners(boxes)), 2, axis=1)
    size, centre = high - low, (low + high) / 2.0
    return bool((size >= 0.0).all() and (np.ptp(centre, axis=0) > np.median(size, axis=0)).any())


def _stay_in_place(boxes: Sequence[NDArray[Any]]) -> bool:
    """True unless candidates of a grid have no place of their own in all samples.

    The box of a cell is near it, whatever the picture; an offset that a decoder adds to the cell is
    not. Of one sample, and of heads without a grid, nothing can be said; lists whose length differs
    from sample to sample come from no grid.
    """
    counts = {len(box) for box in boxes}
    if len(boxes) < 2 or len(counts) > 1 or min(counts) <= MAX_QUERIES:
        return True
    corners = all(map(have_corners, boxes))
    centres = np.stack([sum(np.split(as_corners(box, corners), 2, axis=1)) / 2.0 for box in boxes])
    of_places = centres.mean(axis=0).var(axis=0)
    return bool((of_places >= MIN_PLACE_SHARE * centres.var(axis=(0, 1))).all())
