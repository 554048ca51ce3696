"""Objects keep their number from frame to frame: ByteTrack (Zhang et al. 2022) on arrays.

All tracks are one set of arrays, so a frame costs a number of NumPy calls that does not depend on
how many objects there are. Time is that of the capture, in seconds: dropped frames make a longer
prediction, and a track is lost after seconds, not frames.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.results import NO_TRACK, Detections
from pipelines.stages import track_kalman as kalman
from pipelines.stages.track_assign import Pairs, assign
from pipelines.track_config import TrackerConfig

SECOND_IOU = 0.5  # with detections of a low score, as the paper has it
TENTATIVE_IOU = 0.3
SAME_IOU = 0.85  # a lost track that overlaps another by more is the same object
NEW, SEEN, LOST = range(3)

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Tracks:
    """All tracks, a row each. `ids`: NO_TRACK until confirmed; `status`: NEW, SEEN or LOST;
    `seen_s`: the capture time of the last detection; `hits`: detections so far."""

    states: kalman.States
    ids: NDArray[np.int64]
    class_ids: NDArray[np.int64]
    scores: NDArray[np.float32]
    status: NDArray[np.int8]
    seen_s: NDArray[np.float64]
    hits: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: NDArray[Any] | slice) -> "Tracks":
        """Return the tracks of these rows; of a slice, a view."""
        return Tracks(
            self.states[:, rows],
            self.ids[rows],
            self.class_ids[rows],
            self.scores[rows],
            self.status[rows],
            self.seen_s[rows],
            self.hits[rows],
        )


class Tracker:
    """Gives detections the numbers of their tracks; one for each source."""

    def __init__(self, config: TrackerConfig, first_id: int = 1) -> None:
        """`first_id`: the number of the first track."""
        self.config = config
        self._tracks = _start(np.zeros((0, 4)), np.zeros(0, np.int64), np.zeros(0, np.float32), 0.0)
        self._at_s = 0.0
        self._next_id = first_id

    @property
    def tracks(self) -> Tracks:
        """All tracks that are known after the last frame."""
        return self._tracks

    @property
    def next_id(self) -> int:
        """The number of the next track; all that were given are below it."""
        return self._next_id

    def update(self, detections: Detections, time_s: float) -> Detections:
        """Return the detections with `track_ids`; those too weak to start a track are left out
        unless they belong to one, and those with a box or score that is not finite are.

        `time_s`: the capture time. It may jump, and count from anywhere, but not run backwards.
        """
        config = self.config
        finite = np.isfinite(detections.boxes).all(axis=1) & np.isfinite(detections.scores)
        if not finite.all():
            detections = detections[finite]
        scores = detections.scores
        tracks = self._predicted(time_s)
        ious = iou_matrix(kalman.corners(tracks.states), detections.boxes)
        if config.same_class:
            ious *= tracks.class_ids[:, None] == detections.class_ids
        rows, columns = self._associate(tracks, ious, scores)
        row_of = np.full(len(detections), -1, np.int64)
        row_of[columns] = rows
        tracks = self._seen(tracks, rows, detections, columns, time_s)
        ids = np.where(row_of >= 0, tracks.ids[row_of] if len(tracks) else NO_TRACK, NO_TRACK)
        fresh = np.flatnonzero((row_of < 0) & (scores >= max(config.new_score, config.high_score)))
        if len(fresh):
            started = _start(
                kalman.centres(detections.boxes[fresh]),
                detections.class_ids[fresh],
                scores[fresh],
                time_s,
            )
            started = self._confirm(started)
            ids[fresh] = started.ids
            tracks = _joined(tracks, started)
        keep = _still_needed(tracks)
        self._tracks = tracks if keep.all() else tracks.take(keep)
        tracked = replace(detections, track_ids=ids)
        strong = (scores >= config.high_score) | (row_of >= 0)
        return tracked if strong.all() else tracked[strong]

    def predict(self, time_s: float) -> Detections:
        """Return where the confirmed tracks of the last frame are now, for a frame that no engine
        saw. The scores are those of their last detections."""
        self._tracks = tracks = self._predicted(time_s)
        rows = np.flatnonzero((tracks.status == SEEN) & (tracks.ids >= 0))
        rows = rows[np.argsort(-tracks.scores[rows], kind="stable")]
        return Detections(
            kalman.corners(tracks.states[:, rows]),
            tracks.scores[rows],
            tracks.class_ids[rows],
            tracks.ids[rows],
        )

    def _predicted(self, time_s: float) -> Tracks:
        """Return the tracks at a time, without those that were lost for too long."""
        tracks = self._tracks
        alive = tracks.seen_s >= time_s - self.config.lost_s
        if not alive.all():
            tracks = tracks.take(alive)
        elapsed_s = max(0.0, time_s - self._at_s) if len(tracks) else 0.0
        self._at_s = time_s
        return replace(tracks, states=kalman.predict(tracks.states, elapsed_s))

    def _associate(
        self, tracks: Tracks, ious: NDArray[np.float32], scores: NDArray[np.float32]
    ) -> Pairs:
        """Return which track takes which detection, in three rounds of falling confidence."""
        config = self.config
        high = scores >= config.high_score
        sure = tracks.status != NEW
        weights = ious * np.where(high, scores, np.float32(0.0))
        weights *= sure[:, None]
        rounds = [assign(weights, config.iou)]
        free_rows = np.ones(len(tracks), bool)
        free_columns = np.ones(len(scores), bool)
        free_rows[rounds[0][0]] = False
        free_columns[rounds[0][1]] = False
        rounds.append(
            _among(
                ious,
                np.flatnonzero(free_rows & (tracks.status == SEEN)),
                np.flatnonzero(free_columns & ~high & (scores >= config.low_score)),
                SECOND_IOU,
            )
        )
        rounds.append(
            _among(
                ious,
                np.flatnonzero(~sure),
                np.flatnonzero(free_columns & high),
                TENTATIVE_IOU,
            )
        )
        return (
            np.concatenate([pairs[0] for pairs in rounds]),
            np.concatenate([pairs[1] for pairs in rounds]),
        )

    def _seen(
        self, tracks: Tracks, rows: Indices, detections: Detections, columns: Indices, time_s: float
    ) -> Tracks:
        """Return the tracks after a frame in which `rows` were seen as detections `columns`.

        All others are lost: their size stops to change.
        """
        status = np.full(len(tracks), LOST, np.int8)
        status[rows] = np.where(tracks.status[rows] == NEW, NEW, SEEN)
        states, scores = tracks.states.copy(), tracks.scores.copy()
        class_ids, seen_s = tracks.class_ids.copy(), tracks.seen_s.copy()
        states[:, rows] = kalman.update(states[:, rows], kalman.centres(detections.boxes[columns]))
        states[kalman.VELOCITY][status == LOST, 2:] = 0.0
        scores[rows] = detections.scores[columns]
        class_ids[rows] = detections.class_ids[columns]
        seen_s[rows] = time_s
        hits = tracks.hits.copy()
        hits[rows] += 1
        return self._confirm(Tracks(states, tracks.ids, class_ids, scores, status, seen_s, hits))

    def _confirm(self, tracks: Tracks) -> Tracks:
        """Return the tracks with numbers for those that were seen often enough."""
        due = (tracks.status == NEW) & (tracks.hits >= self.config.confirm_frames)
        count = int(np.count_nonzero(due))
        if not count:
            return tracks
        ids, status = tracks.ids.copy(), tracks.status.copy()
        ids[due] = np.arange(self._next_id, self._next_id + count)
        status[due] = SEEN
        self._next_id += count
        return replace(tracks, ids=ids, status=status)


def iou_matrix(first: NDArray[np.float32], second: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the intersection over union, float32 [N, M], of boxes [N, 4] and [M, 4]; 0 where an
    area is beyond float32."""
    width = np.minimum(first[:, None, 2], second[:, 2]) - np.maximum(
        first[:, None, 0], second[:, 0]
    )
    height = np.minimum(first[:, None, 3], second[:, 3])
    height -= np.maximum(first[:, None, 1], second[:, 1])
    shared = np.maximum(width, np.float32(0.0), out=width)
    shared *= np.maximum(height, np.float32(0.0), out=height)
    union = (_areas(first) + np.float32(1e-9))[:, None] + _areas(second)
    union -= shared
    ious = np.asarray(shared / union)
    if not np.isfinite(ious).all():
        ious[~np.isfinite(ious)] = 0.0
    return ious


