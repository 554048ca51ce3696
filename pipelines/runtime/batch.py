"""The stages of a batch: every model sees its frames, results are decoded, tracked, described by
models on crops, and given out.

A batch is started, and finished once its models are done: `pipelines.runtime.in_flight` starts the
next one in between. Each engine runs in a thread of its own: one may have the GPU and another one a
DLA.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from msgspec import UNSET

from pipelines.config import PipelineConfig
from pipelines.frame import Frame
from pipelines.results import Decoded, Detections, ModelResult, ModelRun, no_detections
from pipelines.runtime.feed import Picture
from pipelines.runtime.lanes import (
    Inference,
    InferenceResult,
    Model,
    PendingResults,
    batch_sizes,
)
from pipelines.runtime.metrics import Metrics
from pipelines.runtime.model_stage import fallbacks_of, model_stages_of
from pipelines.sinks.controls import Controls
from pipelines.sinks.draw_zones import places_of
from pipelines.sinks.events import FrameFacts, make_event
from pipelines.sinks.result import roles_of
from pipelines.sinks.table import FrameResult, Sink
from pipelines.sources.batching import Pace
from pipelines.sources.table import Source
from pipelines.stages.crops import Describer, attribute_of, crop
from pipelines.stages.scene import Scene
from pipelines.stages.zones import NO_ZONES, ZoneFrame

__all__ = ["BatchRunner", "Inference", "Model", "batch_sizes"]


class Tap(Protocol):
    """Takes frames beside the sinks: `pipelines.shadow.tap`."""

    def offer(self, frame: Frame, decoded: Callable[[], Decoded]) -> None:
        """Take a frame and what the first model sees in it, before controls and tracks."""


@dataclass(slots=True)
class _FrameInference:
    """What the models gave for one frame, of a picture whose upper left corner is (x, y), the
    times of its stages, and the inferences for it."""

    frame: Frame
    x: int = 0
    y: int = 0
    first: InferenceResult | None = None
    beside: dict[str, tuple[ModelRun, Decoded]] = field(default_factory=dict)
    times_ms: dict[str, float] = field(default_factory=dict)
    runs: list[ModelRun] = field(default_factory=list)

    @property
    def processors(self) -> tuple[str, ...]:
        """Where its inferences ran."""
        return tuple(dict.fromkeys(name for run in self.runs for name in run.processors))

    def add(self, run: ModelRun) -> None:
        """Add an inference; several crops of an object are one."""
        if run not in self.runs:
            self.runs.append(run)


@dataclass(frozen=True, slots=True)
class Started:
    """A batch whose models run since `begin_ns`, and what they have of which of its frames.

    `here`: they ran in the thread that started it, and are done.
    """

    inferences: list[_FrameInference]
    begin_ns: int
    first: list[PendingResults]
    first_rows: list[int]
    beside: dict[str, tuple[list[int], Future[list[tuple[ModelRun, Decoded]]]]]
    here: bool

    @property
    def futures(self) -> tuple[Future[Any], ...]:
        """What is to be done before the batch can be finished without waiting."""
        if self.here:
            return ()
        running = (one for one in self.first if isinstance(one, Future))
        return (*running, *(future for _, future in self.beside.values()))

    def prepare_s(self) -> float:
        """Return how long it took to make the first model's inputs; those of a second inference
        wait for the engine. The first model has seen some, and is done."""
        return (self.first[0].result()[0].run.ready_ns - self.begin_ns) / 1e9

    def infer_s(self) -> float:
        """Return how long the first model's engine took. It is done."""
        spans_ns = [future.result()[0].run.infer_ns for future in self.first]
        return sum(end_ns - begin_ns for begin_ns, end_ns in spans_ns) / 1e9

    def collect(self) -> list[_FrameInference]:
        """Wait for the models; return what they gave. Raises what an engine has raised."""
        of_first = [result for future in self.first for result in future.result()]
        for row, result in zip(self.first_rows, of_first, strict=True):
            self.inferences[row].first = result
        for name, (rows, future) in self.beside.items():
            for row, decoded in zip(rows, future.result(), strict=True):
                self.inferences[row].beside[name] = decoded
        return self.inferences


