"""Files that commands write, and how commands end that cannot say what was asked."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from device.errors import ConfigError, TandemError
from device.files import replace_file
from toolkit.cli.command import given
from toolkit.cli.options.ranges import RangeOutputs

if TYPE_CHECKING:
    import onnx_ir as ir
from toolkit.errors import BuildError, NotComparedError
from toolkit.importers.source import check_not_model

NOT_TIMED = "{cache} is unchanged: no segment runs on a GPU here, so no tactic was timed"


def need_folders(*paths: Path | None, model: Path | None = None) -> None:
    """Refuse output files in missing folders, and in place of the model, before long work.

    Raises BuildError.
    """
    for path in paths:
        check_not_model(path, model)
        if path is not None and not path.parent.is_dir():
            raise BuildError(
                f"{path} cannot be written: there is no folder {path.parent}; make it."
            )


def refuse_unused(outputs: RangeOutputs) -> None:
    """Refuse options of files that are not asked for. Raises click.UsageError."""
    for name, file, path in (("tensorrt", "cache", outputs.cache), ("qdq_for", "qdq", outputs.qdq)):
        if path is None and given(name):
            option = name.replace("_", "-")
            raise click.UsageError(f"--{option} is for the file of --{file}; give --{file} too.")


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically. Raises BuildError: it cannot be written."""
    try:
        replace_file(path, data)
    except OSError as err:
        raise BuildError(f"{path} cannot be written: {err.strerror}; use another place.") from err


def write_text(path: Path, text: str) -> None:
    """Write a file atomically. Raises ConfigError: it cannot be written."""
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}): check the path."
        ) from error


def print_result(value: object, text: str, *, as_json: bool) -> None:
    """Print a value as JSON, or what is said of it."""
    click.echo(msgspec.json.encode(value).decode() if as_json else text)


def print_page_path(html: Path | None, *, as_json: bool) -> None:
    """Print where the HTML page is; JSON stays alone on standard output."""
    if html is not None:
        click.echo(f"wrote {html}", err=as_json)


@contextmanager
def status_2() -> Iterator[None]:
    """End with status 2 where nothing can be said: 1 says that something differs or failed."""
    try:
        yield
    except TandemError as error:
        raise NotComparedError(str(error)) from error


def write_model(path: Path, model: "ir.Model") -> None:
    """Write an ONNX file atomically. Raises BuildError: it cannot be written."""
    from onnx_ir import to_proto

    write_bytes(path, to_proto(model).SerializeToString(deterministic=True))
