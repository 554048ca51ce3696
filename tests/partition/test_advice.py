"""Advice names options that the command has: every text with an `--option` is held against click.

A text that names its command (`tandem build --data`) is checked against that one; any other against
every command whose modules it belongs to.
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from functools import cache, partial

import click
import pytest
from advice_fixtures import OPTION, Text, imports, product_texts

from device.agent.command_line import make_parser as agent_parser
from device.control.__main__ import make_parser as control_parser
from device.enrol.__main__ import make_parser as enrol_parser
from device.runtime.prepare.__main__ import make_parser as prepare_parser
from device.selftest.__main__ import make_parser as selftest_parser
from pipelines.__main__ import make_parser as pipeline_parser
from toolkit.cli.main import COMMANDS, tandem
from toolkit.fleet.brokers.local import make_parser as broker_parser

NAMED = re.compile(
    r"\btandem ([a-z]+)|\b(tandem-agent(?: control| enrol| prepare| selftest)?)\b"
    r"|(tandem-pipeline)"
    r"|\b(build|calibrate)(?: it| again)? with",
    re.IGNORECASE,
)
QUOTED = re.compile(r"`tandem ([a-z]+)([^`]*)`")
GIVEN = re.compile(r"given with (--[\w-]+)")  # by the user, so the command has it
# Options of other programs.
FOREIGN = {
    "--system-site-packages",  # python -m venv
    "--layerPrecisions",  # trtexec
    "--onnx",
    "--add_unary_ew_scales_for_dla",  # NVIDIA's Q/DQ translator
    "--write",  # python -m scripts.rules_page
}
# (package, command) -> why no message of it is printed by that command.
SILENT = {
    ("toolkit", "demo"): "its model and all options are its own",
    ("pipelines", "demo"): "its model and all options are its own",
    ("device.selftest", "build"): "boards of a farm run it",
    ("device.selftest", "build-all"): "boards of a farm run it",
    ("toolkit", "import-triton"): "its note says that `tandem build` has the options",
    ("toolkit.graph", "model"): "it reads outputs and metadata, and runs no pass",
    ("toolkit.importers", "model"): "it reads outputs and metadata, and freezes no size",
    ("toolkit.plugins", "model"): "it takes no plugins",
    ("toolkit.graph", "pipeline"): "it reads outputs and metadata, and runs no pass",
    ("toolkit.importers", "pipeline"): "it reads outputs and metadata, and freezes no size",
    ("toolkit.plugins", "pipeline"): "it takes no plugins",
    ("toolkit.gpu", "export"): "the graph of an engine has the sizes that it was built for",
    ("toolkit.graph", "export"): "the graph of an engine has the sizes that it was built for",
    ("toolkit.gpu.reasons", "explain"): "it says what a refusal means, and not the refusal",
    ("toolkit.evaluate.bench.measure", "inspect"): "it reads what was measured",
    ("toolkit.guess.toml_text", "pipeline"): "it prints no proposal",
    ("toolkit.importers.input_shapes", "compare"): "it gives the shapes of the engine",
}
# Modules whose texts are commands for the shell of a board; those of Tandem in them name it.
SHELL = frozenset(
    {"toolkit.fleet.transports.login_shell"}
    | {
        f"toolkit.fleet.boards.{name}"
        for name in ("packages", "service", "steps", "texts", "trust", "wheels")
    }
)
PARSERS: Mapping[str, tuple[str, argparse.ArgumentParser]] = {
    "tandem-agent": ("device.agent.agent", agent_parser()),
    "tandem-agent control": ("device.control.__main__", control_parser()),
    "tandem-agent enrol": ("device.enrol.__main__", enrol_parser()),
    "tandem-agent prepare": ("device.runtime.prepare.__main__", prepare_parser()),
    "tandem-agent selftest": ("device.selftest.__main__", selftest_parser()),
    "tandem-pipeline": ("pipelines.__main__", pipeline_parser()),
    "python -m toolkit.fleet.brokers.local": ("toolkit.fleet.brokers.local", broker_parser()),
}


def with_subcommands(command: click.Command) -> Iterator[click.Command]:
    """A command and all below it."""
    yield command
    if isinstance(command, click.Group):
        for below in command.commands.values():
            yield from with_subcommands(below)


def with_subparsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


@cache
def options_of(command: str) -> frozenset[str]:
    """The options of a command, of its subcommands too."""
    if command in PARSERS:
        texts = (parser.format_help() for parser in with_subparsers(PARSERS[command][1]))
        return frozenset(name for text in texts for name in OPTION.findall(text))
    actual = tandem.get_command(click.Context(tandem), command)
    assert actual is not None, f"there is no command `tandem {command}`"
    options = {
        name
        for part in with_subcommands(actual)
        for p in part.params
        for name in (*p.opts, *p.secondary_opts)
    }
    of_matrix = options_of("build") if command == "build-all" else frozenset[str]()
    return frozenset({"--help", *options, *of_matrix})


@cache
def modules_of(command: str) -> frozenset[str]:
    """The modules of a command's options and of its actions."""
    if command in PARSERS:
        return frozenset({PARSERS[command][0]})
    named = tandem.get_command(click.Context(tandem), command)
    assert named is not None
    modules = {f"toolkit.cli.commands.{command.replace('-', '_')}"}
    for one in with_subcommands(named):
        if isinstance(one.callback, partial):
            _, action, _ = one.callback.args
            modules.add(f"toolkit.cli.actions.{action.partition(':')[0]}")
    return frozenset(modules)


