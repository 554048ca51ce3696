"""Write a pipeline.toml, check one, and say what it may hold."""

import json
import re
import shlex
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import click
import msgspec
from msgspec import UNSET

from device.engine.file import open_engine
from device.errors import ConfigError
from pipelines.config import (
    PipelineConfig,
    load_labels,
    load_model,
    load_pipeline,
    parse_pipeline,
)
from pipelines.decode_config import DecodeConfig, Scored
from pipelines.open_models import ModelFiles, check_names, files_of
from pipelines.sources.live import Waiting
from pipelines.sources.table import open_source
from pipelines.sources.uri import redact
from pipelines.stages.fit import EngineFacts, check_engines
from pipelines.stages.scene import check_tracking
from pipelines.track_config import TrackerConfig
from toolkit.cli.actions.outputs import write_text
from toolkit.cli.commands.pipeline import Check, New, Schema
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
    "mcap": 'path = "seen.mcap"\n',
    "foxglove": "",
}


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


def new(options: New) -> None:
    """Write the file whole or not at all, and print what it does. Raises TandemError.

    Labels that are in no file yet are written beside it, first.
    """
    output = options.output
    if output.exists() and not options.overwrite:
        raise ConfigError(
            f"{output} is there already: choose another -o, or give"
            " `tandem pipeline new --overwrite`."
        )
    text, models = _text(options)
    config = parse_pipeline(text, output)
    _check_sources(config)
    new_labels = [model for model in models if model.names]
    for model in new_labels:
        write_text(model.labels, "".join(f"{name}\n" for name in model.names))
    write_text(output, text)
    lines = [f"{output}: {_summary(config)}", *(model.of_labels for model in new_labels)]
    click.echo("\n".join([*lines, f"Next: tandem pipeline check {output}"]))


def check(options: Check) -> None:
    """Check a file, and whether its engines fit, and print what it does.

    Engines and labels that are not given are files that pipeline.toml names. Raises TandemError:
    the first thing that is wrong.
    """
    path, labels = options.file, options.labels
    config = load_pipeline(path)
    _check_sources(config)
    first = config.first
    engines = {**options.engines, **({first.name: options.engine} if options.engine else {})}
    notes = []
    if config.kind == "service":
        check_names(config, engines)
    elif (engines or first.engine) and (labels or first.labels):
        notes = _check_engines(config, files_of(config, path.parent, engines, labels))
    else:
        if config.kind == "frames":
            check_tracking(config)
        files = {"engine": engines or first.engine, "labels": labels or first.labels}
        unnamed = [key for key, file in files.items() if not file]
        keys, flags = (" and ".join(f"`{dash}{key}`" for key in unnamed) for dash in ("", "--"))
        notes = [
            f"whether an engine fits was not checked, as the file names no {keys}: write what is"
            f" missing there, or give `tandem pipeline check` {flags}"
        ]
    if options.as_json:
        shown = {camera.id: redact(camera.uri) for camera in config.cameras}
        click.echo(msgspec.json.encode(config.with_sources(shown)).decode())
    else:
        click.echo("\n".join([f"{path}: {_summary(config)}", *notes]))


def schema(options: Schema) -> None:
    """Print or write the JSON Schema. Raises ConfigError: the file cannot be written."""
    if options.output is None:
        click.echo(pipeline_schema())
    else:
        write_text(options.output, pipeline_schema() + "\n")


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
    return [*notes, *(check_engines(config, facts) if config.kind == "frames" else [])]


def _text(options: New) -> tuple[str, list[_ModelText]]:
    """Return the text of the file, and what it says of each model."""
    folder = options.output.parent
    several = bool(options.beside or options.on_crops)
    prefix = PREFIX if several else ""
    first = _model_text(
        options.model, options.model.stem, folder, prefix, options.choose, track=options.track
    )
    models = [first]
    head = f"name = {string_text(options.name or first.name)}\n"
    if several:
        name = re.sub(r"[^A-Za-z0-9_-]", "_", first.name)[:64]
        tables = [_model_table(name, options.model, first, folder)]
        for files, keys in ((options.beside, ""), (options.on_crops, _on(name))):
            for model_name, file in files.items():
                follow = options.track and not keys and not any(model.tracked for model in models)
                models.append(_model_text(file, model_name, folder, prefix, track=follow))
                tables.append(_model_table(model_name, file, models[-1], folder, keys))
    else:
        head += _files_text(options.model, first.labels, folder)
        tables = [first.settings]
    parts = [
        head,
        f"[source]\nuri = {string_text(options.source)}\n",
        *tables,
        *(["[tracker]\n"] if options.track else []),
        *(
            f"[[sinks]]\nkind = {string_text(kind)}\n{SINK_TEXTS[kind]}"
            for kind in options.sinks or ("mqtt",)
        ),
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
    if config.service:
        return f"{config.name!r} runs {shlex.join(config.service.command)}"
    if config.kind == "serve":
        names = [model.name for model in config.models] or [config.name]
        return f"{config.name!r} serves {', '.join(names)}"
    sources = ", ".join(redact(camera.uri) for camera in config.cameras)
    kinds = [str(sink.__struct_config__.tag) for sink in config.sinks]
    decoders = ", ".join(
        f"{network.reading.__struct_config__.tag}{f' on {network.on}' if network.on else ''}"
        for network in config.networks
        if not network.replaces
    )
    sinks = ", ".join(kinds) or "nobody"
    tracks = ""
    if config.models and config.tracker is not UNSET:
        tracks = f", tracks objects of {config.followed.name}"
    return f"{config.name!r} reads {sources}, decodes {decoders}{tracks}, gives to {sinks}"
