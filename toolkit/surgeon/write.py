"""Writes a model: checked, whole or not at all, large weights in a file beside it."""

import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes.common._c_api_utils import call_onnx_api  # leaves large weights out

from device.files import sync_folder
from toolkit.errors import SurgeonError, first_line
from toolkit.graph import native

LARGEST_BYTES = 2_000_000_000
"""A protobuf file holds up to 2 GiB; a model with more weights keeps them beside it."""
HASH_DIGITS = 12


def write_model(model: ir.Model, path: Path, *, external: bool = False) -> tuple[Path, ...]:
    """Write a model and check the file; returns the files: the model, and its weights if external.

    `external`: weights of 256 bytes and more go to PATH.data; so they do where they have to.
    Where PATH.data exists its name gets a hash, because one rename must put model and weights in
    place together, also when the power fails: PATH names the file of its weights. Then the weights
    that no model needs any more are removed.

    Raises SurgeonError: the model is not valid, or the file cannot be written.
    """
    weights = [v.const_value for v in model.graph.initializers.values()]
    size = sum(tensor.nbytes for tensor in weights if tensor is not None)
    separate = external or size > LARGEST_BYTES
    data = f"{path.name}.data" if separate else None
    if separate and path.with_name(f"{path.name}.data").exists():
        data = f"{path.name}.{_hash(weights)}.data"
    try:
        # A folder, because the model names the file of its weights: both have their last names.
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            whole = Path(folder) / path.name
            call_onnx_api(native.check_model, model)
            ir.save(model, whole, format="protobuf", external_data=data)
            if data is not None:
                _put(whole.with_name(data), path.with_name(data))
            _put(whole, path)
        _remove_others(path, keep=data)
    except OSError as error:
        raise SurgeonError(f"cannot write {path}: {error.strerror}; check the folder") from error
    except (onnx.checker.ValidationError, ValueError) as error:
        raise SurgeonError(f"the part is not a valid model: {first_line(error)}") from error
    return (path,) if data is None else (path, path.with_name(data))


def weight_files(path: Path) -> tuple[Path, ...]:
    """Return the files beside a model that `write_model` makes for its weights."""
    name = re.compile(rf"{re.escape(path.name)}\.([0-9a-f]{{{HASH_DIGITS}}}\.)?data")
    files = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    return tuple(file for file in files if name.fullmatch(file.name))


def _hash(weights: Sequence[ir.TensorProtocol | None]) -> str:
    digest = hashlib.sha256()
    for tensor in weights:
        if tensor is not None:
            digest.update(tensor.tobytes())
    return digest.hexdigest()[:HASH_DIGITS]


def _put(source: Path, target: Path) -> None:
    """Move a file to its place, and bring it and its name onto the disk."""
    with source.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(source, target)
    sync_folder(target.parent)


def _remove_others(path: Path, keep: str | None) -> None:
    for file in weight_files(path):
        if file.name != keep:
            file.unlink(missing_ok=True)


def why_invalid(model: ir.Model) -> str | None:
    """Return what the checker of ONNX finds wrong with a model, None if nothing."""
    try:
        call_onnx_api(native.check_model, model)
    except (onnx.checker.ValidationError, ValueError) as error:
        return first_line(error)
    return None
