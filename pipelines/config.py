"""pipeline.toml and the model files of `configs/models`, decoded once into frozen values."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from device.choices import list_choices
from device.errors import ConfigError
from device.toml_file import convert, parse_toml
from pipelines.decode_config import BOXLESS, DecodeConfig
from pipelines.load_config import LoadConfig
from pipelines.model_config import (
    ONLY,
    PipelineModel,
    PreprocessConfig,
    check_frame_model,
    check_models,
    followed_of,
    with_inherited,
)
from pipelines.service_config import ServiceConfig
from pipelines.sink_config import MqttSink, SerialSink, SinkConfig, resource_of
from pipelines.track_config import LineConfig, RoiConfig, TrackerConfig, ZoneConfig
from pipelines.value import Name, Positive, PositiveFloat
from pipelines.value import Value as _Value

__all__ = [
    "ModelConfig",
    "PipelineConfig",
    "PipelineModel",
    "PreprocessConfig",
    "SourceConfig",
    "load_labels",
    "load_model",
    "load_pipeline",
    "parse_pipeline",
]


class SourceConfig(_Value, frozen=True, kw_only=True):
    """Where frames come from.

    `uri`: see `pipelines.sources.table`. `frames`: "latest" drops what the engine cannot keep up
    with, "bounded" keeps frames in order while they are younger than `max_age_ms`, "every" runs
    each frame; unset: "every" of files, "latest" of cameras. `id` names the source where there are
    several. `loop` starts a file or folder again at its end. `stall_s`: a live source that gives no
    frame for so long is opened again. `max_hz`: at most so many frames a second are run.
    """

    uri: str
    id: Name = ""
    frames: Literal["latest", "bounded", "every"] | UnsetType = UNSET
    max_age_ms: PositiveFloat = 500.0
    loop: bool = False
    realtime: bool = True  # files: keep the pace of their frame rate
    stall_s: PositiveFloat = 2.0
    max_hz: PositiveFloat | UnsetType = UNSET


# Kind without frames -> its keys.
FRAMELESS: Mapping[str, tuple[str, ...]] = {
    "serve": ("name", "kind", "serve", "engine", "labels", "models"),
    "service": ("name", "kind", "service"),
}
Port = Annotated[int, Meta(ge=0, le=65535)]


class ServeConfig(_Value, frozen=True, kw_only=True):
    """[serve]: where a release of kind "serve" listens, and how it batches; port 0: none.

    `dynamic_batching`: requests that wait go together, at most `max_queue_delay_us` microseconds
    later. `token_file`, `certificate`, `key`, `client_ca`: files of the board. Another host than
    this machine's needs a token or a CA of clients.
    """

    host: str = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 8001
    metrics_port: Port = 8002
    dynamic_batching: bool = False
    max_queue_delay_us: Annotated[int, Meta(ge=0, le=10**7)] = 0
    max_request_mb: Positive = 64
    token_file: str = ""
    certificate: str = ""
    key: str = ""
    client_ca: str = ""


class PipelineConfig(_Value, frozen=True, kw_only=True):
    """pipeline.toml: sources that share models, what to follow, any sinks.

    `kind` "serve": no frames, but requests of clients, which `serve` says more of; "service": the
    program of another runtime, `service`.

    One source is `source`; several are `sources`, each with an `id`. One model is `preprocess` and
    `decode`, with `engine` and `labels` if no command line names these files; several are `models`,
    of which every frame is for the first. `batch`: the most frames of one
    inference, by default as many as there are sources and the engine takes.
    """

    name: str
    kind: Literal["frames", "serve", "service"] = "frames"
    serve: ServeConfig | UnsetType = UNSET
    service: ServiceConfig | UnsetType = UNSET
    source: SourceConfig | UnsetType = UNSET
    sources: tuple[SourceConfig, ...] = ()
    batch: Positive | UnsetType = UNSET
    load: LoadConfig | UnsetType = UNSET
    engine: str = ""
    labels: str = ""
    preprocess: PreprocessConfig | UnsetType = UNSET
    decode: DecodeConfig | UnsetType = UNSET
    models: tuple[PipelineModel, ...] = ()
    roi: RoiConfig | UnsetType = UNSET
    tracker: TrackerConfig | UnsetType = UNSET
    zones: tuple[ZoneConfig, ...] = ()
    lines: tuple[LineConfig, ...] = ()
    sinks: tuple[SinkConfig, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError unless there is a source, a name for each of several, models that go
        together, and sinks know whom they speak of."""
        if self.kind in FRAMELESS:
            self._check_frameless(FRAMELESS[self.kind])
            return
        for kind in FRAMELESS:
            if getattr(self, kind) is not UNSET:
                raise ValueError(f'[{kind}] belongs to `kind = "{kind}"`: add that, or remove it')
        self._check_frames()

    def _check_frameless(self, keys: Sequence[str]) -> None:
        field_names = self.__struct_fields__
        if extra := [key for key in field_names if getattr(self, key) and key not in keys]:
            raise ValueError(f'a pipeline of kind "{self.kind}" has no {extra[0]!r}: remove it')
        if self.kind == "service" and self.service is UNSET:
            raise ValueError('a pipeline of kind "service" needs [service]: add it')

    def _check_frames(self) -> None:
        if (self.source is UNSET) == (not self.sources):
            raise ValueError("write one [source], or [[sources]] for several")
        ids = [source.id for source in self.cameras]
        if len(set(ids)) < len(ids) or (len(ids) > 1 and "" in ids):
            raise ValueError(f"each of [[sources]] needs an `id` of its own, not {ids}")
        self._check_models(ids)
        for sink in self.sinks:
            if (
                isinstance(sink, SerialSink)
                and sink.camera not in ids
                and (sink.camera or len(ids) > 1)
            ):
                raise ValueError(
                    f"the serial sink of {sink.port} needs `camera`, the id of one source ({ids}),"
                    f" not {sink.camera!r}"
                )
        self._check_names()
        if sum(isinstance(sink, MqttSink) for sink in self.sinks) > 1:
            raise ValueError('write one [[sinks]] of kind "mqtt": two would share their topics')
        taken = [one for one in map(resource_of, self.sinks) if one is not None]
        for number, (what, name) in enumerate(taken):
            if (what, name) in taken[:number]:
                raise ValueError(f"two [[sinks]] have the {what} {name!r}: give each its own")

    def _check_models(self, ids: Sequence[str]) -> None:
        single = {"preprocess": self.preprocess, "decode": self.decode,
                  "engine": self.engine, "labels": self.labels}  # fmt: skip
        if self.models:
            extra = [key for key, value in single.items() if value]
            if extra:
                raise ValueError(f"[[models]] have {extra[0]!r} each: remove it at the top")
            check_models(self.models)
        elif missing := [key for key in ("preprocess", "decode") if not single[key]]:
            raise ValueError(f"it has no {missing[0]!r}: add it, or [[models]] for several models")
        for model in self.models:
            if strangers := [camera for camera in model.cameras if camera not in ids]:
                raise ValueError(
                    f"the model {model.name!r} sees the camera {strangers[0]!r}, which is no id of"
                    f" [[sources]]: use one of {list_choices(strangers[0], ids)}"
                )
        fallbacks = {model.name: model.replaces for model in self.models if model.replaces}
        for step in () if self.load is UNSET else self.load.steps:
            if unknown := [name for name in step.use if name not in fallbacks]:
                raise ValueError(
                    f"[load] uses {unknown[0]!r}, which is none of [[models]] with `replaces`"
                    f" ({', '.join(fallbacks) or 'there are none'})"
                )
            if len({fallbacks[name] for name in step.use}) < len(step.use):
                raise ValueError(f"[load] uses {list(step.use)} at once, which replace one model")

    def _check_names(self) -> None:
        """The tracker and sinks name models on frames, and the one that is followed sees every
        frame of its cameras."""
        networks = self.networks
        for sink in self.sinks:
            kind = sink.__struct_config__.tag
            for name in getattr(sink, "models", ()):
                check_frame_model(networks, name, f"the {kind} sink")
                reading = next(network.reading for network in networks if network.name == name)
                if isinstance(sink, SerialSink) and isinstance(reading, BOXLESS):
                    raise ValueError(
                        f"the serial sink names the model {name!r}, which gives no boxes: name"
                        " detectors"
                    )
        if self.tracker is UNSET:
            return
        if self.tracker.model:
            check_frame_model(networks, self.tracker.model, "[tracker]")
        followed = self.followed
        for key in ("every_nth", "max_hz"):
            if getattr(followed, key) not in (1, UNSET):
                raise ValueError(
                    f"the model {followed.name!r}, which [tracker] follows, has `{key}`: set the"
                    " rate in [tracker] or [source], or let `model` of [tracker] name another one"
                )

    @property
    def networks(self) -> tuple[PipelineModel, ...]:
        """All models, that of a pipeline without [[models]] included."""
        if self.models:
            return with_inherited(self.models)
        return (
            PipelineModel(
                name=ONLY,
                engine=self.engine,
                labels=self.labels,
                preprocess=self.preprocess,
                decode=self.decode,
            ),
        )

    @property
    def first(self) -> PipelineModel:
        """The model that every frame is for."""
        return self.networks[0]

    @property
    def followed(self) -> PipelineModel:
        """The model whose objects tracker, zones and lines follow."""
        chosen = "" if self.tracker is UNSET else self.tracker.model
        return followed_of(self.networks, chosen)

    @property
    def cameras(self) -> tuple[SourceConfig, ...]:
        """All sources."""
        return self.sources if self.source is UNSET else (self.source,)

    @property
    def lost_s(self) -> float:
        """After how long an object has gone that was not seen."""
        return (TrackerConfig() if self.tracker is UNSET else self.tracker).lost_s

    def with_source(self, text: str) -> "PipelineConfig":
        """Return the pipeline with another address, written `URI`, or `ID=URI` for one of several.

        Raises ConfigError: there is no such source.
        """
        ids = [source.id for source in self.cameras]
        name, equals, uri = text.partition("=")
        if len(ids) == 1 and (self.source is not UNSET or name not in ids):
            return self.with_sources({ids[0]: text})
        if not equals or name not in ids:
            raise ConfigError(
                f"pipeline {self.name!r} has {len(ids)} sources: write ID=URI with one of"
                f" {list_choices(name, ids)}."
            )
        return self.with_sources({name: uri})

    def with_sources(self, uris: Mapping[str, str]) -> "PipelineConfig":
        """Return the pipeline with other addresses, by the id of their source.

        Raises ConfigError: there is no such source.
        """
        ids = [source.id for source in self.cameras]
        if strangers := [name for name in uris if name not in ids]:
            raise ConfigError(
                f"pipeline {self.name!r} has no source {strangers[0]!r}: its ids are"
                f" {list_choices(strangers[0], filter(None, ids))}; correct [sources] in"
                " agent.toml, or the ids in pipeline.toml."
            )
        cameras = tuple(
            msgspec.structs.replace(source, uri=uris.get(source.id, source.uri))
            for source in self.cameras
        )
        if self.source is not UNSET:
            return msgspec.structs.replace(self, source=cameras[0])
        return msgspec.structs.replace(self, sources=cameras)


