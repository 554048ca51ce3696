"""How a command that fails says so: a sentence and an exit status, with `--json` as JSON."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import click
import msgspec

from device.errors import TandemError
from device.install_advice import pip_install

LOG = logging.getLogger("tandem")
JSON_FLAG = "--json"
_KEY = "tandem.json_errors"  # of the context's meta

EXTRA_OF_MODULE: Mapping[str, str] = {
    "onnx": "host",
    "onnx_ir": "host",
    "onnxscript": "host",
    "cyclonedx": "host",
    "highspy": "host",
    "threadpoolctl": "host",
    "amqtt": "host",
    "onnxruntime": "portable",
    "cv2": "camera",
    "torch": "torch",
    "tuf": "fleet",
    "securesystemslib": "fleet",
    "cryptography": "fleet",
    "urllib3": "fleet",
    "packaging": "host",
    "zeroconf": "host",
    "zstandard": "fleet",
    "serial": "serial",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A sentence for people, and the exit status."""

    sentence: str
    status: int


def failure_of(error: Exception) -> Failure | None:
    """Return what is said of an error; None: it is one of ours, and needs its traceback."""
    if isinstance(error, TandemError):
        return Failure(str(error), error.exit_status)
    if isinstance(error, click.ClickException):
        return Failure(error.format_message(), error.exit_code)
    if isinstance(error, ModuleNotFoundError):
        extra = EXTRA_OF_MODULE.get((error.name or "").split(".")[0])
        if extra is not None:
            return Failure(
                f"this needs the package {error.name!r}, which is not installed; "
                f"{pip_install(extra)}",
                1,
            )
    return None


class JsonErrors(click.Command):
    """A command whose errors are `{"error": ...}` on standard output where `--json` is given.

    Those of the command line count, too: a program that reads the output gets one form.
    """

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: object,
    ) -> click.Context:
        """Read the command line."""
        as_json = asks_for_json(args)  # before click takes words out of the list
        with errors_as_json(as_json):
            context = super().make_context(info_name, args, parent, **extra)
        context.meta[_KEY] = as_json
        return context

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        with errors_as_json(bool(ctx.meta.get(_KEY))):
            return super().invoke(ctx)


class JsonErrorsGroup(JsonErrors, click.Group):
    """A group whose commands say their errors so."""


def asks_for_json(args: Sequence[str]) -> bool:
    """Whether a command line says `--json`."""
    options = args[: args.index("--")] if "--" in args else args
    return JSON_FLAG in options


@contextmanager
def errors_as_json(as_json: bool) -> Iterator[None]:
    """Print an error inside the block as JSON and exit, where `as_json`; else it is raised."""
    try:
        yield
    except (TandemError, click.ClickException, ModuleNotFoundError) as error:
        failure = failure_of(error) if as_json else None
        if failure is None:
            raise
        LOG.debug("failed: %s", error, exc_info=error)
        click.echo(msgspec.json.encode({"error": failure.sentence}).decode())
        sys.exit(failure.status)
