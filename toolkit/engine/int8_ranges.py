"""Steps 3 and 4 of the build for INT8: the graph is rewritten for the DLA, and gets its ranges."""

from dataclasses import replace
from pathlib import Path

import msgspec
import onnx_ir as ir

from calibration.table import CalibrationTable, write_table
from device.engine.manifest import IMPORTED
from toolkit.cache import key_of
from toolkit.engine.frontend_result import Frontend
from toolkit.partition.best_precision import GpuNodes, best_options, no_gain_nodes
from toolkit.partition.prepare_graph import prepare_graph
from toolkit.quantize.corrections.adjust import adjusted_for, adjusts_only
from toolkit.quantize.loss.judge import check
from toolkit.quantize.loss.parts import bounded_tensors, mixing_concats, output_layers
from toolkit.quantize.ranges.data import Source
from toolkit.quantize.ranges.measure import RangeOptions, dummy_table, measure_ranges, with_model
from toolkit.quantize.ranges.table_file import fit_table, plain_notes, refused_notes, table_of_plain

CLIPPED = "on the DLA a range of another tool may clip what the model puts out"


def with_ranges(front: Frontend) -> Frontend:
    """Rewrite the graph, and give INT8 its ranges: measured, given, or made up."""
    options, plain, sha256 = front.options, front.plain, front.imported.sha256
    int8, table = front.plan.precision == "int8", options.table
    if int8 and options.data is not None:
        return _measured(front, options.data)
    if table is None and plain is not None and plain.amax and not options.dummy_ranges:
        table = table_of_plain(plain, sha256)
    if int8 and table is not None:
        return from_table(front, table)
    front = rewritten(front)
    if int8 and options.dummy_ranges:
        table = dummy_table(front.prepared.model, sha256)
        return _with_table(front, table, _harmed(front), _notes(front))
    return replace(front, floating=_harmed(front)) if int8 else front


def rewritten(front: Frontend, keep_float: frozenset[str] = frozenset()) -> Frontend:
    """Rewrite the graph for the DLA, before its ranges are known."""
    profile = front.target.profile
    if front.bfloat16:  # no node is for the DLA
        profile = msgspec.structs.replace(profile, dla=None)
    prepared = prepare_graph(front.graph, profile, front.plan, keep_float=keep_float)
    return replace(front, prepared=prepared)


def to_measure(front: Frontend) -> tuple[Frontend, RangeOptions]:
    """Return the rewritten graph whose ranges are measured, and how."""
    options, profile, imported = front.options, front.target.profile, front.imported
    requested = frozenset(options.ranges.keep_float)
    front = rewritten(front, requested)
    graph, harmed = front.prepared.model, _harmed(front)
    front = replace(front, floating=harmed, off_dla=frozenset(harmed) - requested)
    range_options = replace(
        with_model(options.ranges, imported),
        on_gpu=profile.gpu is not None and profile.dla is None,
        keep_float=requested | harmed.keys(),
    )
    if options.precision == "best":
        range_options = best_options(range_options, graph)
    return front, range_options


def _measured(front: Frontend, data: Source) -> Frontend:
    """Measure ranges over data; write them to a table where requested, refused ones marked.

    They are judged with all in INT8, so that the table holds for any board.
    """
    front, range_options = to_measure(front)
    options, imported, graph = front.options, front.imported, front.prepared.model
    known = {} if options.measured is None else options.measured
    serialized = b"" if options.measured is None else ir.to_proto(graph).SerializeToString()
    key = key_of(serialized, imported.sha256, repr(range_options), repr(data))
    ranges = known.get(key)
    if ranges is None:
        ranges = measure_ranges(graph, data, imported.sha256, range_options, front.report)
        known[key] = ranges
    if options.save_table is not None:
        write_table(Path(options.save_table), ranges.table)
    if not options.accept_loss:
        check(ranges.judgement, imported.name)
    front = replace(
        front,
        prepared=replace(front.prepared, model=ranges.model),
        table=ranges.table,
        ranges=ranges,
        notes=_notes(front),
    )
    return _on_gpu_alone(front, ranges.table)


def from_table(front: Frontend, table: CalibrationTable) -> Frontend:
    """Fit the ranges of a table, or of the model's Q/DQ, to the rewritten graph."""
    profile, plain, imported = front.target.profile, front.plain, front.imported
    original = imported.model if plain is None else plain.model
    # Adjustments measured before the rewrites are made before them, others after.
    early = adjusts_only(front.graph, table)
    graph = adjusted_for(front.graph, table, imported.sha256) if early else front.graph
    keep = frozenset(table.keep_float)
    prepared = prepare_graph(graph, profile, front.plan, table.tensors, keep)
    with_ranges = msgspec.structs.replace(table, tensors=dict(prepared.ranges))
    if not early:
        prepared = replace(prepared, model=adjusted_for(prepared.model, table, imported.sha256))
    fitted = fit_table(with_ranges, original, prepared.model)
    front = replace(front, prepared=prepared)
    harmed, table = _harmed(front), fitted.table
    foreign = plain is None and table.method == IMPORTED
    # A DLA hands its results on in INT8; a GPU hands the last layers on in floating point.
    if profile.dla is not None and foreign and not front.options.accept_loss:
        scores = [n for n in bounded_tensors(prepared.model) if table.tensors.get(n, 1.0) < 1.0]
        ranges = {**table.tensors, **dict.fromkeys(scores, 1.0)}
        table = msgspec.structs.replace(table, tensors=ranges)
        last = output_layers(prepared.model).items()
        harmed |= {node: CLIPPED for node, name in last if name in ranges}
    notes = (*_notes(front), *refused_notes(table), *fitted.notes)
    return _with_table(front, table, harmed, notes)


def _with_table(
    front: Frontend, table: CalibrationTable, harmed: dict[str, str], notes: tuple[str, ...]
) -> Frontend:
    """Keep in floating point what the table, the DLA and the GPU leave there."""
    requested = frozenset(table.keep_float)
    keep = tuple(sorted(requested | harmed.keys()))
    table = msgspec.structs.replace(table, keep_float=keep)
    front = replace(
        front,
        table=table,
        notes=notes,
        floating=harmed,
        off_dla=frozenset(harmed) - requested,
    )
    return _on_gpu_alone(front, table)


def _notes(front: Frontend) -> tuple[str, ...]:
    return plain_notes(front.plain) if front.plain is not None else ()


def _harmed(front: Frontend) -> dict[str, str]:
    """Return the nodes that would give scores and boxes one scale on a DLA, and why each stays."""
    if front.target.profile.dla is None:
        return {}
    mixing = mixing_concats(front.prepared.model)
    return {node: f"on the DLA it would give one scale to {mix}" for node, mix in mixing.items()}


def _on_gpu_alone(front: Frontend, table: CalibrationTable) -> Frontend:
    """`note_gain` where no DLA can take a node, so that nothing waits for the plan."""
    if front.target.profile.dla is not None:
        return front
    nodes = [str(node.name) for node in front.prepared.model.graph]
    return note_gain(front, GpuNodes(nodes, frozenset(table.keep_float), table.tensors))


def note_gain(front: Frontend, nodes: GpuNodes) -> Frontend:
    """Return a front half that knows the nodes for which INT8 saves no time on the GPU."""
    graph, nodes = front.prepared.model, replace(nodes, times=front.node_times())
    no_gain = no_gain_nodes(graph, nodes, front.target.profile, front.plan.power_mode)
    return replace(front, no_gain=no_gain)
