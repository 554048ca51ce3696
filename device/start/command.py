"""The command line of a child process that runs a module of Tandem."""

import sys
from pathlib import Path


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs `python -m module` with this interpreter and these packages.

    Unlike `-m`, it does not search the working directory (`device.start.isolation`), and it needs
    no PYTHONPATH in a checkout that is not installed.
    """
    return (sys.executable, "-I", str(Path(__file__).parent), module, *arguments)
