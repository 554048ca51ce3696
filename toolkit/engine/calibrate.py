"""Steps 3 and 4 of the build: the graph rewritten for the DLA, and the ranges of its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import onnx_ir as ir

from calibration.table import CalibrationTable, write_table
from device.engine.manifest import IMPORTED
from device.profile import Profile
from toolkit.engine.options import BuildJob
from toolkit.gpu.data_dependent_shapes.rewrite import ROW_PASSES
from toolkit.graph.passes import run_passes
from toolkit.partition.best_precision import best_options, idle_nodes, kept_nodes
from toolkit.partition.prepare import Prepared, prepare
from toolkit.quantize.corrections.adjust import adjusted_for, adjusts_only
from toolkit.quantize.loss.judge import check
from toolkit.quantize.loss.parts import bounded_tensors, mixing_concats, output_layers
from toolkit.quantize.ranges.data import Source
from toolkit.quantize.ranges.measure import Ranges, dummy_table, measure_ranges, with_model
from toolkit.quantize.ranges.table_file import (
    fit_table,
    plain_notes,
    refuse_lossy,
    refused_notes,
    table_of_plain,
)

CLIPPED = "on the DLA a range of another tool may clip what the model puts out"


def bounded_rows(prepared: Prepared, profile: Profile) -> tuple[Prepared, tuple[str, ...]]:
    """Return a graph whose rows have bounds, and notes on them; as it is without a GPU."""
    if profile.gpu is None:
        return prepared, ()
    model, reports = run_passes(prepared.model, ROW_PASSES)
    notes = tuple(
        f"pass {step.name}{' left out' if step.failure else ''}: {step.failure or step.changes}"
        for step in reports
        if step.failure or step.changes
    )
    return replace(prepared, model=model), notes


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The graph to plan, with its ranges and their report.

    `table`: None where the precision is not INT8. `ranges`: how they were measured, None where they
    were given. `floating`: nodes that stay in floating point unasked, and why; `off_dla`: those of
    them that the DLA's ranges would harm.
    """

    prepared: Prepared
    table: CalibrationTable | None = None
    ranges: Ranges | None = None
    notes: tuple[str, ...] = ()
    floating: Mapping[str, str] = field(default_factory=dict)
    off_dla: frozenset[str] = frozenset()

    @property
    def kept_for_targets(self) -> frozenset[str]:
        """The nodes that the calibration keeps in floating point for its targets."""
        kept = self.ranges.kept if self.ranges is not None else None
        return frozenset() if kept is None else kept.nodes

    @property
    def keep_float(self) -> frozenset[str]:
        """The nodes that stay in floating point beside INT8."""
        return frozenset(self.table.keep_float if self.table is not None else ())

    def kept(self) -> dict[str, str]:
        """Return the reason for each node in `keep_float`."""
        if self.table is None:
            return {}
        ranges = self.ranges
        budget = ranges.budget if ranges is not None else None
        reasons = ranges.kept.reasons() if ranges is not None and ranges.kept is not None else {}
        return kept_nodes(self.table.keep_float, {**self.floating, **reasons}, budget)


def calibrate(job: BuildJob) -> Calibrated:
    """Rewrite the graph for the DLA; for INT8 take the ranges given, measure them, or make some up.

    For kernels, numbers of rows that data decide then get bounds. Raises TandemError: the data or
    the table cannot be used.
    """
    calibrated = _calibrate(job)
    if not job.options.kernels:
        return calibrated
    prepared, notes = bounded_rows(calibrated.prepared, job.target.profile)
    return replace(calibrated, prepared=prepared, notes=(*calibrated.notes, *notes))


def _calibrate(job: BuildJob) -> Calibrated:
    job.report("rewrite", 0.0)
    options = job.options
    if job.plan.precision != "int8":
        return Calibrated(prepare(job.graph, job.target.profile, job.plan))
    if options.data is not None:
        return _measured(job, options.data)
    if options.dummy_ranges and options.table is None:
        prepared = prepare(job.graph, job.target.profile, job.plan)
        table = dummy_table(prepared.model, job.imported.sha256)
        return Calibrated(prepared, table, notes=_notes(job))
    return _from_table(job)


