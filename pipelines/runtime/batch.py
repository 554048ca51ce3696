"""The stages of a batch: every model sees its frames, results are decoded, tracked, described by
models on crops, and given out.

Models beside the first run in threads of their own, at the same time: one may have the GPU and
another one a DLA.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec import UNSET

from pipelines.config import PipelineConfig
from pipelines.frame import Frame
from pipelines.results import Decoded, Detections, ModelResult, no_detections
from pipelines.runtime.feed import Picture
from pipelines.runtime.metrics import Metrics
from pipelines.runtime.network import (
    Inference,
    Model,
    Network,
    Seen,
    batch_sizes,
    seats_of,
    spares_of,
)
from pipelines.sinks.controls import Controls
from pipelines.sinks.draw_zones import places_of
from pipelines.sinks.events import FrameFacts, encode_event, make_event
from pipelines.sinks.result import roles_of
from pipelines.sinks.table import FrameResult, Sink
from pipelines.sources.table import Source
from pipelines.sources.take import Pace
from pipelines.stages.crops import Describer, attribute_of, crop
from pipelines.stages.scene import Scene
from pipelines.stages.zones import NO_ZONES, ZoneFrame

__all__ = ["BatchRunner", "Inference", "Model", "batch_sizes"]


@dataclass(frozen=True, slots=True)
class _Beside:
    """What a model beside the first said of one image, in how many ms."""

    network: Network
    decoded: Decoded
    times_ms: float
    infer_ns: tuple[int, int]


@dataclass(slots=True)
class _Looks:
    """What the models see of one frame: a picture whose upper left corner is (x, y)."""

    frame: Frame
    first: Seen | None = None
    beside: dict[str, _Beside] = field(default_factory=dict)
    x: int = 0
    y: int = 0


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
        self._seats = seats_of(networks, models, most)
        self._first, *self._beside = (seat for seat in self._seats.values() if not seat.config.on)
        self.room = self._first.room
        self.metrics = Metrics()
        self.pace = Pace()
        self.warm_up_s = 0.0
        self._config = config
        self._places = places_of(config)
        self._labels = model.labels
        self._roles = roles_of(config, model.labels)
        self._followed = self._seats[config.followed.name]
        tracked_labels = models[config.followed.name].labels
        self._scenes = {camera.id: Scene(config, tracked_labels) for camera in config.cameras}
        self._describers = {
            (seat.config.name, camera.id): Describer(seat.config, models[seat.config.on].labels)
            for seat in self._seats.values()
            for camera in config.cameras
            if seat.config.on
        }
        self._sources: Mapping[str, Source] = {}
        self._controls = controls or Controls()
        # One thread for each engine, always the same: a CUDA context has one owner.
        self._threads = {seat.config.name: ThreadPoolExecutor(1) for seat in self._beside}

    def close(self) -> None:
        """End the threads of the models beside the first, and free what inputs took."""
        for thread in self._threads.values():
            thread.shutdown()
        for seat in self._seats.values():
            seat.close()

    def warm_up(self) -> None:
        """Infer once with every engine, so that the first frame waits for no initialization."""
        begin_s = time.monotonic()
        for seat in self._seats.values():
            thread = self._threads.get(seat.config.name)
            if thread is None:
                seat.warm_up()
            else:
                thread.submit(seat.warm_up).result()
        self.warm_up_s = time.monotonic() - begin_s

    def watch_drops(self, sources: Sequence[Source]) -> None:
        """Let results say what each of the sources dropped, in the order of the pipeline's."""
        cameras = (camera.id for camera in self._config.cameras)
        self._sources = dict(zip(cameras, sources, strict=True))

    def use(self, names: Sequence[str]) -> None:
        """Let these models with `replaces` run from now on, and no others of them."""
        for seat in self._seats.values():
            seat.use(names)

    def check(self, config: PipelineConfig) -> None:
        """Raise PipelineError if frames such as those of before do not fit a configuration."""
        for scene in self._scenes.values():
            scene.check(config)

    def change(self, config: PipelineConfig) -> None:
        """Go on with other thresholds, rates, zones and lines, a tracker and a region."""
        networks = config.networks
        for one in networks:
            if not one.replaces:
                self._seats[one.name].change(one, spares_of(one.name, networks))
        for (name, _), describer in self._describers.items():
            describer.config = self._seats[name].config
        for scene in self._scenes.values():
            scene.change(config)
        self._config = config
        self._places = places_of(config)
        self._roles = roles_of(config, self._labels)

    def run(self, batch: Sequence[Frame], sinks: Sequence[Sink]) -> Iterator[FrameResult]:
        """Run every stage on a batch; yield each result once the sinks have it."""
        begin_ns = time.monotonic_ns()
        for looks in self._look(batch):
            times_ms = {"wait": (begin_ns - looks.frame.t_recv.mono_ns) / 1e6}
            if looks.first is not None:
                first_ns, (ready_ns, inferred_ns) = looks.first.begin_ns, looks.first.infer_ns
                times_ms["wait"] = (first_ns - looks.frame.t_recv.mono_ns) / 1e6
                times_ms["preprocess"] = (ready_ns - first_ns) / 1e6
                times_ms["infer"] = (inferred_ns - ready_ns) / 1e6
            yield self._finish(looks, times_ms, sinks)
        self.pace.ran((time.monotonic_ns() - begin_ns) / 1e9)

    def _look(self, batch: Sequence[Frame]) -> list[_Looks]:
        """Let every model see its frames, all at the same time."""
        looks = [_Looks(frame) for frame in batch]
        pictures = self._pictures_for(looks)
        waiting: dict[str, Future[list[_Beside]]] = {}
        for seat in self._beside:
            name = seat.config.name
            if pictures[name]:
                views = list(pictures[name].values())
                waiting[name] = self._threads[name].submit(_look_beside, seat.network, views)
        own = pictures[self._first.config.name]
        for i, seen in zip(own, self._first.network.see(list(own.values())), strict=True):
            looks[i].first = seen
        for name, future in waiting.items():
            for i, result in zip(pictures[name], future.result(), strict=True):
                looks[i].beside[name] = result
        return looks

    def _pictures_for(self, looks: Sequence[_Looks]) -> dict[str, dict[int, Picture]]:
        """Return what each model is to see, by the number of the frame in the batch."""
        pictures: dict[str, dict[int, Picture]] = {name: {} for name in self._seats}
        for i, one in enumerate(looks):
            scene = self._scenes[one.frame.camera]
            seats = [
                seat
                for seat in (*self._beside, self._first)
                if seat.takes(one.frame) and (seat is not self._followed or scene.is_due())
            ]
            if seats:
                picture, one.x, one.y = scene.picture(one.frame)
            for seat in seats:
                pictures[seat.config.name][i] = picture
        return pictures

    def _finish(
        self, looks: _Looks, times_ms: dict[str, float], sinks: Sequence[Sink]
    ) -> FrameResult:
        """Decode what the models gave for one frame, and give the result to the sinks."""
        frame, seen = looks.frame, looks.first
        name, followed = self._first.config.name, self._followed.config.name
        said: dict[str, Decoded] = {}  # by all models that saw the frame
        if seen is not None:
            begin_ns = time.monotonic_ns()
            said[name] = seen.decoded()
            times_ms["decode"] = (time.monotonic_ns() - begin_ns) / 1e6
        said |= {beside: one.decoded for beside, one in looks.beside.items()}
        times_ms |= {beside: one.times_ms for beside, one in looks.beside.items()}
        fresh = frozenset(said)
        zones = self._follow(looks, said, times_ms)
        networks = [one.network for one in (seen, *looks.beside.values()) if one is not None]
        said = {
            model: self._described(model, decoded, frame, times_ms, networks, fresh=model in fresh)
            for model, decoded in said.items()
        }
        facts = FrameFacts(
            infer_ns=next((one.infer_ns for one in (seen, *looks.beside.values()) if one), None),
            processors=_processors_of(networks),
            predicted=followed in said and followed not in fresh,
            zones=zones,
            models={
                model: ModelResult(decoded, self._seats[model].network.labels)
                for model, decoded in said.items()
                if model != name
            },
        )
        decoded = said.get(name, no_detections())
        return self._give(frame, decoded, times_ms, facts, sinks)

    def _follow(
        self, looks: _Looks, said: dict[str, Decoded], times_ms: dict[str, float]
    ) -> ZoneFrame:
        """Bring results into the frame's pixels, in place, those of the model that is followed with
        their tracks, also where it did not see the frame; return what happened in zones."""
        begin_ns, frame = time.monotonic_ns(), looks.frame
        scene, followed = self._scenes[frame.camera], self._followed.config
        has_tracks = self._config.tracker is not UNSET
        zones = NO_ZONES
        for name, decoded in said.items():
            kept = self._controls.filtered(decoded, frame.camera)
            if name == followed.name:
                said[name], zones = scene.follow(kept, frame, looks.x, looks.y)
            else:
                said[name] = scene.placed(kept, frame, looks.x, looks.y)
        is_seen = followed.name in said
        if has_tracks and not is_seen and frame.camera in (followed.cameras or (frame.camera,)):
            is_seen = True
            said[followed.name], zones = scene.predict(frame)
        if has_tracks and is_seen:
            times_ms["track"] = (time.monotonic_ns() - begin_ns) / 1e6
        return zones

    def _described(
        self,
        name: str,
        decoded: Decoded,
        frame: Frame,
        times_ms: dict[str, float],
        networks: list[Network],
        *,
        fresh: bool,
    ) -> Decoded:
        """Return the objects of a model with what models on its crops say; if not `fresh`, with
        what they said before."""
        for seat in self._seats.values():
            if seat.config.on != name or not isinstance(decoded, Detections):
                continue
            describer = self._describers[seat.config.name, frame.camera]
            begin_ns = time.monotonic_ns()
            rows = describer.choose(decoded) if fresh else []
            boxes = decoded.boxes[np.array(rows, np.int64)].tolist()
            images = [crop(frame.image, box, seat.config.margin) for box in boxes]
            network = seat.network
            attributes = [
                attribute_of(one.decoded(), network.labels) for one in network.see(images)
            ]
            decoded = describer.describe(decoded, rows, attributes)
            if rows:
                networks.append(network)
            times_ms[seat.config.name] = (time.monotonic_ns() - begin_ns) / 1e6
        return decoded

    def _give(
        self,
        frame: Frame,
        decoded: Decoded,
        times_ms: dict[str, float],
        facts: FrameFacts,
        sinks: Sequence[Sink],
    ) -> FrameResult:
        begin_ns = time.monotonic_ns()
        source = self._sources.get(frame.camera)
        facts = replace(facts, dropped={} if source is None else source.dropped)
        event = make_event(self._config.name, frame, decoded, self._labels, times_ms, facts)
        payload = encode_event(event)
        result = FrameResult(
            frame, decoded, event, payload, facts.zones, facts.models, self._places, self._roles
        )
        for sink in sinks:
            sink.write(result)
        done_ns = time.monotonic_ns()
        times_ms["sinks"] = (done_ns - begin_ns) / 1e6
        self.metrics.add(times_ms, (done_ns - frame.t_recv.mono_ns) / 1e6)
        return result


def _look_beside(network: Network, pictures: Sequence[Picture]) -> list[_Beside]:
    """Return what a network says of images, decoded in its own thread."""
    begin_ns = time.monotonic_ns()
    seen = network.see(pictures)
    decoded = [one.decoded() for one in seen]
    times_ms = (time.monotonic_ns() - begin_ns) / 1e6
    return [
        _Beside(network, results, times_ms, one.infer_ns)
        for one, results in zip(seen, decoded, strict=True)
    ]


def _processors_of(networks: Sequence[Network]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for network in networks for name in network.processors))
