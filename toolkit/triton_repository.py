"""Triton's model repositories (`toolkit.export.triton` writes one), read into engines."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from device.engine.manifest import DimRange
from device.errors import TandemError
from pipelines.serving.messages import message
from pipelines.serving.model_config import CONFIG, Config, inside, read_config, write_config
from pipelines.serving.repository import Source, scan
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.errors import BuildError
from toolkit.export.folder import new_folder
from toolkit.importers.refusals import tensors_of


@dataclass(frozen=True, slots=True)
class ImportedVersion:
    """A version that was read: `file` is what serves it, `note` why that is no engine."""

    model: str
    version: int
    file: str
    note: str = ""


def import_triton(
    repository: Path, output: Path, profile: str, options: BuildOptions
) -> list[ImportedVersion]:
    """Write a repository whose models are engines, for `tandem serve`.

    A model.onnx that cannot be built is kept, and runs by onnxruntime. Raises BuildError: `output`
    exists, or the repository has no model; ConfigError: it cannot be read.
    """
    sources = scan(repository)
    if not sources:
        raise BuildError(
            f"{repository} has no model: no folder in it has {CONFIG} or 1/model.onnx."
        )
    rows: list[ImportedVersion] = []
    with new_folder(output) as folder:
        for source in sources.values():
            rows += _import_model(source, folder / source.name, profile, options)
    return rows


def _import_model(
    source: Source, folder: Path, profile: str, options: BuildOptions
) -> Iterator[ImportedVersion]:
    folder.mkdir()
    config = read_config(source.config) if source.config else message("ModelConfig")()
    ensemble = config.HasField("ensemble_scheduling")
    for name in () if ensemble else ("platform", "backend", "default_model_filename"):
        config.ClearField(name)
    (folder / CONFIG).write_text(write_config(config))
    for row in config.output:
        labels = inside(source.folder, row.label_filename)
        if labels.is_file():
            _copy(labels, inside(folder, row.label_filename))
    for version, path in source.versions.items():
        place = folder / str(version)
        place.mkdir(exist_ok=True)
        if ensemble:
            file, note = "ensemble", ""
        elif path.is_dir():
            names = ", ".join(sorted(one.name for one in path.iterdir())) or "nothing"
            file, note = "", f"it has no model.onnx, but {names}"
        else:
            file, note = _import_file(path, place, profile, _sized(options, path, config))
        yield ImportedVersion(source.name, version, file, note)


def _import_file(path: Path, folder: Path, profile: str, options: BuildOptions) -> tuple[str, str]:
    """Build an engine of a model.onnx, or copy the file; return its name, and why it is a copy."""
    note = ""
    if path.suffix == ".onnx":
        try:
            build_engine(path, profile, folder / "model.engine", options)
            return "model.engine", ""
        except TandemError as error:
            note = f"not built, and `tandem build` says why and has the options: {error}"
    _copy(path, folder / path.name)
    locations = {
        entry.value
        for one in (tensors_of(_proto(path)) if path.suffix == ".onnx" else ())
        for entry in one.external_data
        if entry.key == "location"
    }
    for name in sorted(locations):
        if (weights := inside(path.parent, name)).is_file():
            _copy(weights, inside(folder, name))
    return path.name, note


def _proto(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(path, load_external_data=False)
    except (DecodeError, ValueError):
        return onnx.ModelProto()  # the build says that the file is damaged


def _copy(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)


def _sized(options: BuildOptions, path: Path, config: Config) -> BuildOptions:
    """Return the options with the sizes that a configuration gives to symbolic dimensions."""
    if path.suffix != ".onnx":
        return options
    graph = _proto(path).graph
    weights = {one.name for one in graph.initializer}
    sizes: dict[str, DimRange] = {}
    rows = {row.name: row for row in config.input}
    for value in graph.input:
        row = rows.get(value.name)
        if value.name in weights or row is None:
            continue
        dims = list(row.reshape.shape if row.HasField("reshape") else row.dims)
        largest = config.max_batch_size
        outer = ([largest] if largest else []) + dims
        for number, (dim, size) in enumerate(zip(value.type.tensor_type.shape.dim, outer)):  # noqa: B905
            if dim.dim_param and size > 0:
                least = 1 if largest and number == 0 else size
                name = dim.dim_param
                sizes[name] = DimRange(name=name, min=least, opt=size, max=size)
    return replace(options, dims=tuple(sizes.values()))
