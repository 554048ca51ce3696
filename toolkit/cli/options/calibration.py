"""The calibration options that `tandem build` and `tandem calibrate` share."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from device.engine.preprocessing import Interpolation
from device.errors import TandemError
from toolkit.cli.command import option, part
from toolkit.cli.options.choices import (
    AUTO,
    CALIBRATION_METHODS,
    PREPROCESSINGS,
    Switch,
    complete_method,
)

_STEP_DEFAULT = "[default: auto with --method auto or --budget, else off]"
_RESIZES = ("letterbox", "letterbox-corner", "stretch", "centre-crop")


@dataclass(frozen=True, slots=True)
class KeepOption:
    """Whether nodes may stay in floating point unasked; `most_float`: the share, None: default."""

    keep: Literal["auto", "none"]
    most_float: float | None = None


def _parse_method(value: str) -> str:
    if value != AUTO:
        from calibration.threshold import method_named

        try:
            method_named(value)
        except TandemError as err:
            raise click.BadParameter(f"{err}, or {AUTO}") from err
    return value


def _parse_keep(value: str | None) -> KeepOption | None:
    """Read "auto", "none", or a percentage such as 30%."""
    if value == "auto":
        return KeepOption("auto")
    if value is None or value == "none":
        return None if value is None else KeepOption("none")
    try:
        share = float(value.removesuffix("%")) / 100.0
    except ValueError:
        share = math.nan
    if not value.endswith("%") or not 0.0 < share <= 1.0:
        raise click.BadParameter(f"{value!r} is not auto, none or a percentage such as 30%")
    return KeepOption("auto", share)


def _parse_numbers(value: str | None) -> tuple[float, ...] | None:
    """Read one number, or three with commas."""
    if value is None:
        return None
    try:
        numbers = tuple(float(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(
            f"{value!r} is not a number for each channel, such as 0.485,0.456,0.406"
        ) from error
    if len(numbers) not in (1, 3):
        raise click.BadParameter(f"{value!r} has {len(numbers)} numbers; give 1 or 3")
    return numbers


def _parse_resize(value: str | None) -> dict[str, Any] | None:
    """Read the name of a resize; the crop may have a fraction of the shorter side."""
    if value is None:
        return None
    name, colon, share = value.partition(":")
    try:
        fraction = float(share) if colon else 1.0
    except ValueError:
        fraction = 0.0
    if name not in _RESIZES or not 0.0 < fraction <= 1.0 or (colon and name != "centre-crop"):
        raise click.BadParameter(
            f"{value!r} is not one of {', '.join(_RESIZES)}; centre-crop takes the share of the "
            "shorter side, such as centre-crop:0.875"
        )
    return {"resize": name, "crop_fraction": fraction}


@dataclass(frozen=True, slots=True)
class PreprocessOptions:
    """How an image becomes the network's input; None: as the model or its file says."""

    preprocess: str | None = option(
        f"How an image becomes the input: {', '.join(PREPROCESSINGS)}, or a model file "
        "(configs/models/*.toml). [default: as the model's metadata or name say, else yolo]",
        metavar="NAME|FILE",
    )
    mean: tuple[float, ...] | None = option(
        "Subtracted from scaled pixels, in the input's colour order.",
        parse=_parse_numbers, metavar="R,G,B",
    )  # fmt: skip
    std: tuple[float, ...] | None = option(
        "Divides after the mean.", parse=_parse_numbers, metavar="R,G,B"
    )
    scale: float | None = option(
        "Multiplies pixels from 0 to 255, such as 1 or 0.00392157.", min=0, min_open=True
    )
    color: Literal["rgb", "bgr", "grey"] | None = option(None, "--colour", "--color")
    layout: Literal["nchw", "nhwc"] | None = option(None)
    resize: dict[str, Any] | None = option(
        f"{', '.join(_RESIZES)}, or centre-crop:0.875 (share of the shorter side).",
        parse=_parse_resize, metavar="MODE",
    )  # fmt: skip
    interpolation: Interpolation | None = option(
        "Of the resize; pillow-* antialias, as classifiers are trained."
    )
    strict: bool = option("Refuse images whose preprocessing is not specified.")


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """What is measured on the data, and what is done about the loss of INT8."""

    samples: int | None = option("Number of samples. [default: all]", min=1)
    method: str = option(
        f"{AUTO}, {', '.join(CALIBRATION_METHODS)}, or percentile:99.9.",
        default=AUTO, parse=_parse_method, metavar="METHOD", complete=complete_method,
    )  # fmt: skip
    budget: str | None = option(
        "Keep nodes in float until a metric holds, such as margin:0 or sqnr:25.",
        metavar="METRIC:LOSS",
    )
    keep: KeepOption | None = option(
        "Keep nodes with the largest INT8 error in float for outputs with scores or beyond their "
        "target: at most 15% of the multiplications, or PERCENT. "
        "[default: auto with --method auto, else none; --budget replaces it]",
        parse=_parse_keep, metavar="auto|none|PERCENT",
    )  # fmt: skip
    resume: Path | None = option("Save the state of the calibration here, and resume from it.")
    workers: str | None = option(
        "Observe the samples in N processes, or on the workers of a Dask scheduler; the "
        "result is that of one process.",
        metavar="N|tcp://HOST:PORT",
    )
    preprocess: PreprocessOptions = part()
    equalise: Switch | None = option(
        f"Rescale channels between layers, some by Mul; auto: if it helps. {_STEP_DEFAULT}"
    )
    round_weights: Switch | None = option(
        "Round weights to minimise the error of layer outputs; auto: where an output misses "
        f"its target, if it helps. {_STEP_DEFAULT}"
    )
    bias_correction: Switch | None = option(
        f"Correct biases by the mean error of INT8; auto: if it helps. {_STEP_DEFAULT}"
    )
    keep_float: tuple[str, ...] = option(
        "Keep a node in floating point. Repeatable.", metavar="NODE"
    )
    accept_loss: bool = option(
        "Continue where INT8, or INT4 weights, lose more at an output than its limit."
    )
