"""`tandem bench`: how fast an engine is on this machine."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.cli.command import argument, command, json_option, option
from toolkit.cli.options.choices import Executor
from toolkit.cli.options.model import (
    executor_option,
    html_option,
    shapes_option,
    timing_cache_option,
)


@dataclass(frozen=True, slots=True)
class Bench:
    """Measure how fast an ENGINE runs on this machine.

    Reports throughput, latency, the GPU's times for copies and kernels, and the machine's clocks,
    power mode and versions, without which figures cannot be compared.

    Example: tandem bench model.engine --streams 2 --profile
    """

    engine: Path = argument()
    duration: float = option(
        "Seconds to measure, at least 10 inferences.", min=0, max=3600, default=3.0
    )
    iterations: int | None = option("Inferences per stream, instead of --duration.", min=1)
    warmup: float = option("Seconds before measuring.", min=0, max=3600, default=0.2)
    batch: int | None = option("Size of a dynamic first dimension.", min=1)
    shapes: dict[str, tuple[int, ...]] = shapes_option("An input's shape, for dynamic dimensions.")
    streams: int = option("Concurrent sessions, each in its own thread.", min=1, max=64, default=1)
    input: Path | None = option("Inputs by name. [default: random]", metavar="FILE.npz")
    profile: bool = option("Also time every layer by itself.")
    executor: Executor = executor_option()
    timing_cache: Path | None = timing_cache_option(
        "Run the fastest tactics; missing ones are timed and added to the file."
    )
    html: Path | None = html_option(
        "percentiles, histogram and, with --profile, layer times in the graph"
    )
    as_json: bool = json_option()


bench = command(Bench, "bench:bench")  # fmt: skip
