"""A user's model for a kit, whose weights stay on the host."""

import hashlib
import re
from pathlib import Path

import onnx_ir as ir

from device.errors import TandemError
from toolkit.board_kit.make import NetworkModel
from toolkit.board_kit.weights import tile_weights
from toolkit.importers.onnx import ModelBytes

MAX_NAME = 50  # characters: a job names many items


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
