"""The options that say when two tensors agree."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from toolkit.evaluate.agreement.tolerance import Tolerances

F = TypeVar("F", bound=Callable[..., Any])


def parse_limits(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, float]:
    """Parse NUMBER or TENSOR:NUMBER, any number of times; "" stands for all other tensors."""
    limits = {}
    for value in values:
        name, _, text = value.rpartition(":")
        try:
            limit = float(text)
        except ValueError as err:
            raise click.BadParameter(
                f"{value!r} is not NUMBER or TENSOR:NUMBER, such as 1e-3 or y:1e-3"
            ) from err
        if math.isnan(limit) or (limit < 0 and param.name != "min_sqnr"):
            raise click.BadParameter(f"{value!r} is not 0 or more")
        limits[name] = limit
    return limits


def tolerance_options(command: F) -> F:
    """Add --atol, --rtol and --min-sqnr."""
    metavar = "[TENSOR:]NUMBER"
    options = (
        click.option("--atol", multiple=True, callback=parse_limits, metavar=metavar,
            help="Absolute tolerance, for all or one tensor. [default: FP32 1e-4, FP16 1e-2, "
            "INT8 none, integers 0]"),
        click.option("--rtol", multiple=True, callback=parse_limits, metavar=metavar,
            help="Relative tolerance: |a - b| <= atol + rtol |b|. [default: FP32 1e-3, FP16 1e-2, "
            "INT8 none, integers 0]"),
        click.option("--min-sqnr", multiple=True, callback=parse_limits, metavar="[TENSOR:]DB",
            help="Least ratio of signal to error, in dB; for INT8."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def tolerances_of(
    atol: dict[str, float], rtol: dict[str, float], min_sqnr: dict[str, float]
) -> "Tolerances":
    """Make one value of the options."""
    from toolkit.evaluate.agreement.tolerance import Tolerances

    return Tolerances(atol, rtol, min_sqnr)
