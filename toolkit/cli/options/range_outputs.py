"""The output options of `tandem calibrate` and `tandem ranges`, and writing of their files."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from device.files import replacing
from toolkit.cli.options.choices import QDQ_FORMS
from toolkit.errors import BuildError

if TYPE_CHECKING:
    import onnx_ir as ir

F = TypeVar("F", bound=Callable[..., Any])


def output_options(command: F) -> F:
    """Add --cache, --tensorrt, --qdq, --qdq-for and --adjusted-model."""
    options = (
        click.option("--cache", type=click.Path(path_type=Path), help="Write a TensorRT cache."),
        click.option(
            "--tensorrt",
            metavar="VERSION",
            help="TensorRT that reads the cache. [default: that of the cache read, else 10.3.0]",
        ),
        click.option("--qdq", type=click.Path(path_type=Path), help="Write the model with Q/DQ."),
        click.option(
            "--qdq-for",
            type=click.Choice(list(QDQ_FORMS)),
            default=QDQ_FORMS[0],
            show_default=True,
            help="Reader of the Q/DQ model; onnxruntime computes the bits of the engine.",
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
    """Refuse output files in missing folders, before a calibration that can take long.

    Raises BuildError.
    """
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise BuildError(
                f"{path} cannot be written: there is no folder {path.parent}; make it."
            )


def write_model(path: Path, model: "ir.Model") -> None:
    """Write an ONNX file atomically."""
    import onnx_ir as ir

    write_bytes(path, ir.to_proto(model).SerializeToString(deterministic=True))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically. Raises BuildError: it cannot be written."""
    try:
        with replacing(path) as file:
            file.write(data)
    except OSError as err:
        raise BuildError(f"{path} cannot be written: {err.strerror}; use another place.") from err
