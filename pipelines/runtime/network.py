"""One model in the loop: images become inputs, one inference of many, and decoded results.

A `Seat` is a model of the pipeline with the engines that may run it: its own, and those with
`replaces`, which a step of [load] puts in its place.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from device.engine.manifest import DimRange, TensorInfo
from device.engine.preprocessing import Preprocessing
from device.runtime.frames import FrameOpener
from pipelines.decode_config import DecodeConfig
from pipelines.frame import Frame
from pipelines.model_config import PipelineModel
from pipelines.results import Decoded
from pipelines.runtime.feed import DeviceFeed, Feed, HostFeed, Picture
from pipelines.sinks.rate import RateLimit
from pipelines.stages.decode import View, decode, view_of
from pipelines.stages.decoder_inputs import constant_inputs
from pipelines.stages.decoders.candidates import Outputs
from pipelines.stages.fit import EngineFacts


class Report(Protocol):
    """How one segment of the engine runs here."""

    @property
    def segment(self) -> str: ...
    @property
    def processor(self) -> str: ...
    @property
    def implementation(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def degraded(self) -> str: ...


class Inference(Protocol):
    """What a pipeline needs of `device.runtime.session.Session`."""

    @property
    def inputs(self) -> tuple[TensorInfo, ...]: ...
    @property
    def outputs(self) -> tuple[TensorInfo, ...]: ...
    @property
    def dims(self) -> tuple[DimRange, ...]: ...
    @property
    def reports(self) -> Sequence[Report]: ...
    def infer(self, feeds: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]: ...


@dataclass(frozen=True, slots=True)
class Model:
    """An open session with the names of its classes, and of its engine file the hash and the
    preprocessing. `frames` opens the input that makes itself of frames, where the GPU does that."""

    session: Inference
    labels: tuple[str, ...]
    engine_sha256: str
    preprocessing: Preprocessing | UnsetType = UNSET
    frames: FrameOpener | None = None

    @property
    def facts(self) -> EngineFacts:
        """What a pipeline is checked against."""
        session = self.session
        return EngineFacts(
            session.inputs, session.outputs, self.labels, session.dims, self.preprocessing
        )


def batch_sizes(session: Inference) -> DimRange:
    """Return the batches that a session takes, from the first dimension of its input.

    It is 1 where an output does not have a row for each image.
    """
    first = session.inputs[0].shape[0]
    if isinstance(first, int):
        return DimRange(name="", min=first, opt=first, max=first)
    one = DimRange(name="", min=1, opt=1, max=1)
    if first is None or any(info.shape[:1] != (first,) for info in session.outputs):
        return one
    return next((dim for dim in session.dims if dim.name == first), one)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a network gave for one image: when its preprocessing began, and begin and end of its
    inference, on the clock of `time.monotonic()`."""

    network: "Network"
    outputs: Outputs
    view: View
    begin_ns: int
    infer_ns: tuple[int, int]

    def decoded(self) -> Decoded:
        """Return the results, in pixels of the image."""
        return decode(self.outputs, self.network.decode, self.view)


