"""A user's model for a kit, whose weights stay on the host."""

import hashlib
from pathlib import Path

import onnx_ir as ir

from device.errors import TandemError
from toolkit.board_kit.make import NetworkModel
from toolkit.board_kit.weights import tile_weights
from toolkit.importers.onnx import ModelBytes


def own_model(path: Path) -> NetworkModel:
    """Return a user's model, without its weights. Raises TandemError: it is none."""
    try:
        model = ir.load(path)
    except Exception as error:  # onnx raises what its parser raises
        raise TandemError(f"{path} cannot be read as ONNX: {error}") from error
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    tile_weights(model)
    return NetworkModel(path.stem, model_bytes(path.stem, model), sha256)


def model_bytes(name: str, model: ir.Model) -> ModelBytes:
    """Return a model as the bytes of its file."""
    return ModelBytes(f"{name}.onnx", ir.to_proto(model).SerializeToString())
