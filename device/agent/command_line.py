"""The command `tandem-agent`: the agent of this board, and programs beside it."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from device.agent.agent import serve
from device.agent.config import AgentConfig, load_agent_config
from device.agent.launch import excuse_start, launch
from device.agent.log import set_up_log
from device.board_files import tandem_version
from device.errors import ConfigError, TandemError
from device.start.command import module_command

# Subcommands, each a program of its own.
PROGRAMS = {
    "control": "device.control",
    "enrol": "device.enrol",
    "prepare": "device.runtime.prepare",
    "selftest": "device.selftest",
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="tandem-agent",
        description="Runs the board's pipeline, reports over MQTT and takes releases from "
        "`tandem deploy`. Runs until SIGTERM.",
        epilog="examples: tandem-agent --config /etc/tandem/agent.toml; "
        "tandem-agent prepare m.engine (finishes segments with TensorRT); "
        "tandem-agent enrol --config agent.toml --claim c.crt --claim-key c.key (asks the fleet "
        "for a certificate); tandem-agent control facts (asks the agent that runs); "
        "tandem-agent selftest --kit kit/ --out r.tandem-report (proves what "
        "only a board can)",
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s, version {tandem_version()}"
    )
    parser.add_argument("--config", required=True, type=Path, help="agent.toml of this board")
    parser.add_argument(
        "--log-level",
        default="INFO",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        help="what goes to stderr (default: INFO)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command `tandem-agent`; its subcommands are programs of their own (CUDA, arrays)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in PROGRAMS:
        command = module_command(PROGRAMS[words[0]], *words[1:])
        os.execv(command[0], command)  # in this process: signals and the exit status are its own
    arguments = make_parser().parse_args(words)
    set_up_log(arguments.log_level, os.environ)
    try:
        launch(arguments.config, words)
        serve(_load(arguments.config))
    except TandemError as error:
        print(f"tandem-agent: {error}", file=sys.stderr)
        return 1
    return 0


def _load(path: Path) -> AgentConfig:
    """Read agent.toml; one that is wrong is no fault of this version. Raises ConfigError."""
    try:
        return load_agent_config(path)
    except ConfigError:
        excuse_start(path)
        raise
