"""Runs the samples of `model_warmup` before a model is ready."""

from pathlib import Path
from typing import Any

import numpy as np

from device.errors import ConfigError
from pipelines.serving.codec import from_bytes
from pipelines.serving.model_config import inside
from pipelines.serving.protocol import (
    BF16,
    BY_CONFIG,
    BYTES,
    Array,
    Refusal,
    Tensor,
    check_datatype,
    elements,
)
from pipelines.serving.queued_model import QueuedModel

FOLDER = "warmup"  # of a model, for the files of `input_data_file`
MAX_RUNS = 1000
MAX_SAMPLE_BYTES = 1 << 30


def warm_up(model: QueuedModel, folder: Path) -> None:
    """Run every instance on each sample. Raises ConfigError: a sample does not fit the model, and
    SessionError: the model fails."""
    for number, row in enumerate(model.config.model_warmup):
        where = f"model_warmup {row.name or number!r} of model {model.name!r}"
        for what, count, limit in (
            ("count", row.count, MAX_RUNS),
            ("batch_size", row.batch_size, max(1, model.max_batch)),
        ):
            if count > limit:
                raise ConfigError(f"{where} has the {what} {count}; at most {limit} are run.")
        try:
            tensors = [
                _tensor(name, row.inputs[name], max(1, row.batch_size), model, folder)
                for name in sorted(row.inputs)
            ]
            model.warm_up(tensors, max(1, row.count))
        except (Refusal, OSError) as error:
            raise ConfigError(f"{where}: {error}.") from error


def _tensor(name: str, entry: Any, rows: int, model: QueuedModel, folder: Path) -> Tensor:  # noqa: ANN401
    """Return an input of a sample; each row of a batch has the same data. Raises ConfigError,
    OSError, Refusal."""
    types = entry.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    config_type = types[entry.data_type].name
    datatype, shape = BY_CONFIG.get(config_type, config_type), tuple(entry.dims)
    kind, count = check_datatype(name, datatype).numpy, elements(name, shape)
    if count * kind.itemsize * rows > MAX_SAMPLE_BYTES:
        raise ConfigError(
            f"input {name!r} of a model_warmup has {count * kind.itemsize * rows} bytes; at most"
            f" {MAX_SAMPLE_BYTES} are run."
        )
    if entry.WhichOneof("choice") == "input_data_file":
        content = inside(folder / FOLDER, entry.input_data_file).read_bytes()
        data = from_bytes(name, datatype, shape, content).data
    elif datatype == BYTES:
        data = np.full(shape, b"", object)
    elif entry.random_data and datatype != BF16:
        data = _random(kind, shape)
    else:
        data = np.zeros(shape, kind)
    if model.max_batch:
        data = np.repeat(data[None], rows, axis=0)
    return Tensor(name, datatype, data.shape, data)


def _random(kind: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    generator = np.random.default_rng(0)
    if kind.kind == "f":
        return generator.random(shape).astype(kind)
    if kind.kind == "b":
        return generator.integers(0, 2, shape).astype(kind)
    limits = np.iinfo(kind)
    return generator.integers(limits.min, limits.max, shape, kind, endpoint=True)
