"""What sinks take and what they are given to work with."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from device.protocol.messages import Stats
from device.protocol.tls import TlsFiles
from pipelines.frame import Frame
from pipelines.results import Decoded, Detections, ModelResult
from pipelines.sinks.controls import Controls
from pipelines.sinks.draw_zones import NO_PLACES, Places
from pipelines.sinks.events import Event
from pipelines.sinks.files import OutputFiles
from pipelines.stages.zones import NO_ZONES, ZoneFrame

if TYPE_CHECKING:
    import supervision


@dataclass(frozen=True, slots=True)
class ModelRun:
    """An inference for a frame: of which model, on which processors, and when it began and ended,
    in ns of `time.monotonic()`; `span_ns`: with its inputs, and where a thread did it, decoding."""

    model: str
    processors: tuple[str, ...]
    infer_ns: tuple[int, int]
    span_ns: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class FrameResult:
    """Everything that is known about one frame; `payload` is the event as JSON.

    `decoded` is of the first model, `models` of those beside it, by name; `places`: the zones and
    lines that held for it; `runs`: the inferences for it.
    """

    frame: Frame
    decoded: Decoded
    event: Event
    payload: bytes
    zones: ZoneFrame = NO_ZONES
    models: Mapping[str, ModelResult] = field(default_factory=dict)
    places: Places = NO_PLACES
    runs: tuple[ModelRun, ...] = ()

    @property
    def detections(self) -> Detections:
        """The objects as arrays; TypeError if the model gives none."""
        if not isinstance(self.decoded, Detections):
            raise TypeError(f"the result of this model is {type(self.decoded).__name__}: `decoded`")
        return self.decoded

    def to_supervision(self) -> "supervision.Detections":
        """Return the objects as `supervision.Detections`; ImportError without that package."""
        from supervision import Detections as Supervised

        objects = self.detections
        labels = [one.label for one in self.event.detections]
        return Supervised(
            xyxy=objects.boxes,
            confidence=objects.scores,
            class_id=objects.class_ids,
            tracker_id=objects.track_ids,
            data={"class_name": np.array(labels)},
        )


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

    `cameras`: the ids of the sources; `lost_s`: after how long an object has gone that was not
    seen.
    """

    labels: Sequence[str]
    broker: Broker | None = None
    files: OutputFiles = field(default_factory=OutputFiles)
    controls: Controls = field(default_factory=Controls)
    cameras: Sequence[str] = ("",)
    lost_s: float = 1.0


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
