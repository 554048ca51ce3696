"""Write a pipeline.toml, check one, and say what it may hold."""

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from msgspec import UNSET

from device.engine.file import open_engine
from device.errors import ConfigError
from device.files import replacing
from pipelines.config import (
    PipelineConfig,
    load_labels,
    load_model,
    load_pipeline,
    parse_pipeline,
)
from pipelines.decode_config import DecodeConfig, Scored
from pipelines.open_models import ModelFiles, files_of
from pipelines.sources.live import Waiting
from pipelines.sources.table import open_source
from pipelines.sources.uri import redact
from pipelines.stages.fit import EngineFacts, check_engines
from pipelines.stages.scene import check_tracking
from pipelines.track_config import TrackerConfig
from toolkit.errors import GuessError
from toolkit.guess.proposal import names_of_classes
from toolkit.guess.rules import guess
from toolkit.guess.toml_text import (
    guessed_text,
    model_settings_text,
    relative_path,
    string_text,
)

PREFIX = "models."  # of the tables of one of [[models]]
# kind -> what a new file says of the sink
SINK_TEXTS = {
    "mqtt": "",
    "jsonl": 'path = "results.jsonl"\n',
    "video": 'path = "seen.mp4"\n',
    "serial": 'port = "/dev/ttyTHS1"\n',
    "prometheus": "",
}


@dataclass(frozen=True, slots=True)
class NewPipeline:
    """The command line of `tandem pipeline new`. `beside`, `on_crops`: other models by name, on
    frames and on crops of the first one's objects."""

    model: Path
    beside: Mapping[str, Path]
    on_crops: Mapping[str, Path]
    source: str
    name: str | None
    track: bool
    sinks: tuple[str, ...]
    choose: int | None
    output: Path
    overwrite: bool


@dataclass(frozen=True, slots=True)
class _ModelText:
    """What pipeline.toml says of a model; `settings` are its [preprocess] and [decode].

    `names`: the classes, for the file `labels`, which is not there yet; else empty. `tracked`: its
    objects are followed.
    """

    name: str
    settings: str
    labels: Path
    names: tuple[str, ...] = ()
    named: bool = True
    tracked: bool = False

    @property
    def of_labels(self) -> str:
        """What is said of the labels that are written."""
        count = f"{len(self.names)} class{'es' if len(self.names) > 1 else ''}"
        if self.named:
            return f"{self.labels}: {count}, named by the model's metadata"
        return f"{self.labels}: {count}, which the model does not name: name them there"


def write_pipeline(request: NewPipeline) -> str:
    """Write the file whole or not at all; return what is said of it. Raises TandemError.

    Labels that are in no file yet are written beside it, first.
    """
    if request.output.exists() and not request.overwrite:
        raise ConfigError(
            f"{request.output} is there already: choose another -o, or give"
            " `tandem pipeline new --overwrite`."
        )
    text, models = _text(request)
    config = parse_pipeline(text, request.output)
    _check_sources(config)
    new_labels = [model for model in models if model.names]
    for model in new_labels:
        _write(model.labels, "".join(f"{name}\n" for name in model.names))
    _write(request.output, text)
    lines = [f"{request.output}: {_summary(config)}", *(model.of_labels for model in new_labels)]
    return "\n".join([*lines, f"Next: tandem pipeline check {request.output}"])


def check_pipeline(
    path: Path, engines: Mapping[str, Path], labels: Path | None, *, as_json: bool
) -> str:
    """Check a file, and whether its engines fit; return what is said of it.

    `engines`: by the model's name, "" is the first; those of other models, and what is not given,
    are files that pipeline.toml names. Raises TandemError: the first thing that is wrong.
    """
    config = load_pipeline(path)
    _check_sources(config)
    first = config.first
    engines = {name or first.name: engine for name, engine in engines.items()}
    if (engines or first.engine) and (labels or first.labels):
        notes = _check_engines(config, files_of(config, path.parent, engines, labels))
    else:
        check_tracking(config)
        files = {"engine": engines or first.engine, "labels": labels or first.labels}
        unnamed = [key for key, file in files.items() if not file]
        keys, options = (" and ".join(f"`{dash}{key}`" for key in unnamed) for dash in ("", "--"))
        notes = [
            f"whether an engine fits was not checked, as the file names no {keys}: write what is"
            f" missing there, or give `tandem pipeline check` {options}"
        ]
    if as_json:
        shown = {camera.id: redact(camera.uri) for camera in config.cameras}
        return msgspec.json.encode(config.with_sources(shown)).decode()
    return "\n".join([f"{path}: {_summary(config)}", *notes])


def pipeline_schema() -> str:
    """Return the JSON Schema of pipeline.toml."""
    _, components = msgspec.json.schema_components((PipelineConfig,), ref_template="#/$defs/{name}")
    page = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pipeline.toml",
        "$ref": f"#/$defs/{PipelineConfig.__name__}",
        "$defs": components,
    }
    return json.dumps(page, indent=2, sort_keys=True)


def write_schema(path: Path) -> None:
    """Write the JSON Schema of pipeline.toml. Raises ConfigError: the file cannot be written."""
    _write(path, pipeline_schema() + "\n")


def _write(path: Path, text: str) -> None:
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}): check the path."
        ) from error


def _check_sources(config: PipelineConfig) -> None:
    """Raise SourceError for an address that cannot be right, or a file that is not there."""
    waiting = Waiting(threading.Event(), patient=True)
    for camera in config.cameras:
        open_source(camera, waiting)  # not entered: cameras may be away


