"""The calibration options that `tandem build` and `tandem calibrate` share."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from device.errors import TandemError
from toolkit.cli.options.choices import AUTO, CALIBRATION_METHODS, Switch
from toolkit.cli.options.names import complete_method
from toolkit.cli.options.preprocess import PreprocessOptions, preprocess_options

if TYPE_CHECKING:
    from toolkit.quantize.ranges.measure import RangeOptions

LOG = logging.getLogger("tandem")

_STEP_DEFAULT = "[default: auto with --method auto or --budget, else off]"

F = TypeVar("F", bound=Callable[..., Any])


def parse_method(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Check "auto" or the name of a calibration method, with a parameter after a colon."""
    if value != AUTO:
        from calibration.threshold import method_named

        try:
            method_named(value)
        except TandemError as err:
            raise click.BadParameter(f"{err}, or {AUTO}") from err
    return value


@dataclass(frozen=True, slots=True)
class KeepOption:
    """Whether nodes may stay in floating point unasked; `most_float`: the share, None: default."""

    keep: Literal["auto", "none"]
    most_float: float | None = None


def parse_keep(ctx: click.Context, param: click.Parameter, value: str | None) -> KeepOption | None:
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


def parse_shapes(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """Parse NAME=1x3x224x224, any number of times, into input name -> shape."""
    shapes = {}
    for value in values:
        name, _, dims = value.rpartition("=")
        try:
            shapes[name] = tuple(int(part) for part in dims.split("x"))
        except ValueError as err:
            raise click.BadParameter(
                f"{value!r} is not NAME=DIMS, such as images=1x3x224x224"
            ) from err
        if not name:
            raise click.BadParameter(f"{value!r} names no input; write NAME=DIMS")
    return shapes


def calibration_options(required: bool) -> Callable[[F], F]:
    """Add the options of a calibration; `required`: --data is mandatory."""
    options = (
        click.option(
            "--data",
            required=required,
            type=click.Path(path_type=Path),
            help="Images, a video, .npy or .npz samples.",
        ),
        click.option(
            "--samples", type=click.IntRange(min=1), help="Number of samples. [default: all]"
        ),
        click.option(
            "--method",
            default=AUTO,
            show_default=True,
            callback=parse_method,
            metavar="METHOD",
            shell_complete=complete_method,
            help=f"{AUTO}, {', '.join(CALIBRATION_METHODS)}, or percentile:99.9.",
        ),
        click.option(
            "--budget",
            metavar="METRIC:LOSS",
            help="Keep nodes in float until a metric holds, such as margin:0 or sqnr:25.",
        ),
        click.option(
            "--keep",
            callback=parse_keep,
            metavar="auto|none|PERCENT",
            help="Keep the nodes in float whose INT8 costs most where an output misses its target, "
            "with at most 50% of the multiplications, or PERCENT. "
            "[default: auto with --method auto, else none; --budget replaces it]",
        ),
        click.option(
            "--resume",
            type=click.Path(path_type=Path),
            help="Save the state of the calibration here, and resume from it.",
        ),
        preprocess_options,
        click.option(
            "--equalise",
            type=click.Choice(["auto", "on", "off"]),
            help=f"Rescale channels between layers; auto: if it helps. {_STEP_DEFAULT}",
        ),
        click.option(
            "--bias-correction",
            type=click.Choice(["auto", "on", "off"]),
            help=f"Correct biases by the mean error of INT8; auto: if it helps. {_STEP_DEFAULT}",
        ),
        click.option(
            "--keep-float",
            multiple=True,
            metavar="NODE",
            help="Keep a node in floating point. Repeatable.",
        ),
        click.option(
            "--accept-loss",
            is_flag=True,
            help="Go on where INT8 loses more at an output than its limit.",
        ),
    )

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def range_options(
    method: str,
    samples: int | None,
    budget: str | None,
    keep: KeepOption | None,
    resume: Path | None,
    preprocess: PreprocessOptions,
    equalise: Switch | None,
    bias_correction: Switch | None,
    keep_float: tuple[str, ...],
) -> "RangeOptions":
    """Make one value of the options; the decoder and the labels come from the model file."""
    from calibration.budget import parse_budget
    from pipelines.config import load_labels
    from toolkit.quantize.ranges.measure import RangeOptions
    from toolkit.quantize.trials.keep import MOST_FLOAT

    file, model = preprocess.file, preprocess.model
    most_float = keep.most_float if keep is not None else None
    return RangeOptions(
        method=method,
        samples=samples,
        preprocess=preprocess.stated,
        budget=parse_budget(budget) if budget else None,
        keep=keep.keep if keep is not None else None,
        most_float=MOST_FLOAT if most_float is None else most_float,
        resume=resume,
        detector=model,
        labels=load_labels(file.parent / model.labels) if file and model else (),
        equalise=equalise,
        correct_biases=bias_correction,
        keep_float=frozenset(keep_float),
    )