def _areas(boxes: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))


def _among(ious: NDArray[np.float32], rows: Indices, columns: Indices, least: float) -> Pairs:
    """Return the assignment of some rows and columns, as indices of all."""
    if not len(rows) or not len(columns):
        return rows[:0], columns[:0]
    chosen_rows, chosen_columns = assign(ious[rows[:, None], columns], least)
    return rows[chosen_rows], columns[chosen_columns]


def _start(
    measured: NDArray[np.float64],
    class_ids: NDArray[np.int64],
    scores: NDArray[np.float32],
    time_s: float,
) -> Tracks:
    """Return tracks that begin with these detections."""
    count = len(measured)
    return Tracks(
        states=kalman.start(measured),
        ids=np.full(count, NO_TRACK, np.int64),
        class_ids=class_ids,
        scores=scores,
        status=np.full(count, NEW, np.int8),
        seen_s=np.full(count, time_s),
        hits=np.ones(count, np.int64),
    )


def _joined(first: Tracks, second: Tracks) -> Tracks:
    # The states have their tracks in columns, all else in rows.
    return Tracks(
        **{
            field.name: np.concatenate(
                [getattr(first, field.name), getattr(second, field.name)],
                axis=1 if field.name == "states" else 0,
            )
            for field in fields(Tracks)
        }
    )


def _still_needed(tracks: Tracks) -> NDArray[np.bool_]:
    """Return which tracks stay: not those that were lost before they had a number, and not lost
    ones in whose place another is seen."""
    lost = tracks.status == LOST
    keep: NDArray[np.bool_] = ~(lost & (tracks.ids < 0))
    lost_rows, seen_rows = np.flatnonzero(lost & keep), np.flatnonzero(~lost)
    if not len(lost_rows) or not len(seen_rows):
        return keep
    boxes = kalman.corners(tracks.states)
    same = iou_matrix(boxes[lost_rows], boxes[seen_rows]) > SAME_IOU
    keep[lost_rows[same.any(axis=1)]] = False
    return keep