@cache
def commands_with(module: str) -> tuple[str, ...]:
    """The commands that import a module, at once or when they run."""
    downstream = imports().find_downstream_modules(module) | {module}
    return tuple(
        name
        for name in (*COMMANDS, *PARSERS)
        if modules_of(name) & downstream and not _silent(module, name)
    )


def _silent(module: str, command: str) -> bool:
    return not module.startswith(("toolkit.demo", "toolkit.cli")) and any(
        name == command and f"{module}.".startswith(f"{package}.") for package, name in SILENT
    )


def wrong_options(text: Text) -> list[str]:
    """Return what the text names and the command that prints it, or that it names, has not."""
    exempt = FOREIGN | set(GIVEN.findall(text.text))
    wrong, start = [], 0
    named: tuple[str, ...] = ()
    for mention in OPTION.finditer(text.text):
        for match in NAMED.finditer(text.text, start, mention.start()):
            named = tuple(name.lower() for name in match.groups() if name)
        start = mention.start()
        if mention[0] in exempt:
            continue
        wrong += [
            f"`{command}` has no {mention[0]}"
            for command in named or (() if text.module in SHELL else commands_with(text.module))
            if mention[0] not in options_of(command)
        ]
    return wrong


# Texts of shared options are part of each command's help, which the test below reads.
def test_a_text_names_options_that_there_are() -> None:
    texts = [each for each in product_texts() if not each.module.startswith("toolkit.cli.options")]
    assert len(texts) > 50
    faults = {f"{text}: {text.text}": wrong_options(text) for text in texts}
    assert not {text: wrong for text, wrong in faults.items() if wrong}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_text_names_options_that_there_are(command: str) -> None:
    actual = tandem.get_command(click.Context(tandem), command)
    assert actual is not None
    wide = click.Context(actual, info_name=command, terminal_width=10_000)  # no option is broken
    help_text = " ".join(actual.get_help(wide).split())
    for name, text in [(command, QUOTED.sub("", help_text)), *QUOTED.findall(help_text)]:
        for mention in set(OPTION.findall(text)) - FOREIGN:
            assert mention in options_of(name), f"`{name}`: {help_text}"


def test_the_scan_finds_what_it_is_for() -> None:
    build = Text("toolkit.engine.read", 1, "use `tandem build --data`, or --data")
    assert wrong_options(build) == []
    assert wrong_options(Text("toolkit.engine.read", 1, "`tandem bundle --data`")) == [
        "`bundle` has no --data"
    ]
    assert wrong_options(Text("toolkit.cli.commands.deploy", 1, "give --data")) == [
        "`deploy` has no --data"
    ]