def _check_engines(config: PipelineConfig, files: Mapping[str, ModelFiles]) -> list[str]:
    facts, notes = {}, []
    for name, one in files.items():
        with open_engine(one.engine) as engine:
            manifest = engine.manifest
        tensors = {tensor.name: tensor for tensor in manifest.tensors}
        facts[name] = EngineFacts(
            [tensors[tensor] for tensor in manifest.inputs],
            [tensors[tensor] for tensor in manifest.outputs],
            load_labels(one.labels),
            manifest.dims,
            manifest.preprocessing,
        )
        which = f"{name} " if config.models else "it "
        notes.append(
            f"{which}fits {one.engine}, an engine for {manifest.profile}, and {one.labels}"
        )
    return [*notes, *check_engines(config, facts)]


def _text(request: NewPipeline) -> tuple[str, list[_ModelText]]:
    """Return the text of the file, and what it says of each model."""
    folder = request.output.parent
    several = bool(request.beside or request.on_crops)
    prefix = PREFIX if several else ""
    first = _model_text(
        request.model, request.model.stem, folder, prefix, request.choose, track=request.track
    )
    models = [first]
    head = f"name = {string_text(request.name or first.name)}\n"
    if several:
        name = re.sub(r"[^A-Za-z0-9_-]", "_", first.name)[:64]
        tables = [_model_table(name, request.model, first, folder)]
        for others, keys in ((request.beside, ""), (request.on_crops, _on(name))):
            for other, file in others.items():
                follow = request.track and not keys and not any(one.tracked for one in models)
                models.append(_model_text(file, other, folder, prefix, track=follow))
                tables.append(_model_table(other, file, models[-1], folder, keys))
    else:
        head += _files_text(request.model, first.labels, folder)
        tables = [first.settings]
    parts = [
        head,
        f"[source]\nuri = {string_text(request.source)}\n",
        *tables,
        *(["[tracker]\n"] if request.track else []),
        *(f"[[sinks]]\nkind = {string_text(kind)}\n{SINK_TEXTS[kind]}" for kind in request.sinks),
    ]
    return "\n".join(parts), models


def _model_table(name: str, path: Path, model: _ModelText, folder: Path, keys: str = "") -> str:
    """Return the table of one of [[models]]."""
    files = _files_text(path, model.labels, folder)
    return f"[[models]]\nname = {string_text(name)}\n{keys}{files}{model.settings}"


def _on(detector: str) -> str:
    return f"on = {string_text(detector)}\n"


def _files_text(path: Path, labels: Path, folder: Path) -> str:
    """Return the keys of a model's files: the engine, if it is one, and the labels."""
    files = {"engine": path} if path.suffix == ".engine" else {}
    return "".join(
        f"{key} = {string_text(relative_path(file, folder))}\n"
        for key, file in {**files, "labels": labels}.items()
    )


def _model_text(
    path: Path,
    name: str,
    folder: Path,
    prefix: str,
    choose: int | None = None,
    *,
    track: bool = False,
) -> _ModelText:
    """Return what is said of a model in a pipeline.toml in `folder`, with a prefix of the tables.

    `name` is that of new labels, `choose`: which of several readings. `track`: the tracker follows
    its objects, if it gives some.
    """
    if path.suffix == ".toml":
        model = load_model(path)
        labels = path.parent / model.labels
        track = track and isinstance(model.decode, Scored)
        if track:
            model = msgspec.structs.replace(model, decode=_with_weak_detections(model.decode))
        settings = model_settings_text(model, prefix)
        return _ModelText(model.name, settings, labels, tracked=track)
    facts, proposal = guess(path, None)
    count = len(proposal.candidates)
    if choose is None and proposal.sureness == "ask":
        kinds = "; ".join(f"{n}: {one.kind}" for n, one in enumerate(proposal.candidates, start=1))
        raise GuessError(
            f"{path} does not show how it is read ({kinds}): choose with"
            " `tandem pipeline new --choose NUMBER` for --model; for another one, name a model.toml"
            " that `tandem model guess --choose NUMBER` writes."
        )
    if choose is not None and choose > count:
        raise GuessError(f"{path} has {count} readings, and --choose is {choose}.")
    candidate = proposal.candidates[(choose or 1) - 1]
    track = track and isinstance(candidate.decode, Scored)
    if track:
        candidate = replace(candidate, decode=_with_weak_detections(candidate.decode))
    settings = guessed_text(facts, proposal, candidate, prefix)
    labels = folder / f"{name}.labels.txt"
    for file in (path.with_suffix(".labels.txt"), labels):
        if file.exists():
            return _ModelText(path.stem, settings, file, tracked=track)
    names = names_of_classes(facts, proposal, candidate)
    return _ModelText(path.stem, settings, labels, names, bool(proposal.labels), tracked=track)


def _with_weak_detections(decode: DecodeConfig) -> DecodeConfig:
    """Return a decoder that lets through what the tracker wants: weak detections extend tracks, and
    those that do not are left out of the results."""
    assert isinstance(decode, Scored)
    threshold = min(decode.score_threshold, TrackerConfig().low_score)
    return msgspec.structs.replace(decode, score_threshold=threshold)


def _summary(config: PipelineConfig) -> str:
    sources = ", ".join(redact(camera.uri) for camera in config.cameras)
    kinds = [str(sink.__struct_config__.tag) for sink in config.sinks]
    decoders = ", ".join(
        f"{one.reading.__struct_config__.tag}{f' on {one.on}' if one.on else ''}"
        for one in config.networks
        if not one.replaces
    )
    sinks = ", ".join(kinds) or "nobody"
    tracks = ""
    if config.models and config.tracker is not UNSET:
        tracks = f", tracks objects of {config.followed.name}"
    return f"{config.name!r} reads {sources}, decodes {decoders}{tracks}, gives to {sinks}"
