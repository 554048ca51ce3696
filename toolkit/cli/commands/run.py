"""`tandem run`: a pipeline on this machine, in this process."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.cli.options.engines import parse_engines

if TYPE_CHECKING:
    from device.runtime.session import Dla, Scales


@click.command(
    epilog="Example: tandem run robot.bundle --source rtsp://10.0.0.7/stream --video seen.mp4"
)
@click.argument("target", metavar="BUNDLE|ENGINE|PIPELINE.toml", type=click.Path(path_type=Path))
@click.option("--pipeline", type=click.Path(path_type=Path), help="pipeline.toml of an engine.")
@click.option(
    "--model",
    "engines",
    multiple=True,
    callback=parse_engines,
    metavar="NAME=FILE",
    help="The engine of one of [[models]], in place of the file that it names.",
)
@click.option("--labels", type=click.Path(path_type=Path), help="labels.txt of an engine.")
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="URI",
    help="A video, a folder, v4l2:///dev/video0, rtsp://...; ID=URI for each of several.",
)
@click.option("--frames", type=click.IntRange(min=1), help="Stop after this number of frames.")
@click.option("--video", "--save", "video", metavar="OUT.mp4", help="Write an annotated video.")
@click.option("--jsonl", metavar="OUT.jsonl", help="Write the detections of every frame.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="OUT.json",
    help="Write the stages of every frame for chrome://tracing.",
)
@click.option("--overwrite", is_flag=True, help="--video, --jsonl and --trace may replace files.")
@click.option(
    "--preview",
    metavar="[HOST]:PORT",
    help="Show pictures and figures on a page; :8090 for this machine, 0.0.0.0:8090 for all.",
)
@click.option("--window", is_flag=True, help="Show the pictures in a window; q ends the run.")
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON at the end.")
@click.option(
    "--dla",
    type=click.Choice(["portable", "exact", "fast"]),
    default="portable",
    show_default=True,
    help="How DLA segments run: portable on onnxruntime; exact and fast emulate the DLA's INT8.",
)
@click.option(
    "--scales",
    type=click.Choice(["hardware", "ideal"]),
    default="hardware",
    show_default=True,
    help="Scales of the emulated DLA: 16 bits and a shift, or exact.",
)
@click.option(
    "--timing-cache",
    type=click.Path(path_type=Path),
    help="Run the fastest GPU tactics; missing ones are timed and added to the file.",
)
def run(
    target: Path,
    pipeline: Path | None,
    engines: dict[str, Path],
    labels: Path | None,
    sources: tuple[str, ...],
    frames: int | None,
    video: str | None,
    jsonl: str | None,
    trace: Path | None,
    overwrite: bool,
    preview: str | None,
    window: bool,
    as_json: bool,
    dla: "Dla",
    scales: "Scales",
    timing_cache: Path | None,
) -> None:
    """Run a pipeline on this machine: a bundle, a pipeline.toml that names its engines and labels,
    or an engine with --pipeline and --labels.

    The same files run on the board. Results go to --video and --jsonl; mqtt sinks are ignored.
    """
    from toolkit.cli.actions.run import RunRequest, run_target

    request = RunRequest(
        target=target,
        pipeline=pipeline,
        engines=engines,
        labels=labels,
        sources=sources,
        frames=frames,
        video=video,
        jsonl=jsonl,
        trace=trace,
        overwrite=overwrite,
        preview=preview,
        window=window,
        dla=dla,
        scales=scales,
        timing_cache=timing_cache,
    )
    run_target(request, as_json=as_json)
