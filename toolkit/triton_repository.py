"""Triton's model repositories: written of an engine, and read into engines.

NAME/config.pbtxt      what clients see, and how requests are batched
NAME/VERSION/          model.onnx for Triton's onnxruntime, or model.engine for `tandem serve`
NAME/tensorrt/         models and trtexec scripts, of which a board with TensorRT makes model.plan
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from device.engine.file import open_engine
from device.engine.manifest import DimRange
from device.errors import TandemError
from pipelines.serving.messages import message
from pipelines.serving.model import ports_of_engine
from pipelines.serving.model_config import CONFIG, Config, complete, read_config, write_config
from pipelines.serving.repository import Source, scan
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.errors import BuildError
from toolkit.export.folder import export_trtexec, write_model
from toolkit.export.network import joined_model


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """A model that was written; `problem`: why it has no scripts for TensorRT."""

    folder: Path
    max_batch_size: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ImportedVersion:
    """A version that was read: `file` is what serves it, `note` why that is no engine."""

    model: str
    version: int
    file: str
    note: str = ""


def export_triton(engine_path: Path, repository: Path) -> ExportedModel:
    """Write an engine as a model of a repository, called like its file.

    Raises BuildError: the model is there, or cannot be written as ONNX; EngineError.
    """
    name = engine_path.stem
    with open_engine(engine_path) as engine:
        inputs, outputs = ports_of_engine(engine.manifest)
        model = joined_model(engine)
    config = complete(message("ModelConfig")(), name, "onnxruntime_onnx", inputs, outputs)
    config.backend = "onnxruntime"
    if config.max_batch_size > 1:
        config.dynamic_batching.max_queue_delay_microseconds = 0
        config.dynamic_batching.preserve_ordering = False
    with _new_folder(repository / name) as folder:
        (folder / "1").mkdir()
        write_model(folder / "1" / "model.onnx", model)
        (folder / CONFIG).write_text(write_config(config))
        problem = ""
        try:
            export_trtexec(engine_path, folder / "tensorrt")
        except TandemError as error:
            problem = str(error)
    return ExportedModel(repository / name, config.max_batch_size, problem)


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
    with _new_folder(output) as folder:
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
        if row.label_filename and (source.folder / row.label_filename).is_file():
            shutil.copyfile(source.folder / row.label_filename, folder / row.label_filename)
    for version, path in source.versions.items():
        place = folder / str(version)
        place.mkdir()
        if ensemble:
            file, note = "ensemble", ""
        elif path.is_dir():
            held = ", ".join(sorted(one.name for one in path.iterdir())) or "nothing"
            file, note = "", f"it has no model.onnx, but {held}"
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
            note = f"not built: {error}"
    for one in (path, *path.parent.glob("*.data")):  # weights beside ONNX
        shutil.copyfile(one, folder / one.name)
    return path.name, note


def _sized(options: BuildOptions, path: Path, config: Config) -> BuildOptions:
    """Return the options with the sizes that a configuration gives to symbolic dimensions."""
    if path.suffix != ".onnx":
        return options
    graph = onnx.load(path, load_external_data=False).graph
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


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Give a folder that appears whole or not at all. Raises BuildError: it exists."""
    if folder.exists():
        raise BuildError(f"{folder} exists; give --output a folder that does not.")
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.rename(temporary, folder)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error.strerror}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
