"""`tandem bench`: how fast an engine is on this machine."""

import json
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from device.engine.manifest import UNCALIBRATED
from toolkit.cli.options.calibration import parse_shapes
from toolkit.cli.options.finite import FiniteRange
from toolkit.cli.options.page import html_option, say_written
from toolkit.cli.options.range_outputs import need_folders


@click.command(epilog="Example: tandem bench model.engine --streams 2 --profile")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "--duration",
    type=FiniteRange(min=0, max=3600),
    default=3.0,
    show_default=True,
    help="Seconds to measure, at least 10 inferences.",
)
@click.option(
    "--iterations", type=click.IntRange(min=1), help="Inferences per stream, instead of --duration."
)
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
    help="Concurrent sessions, each in its own thread.",
)
@click.option(
    "--input",
    "data",
    type=click.Path(path_type=Path),
    metavar="FILE.npz",
    help="Inputs by name. [default: random]",
)
@click.option("--profile", is_flag=True, help="Also time every layer by itself.")
@click.option(
    "--timing-cache",
    type=click.Path(path_type=Path),
    help="Run the fastest tactics; missing ones are timed and added to the file.",
)
@html_option("percentiles, histogram and, with --profile, layer times in the graph")
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
    html: Path | None,
    as_json: bool,
) -> None:
    """Measure how fast an ENGINE runs on this machine.

    Reports throughput, latency, the GPU's times for copies and kernels, and the machine's clocks,
    power mode and versions, without which figures cannot be compared.
    """
    if data and (shapes or batch):
        raise click.UsageError("--input has shapes of its own; leave out --shape and --batch.")

    from toolkit.cli.actions.bench import bench_engine, write_bench_page
    from toolkit.evaluate.bench.measure import BenchOptions
    from toolkit.evaluate.bench.report import bench_builtins, bench_table

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
    need_folders(html)
    result, manifest = bench_engine(engine, options, data)
    if html is not None:
        write_bench_page(result, html)
    if as_json:
        click.echo(json.dumps(bench_builtins(result)))
        say_written(html, as_json=True)
        return
    console = Console()
    if manifest.uncalibrated:
        console.print(Text(UNCALIBRATED, style="bold red"))
    console.print(bench_table(result, manifest))
    say_written(html, as_json=False)
