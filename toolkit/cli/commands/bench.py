"""`tandem bench`: how fast an engine is on this machine."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from zipfile import BadZipFile

import click
import numpy as np
from numpy.lib.npyio import NpzFile
from rich.console import Console
from rich.text import Text

from device.engine.file import open_engine
from device.engine.manifest import UNCALIBRATED
from toolkit.cli.options.calibration import parse_shapes
from toolkit.cli.options.finite import FiniteRange
from toolkit.cli.options.tactics import not_timed
from toolkit.errors import BenchError
from toolkit.evaluate.bench.measure import BenchOptions, Measured, measure
from toolkit.evaluate.bench.report import BenchResult, bench_builtins, bench_table
from toolkit.evaluate.bench.state import readings, versions
from toolkit.machine import this_machine


@click.command(epilog="Example: tandem bench model.engine --streams 2 --profile")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "--duration",
    type=FiniteRange(min=0, max=3600),
    default=3.0,
    show_default=True,
    help="Seconds to measure, at least 10 inferences.",
)
@click.option("--iterations", type=click.IntRange(min=1), help="Instead: inferences a stream.")
@click.option(
    "--warmup",
    type=FiniteRange(min=0, max=3600),
    default=0.2,
    show_default=True,
    help="Seconds before measuring.",
)
@click.option("--batch", type=click.IntRange(min=1), help="Size of a dynamic first dimension.")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    callback=parse_shapes,
    metavar="NAME=DIMS",
    help="An input's shape, for dynamic dimensions.",
)
@click.option(
    "--streams",
    type=click.IntRange(min=1, max=64),
    default=1,
    show_default=True,
    help="Sessions that run at once, each in a thread.",
)
@click.option(
    "--input",
    "data",
    type=click.Path(path_type=Path),
    metavar="FILE.npz",
    help="Inputs by name. [default: random]",
)
@click.option("--profile", is_flag=True, help="Time every layer by itself, too.")
@click.option(
    "--timing-cache",
    type=click.Path(path_type=Path),
    help="Run the fastest tactics; those that the file lacks are timed and added to it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def bench(
    engine: Path,
    duration: float,
    iterations: int | None,
    warmup: float,
    batch: int | None,
    shapes: dict[str, tuple[int, ...]],
    streams: int,
    data: Path | None,
    profile: bool,
    timing_cache: Path | None,
    as_json: bool,
) -> None:
    """Measure how fast an ENGINE runs on this machine.

    Throughput, latency, the GPU's times for copies and kernels, and the machine's clocks, power
    mode and versions: figures without them cannot be compared.
    """
    if data and (shapes or batch):
        raise click.UsageError("--input has shapes of its own; leave out --shape and --batch.")
    options = BenchOptions(
        duration_s=duration,
        iterations=iterations,
        warmup_s=warmup,
        streams=streams,
        shapes=shapes,
        batch=batch,
        profile=profile,
        timing_cache=timing_cache,
    )
    machine = this_machine()
    found: dict[str, str] = {}
    with open_engine(engine) as opened:
        measured = measure(
            opened,
            options,
            read_inputs(data) if data else None,
            lambda: found.update(readings(machine)),
        )
        manifest = opened.manifest
        result = BenchResult(
            engine=str(engine),
            sha256=opened.sha256,
            profile=manifest.profile,
            precision=manifest.provenance.precision,
            measured=measured,
            machine=found,
            versions=versions(machine),
            notes=_notes(measured, timing_cache),
        )
    if as_json:
        click.echo(json.dumps(bench_builtins(result)))
        return
    console = Console()
    if manifest.uncalibrated:
        console.print(Text(UNCALIBRATED, style="bold red"))
    console.print(bench_table(result, manifest))


def _notes(measured: Measured, timing_cache: Path | None) -> tuple[str, ...]:
    """Say what a machine without a GPU leaves out."""
    if measured.gpu:
        return ()
    times = "no segment runs on a GPU here, so there are no times of one"
    return (times,) if timing_cache is None else (times, not_timed(timing_cache))


def read_inputs(path: Path) -> Mapping[str, np.ndarray]:
    """Read arrays by name from a .npz file; raises BenchError."""
    try:
        found = np.load(path, allow_pickle=False)
        if not isinstance(found, NpzFile):
            raise BenchError(f"{path} holds one array without a name; write it with numpy.savez")
        with found:
            arrays = {name: found[name] for name in found.files}
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        raise BenchError(
            f"{path} cannot be read as .npz ({error}); write one with numpy.savez"
        ) from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise BenchError(f"{path}: {name!r} is no array; write the file with numpy.savez")
    return arrays
