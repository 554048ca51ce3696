"""Render docs/commands/*.md from the options of the commands.

python -m scripts.cli_page --write     replace the pages
python -m scripts.cli_page --check     exit 1 if they are not up to date
"""

import argparse
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from toolkit.cli.main import COMMANDS, tandem

FOLDER = Path(__file__).parents[1] / "docs" / "commands"
# File below docs/commands -> (title, commands). A command belongs to one page.
PAGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "calibrate.md": ("Commands: INT8 ranges", ("calibrate", "ranges")),
    "plan.md": ("Commands: profiles and plans", ("profiles", "plan", "explain", "explore")),
    "build.md": (
        "Commands: engines",
        ("build", "build-all", "cache", "inspect", "export"),
    ),
    "check.md": ("Commands: results", ("infer", "bench", "compare", "surgeon")),
    "pipelines.md": (
        "Commands: pipelines",
        ("model", "pipeline", "run", "record", "replay"),
    ),
    "deploy.md": ("Commands: devices", ("deploy", "flash")),
    "serve.md": ("Commands: serving", ("serve", "import-triton")),
    "bundle.md": ("Commands: bundles", ("bundle",)),
    "board.md": ("Commands: one board", ("board",)),
    "fleet.md": ("Commands: fleets", ("fleet",)),
    "machine.md": ("Commands: this machine", ("demo", "completion", "doctor")),
}
OTHERS = "machine.md"  # commands that no row above names
EVERYWHERE = frozenset({"--verbose", "--quiet", "--log", "--help"})

_HEAD = """\
# {title}

Written by `python -m scripts.cli_page --write`. Every command also takes `-v` and `-vv` (say each
step, details), `-q` (errors and results alone), `--log FILE` (everything, with times) and `--help`.
"""


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    named = {name for _, names in PAGES.values() for name in names}
    others = tuple(name for name in COMMANDS if name not in named)
    context = click.Context(tandem, info_name="tandem")
    texts = {}
    for file, (title, names) in PAGES.items():
        parts = [_HEAD.format(title=title)]
        for name in (*names, *(others if file == OTHERS else ())):
            command = tandem.get_command(context, name)
            assert command is not None, name
            parts += _sections(command, click.Context(command, context, name))
        texts[file] = "\n".join(parts)
    return texts


def _sections(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the section of a command and those of its subcommands."""
    usage = " ".join(command.collect_usage_pieces(context))
    words = inspect.cleandoc(command.help or "").replace("\b\n", "")
    yield f"## `{context.command_path}`\n\n{words}\n\n    {context.command_path} {usage}\n"
    rows = [
        f"| `{_cell(record[0])}` | {_cell(record[1])} |"
        for parameter in command.get_params(context)
        if not EVERYWHERE.intersection(parameter.opts)
        and (record := parameter.get_help_record(context)) is not None
        and record[1]
    ]
    if rows:
        yield "\n".join(("| option | meaning |", "|---|---|", *rows)) + "\n"
    if command.epilog:
        yield _example(inspect.cleandoc(command.epilog))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None, name
            yield from _sections(subcommand, click.Context(subcommand, context, name))


def _example(epilog: str) -> str:
    """Return the epilog of a command with its example, or its lines of examples, as code."""
    if epilog.startswith("\b\n"):
        title, _, lines = epilog.removeprefix("\b\n").partition("\n")
        return f"{title}\n\n{textwrap.indent(inspect.cleandoc(lines), '    ')}\n"
    words, example, command = epilog.partition("Example: ")
    return f"{words}Example: `{command}`\n" if example else f"{epilog}\n"


def _cell(text: str) -> str:
    """Return a text on one line, as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def main() -> int:
    """Write the pages or check them."""
    parser = argparse.ArgumentParser(description="Render docs/commands.")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="replace the pages")
    mode.add_argument("--check", action="store_true", help="exit 1 if they are not up to date")
    if parser.parse_args().write:
        FOLDER.mkdir(exist_ok=True)
        for file, text in pages().items():
            (FOLDER / file).write_text(text)
        return 0
    old = [file for file, text in pages().items() if (FOLDER / file).read_text() != text]
    if old:
        print(f"{', '.join(old)} are not up to date; run python -m scripts.cli_page --write")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
