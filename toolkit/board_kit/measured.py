"""The times of one network in a report, as `tandem plan --measured` takes them."""

from pathlib import Path

from device.engine.manifest import Precision
from device.errors import ConfigError
from device.selftest.report import NetworkRow, SegmentRow, read_report
from toolkit.partition.costs.measured import Measured, MeasuredTime

_FASTER_THAN_US = 1e-3


def measured_in(path: Path, *, model_sha256: str, model: str, precision: Precision) -> Measured:
    """Return the times that a report has of a model in a precision.

    Raises ReportError: it is none; ConfigError: it has no times of this model and precision.
    """
    report = read_report(path).report
    rows = [row for row in report.networks if row.precision == precision and not row.problem]
    ours = [row for row in rows if row.model_sha256 == model_sha256]
    if not ours:
        known = sorted({row.network for row in rows})
        raise ConfigError(
            f"{path} has no times of {model} in {precision}; it has {', '.join(known) or 'none'}. "
            "Make a kit with your model: docs/board_kit.md."
        )
    return Measured(
        profile=report.profile,
        power_mode=report.machine.power_mode_name or None,
        precision=precision,
        source=f"selftest of {report.machine.model or 'a board'}, TensorRT "
        f"{report.machine.tensorrt or 'none'}",
        times=times_of(ours),
    )


def times_of(rows: list[NetworkRow]) -> tuple[MeasuredTime, ...]:
    """Return the times of the nodes of a network: on the GPU by operation, on a DLA by segment.

    A node has one time for a processor: that of the first row that has one, the whole network on
    one processor before a split. A segment that ran otherwise than on its processor has none.
    """
    order = {"gpu": 0, "dla": 1, "split": 2}
    times: dict[tuple[str, str], MeasuredTime] = {}
    for row in sorted(rows, key=lambda row: order[row.variant]):
        for layer in row.layers:
            _add(times, "gpu", layer.nodes, layer.time_us)
        for segment in row.segments:
            if _on_dla(segment):
                _add(times, "dla", segment.nodes, segment.time_us)
    return tuple(dict.fromkeys(times.values()))


def _on_dla(segment: SegmentRow) -> bool:
    return segment.processor.startswith("dla") and segment.implementation == "tensorrt"


def _add(
    times: dict[tuple[str, str], MeasuredTime],
    processor: str,
    nodes: tuple[str, ...],
    time_us: float,
) -> None:
    seen = any((processor, node) in times for node in nodes)
    if not nodes or seen or time_us < _FASTER_THAN_US:
        return
    row = MeasuredTime(
        nodes=nodes, processor="gpu" if processor == "gpu" else "dla", time_us=time_us
    )
    times[processor, nodes[0]] = row
    for node in nodes[1:]:
        times[processor, node] = row