def _measured(job: BuildJob, data: Source) -> Calibrated:
    """Measure ranges over data; write them to a table where requested, refused ones marked."""
    options, profile = job.options, job.target.profile
    asked = frozenset(options.ranges.keep_float)
    prepared = prepare(job.graph, profile, job.plan, keep_float=asked)
    harmed = _harmed(prepared, job)
    floating = harmed | _idle(prepared, job)
    range_options = replace(
        with_model(options.ranges, job.imported),
        on_gpu=profile.gpu is not None and profile.dla is None,
        keep_float=frozenset({*options.ranges.keep_float, *floating}),
    )
    if options.precision == "best":
        range_options = best_options(range_options, prepared.model, floating)
    ranges = measure_ranges(prepared.model, data, job.imported.sha256, range_options, job.report)
    if options.save_table is not None:
        write_table(Path(options.save_table), ranges.table)
    if not options.accept_loss:
        check(ranges.judgement, job.imported.name)
    prepared = replace(prepared, model=ranges.model)
    return Calibrated(
        prepared, ranges.table, ranges, _notes(job), floating, frozenset(harmed) - asked
    )


def _from_table(job: BuildJob) -> Calibrated:
    """Fit the ranges of a table, and of the model's Q/DQ, to the rewritten graph."""
    table, original, sha256 = job.options.table, job.imported.model, job.imported.sha256
    if job.plain is not None:
        table, original = table or table_of_plain(job.plain, sha256), job.plain.model
    assert table is not None  # `read_model` lets nothing else through
    if not job.options.accept_loss:
        refuse_lossy(table, job.imported.name)
    # Adjustments measured before the rewrites are made before them, others after.
    early = adjusts_only(job.graph, table)
    graph = adjusted_for(job.graph, table, sha256) if early else job.graph
    keep = frozenset(table.keep_float)
    prepared = prepare(graph, job.target.profile, job.plan, table.tensors, keep)
    with_ranges = msgspec.structs.replace(table, tensors=dict(prepared.ranges))
    fitted = fit_table(with_ranges, original, prepared.model)
    if not early:
        prepared = replace(prepared, model=adjusted_for(prepared.model, table, sha256))
    harmed = _harmed(prepared, job)
    table = fitted.table
    foreign = job.plain is None and foreign_for_dla(table, job.target.profile)
    if foreign and not job.options.accept_loss:
        table = with_bounds(table, prepared.model)
        harmed |= dict.fromkeys(clipped_layers(table, prepared.model), CLIPPED)
    asked = frozenset(table.keep_float)
    floating = harmed | _idle(prepared, job)
    table = msgspec.structs.replace(table, keep_float=tuple(sorted(asked | floating.keys())))
    notes = (*_notes(job), *refused_notes(table), *fitted.notes)
    return Calibrated(
        prepared, table, notes=notes, floating=floating, off_dla=frozenset(harmed) - asked
    )


def foreign_for_dla(table: CalibrationTable, profile: Profile) -> bool:
    """Whether ranges of another tool meet a DLA, which hands its results on in INT8.

    A GPU hands the last layers on in floating point, so that the same ranges clip nothing there.
    """
    return profile.dla is not None and table.method == IMPORTED


def with_bounds(table: CalibrationTable, model: ir.Model) -> CalibrationTable:
    """Return a table whose ranges of scores reach 1."""
    scores = {name: 1.0 for name in bounded_tensors(model) if table.tensors.get(name, 1.0) < 1.0}
    return msgspec.structs.replace(table, tensors={**table.tensors, **scores})


def clipped_layers(table: CalibrationTable, model: ir.Model) -> frozenset[str]:
    """Return the layers whose ranges may clip what the model puts out."""
    return frozenset(node for node, name in output_layers(model).items() if name in table.tensors)


def _notes(job: BuildJob) -> tuple[str, ...]:
    return plain_notes(job.plain) if job.plain is not None else ()


def _harmed(prepared: Prepared, job: BuildJob) -> dict[str, str]:
    """Return the nodes that would give scores and boxes one scale on a DLA, and why each stays."""
    if job.target.profile.dla is None:
        return {}
    mixing = mixing_concats(prepared.model)
    return {node: f"on the DLA it would give one scale to {mix}" for node, mix in mixing.items()}


def _idle(prepared: Prepared, job: BuildJob) -> dict[str, str]:
    """Return the nodes that INT8 does not speed up, where "best" is requested, and why."""
    if job.options.precision != "best":
        return {}
    return idle_nodes(prepared.model, job.target.profile, job.plan.power_mode)
