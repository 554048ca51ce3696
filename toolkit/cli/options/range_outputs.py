"""The files that `tandem calibrate` and `tandem ranges` write, in the same words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import onnx_ir as ir

from device.files import replacing
from toolkit.errors import BuildError
from toolkit.quantize.qdq.export import FORMS

F = TypeVar("F", bound=Callable[..., Any])


def output_options(command: F) -> F:
    """--cache, --tensorrt, --qdq, --qdq-for and --adjusted-model."""
    options = (
        click.option("--cache", type=click.Path(path_type=Path), help="Write a TensorRT cache."),
        click.option(
            "--tensorrt",
            metavar="VERSION",
            help="The TensorRT that reads the cache. [default: that of a cache read, else 10.3.0]",
        ),
        click.option("--qdq", type=click.Path(path_type=Path), help="Write the model with Q/DQ."),
        click.option(
            "--qdq-for",
            type=click.Choice(list(FORMS)),
            default=FORMS[0],
            show_default=True,
            help="Who reads the Q/DQ model; onnxruntime gets the bits of the engine.",
        ),
        click.option(
            "--adjusted-model",
            type=click.Path(path_type=Path),
            help="Write the plain model with equalised weights and corrected biases.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def need_folders(*paths: Path | None) -> None:
    """Refuse files in folders that do not exist before the work, which can take long.

    Raises BuildError.
    """
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise BuildError(
                f"{path} cannot be written: there is no folder {path.parent}; make it."
            )


def write_model(path: Path, model: ir.Model) -> None:
    """Write an ONNX file; it appears whole or not at all."""
    write_bytes(path, ir.to_proto(model).SerializeToString(deterministic=True))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file; it appears whole or not at all. Raises BuildError: it cannot be written."""
    try:
        with replacing(path) as file:
            file.write(data)
    except OSError as err:
        raise BuildError(f"{path} cannot be written: {err.strerror}; use another place.") from err