class BatchRunner:
    """The stages of up to `room` frames, timed."""

    def __init__(
        self,
        config: PipelineConfig,
        model: Model,
        controls: Controls | None = None,
        others: Mapping[str, Model] | None = None,
    ) -> None:
        """`model`: the first; `others`: the rest of [[models]] by name."""
        networks = config.networks
        models = {**(others or {}), networks[0].name: model}
        most = len(config.cameras) if config.batch is UNSET else config.batch
        self._stages = model_stages_of(networks, models, most)
        self._first, *self._beside = (
            stage for stage in self._stages.values() if not stage.config.on
        )
        self.room = self._first.room
        self.metrics = Metrics()
        self.pace = Pace()
        self.warm_up_s = 0.0
        self._config = config
        self._places = places_of(config)
        self._labels = model.labels
        self._roles = roles_of(config, model.labels)
        self._followed = self._stages[config.followed.name]
        tracked_labels = models[config.followed.name].labels
        self._scenes = {camera.id: Scene(config, tracked_labels) for camera in config.cameras}
        self._describers = {
            (stage.config.name, camera.id): Describer(stage.config, models[stage.config.on].labels)
            for stage in self._stages.values()
            for camera in config.cameras
            if stage.config.on
        }
        self._sources: Mapping[str, Source] = {}
        self._controls = controls or Controls()
        self.tap: Tap | None = None

    @property
    def lanes(self) -> int:
        """How many batches the first model runs at the same time."""
        return len(self._first.network.lanes)

    def close(self) -> None:
        """End the threads of the engines, and free what inputs took."""
        for stage in self._stages.values():
            stage.close()

    def warm_up(self) -> None:
        """Infer twice with every engine: the first time initializes, the second is measured."""
        for _ in range(2):
            begin_s = time.monotonic()
            for stage in self._stages.values():
                stage.warm_up()
            self.warm_up_s = time.monotonic() - begin_s

    def watch_drops(self, sources: Sequence[Source]) -> None:
        """Let results say what each of the sources dropped, in the order of the pipeline's."""
        cameras = (camera.id for camera in self._config.cameras)
        self._sources = dict(zip(cameras, sources, strict=True))

    def use(self, names: Sequence[str]) -> None:
        """Let these models with `replaces` run from now on, and no others of them."""
        for stage in self._stages.values():
            stage.use(names)

    def check(self, config: PipelineConfig) -> None:
        """Raise PipelineError if frames such as those of before do not fit a configuration."""
        for scene in self._scenes.values():
            scene.check(config)

    def change(self, config: PipelineConfig) -> None:
        """Go on with other thresholds, rates, zones and lines, a tracker and a region."""
        networks = config.networks
        for network in networks:
            if not network.replaces:
                self._stages[network.name].change(network, fallbacks_of(network.name, networks))
        for (name, _), describer in self._describers.items():
            describer.config = self._stages[name].config
        for scene in self._scenes.values():
            scene.change(config)
        self._config = config
        self._places = places_of(config)
        self._roles = roles_of(config, self._labels)

    def run(self, batch: Sequence[Frame], sinks: Sequence[Sink]) -> Iterator[FrameResult]:
        """Run every stage on a batch; yield each result once the sinks have it."""
        yield from self.finish(self.start(batch), sinks)

    def start(self, batch: Sequence[Frame], *, here: bool = False) -> Started:
        """Let every model begin with its frames, all at the same time.

        `here`: infer in this thread, if there is one model for whole frames alone.
        """
        begin_ns = time.monotonic_ns()
        inferences = [_FrameInference(frame) for frame in batch]
        pictures = self._pictures_for(inferences)
        beside = {}
        for stage in self._beside:
            views = pictures[stage.config.name]
            if views:
                future = stage.network.start_whole(list(views.values()))
                beside[stage.config.name] = (list(views), future)
        picture = pictures[self._first.config.name]
        here = here and not self._beside
        first = self._first.network.start(list(picture.values()), here=here)
        return Started(inferences, begin_ns, first, list(picture), beside, here)

    def finish(self, started: Started, sinks: Sequence[Sink]) -> Iterator[FrameResult]:
        """Wait for the models; decode, track and describe what they gave, and give each result to
        the sinks before it is yielded."""
        for inference in started.collect():
            now_ns, arrived_ns = time.monotonic_ns(), inference.frame.t_recv.mono_ns
            times_ms, done_ns = inference.times_ms, started.begin_ns
            run = None if inference.first is None else inference.first.run
            begin_ns = started.begin_ns if run is None else run.span_ns[0]
            times_ms["wait"] = (begin_ns - arrived_ns) / 1e6
            if run is not None:
                infer_ns, done_ns = run.infer_ns
                times_ms["preprocess"] = (run.ready_ns - begin_ns) / 1e6
                times_ms["queue"] = (infer_ns - run.ready_ns) / 1e6
                times_ms["infer"] = (done_ns - infer_ns) / 1e6
            times_ms["collect"] = (now_ns - done_ns) / 1e6
            yield self._finish(inference, sinks)

    def _pictures_for(self, inferences: Sequence[_FrameInference]) -> dict[str, dict[int, Picture]]:
        """Return what each model is to see, by the number of the frame in the batch."""
        pictures: dict[str, dict[int, Picture]] = {name: {} for name in self._stages}
        for i, one in enumerate(inferences):
            scene = self._scenes[one.frame.camera]
            stages = [
                stage
                for stage in (*self._beside, self._first)
                if stage.takes(one.frame) and (stage is not self._followed or scene.is_due())
            ]
            if stages:
                picture, one.x, one.y = scene.picture(one.frame)
            for stage in stages:
                pictures[stage.config.name][i] = picture
        return pictures

    def _finish(self, inference: _FrameInference, sinks: Sequence[Sink]) -> FrameResult:
        """Decode what the models gave for one frame, and give the result to the sinks."""
        frame, first, times_ms = inference.frame, inference.first, inference.times_ms
        name, followed = self._first.config.name, self._followed.config.name
        results: dict[str, Decoded] = {}  # of all models that saw the frame
        zones = None
        if first is not None:
            inference.add(first.run)
            zones = self._follow_at_once(inference, first, results)
            if zones is None:
                self._decode(inference, first, results)
        for beside, (run, decoded) in inference.beside.items():
            inference.add(run)
            results[beside] = decoded
            times_ms[beside] = (run.span_ns[1] - run.span_ns[0]) / 1e6
        infer_ns = inference.runs[0].infer_ns if inference.runs else None
        fresh = frozenset(results)
        if zones is None:
            zones = self._follow(inference, results)
        results = {
            model: self._described(model, decoded, inference, fresh=model in fresh)
            for model, decoded in results.items()
        }
        source = self._sources.get(frame.camera)
        facts = FrameFacts(
            infer_ns=infer_ns,
            processors=inference.processors,
            dropped={} if source is None else source.dropped,
            predicted=followed in results and followed not in fresh,
            zones=zones,
            models={
                model: ModelResult(decoded, self._stages[model].network.labels)
                for model, decoded in results.items()
                if model != name
            },
        )
        model_results = results[name] if name in results else no_detections()
        return self._give(inference, model_results, facts, sinks)

    def _follow_at_once(
        self, inference: _FrameInference, first: InferenceResult, results: dict[str, Decoded]
    ) -> ZoneFrame | None:
        """Decode and follow by one call, where no step between needs what was decoded, and no other
        model saw the frame; return what happened in zones. None: one after the other."""
        frame, name = inference.frame, self._first.config.name
        if (
            self.tap is not None
            or inference.beside
            or name != self._followed.config.name
            or self._controls.least_score(frame.camera)
        ):
            return None
        begin_ns = time.monotonic_ns()
        scene, network = self._scenes[frame.camera], first.network
        followed = scene.follow_head(first.outputs, network.decode, first.view, frame)
        if followed is None:
            return None
        results[name], zones, decoded_ns = followed
        inference.times_ms["decode"] = (decoded_ns - begin_ns) / 1e6
        inference.times_ms["track"] = (time.monotonic_ns() - decoded_ns) / 1e6
        return zones

    def _decode(
        self, inference: _FrameInference, first: InferenceResult, results: dict[str, Decoded]
    ) -> None:
        """Decode what the first model gave, and offer it to the tap."""
        frame, begin_ns = inference.frame, time.monotonic_ns()
        results[self._first.config.name] = raw = first.decoded()
        inference.times_ms["decode"] = (time.monotonic_ns() - begin_ns) / 1e6
        if self.tap is not None:
            scene = self._scenes[frame.camera]
            self.tap.offer(frame, lambda: scene.placed(raw, frame, inference.x, inference.y))

    def _follow(self, inference: _FrameInference, results: dict[str, Decoded]) -> ZoneFrame:
        """Bring results into the frame's pixels, in place, those of the model that is followed with
        their tracks, also where it did not see the frame; return what happened in zones."""
        begin_ns, frame = time.monotonic_ns(), inference.frame
        scene, followed = self._scenes[frame.camera], self._followed.config
        has_tracks = self._config.tracker is not UNSET
        zones = NO_ZONES
        for name, decoded in results.items():
            filtered = self._controls.filtered(decoded, frame.camera)
            if name == followed.name:
                results[name], zones = scene.follow(filtered, frame, inference.x, inference.y)
            else:
                results[name] = scene.placed(filtered, frame, inference.x, inference.y)
        is_seen = followed.name in results
        if has_tracks and not is_seen and frame.camera in (followed.cameras or (frame.camera,)):
            is_seen = True
            results[followed.name], zones = scene.predict(frame)
        if has_tracks and is_seen:
            inference.times_ms["track"] = (time.monotonic_ns() - begin_ns) / 1e6
        return zones

    def _described(
        self, name: str, decoded: Decoded, inference: _FrameInference, *, fresh: bool
    ) -> Decoded:
        """Return the objects of a model with what models on its crops say; if not `fresh`, with
        what they said before."""
        frame = inference.frame
        for stage in self._stages.values():
            if stage.config.on != name or not isinstance(decoded, Detections):
                continue
            describer = self._describers[stage.config.name, frame.camera]
            begin_ns = time.monotonic_ns()
            rows = describer.choose(decoded) if fresh else []
            boxes = decoded.boxes[np.array(rows, np.int64)].tolist()
            images = [crop(frame.image, box, stage.config.margin) for box in boxes]
            of_crops = stage.network.see(images)
            attributes = [attribute_of(one.decoded(), stage.network.labels) for one in of_crops]
            decoded = describer.describe(decoded, rows, attributes)
            for one in of_crops:
                inference.add(one.run)
            inference.times_ms[stage.config.name] = (time.monotonic_ns() - begin_ns) / 1e6
        return decoded

    def _give(
        self,
        inference: _FrameInference,
        decoded: Decoded,
        facts: FrameFacts,
        sinks: Sequence[Sink],
    ) -> FrameResult:
        begin_ns, frame, times_ms = time.monotonic_ns(), inference.frame, inference.times_ms
        event = make_event(self._config.name, frame, decoded, self._labels, times_ms, facts)
        result = FrameResult(
            frame=frame,
            decoded=decoded,
            event=event,
            zones=facts.zones,
            models=facts.models,
            places=self._places,
            runs=tuple(inference.runs),
            roles=self._roles,
        )
        for sink in sinks:
            sink.write(result)
        done_ns = time.monotonic_ns()
        times_ms["sinks"] = (done_ns - begin_ns) / 1e6
        total_ms = (done_ns - frame.t_recv.mono_ns) / 1e6
        self.metrics.add(times_ms, total_ms, facts.processors)
        return result
