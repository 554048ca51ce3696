"""A user's model for a kit, whose weights stay on the host."""

import hashlib
import math
import re
from pathlib import Path

import numpy as np
import onnx_ir as ir

from device.errors import TandemError
from toolkit.board_kit.make import NetworkModel
from toolkit.importers.onnx import ModelBytes

MAX_NAME = 50  # characters: a job names many items
_PERIOD = 251  # of the weights; prime: rows of no usual length begin alike
_SEED = 5


def own_model(path: Path) -> NetworkModel:
    """Return a user's model, without its weights, named by its file as far as the name of an item
    of a job may be. Raises TandemError: it is none."""
    try:
        model = ir.load(path)
    except Exception as error:  # onnx raises what its parser raises
        raise TandemError(f"{path} cannot be read as ONNX: {error}") from error
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    tile_weights(model)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", path.stem).lstrip("-._")[:MAX_NAME]
    if name != path.stem:
        name = f"{name}-{sha256[:8]}".lstrip("-")
    return NetworkModel(name, model_bytes(name, model), sha256)


def model_bytes(name: str, model: ir.Model) -> ModelBytes:
    """Return a model as the bytes of its file."""
    return ModelBytes(f"{name}.onnx", ir.to_proto(model).SerializeToString())


def tile_weights(model: ir.Model) -> None:
    """Replace each float32 weight of two dimensions or more by a short pattern of the same spread.

    Times do not depend on weights, and an engine of them is small once it is compressed: layouts
    that permute the weights keep the repetition. Weights without a spread to copy get
    1 / sqrt(elements of one output).
    """
    pattern = np.random.default_rng(_SEED).normal(0, 1, _PERIOD).astype(np.float32)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) < 2:
            continue
        shape = tuple(tensor.shape.numpy())
        size = math.prod(shape)
        spread = np.float32(1 / math.sqrt(max(1, size // shape[0])))
        array = np.resize(pattern * spread, size).reshape(shape)
        value.const_value = ir.Tensor(array, name=value.name)
