"""What `tandem build` and `tandem calibrate` ask in the same words."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from calibration.budget import parse_budget
from calibration.errors import CalibrationError
from calibration.threshold import METHODS, method_named
from pipelines.config import load_labels, load_model
from toolkit.quantize.corrections.corrections import Switch
from toolkit.quantize.ranges.measure import AUTO, RangeOptions, Report

_STEP_DEFAULT = "[default: auto with --method auto or --budget, else off]"

F = TypeVar("F", bound=Callable[..., Any])


def parse_method(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """A row of METHODS, with a parameter after a colon where it takes one, or "auto"."""
    if value != AUTO:
        try:
            method_named(value)
        except CalibrationError as err:
            raise click.BadParameter(f"{err}, or {AUTO}") from err
    return value


def parse_shapes(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """NAME=1x3x224x224, any number of times, as input name -> shape."""
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
    """The options that find ranges; `required`: --data must be given."""
    options = (
        click.option(
            "--data",
            required=required,
            type=click.Path(path_type=Path),
            help="Pictures, a video, .npy or .npz samples.",
        ),
        click.option(
            "--samples", type=click.IntRange(min=1), help="How many samples. [default: all]"
        ),
        click.option(
            "--method",
            default="entropy",
            show_default=True,
            callback=parse_method,
            metavar="METHOD",
            help=f"{AUTO}, {', '.join(METHODS)}, or percentile:99.9.",
        ),
        click.option(
            "--budget",
            metavar="METRIC:LOSS",
            help="Keep nodes in float until a metric holds, such as sqnr:25 or map50:-0.5.",
        ),
        click.option(
            "--resume",
            type=click.Path(path_type=Path),
            help="Keep the state here, and go on from it.",
        ),
        click.option(
            "--preprocess",
            type=click.Path(path_type=Path),
            help="Model file (configs/models/*.toml): how pictures become the input.",
        ),
        click.option(
            "--equalise",
            type=click.Choice(["auto", "on", "off"]),
            help=f"Rescale channels between layers; auto: if it helps. {_STEP_DEFAULT}",
        ),
        click.option(
            "--bias-correction",
            type=click.Choice(["auto", "on", "off"]),
            help=f"Take the mean error of INT8 out of biases; auto: if it helps. {_STEP_DEFAULT}",
        ),
        click.option(
            "--keep-float",
            multiple=True,
            metavar="NODE",
            help="Keep a node in floating point, any number of times.",
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
    resume: Path | None,
    preprocess: Path | None,
    equalise: Switch | None,
    bias_correction: Switch | None,
    keep_float: tuple[str, ...],
) -> RangeOptions:
    """The options as `toolkit.quantize.ranges.measure` takes them; a model file brings decoder and
    labels.
    """
    model = load_model(preprocess) if preprocess else None
    return RangeOptions(
        method=method,
        samples=samples,
        preprocess=model.preprocess if model else None,
        budget=parse_budget(budget) if budget else None,
        resume=resume,
        detector=model,
        labels=load_labels(preprocess.parent / model.labels) if preprocess and model else (),
        equalise=equalise,
        correct_biases=bias_correction,
        keep_float=frozenset(keep_float),
    )


@contextmanager
def progress_bar(title: str) -> Iterator[Report]:
    """Show the steps on standard error while they run, with the time that is left."""
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(title, total=1.0)

        def report(step: str, share: float) -> None:
            bar.update(task, description=f"{title}: {step}", completed=share)

        yield report
