"""`tandem`: the table of subcommands, each a module of `toolkit.cli.commands`.

A command's options are imported when the command is named, and what it needs (onnx, numpy, the
compiler) when it runs. So `--help` is quick, and `doctor`, `inspect` and `bench` run on a board.
"""

import atexit
import gc
import importlib
import logging
import signal
import sys
import time
import warnings
from collections.abc import Mapping
from types import FrameType
from typing import NoReturn

import click

from device.errors import TandemError
from device.start.packages import claim
from device.start.stdout import drop_unwritten, reserve_stdout
from toolkit.cli.crashes import survive_crashes
from toolkit.cli.failures import asks_for_json, errors_as_json, failure_of
from toolkit.cli.log import add_log_options, log_options, start
from toolkit.late_imports import import_late

LOG = logging.getLogger("tandem")

# name -> what the overview says. `toolkit.cli.commands.NAME` has the command's options, and is
# loaded when the command is named; the module of its action is loaded when it runs.
COMMANDS: Mapping[str, str] = {
    "profiles": "List and explain device profiles.",
    "plan": "Say what runs where, why, and what it takes.",
    "explain": "Explain a reason in a report.",
    "explore": "Compare the precisions of a model on a board.",
    "build": "Build an engine from a model.",
    "build-all": "Build a matrix of models and profiles.",
    "calibrate": "Measure INT8 ranges on real data.",
    "ranges": "Convert and compare INT8 ranges.",
    "inspect": "Show what is inside a model or an engine.",
    "model": "Show a model's preprocessing and decoder.",
    "infer": "Run a model or an engine, keep its outputs.",
    "compare": "Say whether two models, engines or outputs agree.",
    "surgeon": "Cut a model, or reduce it.",
    "bench": "Measure an engine on this machine.",
    "export": "Write an engine for trtexec or a Triton server.",
    "import-triton": "Build engines of a Triton repository.",
    "pipeline": "Write and check a pipeline.toml.",
    "run": "Run a pipeline on this machine.",
    "record": "Run a pipeline and record it.",
    "replay": "Run a pipeline on a recording.",
    "serve": "Serve models to clients of KServe v2 and Triton.",
    "bundle": "Pack engine, pipeline and labels.",
    "deploy": "Send a bundle to a device over MQTT.",
    "flash": "Bring a bundle to the board on the desk.",
    "board": "Set a board up, look after it, provision many.",
    "fleet": "Sign releases, enrol devices, roll out to a fleet.",
    "demo": "Build, run, deploy and roll back on this machine.",
    "cache": "Manage the cache of builds.",
    "completion": "Print the completion script of a shell.",
    "doctor": "Check what this machine lacks.",
}

# Imports and graphs are many objects that stay. Python looks for cycles among all of them each time
# that a few hundred are new, which took a tenth of a calibration. Imports alone make 100 000.
GC_THRESHOLDS = (200_000, 10, 10)
LIBRARIES = ("onnx", "onnx_ir", "onnxscript")  # that log what Tandem handles or reports itself


class _Commands(click.Group):
    """A group that lists COMMANDS and imports a command when it is used."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if nul := next((arg for arg in args if "\0" in arg), None):
            raise click.UsageError(f"{nul!r} holds the character NUL, which no path can", ctx)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        module = importlib.import_module(f"toolkit.cli.commands.{name}")
        command: click.Command = getattr(module, name)
        add_log_options(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    params=log_options(),
)
@click.version_option(package_name="tandem-edge", prog_name="tandem")
@click.pass_context
def tandem(ctx: click.Context) -> None:
    """Put ONNX models on Jetson-class boards: build, run, deploy.

    Example: tandem build model.onnx --profile agx-orin-64gb --data images/ -o model.engine
    """
    start(ctx)


def main() -> None:
    """Entry point: errors of Tandem become one sentence on standard error and their exit status."""
    claim()  # a plugin may put its folder on the path
    import_late()
    reserve_stdout()
    gc.set_threshold(*GC_THRESHOLDS)
    atexit.register(gc.freeze)  # cycles end with the process: looking for them takes a tenth of it
    signal.signal(signal.SIGTERM, _end)
    _silence_libraries()
    begin = time.perf_counter()
    words = sys.argv[1:]
    try:
        with errors_as_json(asks_for_json(words)):
            survive_crashes(next((word for word in words if word in COMMANDS), ""), words)
        tandem(standalone_mode=True)
    except (TandemError, ModuleNotFoundError) as err:
        failure = failure_of(err)
        if failure is None:
            raise
        LOG.debug("failed: %s", err, exc_info=err)
        drop_unwritten()
        _fail(failure.sentence, failure.status)
    except ImportError as err:
        # What Ctrl-C ends while a module in C starts; click says it of a KeyboardInterrupt alone.
        if not isinstance(err.__cause__ or err.__context__, KeyboardInterrupt):
            raise
        click.echo("Aborted!", err=True)
        sys.exit(1)
    finally:
        LOG.info("ended after %.2f s", time.perf_counter() - begin)


def _fail(message: str, status: int) -> NoReturn:
    from rich.console import Console
    from rich.text import Text

    text = Text.assemble(("error:", "bold red"), " ", message)
    Console(stderr=True, soft_wrap=True).print(text)
    sys.exit(status)


def _silence_libraries() -> None:
    """Keep log lines and warnings of libraries off the terminal, unless python -W asks for them."""
    for name in LIBRARIES:
        logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger(name).propagate = False
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Exit by an exception, so that files are cleaned up and child processes end."""
    signal.signal(number, signal.SIG_IGN)  # `timeout` sends it to the process and to its group
    sys.exit(128 + number)
