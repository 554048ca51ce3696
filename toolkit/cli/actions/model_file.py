"""Models that `tandem calibrate` and `tandem ranges` write."""

from pathlib import Path

import onnx_ir as ir

from toolkit.cli.actions.outputs import write_bytes


def write_model(path: Path, model: ir.Model) -> None:
    """Write an ONNX file atomically. Raises BuildError: it cannot be written."""
    write_bytes(path, ir.to_proto(model).SerializeToString(deterministic=True))
