"""`tandem compare`: two files with each other, or one engine with its model."""

import click

from toolkit.cli.actions.agreement import compare_two
from toolkit.cli.actions.loss import compare_one
from toolkit.cli.actions.outputs import need_folders, status_2
from toolkit.cli.command import given
from toolkit.cli.commands.compare import Compare

# Options of one form alone: name of the field -> the option.
_OF_TWO = {
    "files": "--input", "seed": "--random", "ranges": "--range", "atol": "--atol",
    "rtol": "--rtol", "min_sqnr": "--min-sqnr", "layers": "--layers", "bisect": "--bisect",
    "out": "--out",
}  # fmt: skip
_OF_ONE = {
    "model": "--model", "profile": "--profile", "table": "--table", "recorded": "--recorded",
    "scales": "--scales", "inputs_as_nchw": "--inputs-as-nchw",
}  # fmt: skip


def compare(options: Compare) -> None:
    """Compare and print the report; exits with 1 where two files differ.

    Raises NotComparedError, click.UsageError.
    """
    with status_2():
        need_folders(options.html)
        if options.b is not None:
            _refuse(_OF_ONE, "one file: an engine with --model, or a model with --profile")
            if options.out is not None and not options.bisect:
                raise click.UsageError("--out is where --bisect writes; give --bisect too.")
            raise click.exceptions.Exit(0 if compare_two(options, options.b) else 1)
        _refuse(_OF_TWO, "two files")
        if (options.model is None) == (options.profile is None):
            raise click.UsageError(
                "Give two files to compare, or an engine with --model M.onnx, or a model with "
                "--profile NAME."
            )
        compare_one(options)


def _refuse(options: dict[str, str], form: str) -> None:
    """Refuse what only the other form of the command has a use for."""
    used = [option for name, option in options.items() if given(name)]
    if used:
        raise click.UsageError(f"{used[0]} is for {form}.")
