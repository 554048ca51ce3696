"""[preprocess] and [[models]] of pipeline.toml: how models are fed, and several beside each other.

A model sees frames, or with `on` crops of another one's objects, or with `replaces` it waits for a
step of [load].
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from device.choices import list_choices
from device.engine.preprocessing import Preprocessing
from pipelines.decode_config import BOXLESS, Classification, DecodeConfig, TextRecognition
from pipelines.value import Fraction, Positive, PositiveFloat, Value

ONLY = "model"  # the name of a model that is not one of [[models]]
# Stages of `latency_ms` beside the models' own.
STAGES = (
    *("wait", "preprocess", "queue", "infer", "collect", "decode", "track", "sinks", "total"),
    "transport",
)
ModelName = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
DESCRIBERS = (Classification, TextRecognition)  # decoders that say something of a crop


class PreprocessConfig(Preprocessing, frozen=True, kw_only=True):
    """Frame -> network input of `width` by `height`; see `Preprocessing`."""

    width: Positive
    height: Positive

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        """The input's shape for one image."""
        return self.shape(self.height, self.width)


class PipelineModel(Value, frozen=True, kw_only=True):
    """One of several models.

    `engine` and `labels`: files, relative to pipeline.toml. `cameras`: those that it sees; empty
    means all. `every_nth`, `max_hz`: which of their frames. With `on` it is given crops of that
    model's objects: of `classes` (empty means all) and from `min_score` on, wider by `margin` of
    the box's sides, at most `max_crops` a frame; what it says becomes an attribute of the object.
    With `replaces` it runs instead of that model in steps of [load] that name it; what it leaves
    out is as in that model. `dla_core`: the core of all its DLA segments. `draw`: its results are
    shown on pictures.
    """

    name: ModelName
    engine: str = ""
    labels: str = ""
    preprocess: PreprocessConfig | UnsetType = UNSET
    decode: DecodeConfig | UnsetType = UNSET
    cameras: tuple[str, ...] = ()
    every_nth: Positive = 1
    max_hz: PositiveFloat | UnsetType = UNSET
    on: str = ""
    classes: tuple[str, ...] = ()
    min_score: Fraction = 0.0
    margin: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.0
    max_crops: Positive = 8
    replaces: str = ""
    dla_core: Annotated[int, Meta(ge=0, le=7)] | UnsetType = UNSET
    draw: bool = True

    @property
    def feeding(self) -> PreprocessConfig:
        """`preprocess`, which a checked model has."""
        assert self.preprocess is not UNSET
        return self.preprocess

    @property
    def reading(self) -> DecodeConfig:
        """`decode`, which a checked model has."""
        assert self.decode is not UNSET
        return self.decode


def check_models(models: Sequence[PipelineModel]) -> None:
    """Raise ValueError unless the names are known and their own, nothing goes in a circle, each
    decoder fits its place, and no key is without effect."""
    by_name = {model.name: model for model in models}
    if len(by_name) < len(models):
        names = [model.name for model in models]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two [[models]] are called {twice!r}: give each a name of its own")
    for model in models:
        if model.name in STAGES:
            raise ValueError(f"{model.name!r} is the name of a stage: call the model otherwise")
        _check_names(model, by_name)
    for model in models:
        _check_circle(model, by_name)
        _check_decoder(model, by_name)
        _check_keys(model)
    first = models[0]
    for key, is_set in (
        ("on", first.on),
        ("replaces", first.replaces),
        ("every_nth", first.every_nth > 1),
        ("max_hz", first.max_hz),
    ):
        if is_set:
            raise ValueError(
                f"{first.name!r} is the first of [[models]], which every frame is for, and has"
                f" `{key}`: put another one first, or set the rate in [source] or [tracker]"
            )


def followed_of(models: Sequence[PipelineModel], chosen: str) -> PipelineModel:
    """Return the model whose objects are followed: the one that is chosen by name, or the first one
    on frames that gives boxes, else the first."""
    on_frames = frame_models(models)
    if chosen:
        return next(model for model in on_frames if model.name == chosen)
    detectors = (model for model in on_frames if not isinstance(model.reading, BOXLESS))
    return next(detectors, models[0])


def frame_models(models: Sequence[PipelineModel]) -> tuple[PipelineModel, ...]:
    """Return the models that see frames and replace no other one."""
    return tuple(model for model in models if not (model.on or model.replaces))


def check_frame_model(models: Sequence[PipelineModel], name: str, where: str) -> None:
    """Raise ValueError unless a name that `where` has is of a model on frames."""
    names = [model.name for model in frame_models(models)]
    if name in names:
        return
    named = next((model for model in models if model.name == name), None)
    if named is None:
        raise ValueError(
            f"{where} names the model {name!r}, which is none of [[models]]: use one of"
            f" {list_choices(name, names)}"
        )
    target = named.on or named.replaces
    how = f"is on crops of {target!r}" if named.on else f"replaces {target!r}"
    raise ValueError(
        f"{where} names the model {name!r}, which {how}: name {target!r}, whose results"
        " have what it says"
    )


