"""Objects cut out of frames: which of them a model is given, and the attributes of each track."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipelines.frame import Image
from pipelines.model_config import PipelineModel
from pipelines.results import (
    NO_TRACK,
    Attribute,
    Attributes,
    ClassScores,
    Decoded,
    Detections,
    Texts,
    label_of,
    text_of,
)

MIN_SIDE_PX = 2.0  # of a box: less shows nothing
FORGET_FRAMES = 1000  # the attribute of a track that was not seen for so many frames

Key = tuple[int, int]  # track, class


def crop(image: Image, box: Sequence[float], margin: float) -> Image:
    """Return the view of a box of an image, wider by `margin` of its sides on each side."""
    height, width = image.shape[:2]
    x1, y1, x2, y2 = box
    more_x, more_y = margin * (x2 - x1), margin * (y2 - y1)
    left = min(max(0, int(x1 - more_x)), width - 1)
    top = min(max(0, int(y1 - more_y)), height - 1)
    right = min(width, max(left + 1, round(x2 + more_x)))
    bottom = min(height, max(top + 1, round(y2 + more_y)))
    part: Image = image[top:bottom, left:right]
    return part


@dataclass(slots=True)
class _TrackAttribute:
    """The last attribute of a track, the frame that it is of, and when the track was last seen."""

    attribute: Attribute | None
    at: int
    seen: int


class Describer:
    """What one model on crops says of one camera's objects.

    Objects without a track are described best first. Of tracks, those that were not described yet
    come first, then those that were described longest ago; an attribute holds until the next.
    """

    def __init__(self, config: PipelineModel, object_labels: Sequence[str]) -> None:
        """`object_labels`: the class names of the objects."""
        self.config = config
        self._labels = object_labels
        self._attributes: dict[Key, _TrackAttribute] = {}
        self._frame = 0

    def choose(self, objects: Detections) -> list[int]:
        """Return the rows of a frame's objects that are to be described, at most `max_crops`."""
        self._frame += 1
        config = self.config
        sides = objects.boxes[:, 2:] - objects.boxes[:, :2]
        takes = (objects.scores >= np.float32(config.min_score)) & (sides >= MIN_SIDE_PX).all(1)
        if config.classes:
            names = [label_of(self._labels, number) for number in objects.class_ids.tolist()]
            takes &= np.array([name in config.classes for name in names], bool)
        rows: list[int] = np.flatnonzero(takes).tolist()
        keys = _keys_of(objects)
        known = self._attributes

        def last(row: int) -> int:
            return known[keys[row]].at if keys[row] in known else 0

        return sorted(rows, key=last)[: config.max_crops]  # stable: the best first

    def describe(
        self, objects: Detections, rows: Sequence[int], attributes: Sequence[Attribute | None]
    ) -> Detections:
        """Return the objects with `attributes` of `rows`, and the last ones of other tracks."""
        now = dict(zip(rows, attributes, strict=True))
        described: list[Attributes] = []
        name = self.config.name
        for row, key in enumerate(_keys_of(objects)):
            attribute = now.get(row)
            if key[0] != NO_TRACK:
                known = self._attributes.setdefault(key, _TrackAttribute(None, 0, 0))
                known.seen = self._frame
                if row in now:
                    known.at, known.attribute = self._frame, attribute
                attribute = known.attribute
            earlier = {} if objects.attributes is None else objects.attributes[row]
            described.append(earlier if attribute is None else {**earlier, name: attribute})
        if self._frame % FORGET_FRAMES == 0:
            limit = self._frame - FORGET_FRAMES
            self._attributes = {
                key: one for key, one in self._attributes.items() if one.seen > limit
            }
        return replace(objects, attributes=tuple(described))


def attribute_of(decoded: Decoded, labels: Sequence[str]) -> Attribute | None:
    """Return the best class or the text that a crop shows; None if the model says nothing."""
    if isinstance(decoded, ClassScores) and len(decoded.scores):
        number = int(decoded.class_ids[0])
        score = round(float(decoded.scores[0]), 3)
        return Attribute(label_of(labels, number), score, number)
    if isinstance(decoded, Texts) and decoded.lines:
        return Attribute(text_of(decoded.lines[0], labels), round(float(decoded.scores[0]), 3))
    return None


def _keys_of(objects: Detections) -> list[Key]:
    class_ids = objects.class_ids.tolist()
    if objects.track_ids is None:
        return [(NO_TRACK, number) for number in class_ids]
    return list(zip(objects.track_ids.tolist(), class_ids, strict=True))
