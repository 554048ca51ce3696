"""Writes a model: checked, whole or not at all, large weights in a file beside it."""

import os
import tempfile
from pathlib import Path

import onnx
import onnx_ir as ir

from toolkit.errors import SurgeonError, first_line

LARGEST_BYTES = 2_000_000_000
"""A protobuf file holds up to 2 GiB; a model with more weights keeps them beside it."""


def write_model(model: ir.Model, path: Path, *, external: bool = False) -> tuple[Path, ...]:
    """Write a model and check the file; returns the files: the model, and its weights if external.

    `external`: weights of 256 bytes and more go to PATH.data; so they do where they have to.
    Raises SurgeonError: the model is not valid, or the file cannot be written.
    """
    weights = [v.const_value for v in model.graph.initializers.values()]
    size = sum(tensor.nbytes for tensor in weights if tensor is not None)
    data = f"{path.name}.data" if external or size > LARGEST_BYTES else None
    try:
        # A folder, because the model names the file of its weights: both have their last names.
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            whole = Path(folder) / path.name
            ir.save(model, whole, format="protobuf", external_data=data)
            onnx.checker.check_model(str(whole), full_check=False)
            if data is not None:
                os.replace(whole.with_name(data), path.with_name(data))
            os.replace(whole, path)
    except OSError as error:
        raise SurgeonError(f"cannot write {path}: {error.strerror}; check the folder") from error
    except (onnx.checker.ValidationError, ValueError) as error:
        raise SurgeonError(f"the part is not a valid model: {first_line(error)}") from error
    return (path,) if data is None else (path, path.with_name(data))


def why_invalid(model: ir.Model) -> str | None:
    """Return what the checker of ONNX finds wrong with a model, None if nothing."""
    try:
        onnx.checker.check_model(ir.to_proto(model), full_check=False)
    except (onnx.checker.ValidationError, ValueError) as error:
        return first_line(error)
    return None
