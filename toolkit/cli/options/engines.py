"""`--model NAME=FILE`: the engines of several models."""

from pathlib import Path

import click


def parse_engines(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, Path]:
    """Parse NAME=FILE, any number of times, into files by the model's name."""
    engines = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not (name and equals and path):
            raise click.BadParameter(f"{value!r} is not NAME=FILE, such as detector=yolo.engine")
        engines[name] = Path(path)
    return engines
