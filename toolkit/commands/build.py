"""`tandem build`: ONNX model -> engine for a device profile."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from calibration.table import read_table, write_table
from calibration.threshold import METHODS
from device.manifest import DimRange, Precision
from pipelines.config import PreprocessConfig, load_model
from toolkit.build import DEFAULT_METHOD, BuildOptions, BuildResult, build_engine
from toolkit.build import Progress as Report
from toolkit.report_text import build_text


def parse_shapes(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """NAME=1x3x224x224, any number of times, as input name -> shape."""
    shapes = {}
    for value in values:
        name, _, dims = value.rpartition("=")
        try:
            shapes[name] = _ints(dims, "x")
        except ValueError:
            name = ""
        if not name:
            raise click.BadParameter(f"{value!r} is not NAME=DIMS, such as images=1x3x224x224")
    return shapes


def parse_dims(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[DimRange, ...]:
    """NAME=MIN:OPT:MAX, any number of times, as ranges of dynamic dimensions."""
    ranges = []
    for value in values:
        name, _, sizes = value.rpartition("=")
        try:
            low, opt, high = _ints(sizes, ":")
        except ValueError as err:
            raise click.BadParameter(
                f"{value!r} is not NAME=MIN:OPT:MAX, such as batch=1:4:8"
            ) from err
        if not (name and 1 <= low <= opt <= high):
            raise click.BadParameter(f"{value!r} does not keep 1 <= MIN <= OPT <= MAX")
        ranges.append(DimRange(name=name, min=low, opt=opt, max=high))
    return tuple(ranges)


@click.command(
    epilog="Example: tandem build model.onnx --profile agx-orin-64gb --data images/ -o m.engine"
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--profile", default="laptop", show_default=True, help="See `tandem profiles`.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="[default: MODEL.engine]")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "int8"]),
    help="[default: int8 with --data or --table, else fp16; fp32 without a GPU]",
)
@click.option("--data", type=click.Path(path_type=Path), help="Pictures, .npy or .npz samples.")
@click.option("--samples", type=click.IntRange(min=1), help="How many samples. [default: all]")
@click.option(
    "--method", type=click.Choice(list(METHODS)), default=DEFAULT_METHOD, show_default=True
)
@click.option("--table", type=click.Path(path_type=Path), help="Use this calibration table.")
@click.option("--save-table", type=click.Path(path_type=Path), help="Write the table measured.")
@click.option(
    "--preprocess",
    type=click.Path(path_type=Path),
    help="Model file (configs/models/*.toml) that says how pictures become the input.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    callback=parse_shapes,
    metavar="NAME=DIMS",
    help="Fix an input's shape.",
)
@click.option(
    "--dim",
    "dims",
    multiple=True,
    callback=parse_dims,
    metavar="NAME=MIN:OPT:MAX",
    help="Keep a dimension dynamic within a range.",
)
@click.option("--jetpack", help="JetPack version on the board. [default: newest with its DLA]")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def build(
    model: Path,
    profile: str,
    out: Path | None,
    precision: Precision | None,
    data: Path | None,
    samples: int | None,
    method: str,
    table: Path | None,
    save_table: Path | None,
    preprocess: Path | None,
    shapes: dict[str, tuple[int, ...]],
    dims: tuple[DimRange, ...],
    jetpack: str | None,
    as_json: bool,
) -> None:
    """Build an engine from an ONNX MODEL for a device profile.

    The report says which node runs on which processor and why, in segments.
    """
    if table and (data or save_table):
        raise click.UsageError("--table replaces --data and --save-table; give one or the other.")
    for option, value in (("--samples", samples), ("--save-table", save_table)):
        if value and not data:
            raise click.UsageError(f"{option} belongs to calibration; give --data with it.")
    if data and precision not in (None, "int8"):
        raise click.UsageError(
            f"--data calibrates INT8; --precision {precision} has no use for it."
        )
    options = BuildOptions(
        precision=precision,
        jetpack=jetpack,
        data=data,
        samples=samples,
        method=method,
        table=read_table(table) if table else None,
        preprocess=read_preprocess(preprocess) if preprocess else None,
        shapes=shapes,
        dims=dims,
    )
    with progress_bar(model.name) as report:
        result = build_engine(model, profile, out or model.with_suffix(".engine"), options, report)
    if save_table and result.calibration:
        write_table(save_table, result.calibration.table)
    if as_json:
        click.echo(json.dumps(as_builtins(result)))
    else:
        click.echo(build_text(result))


def read_preprocess(path: Path) -> PreprocessConfig:
    """The preprocessing that a model file describes."""
    return load_model(path).preprocess


def as_builtins(result: BuildResult) -> dict[str, Any]:
    """What `--json` prints."""
    calibration = result.calibration
    return {
        "engine": str(result.path),
        "bytes": result.path.stat().st_size,
        "manifest": msgspec.to_builtins(result.manifest),
        "passes": {step.name: step.changes for step in result.passes},
        "notes": list(result.notes),
        "skipped_samples": [s.name for s in calibration.skipped] if calibration else [],
    }


@contextmanager
def progress_bar(title: str) -> Iterator[Report]:
    """Show the steps of a build on standard error while it runs."""
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


def _ints(text: str, separator: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(separator))
