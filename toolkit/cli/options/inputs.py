"""The options that say what a model or an engine is run on."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from toolkit.cli.options.calibration import parse_shapes

if TYPE_CHECKING:
    from toolkit.evaluate.infer.inputs import InputRequest

F = TypeVar("F", bound=Callable[..., Any])


def parse_files(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str, Path], ...]:
    """Parse FILE or NAME=FILE, any number of times. A file with = in its name exists."""
    pairs = []
    for value in values:
        name, _, path = value.rpartition("=")
        pairs.append(("", Path(value)) if Path(value).exists() else (name, Path(path)))
    return tuple(pairs)


def parse_ranges(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, tuple[float, float]]:
    """Parse NAME=LOW:HIGH, any number of times."""
    ranges = {}
    for value in values:
        name, _, limits = value.rpartition("=")
        low, _, high = limits.partition(":")
        try:
            pair = (float(low), float(high))
        except ValueError as err:
            raise click.BadParameter(
                f"{value!r} is not NAME=LOW:HIGH, such as ids=0:30521"
            ) from err
        if not name or not math.isfinite(sum(pair)) or pair[0] > pair[1]:
            raise click.BadParameter(f"{value!r} is not NAME=LOW:HIGH with LOW <= HIGH")
        ranges[name] = pair
    return ranges


def input_options(command: F) -> F:
    """Add the options of `input_request`."""
    options = (
        click.option("--input", "files", multiple=True, callback=parse_files, metavar="[NAME=]FILE",
            help=".npz with arrays by input name, .npy, or the bytes of one input. Repeatable."),
        click.option("--data", type=click.Path(path_type=Path),
            help="Images, a video, .npy or .npz samples, as for `tandem build`."),
        click.option("--preprocess", type=click.Path(path_type=Path),
            help="Model file (configs/models/*.toml): how an image becomes the input."),
        click.option("--random", "seed", type=click.IntRange(min=0), metavar="SEED",
            help="Random inputs within their types: normal floats, all 8-bit values, 0 or 1 for "
            "wider integers. [default: 0, without --input and --data]"),
        click.option("--range", "ranges", multiple=True, callback=parse_ranges,
            metavar="NAME=LOW:HIGH", help="Range of a random input, such as ids=0:30521."),
        click.option("--samples", type=click.IntRange(min=1),
            help="Number of samples. [default: all of a file, 1 at random]"),
        click.option("--shape", "shapes", multiple=True, callback=parse_shapes,
            metavar="NAME=DIMS", help="Shape of an input that has dynamic dimensions."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def input_request(
    files: tuple[tuple[str, Path], ...],
    data: Path | None,
    preprocess: Path | None,
    seed: int | None,
    ranges: dict[str, tuple[float, float]],
    samples: int | None,
    shapes: dict[str, tuple[int, ...]],
) -> "InputRequest":
    """Make one value of the options. Raises click.UsageError: they contradict each other."""
    sources = [
        name
        for name, given in (("--input", files), ("--data", data), ("--random", seed is not None))
        if given
    ]
    if len(sources) > 1:
        raise click.UsageError(f"{' and '.join(sources)} are two sources of inputs; give one.")
    if ranges and (files or data):
        raise click.UsageError("--range is for random inputs; leave out --input and --data.")
    if preprocess and not data:
        raise click.UsageError("--preprocess says how pictures become inputs; give --data.")
    from toolkit.evaluate.infer.inputs import InputRequest

    return InputRequest(files, data, preprocess, seed, samples, shapes, ranges)