class Network:
    """One engine with its inputs, for up to `room` images an inference. Used by one thread."""

    def __init__(self, config: PipelineModel, model: Model, most: int) -> None:
        """`most`: the most images at once; more of them run in several inferences."""
        session = model.session
        self._sizes = batch_sizes(session)
        self.room = min(most, self._sizes.max)
        self.labels = model.labels
        self.decode: DecodeConfig = config.reading
        self.processors = tuple(dict.fromkeys(report.processor for report in session.reports))
        self._preprocess = config.feeding
        constants = constant_inputs(config.reading, config.feeding)
        name = next(i.name for i in session.inputs if i.name not in constants)
        self._largest = self._size_for(self.room)
        others = {n: np.repeat(value, self._largest, axis=0) for n, value in constants.items()}
        self._feed: Feed
        if model.frames is None:
            self._feed = HostFeed(config.feeding, session.infer, name, self._largest, others)
        else:
            self._feed = DeviceFeed(config.feeding, model.frames(self._largest, others))

    def warm_up(self) -> None:
        """Infer once, so that the first frame does not wait for initialization."""
        self._feed.infer(self._largest)

    def close(self) -> None:
        """Free what the inputs took."""
        self._feed.close()

    def see(self, pictures: Sequence[Picture]) -> list[Seen]:
        """Return what the network gives for pictures."""
        return [
            seen
            for start in range(0, len(pictures), self.room)
            for seen in self._see(pictures[start : start + self.room])
        ]

    def _see(self, pictures: Sequence[Picture]) -> Iterator[Seen]:
        begin_ns = time.monotonic_ns()
        places = [self._feed.put(row, picture) for row, picture in enumerate(pictures)]
        ready_ns = time.monotonic_ns()
        outputs = self._feed.infer(self._size_for(len(pictures)))
        infer_ns = (ready_ns, time.monotonic_ns())
        for row, placed in enumerate(places):
            rows = slice(row, row + 1)
            own = {name: output[rows] for name, output in outputs.items()}
            view = view_of(placed.geometry, placed.shape, self._preprocess)
            only = outputs if self._largest == 1 else own
            yield Seen(self, only, view, begin_ns, infer_ns)

    def _size_for(self, count: int) -> int:
        """Return the batch that the engine takes for so many images: the rest of it is padding."""
        sizes = self._sizes
        steps = -(-max(count, sizes.min) // sizes.step)
        return min(steps * sizes.step, sizes.max)


class Seat:
    """A model of the pipeline: which frames it takes, and the network that runs it now."""

    def __init__(
        self,
        config: PipelineModel,
        spares: Sequence[PipelineModel],
        models: Mapping[str, Model],
        most: int,
    ) -> None:
        """`models`: by name; `most`: the most images of one inference."""
        self.config = config
        self._networks = {
            one.name: Network(one, models[one.name], most) for one in (config, *spares)
        }
        self.network = self._networks[config.name]
        self._counts: dict[str, int] = {}
        self._limits: dict[str, RateLimit] = {}

    @property
    def room(self) -> int:
        """The most images that any of its networks takes at once."""
        return max(network.room for network in self._networks.values())

    def warm_up(self) -> None:
        """Warm all networks up."""
        for network in self._networks.values():
            network.warm_up()

    def close(self) -> None:
        """Free what the inputs of all networks took."""
        for network in self._networks.values():
            network.close()

    def use(self, names: Sequence[str]) -> None:
        """Let the network of these that belongs here run from now on, or the model's own."""
        spare = next((name for name in names if name in self._networks), self.config.name)
        self.network = self._networks[spare]

    def takes(self, frame: Frame) -> bool:
        """Count a frame; return whether the model is to see it."""
        config = self.config
        if config.cameras and frame.camera not in config.cameras:
            return False
        count = self._counts.get(frame.camera, 0)
        self._counts[frame.camera] = count + 1
        if count % config.every_nth:
            return False
        if config.max_hz is UNSET:
            return True
        limit = self._limits.setdefault(frame.camera, RateLimit(config.max_hz))
        return limit.allows(frame.t_recv.mono_ns / 1e9)

    def change(self, config: PipelineModel, spares: Sequence[PipelineModel]) -> None:
        """Take other thresholds and another rate; all else is as before."""
        if config.max_hz != self.config.max_hz:
            self._limits.clear()
        self.config = config
        for one in (config, *spares):
            self._networks[one.name].decode = one.reading


def seats_of(
    networks: Sequence[PipelineModel], models: Mapping[str, Model], most: int
) -> dict[str, Seat]:
    """Return a seat for each model that does not replace another one, by name, in their order.

    `most`: the most frames of one inference.
    """
    return {
        one.name: Seat(
            one, spares_of(one.name, networks), models, one.max_crops if one.on else most
        )
        for one in networks
        if not one.replaces
    }


def spares_of(name: str, networks: Sequence[PipelineModel]) -> tuple[PipelineModel, ...]:
    """Return the models that replace a model."""
    return tuple(one for one in networks if one.replaces == name)