class ModelConfig(_Value, frozen=True, kw_only=True):
    """A file of `configs/models`: a model with its labels and how to feed and read it.

    Paths are relative to the file's own folder.
    """

    name: str
    file: str
    labels: str
    calibration: str = ""
    preprocess: PreprocessConfig
    decode: DecodeConfig


T = TypeVar("T", bound=_Value)


def load_pipeline(path: str | Path) -> PipelineConfig:
    """Return the pipeline in a TOML file, or raise ConfigError naming the file and the key."""
    return _load(Path(path), PipelineConfig)


def load_model(path: str | Path) -> ModelConfig:
    """Return the model in a TOML file, or raise ConfigError naming the file and the key."""
    return _load(Path(path), ModelConfig)


def load_labels(path: str | Path) -> tuple[str, ...]:
    """Return the class names of a labels.txt: one a line, in the order of the class ids."""
    # Not `splitlines` and not every blank: alphabets have U+2028 and the wide space as characters.
    names = tuple(line.strip(" \t\r\ufeff") for line in _read(Path(path)).split("\n"))
    names = names[: len(names) - next((i for i, n in enumerate(reversed(names)) if n), len(names))]
    if not names or not all(names):
        raise ConfigError(
            f"{path} holds {'an empty line' if names else 'no labels'}: write one class name a"
            " line, in the order of the model's class ids."
        )
    return names


def parse_pipeline(text: str, path: Path) -> PipelineConfig:
    """Return the pipeline in a text that is or will be at `path`; raises as `load_pipeline`."""
    return _parse(text, path, PipelineConfig)


def _load(path: Path, kind: type[T]) -> T:
    return _parse(_read(path), path, kind)


def _parse(text: str, path: Path, kind: type[T]) -> T:
    try:
        tree = parse_toml(text.encode())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML ({error}): mend it there.") from error
    try:
        return convert(tree, kind)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}.") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check the path.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8."
        ) from error
