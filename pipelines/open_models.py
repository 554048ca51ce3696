"""Opens the engines of a pipeline, with their labels, from the files that it names."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from msgspec import UNSET

from device.choices import list_choices
from device.engine.file import Engine, open_engine
from device.engine.manifest import UNCALIBRATED
from device.errors import ConfigError
from device.runtime.frames import frame_opener
from device.runtime.pool import turns_of
from device.runtime.session import Session
from device.update.bundle import ENGINE, INFO, LABELS, BundleModel, read_folder_info
from pipelines.config import PipelineConfig, PipelineModel, load_labels
from pipelines.runtime.lanes import Model, SessionHandle
from pipelines.service_config import no_service


class Opener(Protocol):
    """Opens a session of an engine: its DLA segments on a core, or where the engine says, and those
    whose frames take turns on the core of this turn."""

    def __call__(self, engine: Engine, dla_core: int | None, turn: int | None) -> Session:
        """Open a session; SessionError if this machine cannot run the engine."""


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model."""

    engine: Path
    labels: Path


def files_of(
    config: PipelineConfig,
    folder: Path,
    engines: Mapping[str, Path] | None = None,
    labels: Path | None = None,
) -> dict[str, ModelFiles]:
    """Return the files of each model, by name, the first one first.

    Paths of pipeline.toml are relative to `folder`. `engines` replace them by the model's name,
    `labels` those of the first model. Raises ConfigError: a file is not named, or a name is of no
    model.
    """
    no_service(config.kind, config.name)
    engines = engines or {}
    check_names(config, engines)
    first = _first_names(config)
    return {
        network.name: ModelFiles(
            engines.get(network.name) or _named(config, network, "engine", folder),
            labels
            if labels and network.name in first
            else _named(config, network, "labels", folder),
        )
        for network in config.networks
    }


def check_names(config: PipelineConfig, names: Iterable[str]) -> None:
    """Raise ConfigError if a name is of no model of a pipeline."""
    known = [network.name for network in config.networks]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"pipeline {config.name!r} has no model {name!r}: use one of"
                f" {list_choices(name, known)}."
            )


def bundle_files(
    config: PipelineConfig,
    folder: Path,
    engines: Mapping[str, Path] | None = None,
    labels: Path | None = None,
    pipeline: Path | None = None,
) -> dict[str, ModelFiles]:
    """Return the files of each model in the folder of a bundle; a folder that a person made has
    them where its pipeline.toml says, or under the names of a bundle's files.

    `engines` and `labels` replace them as in `files_of`; `pipeline`: that file, if it is another
    than the folder's. Raises ConfigError as that does, and BundleError: bundle.json is damaged.
    """
    no_service(config.kind, config.name)
    members = _members(folder)
    engines = engines or {}
    if not members:
        only = config.first
        ours = (folder / INFO).exists()  # then pipeline.toml says where the files came from
        if not config.models[1:]:
            if ours or not only.engine:
                engines = {only.name: folder / ENGINE, **engines}
            if ours or not only.labels:
                labels = labels or folder / LABELS
        return files_of(config, pipeline.parent if pipeline else folder, engines, labels)
    names = [network.name for network in config.networks]
    if unknown := [name for name in names if name not in members]:
        raise ConfigError(
            f"pipeline {config.name!r} has the model {unknown[0]!r}, which is none of the bundle's"
            f" ({', '.join(members)}): write the bundle again, with this pipeline.toml."
        )
    check_names(config, engines)
    first = _first_names(config)
    return {
        name: ModelFiles(
            engines.get(name, folder / members[name].engine),
            labels if labels and name in first else folder / members[name].labels,
        )
        for name in names
    }


def _first_names(config: PipelineConfig) -> set[str]:
    """Return the names of the first model and of those that replace it."""
    first = config.first.name
    return {
        network.name for network in config.networks if first in (network.name, network.replaces)
    }


def _members(folder: Path) -> dict[str, BundleModel]:
    """Return the models of an unpacked bundle of several by name; none where that is no such."""
    if not (folder / INFO).exists():
        return {}
    return {model.name: model for model in read_folder_info(folder).models}


def open_models(
    config: PipelineConfig,
    files: Mapping[str, ModelFiles],
    stack: ExitStack,
    open_session: Opener,
    warn: Callable[[str], None] = _log.warning,
) -> dict[str, Model]:
    """Return the models of a pipeline, by name, the first one first; `stack` closes them.

    `warn` hears of engines without calibration. Raises TandemError: a file cannot be used here.
    """
    if config.kind == "serve":
        raise ConfigError(
            f"pipeline {config.name!r} is of kind 'serve', which has no frames: `tandem serve` runs"
            " its engines."
        )
    models, first = {}, config.first.name
    for network in config.networks:
        labels = load_labels(files[network.name].labels)
        engine = stack.enter_context(open_engine(files[network.name].engine))
        if engine.manifest.uncalibrated:
            warn(f"{network.name}: {UNCALIBRATED}" if config.models else UNCALIBRATED)
        core = None if network.dla_core is UNSET else network.dla_core
        # Threads of other models have no context of their own for the kernels of frames.
        has_frames = first in (network.name, network.replaces)
        turns = tuple(
            SessionHandle(session, frame_opener(engine, session) if has_frames else None)
            for session in _sessions(engine, core, open_session, stack)
        )
        predicted_us: dict[str, float] = defaultdict(float)
        for node in engine.manifest.plan:
            predicted_us[node.processor] += node.predicted_us
        facts = engine.manifest.preprocessing
        models[network.name] = Model(
            turns[0].session,
            labels,
            engine.sha256,
            facts,
            turns[0].frames,
            turns[1:],
            predicted_us,
        )
    return models


def _sessions(
    engine: Engine, core: int | None, open_session: Opener, stack: ExitStack
) -> list[Session]:
    """Open a session, or one for each DLA core where frames take turns on them."""
    if core is not None:
        return [stack.enter_context(open_session(engine, core, None))]
    sessions = [stack.enter_context(open_session(engine, None, 0))]
    for turn in range(1, turns_of(engine, sessions[0])):
        sessions.append(stack.enter_context(open_session(engine, None, turn)))
    return sessions


def _named(config: PipelineConfig, model: PipelineModel, key: str, folder: Path) -> Path:
    path = model.engine if key == "engine" else model.labels
    if not path:
        which = f"the model {model.name!r} of pipeline" if config.models else "pipeline"
        run = f"tandem run PIPELINE.toml --model {model.name}=ENGINE"
        if key == "labels":
            run = "tandem run --labels"
        elif not config.models:
            run = "tandem run ENGINE --pipeline PIPELINE.toml"
        raise ConfigError(
            f"{which} {config.name!r} has no `{key}`: name the file there, or use `{run}`."
        )
    return folder / path
