"""Print the script that lets a shell complete commands, options and names."""

import click
from click.shell_completion import get_completion_class

from toolkit.cli.commands.completion import Completion

VARIABLE = "_TANDEM_COMPLETE"

# Shell -> the line that switches completion on, and the file that it belongs into.
INSTALL = {
    "bash": ('eval "$(tandem completion bash)"', "~/.bashrc"),
    "zsh": ('eval "$(tandem completion zsh)"', "~/.zshrc"),
    "fish": ("tandem completion fish | source", "~/.config/fish/completions/tandem.fish"),
}


def completion(options: Completion) -> None:
    """Print the script of a shell, with the line that installs it."""
    line, file = INSTALL[options.shell]
    kind = get_completion_class(options.shell)
    root = click.get_current_context().find_root().command
    if kind is None:
        raise click.ClickException(f"this version of click has no completion for {options.shell}")
    click.echo(f"# For every new shell put this line into {file}:\n#   {line}")
    click.echo(kind(root, {}, "tandem", VARIABLE).source())
