"""`tandem completion`: the script that lets a shell complete commands, options and names."""

from dataclasses import dataclass
from typing import Literal

from toolkit.cli.command import argument, command


@dataclass(frozen=True, slots=True)
class Completion:
    """Print the completion script of a SHELL, with the line that installs it.

    Commands, options, profiles, power modes and calibration methods are completed.

    Example: eval "$(tandem completion bash)"
    """

    shell: Literal["bash", "zsh", "fish"] = argument()


completion = command(Completion, "completion:completion")  # fmt: skip
