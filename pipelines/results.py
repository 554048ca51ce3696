"""What a network says about one frame: the values that decoders give and sinks take.

Everything is in pixels of the frame, best first. The arrays of a value belong together, row by
row; they are not written to once the value is there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

NO_TRACK = -1  # the track id of a detection without a track
SPACE = -1  # the character number of a space

Region = tuple[float, float, float, float]  # x1, y1, x2, y2 in frame pixels


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """The outlines of N objects as the network drew them: small crops, not enlarged.

    `crops`: N arrays, float32 [h, w]; a point is inside where the number is above 0. `regions`:
    float32 [N, 4], the rectangle of the frame that each crop covers.
    `pipelines.stages.mask_pixels` enlarges one to pixels of the frame when it is asked for.
    """

    crops: tuple[NDArray[np.float32], ...]
    regions: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.crops)

    def __getitem__(self, rows: NDArray[Any]) -> "Masks":
        """Return the masks of these rows: indices, or a boolean for each."""
        order = np.arange(len(self.crops))[rows].tolist()
        return Masks(tuple(self.crops[row] for row in order), self.regions[rows])


class Attribute(msgspec.Struct, frozen=True):
    """What a model says of one object: a class, or a text, which has no `class_id`."""

    label: str
    score: float
    class_id: int | UnsetType = UNSET


Attributes = Mapping[str, Attribute]  # by the name of the model


@dataclass(frozen=True, slots=True, eq=False)
class Detections:
    """Objects in a frame, best first. None: the model or pipeline does not give it.

    `boxes`: float32 [N, 4], x1, y1, x2, y2; `scores`: float32 [N]; `class_ids`: int64 [N];
    `track_ids`: int64 [N], NO_TRACK for none; `keypoints`: float32 [N, K, 3], x, y and score (1
    where the model gives none); `rotated`: float32 [N, 5], centre x, centre y, width, height and
    angle in radians, clockwise as y points down, whose upright frame is `boxes`; `attributes`: what
    models on crops say of each.
    """

    boxes: NDArray[np.float32]
    scores: NDArray[np.float32]
    class_ids: NDArray[np.int64]
    track_ids: NDArray[np.int64] | None = None
    keypoints: NDArray[np.float32] | None = None
    masks: Masks | None = None
    rotated: NDArray[np.float32] | None = None
    attributes: tuple[Attributes, ...] | None = None

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, rows: NDArray[Any]) -> "Detections":
        """Return the detections of these rows, in their order: indices, or a boolean for each."""
        attributes = self.attributes
        if attributes is not None:
            order = np.arange(len(attributes))[rows].tolist()
            attributes = tuple(attributes[row] for row in order)
        return Detections(
            self.boxes[rows],
            self.scores[rows],
            self.class_ids[rows],
            None if self.track_ids is None else self.track_ids[rows],
            None if self.keypoints is None else self.keypoints[rows],
            None if self.masks is None else self.masks[rows],
            None if self.rotated is None else self.rotated[rows],
            attributes,
        )


@dataclass(frozen=True, slots=True, eq=False)
class ClassScores:
    """What an image shows, best first: `scores` float32 [K], `class_ids` int64 [K]."""

    scores: NDArray[np.float32]
    class_ids: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentationMap:
    """The class of each point: `class_ids` integers [h, w], in the network's resolution.

    The map covers `region` of the frame; a centre crop leaves the border out.
    """

    class_ids: NDArray[Any]
    region: Region


@dataclass(frozen=True, slots=True, eq=False)
class DepthMap:
    """The depth of each point: `depth` float32 [h, w], in the network's resolution.

    It covers `region` of the frame. `metric`: metres; else relative inverse depth, larger is
    nearer.
    """

    depth: NDArray[np.float32]
    region: Region
    metric: bool


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Lines that were read, best first: `lines`, each the numbers of its characters in labels.txt
    or SPACE, and `scores` float32 [N]. `text_of` gives the text."""

    lines: tuple[tuple[int, ...], ...]
    scores: NDArray[np.float32]


Decoded = Union[  # noqa: UP007  (an alias, so 3.10 evaluates it)
    Detections, ClassScores, SegmentationMap, DepthMap, Texts
]


@dataclass(frozen=True, slots=True)
class ModelResult:
    """What one of several models says of a frame, with the names of its classes."""

    decoded: Decoded
    labels: Sequence[str]


@dataclass(frozen=True, slots=True)
class ModelRun:
    """One inference: of which model, on which processors, and when, in ns of `time.monotonic()`.

    `span_ns`: from the begin of its inputs to its outputs, and where a thread decoded them too, to
    the end of that; `ready_ns`: its inputs were ready; `infer_ns`: the engine began and ended.
    """

    model: str
    processors: tuple[str, ...]
    span_ns: tuple[int, int]
    ready_ns: int
    infer_ns: tuple[int, int]


def no_detections() -> Detections:
    """Return detections of a frame without objects."""
    return Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64))


def label_of(labels: Sequence[str], class_id: int) -> str:
    """Return the name of a class, or its number where labels.txt has none."""
    return labels[class_id] if 0 <= class_id < len(labels) else str(class_id)


def text_of(line: Sequence[int], labels: Sequence[str]) -> str:
    """Return a line of `Texts` as text; a number that labels.txt does not have is left out."""
    return "".join(" " if n == SPACE else labels[n] for n in line if n < len(labels))
