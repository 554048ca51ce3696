"""What a model or an engine is run on, and when two tensors agree."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from toolkit.cli.command import option
from toolkit.cli.options.model import parse_named, shapes_option


def _parse_files(values: tuple[str, ...]) -> tuple[tuple[str, Path], ...]:
    """Read FILE or NAME=FILE, any number of times. A file with = in its name exists."""
    pairs = []
    for value in values:
        name, _, path = value.rpartition("=")
        pairs.append(("", Path(value)) if Path(value).exists() else (name, Path(path)))
    return tuple(pairs)


def _parse_ranges(values: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    """Read NAME=LOW:HIGH, any number of times."""

    def read(text: str) -> tuple[float, float]:
        low, _, high = text.partition(":")
        return float(low), float(high)

    ranges = {}
    for value in values:
        name, pair = parse_named(value, "=", read, "NAME=LOW:HIGH, such as ids=0:30521")
        if not name or not math.isfinite(sum(pair)) or pair[0] > pair[1]:
            raise click.BadParameter(f"{value!r} is not NAME=LOW:HIGH with LOW <= HIGH")
        ranges[name] = pair
    return ranges


@dataclass(frozen=True, slots=True)
class InputOptions:
    """Where inputs come from: files, pictures or random numbers."""

    files: tuple[tuple[str, Path], ...] = option(
        ".npz with arrays by input name, .npy, or the bytes of one input. Repeatable.",
        "--input", multiple=True, parse=_parse_files, metavar="[NAME=]FILE",
    )  # fmt: skip
    data: Path | None = option("Images, a video, .npy or .npz samples, as for `tandem build`.")
    preprocess: Path | None = option(
        "Model file (configs/models/*.toml): how an image becomes the input."
    )
    seed: int | None = option(
        "Random inputs within their types: normal floats, all 8-bit values, 0 or 1 for wider "
        "integers. [default: 0, without --input and --data]",
        "--random", min=0, metavar="SEED",
    )  # fmt: skip
    ranges: dict[str, tuple[float, float]] = option(
        "Range of a random input, such as ids=0:30521.",
        "--range", multiple=True, parse=_parse_ranges, metavar="NAME=LOW:HIGH",
    )  # fmt: skip
    samples: int | None = option("Number of samples. [default: all of a file, 1 at random]", min=1)
    shapes: dict[str, tuple[int, ...]] = shapes_option(
        "Shape of an input that has dynamic dimensions."
    )


def _parse_limits(values: tuple[str, ...], *, least: float = 0.0) -> dict[str, float]:
    """Read NUMBER or TENSOR:NUMBER, any number of times; "" stands for all other tensors."""
    limits = {}
    for value in values:
        example = "NUMBER or TENSOR:NUMBER, such as 1e-3 or y:1e-3"
        name, limit = parse_named(value, ":", float, example)
        if math.isnan(limit) or limit < least:
            raise click.BadParameter(f"{value!r} is not 0 or more")
        limits[name] = limit
    return limits


@dataclass(frozen=True, slots=True)
class ToleranceOptions:
    """When two tensors agree, for all tensors or by their names."""

    atol: dict[str, float] = option(
        "Absolute tolerance, for all or one tensor. [default: FP32 1e-4, FP16 1e-2, BF16 8e-2, "
        "others none, integers 0]", multiple=True, parse=_parse_limits, metavar="[TENSOR:]NUMBER",
    )  # fmt: skip
    rtol: dict[str, float] = option(
        "Relative tolerance: |a - b| <= atol + rtol |b|. [default: FP32 1e-3, FP16 1e-2, "
        "BF16 8e-2, others none, integers 0]",
        multiple=True, parse=_parse_limits, metavar="[TENSOR:]NUMBER",
    )  # fmt: skip
    min_sqnr: dict[str, float] = option(
        "Least ratio of signal to error, in dB; for INT8.",
        multiple=True, parse=partial(_parse_limits, least=-math.inf), metavar="[TENSOR:]DB",
    )  # fmt: skip
