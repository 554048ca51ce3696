"""`tandem`: the table of subcommands, each a module of `toolkit.cli.commands`.

A command's module is imported when the command is used, and what it needs (onnx, numpy, the
compiler) when it runs. So `--help` is quick, and `doctor`, `inspect` and `bench` run on a board.
"""

import importlib
import logging
import signal
import sys
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from types import FrameType
from typing import NoReturn

import click
from rich.console import Console
from rich.markup import escape

from device.errors import TandemError

# name -> (module, command, what the overview says)
COMMANDS: Mapping[str, tuple[str, str, str]] = {
    "profiles": ("toolkit.cli.commands.profiles", "profiles", "List and explain device profiles."),
    "plan": ("toolkit.cli.commands.plan", "plan", "Say what runs where, why, and what it takes."),
    "build": ("toolkit.cli.commands.build", "build", "Build an engine from an ONNX model."),
    "calibrate": (
        "toolkit.cli.commands.calibrate",
        "calibrate",
        "Measure INT8 ranges on real data.",
    ),
    "ranges": ("toolkit.cli.commands.ranges", "ranges", "Convert and compare INT8 ranges."),
    "inspect": ("toolkit.cli.commands.inspect", "inspect", "Show what is inside an engine."),
    "compare": (
        "toolkit.cli.commands.compare",
        "compare",
        "Compare FP32, GPU INT8 and DLA INT8.",
    ),
    "bench": ("toolkit.cli.commands.bench", "bench", "Measure an engine on this machine."),
    "run": ("toolkit.cli.commands.run", "run", "Run a pipeline on this machine."),
    "bundle": ("toolkit.cli.commands.bundle", "bundle", "Pack engine, pipeline and labels."),
    "deploy": ("toolkit.cli.commands.deploy", "deploy", "Send a bundle to a device over MQTT."),
    "demo": (
        "toolkit.cli.commands.demo",
        "demo",
        "Build, run, deploy and roll back on this machine.",
    ),
    "doctor": (
        "toolkit.cli.commands.doctor",
        "doctor",
        "Check what this machine lacks.",
    ),
}

EXTRA_OF_MODULE: Mapping[str, str] = {
    "onnx": "host",
    "onnx_ir": "host",
    "onnxscript": "host",
    "highspy": "host",
    "threadpoolctl": "host",
    "amqtt": "host",
    "onnxruntime": "portable",
    "cv2": "camera",
}

LIBRARIES = ("onnx", "onnx_ir", "onnxscript")  # that log what Tandem handles or reports itself


class _Commands(click.Group):
    """A group that lists COMMANDS and imports a command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, row[2]) for name, row in COMMANDS.items()])


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("tandem-edge"), prog_name="tandem")
def tandem() -> None:
    """Put ONNX models on Jetson-class boards: build, run, deploy.

    Example: tandem build model.onnx --profile agx-orin-64gb --data images/ -o model.engine
    """


def main() -> None:
    """Entry point: errors of Tandem become one sentence on standard error and exit status 1."""
    console = Console(stderr=True, soft_wrap=True)
    signal.signal(signal.SIGTERM, _end)
    _silence_libraries()
    try:
        tandem(standalone_mode=True)
    except TandemError as err:
        console.print(f"[bold red]error:[/] {escape(str(err))}", highlight=False)
        sys.exit(1)
    except ModuleNotFoundError as err:
        extra = EXTRA_OF_MODULE.get((err.name or "").split(".")[0])
        if extra is None:
            raise
        console.print(
            f"[bold red]error:[/] this needs the package {err.name!r}, which is not installed; "
            f"pip install 'tandem-edge\\[{extra}]'",
            highlight=False,
        )
        sys.exit(1)


def _silence_libraries() -> None:
    """Keep log lines and warnings of libraries off the terminal, unless python -W asks for them."""
    for name in LIBRARIES:
        logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger(name).propagate = False
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Exit by an exception, so that files are cleaned up and child processes end."""
    sys.exit(128 + number)
