"""`tandem replay`: a pipeline on this machine, on the pictures of a recording."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.cli.command import argument, command, option, part
from toolkit.cli.commands.run import FileOptions, KernelOptions, OutputOptions


@dataclass(frozen=True, slots=True)
class Replay:
    """Run a pipeline on the pictures of a recording: each of them, with its number and its time.

    A folder is a recording in several files. The pictures of several sources are those of the
    topics /ID/image/compressed.

    Example: tandem replay robot.bundle field.mcap --fast --jsonl again.jsonl
    """

    target: Path = argument("BUNDLE|ENGINE|PIPELINE.toml")
    recording: Path = argument("RECORDING.mcap")
    topic: str = option("Of one source: the topic; else the first with pictures.", default="")
    fast: bool = option("As fast as the engine is, not in the time of the recording.")
    model: FileOptions = part("Model")
    kernels: KernelOptions = part("Kernels")
    output: OutputOptions = part("Output")


replay = command(Replay, "run:replay")  # fmt: skip
