"""What `tandem bench` prints: a table for people, and the same as JSON for programs."""

from collections.abc import Mapping
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from device.engine.manifest import Manifest
from toolkit.evaluate.bench.distribution import Distribution
from toolkit.evaluate.bench.measure import GpuTimes, Layer, Measured

_COLUMNS = ("min", "mean", "median", "p90", "p95", "p99", "max")
_NODES_SHOWN = 3  # of one operation


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints: the times, the machine while they were taken, and the versions.

    `sha256` is that of the engine file; `notes` say what is missing, and why.
    """

    engine: str
    sha256: str
    profile: str
    precision: str
    measured: Measured
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()


def bench_table(result: BenchResult, manifest: Manifest) -> Group:
    """Return the report as text."""
    measured = result.measured
    shapes = ", ".join(f"{name} {'x'.join(map(str, s))}" for name, s in measured.shapes.items())
    parts: list[Any] = [
        Text(f"{result.engine}: {manifest.provenance.model}, {result.precision}, {shapes}"),
        *(Text(line, style="dim") for line in measured.segments),
        _times(measured),
        Text(throughput_text(measured), style="bold"),
    ]
    parts += [Text(note) for note in result.notes]
    if measured.layers:
        parts.append(_layers(measured.layers))
    parts.append(Text(_line("machine under load", result.machine), style="dim"))
    parts.append(Text(_line("versions", result.versions), style="dim"))
    return Group(*parts)


def bench_builtins(result: BenchResult) -> dict[str, Any]:
    """Return the report as JSON values."""
    fields: dict[str, Any] = msgspec.to_builtins(result)
    return fields


def _times(measured: Measured) -> Table:
    table = Table(
        caption="ms; pNN: the smallest time that NN % of the runs do not exceed",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("", no_wrap=True)
    for name in (*_COLUMNS, "runs"):
        table.add_column(name, justify="right")
    table.add_row("latency (infer)", *_cells(measured.latency), style="bold")
    for gpu_times in measured.gpu:
        where = f" {gpu_times.segment}" if len(measured.gpu) > 1 else ""
        for title, times in gpu_rows(gpu_times):
            table.add_row(f"{title}{where}", *_cells(times))
    return table


def gpu_rows(gpu_times: GpuTimes) -> tuple[tuple[str, Distribution], ...]:
    """Return the times of one segment with their titles."""
    return (
        ("enqueue (CPU)", gpu_times.enqueue),
        ("H2D", gpu_times.copy_in),
        ("GPU compute", gpu_times.compute),
        ("D2H", gpu_times.copy_out),
    )


def _cells(latency: Distribution) -> list[str]:
    values = (
        latency.min_ms,
        latency.mean_ms,
        latency.median_ms,
        latency.p90_ms,
        latency.p95_ms,
        latency.p99_ms,
        latency.max_ms,
    )
    return [*map(_digits, values), str(latency.count)]


def _digits(value: float) -> str:
    """Write three digits after the point, fewer of what is large: 0.125, 12.345, 345.67."""
    return f"{value:.3f}" if value < 100 else f"{value:.2f}"


def throughput_text(measured: Measured) -> str:
    """Return inferences a second in words."""
    text = f"throughput {measured.throughput_qps:.1f} inferences/s"
    if measured.items > 1:
        text += (
            f", {measured.throughput_qps * measured.items:.1f} items/s at batch {measured.items}"
        )
    streams = f" on {measured.streams} streams" if measured.streams > 1 else ""
    return f"{text} ({measured.inferences} in {measured.wall_s:.2f} s{streams})"


def _layers(layers: tuple[Layer, ...]) -> Table:
    total = sum(row.time_ms for row in layers)
    table = Table(
        title="profile, in running order",
        caption=f"{len(layers)} rows, {total:.3f} ms in sum; work on the GPU repeats by itself, "
        "without starts and with its tensors in the L2 cache as far as they fit",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("nodes", overflow="fold")
    table.add_column("kernel", overflow="fold")
    for name in ("tactic", "us", "share"):
        table.add_column(name, justify="right")
    for row in layers:
        more = len(row.nodes) - _NODES_SHOWN
        nodes = " ".join(row.nodes[:_NODES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        table.add_row(
            nodes or "(change of layout)",
            " + ".join(row.kernels),
            f"{row.tactic + 1} of {row.tactics}" if row.tactics > 1 else "",
            f"{row.time_ms * 1000:.1f}",
            f"{row.share:.1%}",
        )
    return table


def _line(title: str, values: Mapping[str, str]) -> str:
    return f"{title}: " + (", ".join(f"{k} {v}" for k, v in values.items()) or "nothing known")
