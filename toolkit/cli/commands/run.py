"""`tandem run`: a pipeline on this machine, in this process."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.cli.command import argument, command, json_option, option, part
from toolkit.cli.options.choices import Dla, Executor, Scales
from toolkit.cli.options.model import engines_option, executor_option, timing_cache_option


@dataclass(frozen=True, slots=True)
class FileOptions:
    """The files of the pipeline, and where its frames come from."""

    pipeline: Path | None = option("pipeline.toml of an engine.")
    engines: dict[str, Path] = engines_option(
        "The engine of one of [[models]], in place of the file that it names.", "--model"
    )
    labels: Path | None = option("labels.txt of an engine.")
    sources: tuple[str, ...] = option(
        "A video, a folder, v4l2:///dev/video0, rtsp://...; ID=URI for each of several.",
        "--source", metavar="URI",
    )  # fmt: skip
    frames: int | None = option("Stop after this number of frames.", min=1)


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """How segments are run."""

    dla: Dla = option(
        "How DLA segments run: portable on onnxruntime; exact and fast emulate the DLA's INT8.",
        default="portable",
    )
    scales: Scales = option(
        "Scales of the emulated DLA: 16 bits and a shift, or exact.", default="hardware"
    )
    executor: Executor = executor_option()
    timing_cache: Path | None = timing_cache_option(
        "Run the fastest GPU tactics; missing ones are timed and added to the file."
    )


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What is written and shown."""

    video: str | None = option("Write an annotated video.", "--video", "--save", metavar="OUT.mp4")
    jsonl: str | None = option("Write the detections of every frame.", metavar="OUT.jsonl")
    trace: Path | None = option(
        "Write the stages of every frame for chrome://tracing.", metavar="OUT.json"
    )
    overwrite: bool = option("--video, --jsonl and --trace may replace files.")
    preview: str | None = option(
        "Show pictures and figures on a page; :8090 for this machine, 0.0.0.0:8090 for all.",
        metavar="[HOST]:PORT",
    )
    window: bool = option("Show the pictures in a window; q ends the run.")
    as_json: bool = json_option("Print a summary as JSON at the end.")


@dataclass(frozen=True, slots=True)
class Run:
    """Run a pipeline on this machine: a bundle, a pipeline.toml that names its engines and labels,
    or an engine with --pipeline and --labels.

    The same files run on the board. Results go to --video and --jsonl; mqtt sinks are ignored.

    Example: tandem run robot.bundle --source rtsp://10.0.0.7/stream --video seen.mp4
    """

    target: Path = argument("BUNDLE|ENGINE|PIPELINE.toml")
    model: FileOptions = part("Model")
    kernels: KernelOptions = part("Kernels")
    output: OutputOptions = part("Output")


run = command(Run, "run:run")  # fmt: skip
