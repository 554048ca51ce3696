"""What sinks take and what they are given to work with."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from device.protocol.messages import Stats
from device.protocol.tls import TlsFiles
from pipelines.config import PipelineConfig
from pipelines.frame import Frame
from pipelines.model_config import ONLY
from pipelines.results import Decoded, Detections, ModelResult, ModelRun, no_detections
from pipelines.sinks.controls import Controls
from pipelines.sinks.draw_zones import NO_PLACES, Places
from pipelines.sinks.events import Detection, Event, encode_event
from pipelines.sinks.files import OutputFiles
from pipelines.stages.zones import NO_ZONES, ZoneFrame

if TYPE_CHECKING:
    import pandas
    import supervision


@dataclass(frozen=True, slots=True)
class Roles:
    """What models are for in a result, by their names.

    `first`: `decoded` is of it, with `labels`. `followed`: tracks, zones and lines are of its
    objects. `hidden`: models that are not shown on pictures, those on crops too.
    """

    first: str = ONLY
    labels: Sequence[str] = ()
    followed: str = ONLY
    hidden: frozenset[str] = frozenset()


def roles_of(config: PipelineConfig, labels: Sequence[str]) -> Roles:
    """Return the roles of a pipeline's models; `labels`: those of the first."""
    hidden = frozenset(network.name for network in config.networks if not network.draw)
    return Roles(config.first.name, labels, config.followed.name, hidden)


@dataclass(frozen=True, eq=False)
class FrameResult:
    """Everything that is known about one frame.

    `decoded` is of the first model, `models` of those beside it, by name; `places`: the zones and
    lines that held for it; `runs`: the inferences for it; `roles`: which model is which.
    """

    frame: Frame
    decoded: Decoded
    event: Event
    zones: ZoneFrame = NO_ZONES
    models: Mapping[str, ModelResult] = field(default_factory=dict)
    places: Places = NO_PLACES
    runs: tuple[ModelRun, ...] = ()
    roles: Roles = Roles()

    @cached_property
    def payload(self) -> bytes:
        """The event as JSON, encoded for the first sink that asks for it."""
        return encode_event(self.event)

    @property
    def by_model(self) -> dict[str, ModelResult]:
        """The results of all models on frames, by name, the first one first."""
        return {self.roles.first: ModelResult(self.decoded, self.roles.labels), **self.models}

    @property
    def followed(self) -> Decoded:
        """The results of the model whose objects are followed, with their tracks."""
        seen = self.by_model.get(self.roles.followed)
        return no_detections() if seen is None else seen.decoded

    def rows_of(self, name: str) -> tuple[Detection, ...]:
        """Return what the event says of one model's objects, row by row as in its results."""
        if name == self.roles.first:
            return self.event.detections
        rows = self.event.models or {}
        return rows[name].detections if name in rows else ()

    @property
    def detections(self) -> Detections:
        """The objects as arrays; TypeError if the model gives none."""
        if not isinstance(self.decoded, Detections):
            raise TypeError(f"the result of this model is {type(self.decoded).__name__}: `decoded`")
        return self.decoded

    def to_supervision(self) -> "supervision.Detections":
        """Return the objects as `supervision.Detections`, whose arrays are those of `detections`;
        the masks of the network are enlarged to the frame. ImportError without that package."""
        from supervision import Detections as Supervised

        objects = self.detections
        labels = [detection.label for detection in self.event.detections]
        mask = None
        if objects.masks is not None:
            from pipelines.stages.mask_pixels import mask_on

            mask = np.zeros((len(objects), *self.frame.size), np.bool_)
            for row, canvas in enumerate(mask):
                part, inside = mask_on(canvas, objects, row)
                part[:] = inside
        return Supervised(
            xyxy=objects.boxes,
            mask=mask,
            confidence=objects.scores,
            class_id=objects.class_ids,
            tracker_id=objects.track_ids,
            data={"class_name": np.array(labels)},
        )

    def to_supervision_keypoints(self) -> "supervision.KeyPoints":
        """Return the key points as `supervision.KeyPoints`, views of those of `detections`;
        TypeError if the model gives none, ImportError without that package."""
        from supervision import KeyPoints

        objects = self.detections
        if objects.keypoints is None:
            raise TypeError("the model of this result gives no key points")
        labels = np.array([detection.label for detection in self.event.detections])
        points, scores = objects.keypoints[..., :2], objects.keypoints[..., 2]
        return KeyPoints(points, objects.class_ids, scores, data={"class_name": labels})

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a row for each object; its numbers are views of the arrays of `detections`.
        ImportError without pandas."""
        from pandas import DataFrame

        objects = self.detections
        columns = dict(zip(("x1", "y1", "x2", "y2"), objects.boxes.T, strict=True))
        columns |= {"score": objects.scores, "class_id": objects.class_ids}
        if objects.track_ids is not None:
            columns["track_id"] = objects.track_ids
        labels = [detection.label for detection in self.event.detections]
        return DataFrame({**columns, "label": labels}, copy=False)


@dataclass(frozen=True, slots=True)
class Broker:
    """Where to publish, below `topic_prefix`. The password is not in its repr."""

    host: str
    port: int
    topic_prefix: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What sinks need beyond their own configuration.

    `labels`: of the model whose objects are followed, `models`: of each model on frames, by name;
    `cameras`: the ids of the sources; `lost_s`: after how long an object has gone that was not
    seen; `about`: what a recording says of the engines.
    """

    labels: Sequence[str]
    broker: Broker | None = None
    files: OutputFiles = field(default_factory=OutputFiles)
    controls: Controls = field(default_factory=Controls)
    cameras: Sequence[str] = ("",)
    lost_s: float = 1.0
    models: Mapping[str, Sequence[str]] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)


class Sink(AbstractContextManager[Any], Protocol):
    """Takes results; a `with` block opens and closes its output."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Results dropped so far, by cause."""

    def write(self, result: FrameResult) -> None:
        """Take one result; never blocks for long and never raises for an external fault."""


@runtime_checkable
class StatsSink(Protocol):
    """A sink that takes the figures of each second, too, from another thread."""

    def take_stats(self, stats: Stats) -> None:
        """Take the figures of the last second."""
