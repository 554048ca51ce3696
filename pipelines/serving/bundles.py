"""Bundles in a repository: their engines, and models that take pictures and give results."""

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET

from device.errors import ConfigError, TandemError
from device.update.bundle import INFO, PIPELINE, extract_bundle, read_folder_info
from pipelines.config import PipelineConfig, PipelineModel, load_labels, load_pipeline
from pipelines.decode_config import BOXLESS
from pipelines.open_models import bundle_files
from pipelines.results import ClassScores, Detections, label_of
from pipelines.serving.messages import message
from pipelines.serving.model import Model
from pipelines.serving.model_config import ENSEMBLE, Port, complete
from pipelines.serving.protocol import BYTES, Array, InferRequest, Tensor, refuse

SUFFIX = ".bundle"
PICTURE = "_picture"  # behind the engine's name
MAX_BUNDLES = 64  # unpacked at once


@dataclass(frozen=True, slots=True)
class BundleModel:
    """A model of a bundle; `picture`: how pictures become its input, None for the engine itself."""

    name: str
    engine: Path
    labels: Path
    config: str
    picture: PipelineModel | None = None


def is_bundle(path: Path) -> bool:
    """Whether a path is a bundle, or its unpacked folder."""
    return path.suffix == SUFFIX if path.is_file() else (path / INFO).is_file()


def models_of(path: Path) -> list[BundleModel]:
    """Return the models of a bundle or of its unpacked folder. Raises TandemError."""
    folder = path
    if path.is_file():
        status = path.stat()
        folder = Path(_unpacked(path, status.st_mtime_ns, status.st_size).name) / "bundle"
    return models_in(folder, load_pipeline(folder / PIPELINE))


def models_in(folder: Path, config: PipelineConfig) -> list[BundleModel]:
    """Return the models of a pipeline in its folder. Raises TandemError."""
    name = read_folder_info(folder).name if (folder / INFO).exists() else config.name
    files, rows = bundle_files(config, folder), []
    for network in config.networks:
        model_name = network.name if config.models else name
        engine, labels = files[network.name].engine, files[network.name].labels
        rows.append(BundleModel(model_name, engine, labels, _settings(config, network)))
        if config.kind == "frames" and not network.on:
            rows.append(BundleModel(model_name + PICTURE, engine, labels, "", network))
    return rows


def _settings(config: PipelineConfig, network: PipelineModel) -> str:
    """Return what config.pbtxt says of a model, where a pipeline says it."""
    text = ""
    if config.serve and config.serve.dynamic_batching:
        delay_us = config.serve.max_queue_delay_us
        text = f"dynamic_batching {{ max_queue_delay_microseconds: {delay_us} }} "
    if network.dla_core is not UNSET:
        device = f"secondary_devices {{ kind: KIND_NVDLA device_id: {network.dla_core} }}"
        text += f"instance_group {{ count: 1 {device} }}"
    return text


@lru_cache(MAX_BUNDLES)
def _unpacked(path: Path, _changed_ns: int, _size: int) -> "tempfile.TemporaryDirectory[str]":
    folder = tempfile.TemporaryDirectory(prefix="tandem-serve-")
    extract_bundle(path, Path(folder.name) / "bundle")
    return folder


class PictureModel(Model):
    """JPEG and other pictures in, detections or classes out: the stages of the pipeline."""

    def __init__(
        self, version: int, source: BundleModel, find: Callable[[str, str], Model]
    ) -> None:
        """`find` returns the engine's model. Raises TandemError: OpenCV or a file is missing."""
        assert source.picture is not None
        try:
            from pipelines.pictures import decode_picture
            from pipelines.stages.decode import constant_inputs, decode, view_of
            from pipelines.stages.preprocess import preprocess
        except ModuleNotFoundError as error:
            raise ConfigError(f"model {source.name!r} needs {error.name} for pictures.") from error
        self._decode_picture, self._preprocess = decode_picture, preprocess
        self._decode, self._view_of = decode, view_of
        self._picture, self._find = source.picture, find
        self._engine = source.name.removesuffix(PICTURE)
        self._labels = load_labels(source.labels)
        self._constants = constant_inputs(source.picture.reading, source.picture.feeding)
        boxes = () if isinstance(source.picture.reading, BOXLESS) else (
            Port("boxes", "FP32", (None, 4)),
        )  # fmt: skip
        outputs = (
            *boxes,
            Port("scores", "FP32", (None,)),
            Port("class_ids", "INT64", (None,)),
            Port("labels", BYTES, (None,)),
        )
        config = message("ModelConfig")(backend="tandem_pipeline")
        for rows, ports in ((config.input, IMAGE), (config.output, outputs)):
            for port in ports:
                dims = [dim if isinstance(dim, int) else -1 for dim in port.dims]
                kind = "TYPE_STRING" if port.datatype == BYTES else f"TYPE_{port.datatype}"
                rows.add(name=port.name, data_type=kind, dims=dims)
        full = complete(config, source.name, ENSEMBLE, IMAGE, outputs)
        super().__init__(version, full, IMAGE, outputs, source.labels.parent)

    def close(self) -> None:
        """There is nothing to close: the engine is a model of its own."""

    async def run(self, request: InferRequest) -> dict[str, Array]:
        """Decode the picture, run the engine on it, decode what it says."""
        data = request.inputs[0].data[0]
        try:
            blob, view = await asyncio.to_thread(self._prepare, data)
        except TandemError as error:
            refuse(f"input 'image' of model {self.name!r}: {error}")
        feeds: Mapping[str, Any] = {**self._constants, self._input_name(): blob}
        inner = self._find(self._engine, "")
        inputs = [
            Tensor(name, inner.inputs[name].datatype, array.shape, array)
            for name, array in feeds.items()
        ]
        tensors = await inner.infer(InferRequest(self._engine, "", inputs, id=request.id))
        outputs = {tensor.name: tensor.data for tensor in tensors}
        result = await asyncio.to_thread(self._decode, outputs, self._picture.reading, view)
        if not isinstance(result, Detections | ClassScores):
            refuse(f"model {self.name!r} gives {type(result).__name__}: ask {self._engine!r}")
        labels = np.empty(len(result.scores), object)
        labels[:] = [
            label_of(self._labels, int(class_id)).encode() for class_id in result.class_ids
        ]
        answer: dict[str, Array] = {
            "scores": result.scores.astype(np.float32),
            "class_ids": result.class_ids.astype(np.int64),
            "labels": labels,
        }
        if "boxes" in self.outputs:
            assert isinstance(result, Detections)
            answer["boxes"] = result.boxes.astype(np.float32)
        return answer

    def _input_name(self) -> str:
        inputs = self._find(self._engine, "").inputs
        return next(name for name in inputs if name not in self._constants)

    def _prepare(self, data: bytes) -> tuple[Array, Any]:
        image = self._decode_picture(data)
        blob, geometry = self._preprocess(image, self._picture.feeding)
        return blob, self._view_of(geometry, image.shape, self._picture.feeding)


IMAGE = (Port("image", BYTES, (1,)),)
