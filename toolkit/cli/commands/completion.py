"""`tandem completion`: the script that lets a shell complete commands, options and names."""

import click
from click.shell_completion import get_completion_class

VARIABLE = "_TANDEM_COMPLETE"

# Shell -> the line that switches completion on, and the file that it belongs into.
INSTALL = {
    "bash": ('eval "$(tandem completion bash)"', "~/.bashrc"),
    "zsh": ('eval "$(tandem completion zsh)"', "~/.zshrc"),
    "fish": ("tandem completion fish | source", "~/.config/fish/completions/tandem.fish"),
}


@click.command(epilog='Example: eval "$(tandem completion bash)"')
@click.argument("shell", type=click.Choice(list(INSTALL)))
def completion(shell: str) -> None:
    """Print the completion script of a SHELL, with the line that installs it.

    Commands, options, profiles, power modes and calibration methods are completed.
    """
    line, file = INSTALL[shell]
    kind = get_completion_class(shell)
    root = click.get_current_context().find_root().command
    if kind is None:
        raise click.ClickException(f"this version of click has no completion for {shell}")
    click.echo(f"# For every new shell put this line into {file}:\n#   {line}")
    click.echo(kind(root, {}, "tandem", VARIABLE).source())
