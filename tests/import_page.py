"""The commands of docs/IMPORT.md, as the tests run them."""

import os
import re
from pathlib import Path

from click.testing import CliRunner

from toolkit.cli.main import tandem

TEXT = (Path(__file__).parents[1] / "docs" / "IMPORT.md").read_text()


def run_command_of_page(name: str, folder: Path) -> tuple[Path, str]:
    """Run the build of the model `name` in the folder that has it; return engine and report."""
    (command,) = re.findall(rf"^tandem (build {re.escape(name)}/?(?: .*)?)$", TEXT, re.MULTILINE)
    before = Path.cwd()
    os.chdir(folder)
    try:
        done = CliRunner().invoke(tandem, command.split())
    finally:
        os.chdir(before)
    assert done.exit_code == 0, (command, done.output, done.exception)
    return (folder / name).with_suffix(".engine"), done.output
