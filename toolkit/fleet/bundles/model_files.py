"""Which engine and which labels that `tandem bundle` is given are those of which model."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from device.choices import list_choices
from device.errors import BundleError
from pipelines.config import PipelineConfig
from pipelines.model_config import PipelineModel
from pipelines.open_models import ModelFiles

KEYS: Mapping[str, str] = {"engine": "ENGINE", "labels": "--labels"}


def model_files(
    config: PipelineConfig, folder: Path, engines: Sequence[str], labels: Sequence[str]
) -> dict[str, ModelFiles]:
    """Return the files of each model of a pipeline, by name, the first one first.

    `engines`, `labels`: FILE, which is of each model whose row names a file of that name, or
    NAME=FILE. What is not given is what pipeline.toml names, relative to `folder`. Raises
    BundleError: a file is of no model, or a model has none.
    """
    chosen = {
        key: _given(config, key, texts) for key, texts in (("engine", engines), ("labels", labels))
    }
    return {
        model.name: ModelFiles(
            *(chosen[key].get(model.name) or _named(config, model, key, folder) for key in KEYS)
        )
        for model in config.networks
    }


def _given(config: PipelineConfig, key: str, texts: Sequence[str]) -> dict[str, Path]:
    """Return the files of a command line by the name of their model."""
    names = [model.name for model in config.networks]
    files: dict[str, Path] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if equals and not Path(text).exists():
            if name not in names:
                raise BundleError(
                    f"`tandem bundle {KEYS[key]} {text}`: pipeline {config.name!r} has no model"
                    f" {name!r}, use one of {list_choices(name, names)}"
                )
            owners = [name]
        else:
            path, owners = text, _owners(config, key, Path(text))
        if not Path(path).is_file():
            raise BundleError(f"`tandem bundle {KEYS[key]} {text}`: there is no file {path}")
        for owner in owners:
            if files.setdefault(owner, Path(path)) != Path(path):
                raise BundleError(
                    f"`tandem bundle` is given {files[owner]} and {path} as {key} of the model"
                    f" {owner!r}: name one of them"
                )
    return files


def _owners(config: PipelineConfig, key: str, path: Path) -> list[str]:
    """Return the models that a file without a model's name is of."""
    networks = config.networks
    if len(networks) == 1:
        return [networks[0].name]
    named = {model.name: Path(getattr(model, key)).name for model in networks}
    owners = [name for name, file in named.items() if file == path.name]
    if not owners:
        rows = ", ".join(f"{file or 'no file'} ({name})" for name, file in named.items())
        raise BundleError(
            f"{path} is {key} of no model of pipeline {config.name!r}, whose [[models]] name"
            f" {rows}: write NAME=FILE to say whose it is, or leave it out"
        )
    return owners


def _named(config: PipelineConfig, model: PipelineModel, key: str, folder: Path) -> Path:
    """Return the file that pipeline.toml names for a model."""
    path: str = getattr(model, key)
    which = f"the model {model.name!r} of pipeline" if config.models else "pipeline"
    example = f"{model.name}=FILE" if config.models else "FILE"
    add = f"add `{example}`" if key == "engine" else f"add `--labels {example}`"
    if not path:
        raise BundleError(f"{which} {config.name!r} has no {key}: {add} to `tandem bundle`")
    if not (folder / path).is_file():
        raise BundleError(
            f"{which} {config.name!r} names {path} as its {key}, and there is no file"
            f" {folder / path}: {add} to `tandem bundle`, or put the file there"
        )
    return folder / path