def with_inherited(models: Sequence[PipelineModel]) -> tuple[PipelineModel, ...]:
    """Return models of which those with `replaces` have what they left out."""
    by_name = {model.name: model for model in models}
    return tuple(
        _inherited(model, by_name[model.replaces]) if model.replaces else model for model in models
    )


def _inherited(fallback: PipelineModel, model: PipelineModel) -> PipelineModel:
    same = (
        "cameras", "every_nth", "max_hz", "on", "classes", "min_score", "margin", "max_crops",
        "draw",
    )  # fmt: skip
    return replace(
        fallback,
        engine=fallback.engine or model.engine,
        labels=fallback.labels or model.labels,
        preprocess=fallback.preprocess if fallback.preprocess is not UNSET else model.preprocess,
        decode=fallback.decode if fallback.decode is not UNSET else model.decode,
        **{name: getattr(model, name) for name in same},
    )


def _check_names(model: PipelineModel, by_name: Mapping[str, PipelineModel]) -> None:
    for key, target in (("on", model.on), ("replaces", model.replaces)):
        if target and target not in by_name:
            raise ValueError(
                f"the model {model.name!r} has {key} = {target!r}, which is none of [[models]]:"
                f" use one of {list_choices(target, by_name)}"
            )
    if model.replaces and by_name[model.replaces].replaces:
        raise ValueError(
            f"the model {model.name!r} replaces {model.replaces!r}, which replaces another one:"
            " name the one that runs without [load]"
        )
    if not model.replaces and (model.preprocess is UNSET or model.decode is UNSET):
        table = "preprocess" if model.preprocess is UNSET else "decode"
        raise ValueError(f"the model {model.name!r} has no [models.{table}]: add it")


def _check_circle(model: PipelineModel, by_name: Mapping[str, PipelineModel]) -> None:
    way = [model.name]
    while (target := by_name[way[-1]].on or by_name[way[-1]].replaces) and target != model.name:
        if target in way:
            return  # a circle further on: it is found from there
        way.append(target)
    if target:
        raise ValueError(
            f"the [[models]] go in a circle ({' -> '.join([*way, target])}): one of them must take"
            " frames, without `on`"
        )


def _check_decoder(model: PipelineModel, by_name: Mapping[str, PipelineModel]) -> None:
    """The models are known to be without circles."""
    if model.replaces:
        usual = by_name[model.replaces]
        if model.decode is not UNSET and not _same_kind(model.reading, usual.reading):
            raise ValueError(
                f"the model {model.name!r} decodes {_kind(model.reading)!r} and replaces"
                f" {usual.name!r}, which decodes {_kind(usual.reading)!r}: what they give must be"
                " of one kind"
            )
    elif model.on:
        if not isinstance(model.reading, DESCRIBERS):
            kinds = " or ".join(repr(str(kind.__struct_config__.tag)) for kind in DESCRIBERS)
            raise ValueError(
                f"the model {model.name!r} is on objects of {model.on!r}, and its decoder"
                f" {_kind(model.reading)!r} says nothing of one object: use {kinds}"
            )
        objects = by_name[model.on]
        if objects.replaces or isinstance(objects.reading, BOXLESS):
            why = "replaces another one" if objects.replaces else "gives no boxes"
            raise ValueError(
                f"the model {model.name!r} is on objects of {model.on!r}, which {why}: name a"
                " detector"
            )


def _check_keys(model: PipelineModel) -> None:
    """Refuse keys that would do nothing."""
    of_crops = ("classes", "min_score", "margin", "max_crops")
    of_frames = ("cameras", "every_nth", "max_hz")
    rows = (
        (not model.on, of_crops, "which is for crops: add `on`, or remove it"),
        (bool(model.on), of_frames, "and its crops follow from the objects: remove it"),
        (bool(model.replaces), (*of_crops, *of_frames, "on", "draw"),
         "which it has from the model that it replaces: remove it"),
    )  # fmt: skip
    for applies, keys, why in rows:
        for key in keys:
            if applies and getattr(model, key) != getattr(_DEFAULTS, key):
                raise ValueError(f"the model {model.name!r} has `{key}`, {why}")


def _same_kind(first: DecodeConfig, second: DecodeConfig) -> bool:
    boxless = [isinstance(one, BOXLESS) for one in (first, second)]
    return boxless == [False, False] or type(first) is type(second)


def _kind(decode: DecodeConfig) -> str:
    return str(decode.__struct_config__.tag)


_DEFAULTS = PipelineModel(name="defaults")
