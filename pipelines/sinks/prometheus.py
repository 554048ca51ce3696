"""The figures of a pipeline for Prometheus."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from device.errors import PipelineError
from device.protocol.messages import Stats
from pipelines.metrics import Family, Figures, MetricsServer, Rows, render
from pipelines.sink_config import PrometheusSink
from pipelines.sinks.result import FrameResult, SinkContext


@dataclass(slots=True)
class CameraFigures:
    """What is counted of one camera since the start; `objects`, `inside`: of the last frame."""

    frames: int = 0
    age_s: float = 0.0
    detections: Counter[str] = field(default_factory=Counter)
    objects: Mapping[str, int] = field(default_factory=dict)
    inside: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    crossed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class PrometheusOut:
    """Serves GET /metrics in threads of its own."""

    def __init__(self, config: PrometheusSink, context: SinkContext) -> None:
        self._lock = threading.Lock()
        self._figures = {camera: CameraFigures() for camera in context.cameras}
        self._stats: Stats | None = None
        self._name = ""
        try:
            self._server = MetricsServer((config.host, config.port), self.text)
        except OSError as error:
            raise PipelineError(
                f"the prometheus sink cannot listen on {config.host}:{config.port}"
                f" ({error.strerror}): give another host or port."
            ) from error

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.port

    @property
    def dropped(self) -> Mapping[str, int]:
        """Nothing: figures are added up."""
        return {}

    def __enter__(self) -> "PrometheusOut":
        """Begin to serve."""
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop to serve."""
        self._server.close()

    def write(self, result: FrameResult) -> None:
        """Add a frame."""
        event = result.event
        objects = Counter(one.label for name in result.by_model for one in result.rows_of(name))
        with self._lock:
            self._name = event.pipeline
            figures = self._figures[result.frame.camera]
            figures.frames += 1
            figures.age_s = event.age_ms / 1e3
            figures.detections.update(objects)
            figures.objects = {**dict.fromkeys(figures.objects, 0), **objects}
            figures.inside = {
                zone: {**dict.fromkeys(figures.inside.get(zone, ()), 0), **counts}
                for zone, counts in result.zones.inside.items()
            }
            figures.crossed = result.zones.crossed

    def take_stats(self, stats: Stats) -> None:
        """Take the figures of the last second."""
        with self._lock:
            self._stats = stats

    def text(self) -> str:
        """Return all figures as they are now."""
        with self._lock:
            return _text(self._name, self._figures, self._stats)


def _text(name: str, cameras: Mapping[str, CameraFigures], stats: Stats | None) -> str:
    by_camera = [({"pipeline": name, "camera": camera}, one) for camera, one in cameras.items()]
    frames: Rows = [(labels, one.frames) for labels, one in by_camera]
    ages: Rows = [(labels, one.age_s) for labels, one in by_camera]
    seen = _by("label", [(labels, one.detections) for labels, one in by_camera])
    objects = _by("label", [(labels, one.objects) for labels, one in by_camera])
    zones = [
        ({**labels, "zone": zone}, counts)
        for labels, one in by_camera
        for zone, counts in one.inside.items()
    ]
    lines = [
        ({**labels, "line": line}, counts)
        for labels, one in by_camera
        for line, counts in one.crossed.items()
    ]
    families = [
        ("frames_total", "counter", "Frames with a result.", frames),
        ("result_age_seconds", "gauge", "From capture to result, of the last frame.", ages),
        ("detections_total", "counter", "Detections by class.", seen),
        ("objects", "gauge", "Objects in the last frame by class.", objects),
        ("zone_objects", "gauge", "Objects in a zone by class.", _by("label", zones)),
        ("line_crossings_total", "counter", "Crossings by direction.", _by("direction", lines)),
        *([] if stats is None else _of_the_last_second({"pipeline": name}, stats)),
    ]
    return render(Figures(families))


def _of_the_last_second(labels: Mapping[str, str], stats: Stats) -> list[Family]:
    totals = (("0.5", stats.latency_p50_ms), ("0.99", stats.latency_p99_ms))
    stages = (("0.5", stats.stage_p50_ms), ("0.99", stats.stage_p99_ms))
    latencies: Rows = [({**labels, "quantile": share}, ms / 1e3) for share, ms in totals]
    by_stage: Rows = [
        ({**labels, "stage": stage, "quantile": share}, ms / 1e3)
        for share, times_ms in stages
        for stage, ms in times_ms.items()
    ]
    dropped = _by("cause", [(labels, stats.dropped)])
    ran = _by("processor", [(labels, stats.processors)])
    return [
        ("fps", "gauge", "Frames a second, over the last second.", [(labels, stats.fps)]),
        ("dropped_total", "counter", "Frames and messages lost by cause.", dropped),
        ("processor_frames", "gauge", "Frames that ran on it, over the last second.", ran),
        ("latency_seconds", "gauge", "From frame to result, over the last second.", latencies),
        ("stage_seconds", "gauge", "Time of each stage, over the last second.", by_stage),
    ]


def _by(label: str, counted: Iterable[tuple[Mapping[str, str], Mapping[str, int]]]) -> Rows:
    """Return a row for each entry of each mapping, with its key as a label."""
    return [
        ({**labels, label: key}, value)
        for labels, counts in counted
        for key, value in counts.items()
    ]
