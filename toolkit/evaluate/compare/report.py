"""The comparison as text and as JSON values."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from device.engine.manifest import UNCALIBRATED
from toolkit.evaluate.agreement.figures import finite_json
from toolkit.evaluate.compare.causes import CAUSES, CLIPPED, CLIPPED_LEAVING, SHARED_SCALE
from toolkit.evaluate.compare.compare import (
    LEAST_COST_DB,
    LEAST_SHARED_DB,
    Comparison,
    OwnError,
    TensorRow,
)
from toolkit.evaluate.compare.gap import CLIPPING, LEAST_LOST, UNHEARD_DB, ClippedTensor, Gap
from toolkit.evaluate.compare.recorded import Recorded, RecordedRow
from toolkit.evaluate.error_tally import Error, Worst

SILICON = (
    "The DLA here is software after the open NVDLA, the ancestor of Xavier's DLA; silicon may "
    "differ, Orin's more so: only a run on a board, with --recorded, can tell"
)
FLOAT_DB = 120.0
NAMED_TENSORS = 3
NO_DLA = "the engine has no segment on the DLA, so that there is no DLA arithmetic to compare"


def why(error: OwnError) -> tuple[str, ...]:
    """Return the reasons of a layer in words, the one of most elements first."""
    counts = sorted(error.causes.items(), key=lambda item: -item[1])
    reasons = [f"{CAUSES[cause]} ({count} of {error.differing})" for cause, count in counts]
    if error.shared_scale_db >= LEAST_SHARED_DB:
        whose = " for one of them" if error.shared_reason == SHARED_SCALE else ""
        reasons.append(f"{error.shared_reason} ({_db(error.shared_scale_db)} dB{whose})")
    if error.clipped_db >= LEAST_SHARED_DB:
        clipped = CLIPPED_LEAVING if error.leaves else CLIPPED
        reasons.append(f"{clipped} ({_db(error.clipped_db)} dB)")
    return tuple(reasons)


def comparison_text(comparison: Comparison, recorded: Recorded | None, *, every: bool) -> str:
    """Return the report; `every`: all nodes, not those alone where the DLA costs something."""
    lines = [UNCALIBRATED] if comparison.uncalibrated else []
    has_dla, graph = bool(comparison.dla_segments), comparison.graph
    dla = f"DLA {comparison.precision.upper()}"
    how = f"; DLA: {comparison.emulation.mode}, {comparison.emulation.arithmetic} scales"
    lines.append(
        f"{comparison.engine} and {comparison.model} on {comparison.samples} samples"
        f"{how if has_dla else ''}"
    )
    if not has_dla:
        lines.append(NO_DLA)
    lines += [f"note: {note}" for note in comparison.notes]
    lines += ["", f"outputs against FP32       {graph:<24} {dla if has_dla else ''}".rstrip()]
    for row in comparison.outputs:
        lines += _output(row, comparison.sample_names, has_dla=has_dla)
    if comparison.metric is not None:
        metric = comparison.metric
        parts = [f"FP32 {metric.fp32:.2f}", f"{graph} {metric.gpu:.2f}"]
        parts += [f"{dla} {metric.dla:.2f}"] if has_dla else []
        lines.append(f"{metric.name}: {', '.join(parts)} points")
    if comparison.gap is not None:
        lines.append(gap_text(comparison.gap))
    lines.append(
        f"{comparison.matched} of {len(comparison.nodes)} tensors have one of the same name in FP32"
    )
    if comparison.dla_segments:
        lines += ["", *_layers(comparison, every=every)]
    elif every:
        lines += ["", *(_so_far(row) for row in comparison.nodes)]
    if recorded is not None:
        lines += ["", *_recorded(recorded)]
    return "\n".join([*lines, "", SILICON] if has_dla or recorded else lines)


def gap_text(gap: Gap) -> str:
    """Return what the DLA loses against a GPU and what takes it, in one line."""
    stages, unit = gap.stages, gap.unit
    title = f"{gap.measure}, DLA against GPU"
    dla, gpu = _figure(stages.dla, unit), _figure(stages.gpu, unit)
    if stages.lost < LEAST_LOST:
        return f"{title}: nothing is lost, {dla} {unit} on the DLA, {gpu} {unit} on a GPU"
    (first, most), *rest = stages.causes
    causes = []
    for cause, lost in ((first, most), *((c, lost) for c, lost in rest if lost >= LEAST_LOST)):
        where = _clipped(gap.clipped) if cause == CLIPPING else ""
        causes.append(f"{lost:.2f} by {cause}{where}")
    return (
        f"{title}: {stages.lost:.2f} {unit} are lost ({dla} on the DLA, {gpu} on a GPU): "
        f"{'; '.join(causes)}"
    )


def _figure(value: float, unit: str) -> str:
    return f"{value:.0f} or more" if unit == "dB" and value == UNHEARD_DB else f"{value:.2f}"


def _clipped(tensors: Sequence[ClippedTensor]) -> str:
    """Name the costliest tensors; none where only several together cost anything."""
    named = [
        f"{tensor.tensor} (range {tensor.amax:.3g}, values up to {tensor.largest:.3g})"
        for tensor in tensors[:NAMED_TENSORS]
    ]
    more = [f"{len(tensors) - len(named)} more"] if len(tensors) > len(named) else []
    return f": {', '.join([*named, *more])}" if named else ""


def comparison_builtins(comparison: Comparison, recorded: Recorded | None) -> dict[str, Any]:
    """Return what `--json` prints; an SQNR that is not finite is None."""
    first = None if recorded is None else recorded.first
    return {
        "engine": comparison.engine,
        "model": comparison.model,
        "graph": comparison.graph,
        "precision": comparison.precision,
        "samples": comparison.samples,
        "sample_names": comparison.sample_names,
        "dla": comparison.emulation.mode,
        "scales": comparison.emulation.arithmetic,
        "dla_segments": comparison.dla_segments,
        "uncalibrated": comparison.uncalibrated,
        "outputs": [_row_builtins(row) for row in comparison.outputs],
        "nodes": [_row_builtins(row) for row in comparison.nodes],
        "by_cost": [row.tensor for row in comparison.by_cost if row.own is not None],
        "matched": comparison.matched,
        "metric": None if comparison.metric is None else asdict(comparison.metric),
        "gap": None if comparison.gap is None else _gap_builtins(comparison.gap),
        "notes": list(comparison.notes),
        "recorded": None
        if recorded is None
        else {
            "first": None if first is None else asdict(first),
            "tensors": [asdict(row) for row in recorded.rows],
            "unknown": list(recorded.unknown),
        },
        "caution": SILICON,
    }


def _gap_builtins(gap: Gap) -> dict[str, Any]:
    stages = gap.stages
    return {**asdict(gap), "lost": stages.lost, "causes": dict(stages.causes), "why": gap_text(gap)}


def _row_builtins(row: TensorRow) -> dict[str, Any]:
    values = asdict(row)
    if row.own is not None:
        values["own"] |= {"cost_db": row.own.cost_db, "costs": row.own.costs, "why": why(row.own)}
    finite: dict[str, Any] = finite_json(values)
    return finite


def _output(row: TensorRow, names: Sequence[str], *, has_dla: bool) -> list[str]:
    if row.gpu is None or row.dla is None:
        return [f"  {row.tensor}: FP32 has no output of that name and shape"]
    dla = row.dla if has_dla else None
    sqnr_db, cosine = (_db(dla.sqnr_db), f"{dla.cosine:.6f}") if dla else ("", "")
    lines = [
        f"  {row.tensor}",
        f"    SQNR dB                  {_db(row.gpu.sqnr_db):<24} {sqnr_db}".rstrip(),
        f"    cosine                   {row.gpu.cosine:<24.6f} {cosine}".rstrip(),
        f"    worst: {_worst(row.gpu.worst, names)}",
    ]
    return [*lines, f"    worst DLA: {_worst(dla.worst, names)}"] if dla else lines


def _layers(comparison: Comparison, *, every: bool) -> list[str]:
    named = [row for row in comparison.by_cost if row.own is not None and row.own.costs]
    total = sum(row.own is not None for row in comparison.nodes)
    lines = [
        f"where the DLA's arithmetic costs something: {len(named)} of {total} layers (own SQNR "
        f"down by {LEAST_COST_DB} dB or more, or a range worth {LEAST_SHARED_DB} dB), the "
        "most costly first"
    ]
    for row in comparison.by_cost if every else named:
        lines.append(_so_far(row))
        lines += _own(row, comparison.sample_names)
    return lines


def _so_far(row: TensorRow) -> str:
    where = f"  {row.node} ({row.op}, {row.segment}) -> {row.tensor}"
    if row.gpu is None or row.dla is None:
        return f"{where}: no tensor of that name in FP32"
    dla = f", DLA {_error(row.dla)}" if row.own is not None else ""
    return f"{where}: so far {_error(row.gpu)}{dla}"


def _own(row: TensorRow, names: Sequence[str]) -> list[str]:
    if row.own is None:
        return []
    error = row.own
    lines = [
        f"    on the same INT8 inputs: GPU {_db(error.gpu_sqnr_db)} dB, "
        f"DLA {_db(error.dla_sqnr_db)} dB; {error.differing} of {error.elements} elements differ, "
        f"by {error.largest_steps} steps at most"
    ]
    if error.worst is not None:
        lines.append(f"    worst, in steps: {_worst(error.worst, names, 'GPU', 'DLA')}")
    return [*lines, *(f"    why: {reason}" for reason in why(error))]


def _error(error: Error) -> str:
    return f"{_db(error.sqnr_db)} dB, cosine {error.cosine:.6f}"


def _worst(
    worst: Worst | None, names: Sequence[str], expected: str = "FP32", actual: str = "found"
) -> str:
    if worst is None:
        return "no difference"
    return (
        f"{names[worst.sample]}, {list(worst.index)}: {expected} {worst.expected:.6g}, "
        f"{actual} {worst.found:.6g}"
    )


def _db(value: float) -> str:
    """Noise 120 dB below is that of float32, which holds the Q/DQ graph's numbers."""
    if value == math.inf:
        return "exact"
    return "over 120" if value > FLOAT_DB else f"{value:.2f}"


def _recorded(recorded: Recorded) -> list[str]:
    agree = sum(row.differing == 0 for row in recorded.rows)
    lines = [f"recorded run: {agree} of {len(recorded.rows)} tensors agree with the emulation"]
    if recorded.first is not None:
        lines.append(f"  first that differs: {_recorded_row(recorded.first)}")
        lines += [f"  {_recorded_row(row)}" for row in recorded.rows if row.differing][1:]
    if recorded.unknown:
        lines.append(f"  not tensors of the engine: {', '.join(recorded.unknown)}")
    return lines


def _recorded_row(row: RecordedRow) -> str:
    unit = "steps" if row.scale is not None else "at most"
    return (
        f"{row.node} ({row.op}, {row.segment}) -> {row.tensor}: {row.differing} of {row.elements} "
        f"elements differ, by {row.largest:g} {unit}; "
        f"{_worst(row.worst, ('the recorded run',), 'board', 'emulation')}"
    )
