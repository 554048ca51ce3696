"""`tandem record`: a pipeline on this machine, recorded in MCAP."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.cli.command import argument, command, part
from toolkit.cli.commands.run import FileOptions, KernelOptions, OutputOptions


@dataclass(frozen=True, slots=True)
class Record:
    """Run a pipeline as `tandem run` does, and record its pictures, results and figures.

    The recording has messages of ROS 2 in MCAP, which Foxglove and rosbags open and `tandem replay`
    runs again. A `[[sinks]]` of kind mcap in pipeline.toml says when the next file begins.

    Example: tandem record robot.bundle field.mcap --source rtsp://10.0.0.7/stream
    """

    target: Path = argument("BUNDLE|ENGINE|PIPELINE.toml")
    recording: str = argument("OUT.mcap")
    model: FileOptions = part("Model")
    kernels: KernelOptions = part("Kernels")
    output: OutputOptions = part("Output")


record = command(Record, "run:record")  # fmt: skip
