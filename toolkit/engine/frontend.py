"""Steps 1 to 4 of the build: model file -> graph, rewritten for the DLA, and the ranges of INT8.

All that plans, builds or calibrates comes through `run_frontend`, so that all decide alike; a shard
of a calibration needs its first steps alone (`toolkit.engine.measure.measure_shard`).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import onnx_ir as ir

from calibration.table import CalibrationTable, write_table
from device.engine.manifest import IMPORTED
from toolkit.cache import key_of
from toolkit.engine.frontend_result import Frontend
from toolkit.engine.options import BuildOptions
from toolkit.engine.read import read_model
from toolkit.engine.target import Target
from toolkit.errors import BuildError
from toolkit.gpu.beyond_half import BeyondHalf, beyond_bfloat16, beyond_half
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import ModelSource, OpenModel
from toolkit.partition.best_precision import (
    GpuNodes,
    best_options,
    no_gain_nodes,
    no_gain_of_float8,
)
from toolkit.partition.prepare_graph import prepare_graph
from toolkit.progress import Progress, silent
from toolkit.quantize.corrections.adjust import adjusted_for, adjusts_only
from toolkit.quantize.float8.model import float8_by_table, quantize_float8
from toolkit.quantize.float8.products import float8_products
from toolkit.quantize.float8.table import for_float8, table_of_float8
from toolkit.quantize.int4.model import quantize_int4
from toolkit.quantize.loss.judge import check, loss_text, samples_text
from toolkit.quantize.loss.parts import bounded_tensors, mixing_concats, output_layers
from toolkit.quantize.loss.rounded import judge_bfloat16
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.ranges.data import Source
from toolkit.quantize.ranges.measure import (
    RangeOptions,
    dummy_table,
    measure_magnitudes,
    measure_ranges,
    with_model,
)
from toolkit.quantize.ranges.steps import refuse_unknown, samples_of
from toolkit.quantize.ranges.table_file import (
    fit_table,
    foreign_notes,
    has_qdq,
    plain_notes,
    refuse_lossy,
    refused_notes,
    table_of_plain,
)

CLIPPED = "on the DLA a range of another tool may clip what the model puts out"


def run_frontend(
    model: ModelSource | OpenModel,
    target: Target,
    options: BuildOptions,
    report: Progress = silent,
    *,
    batch: int = 1,
    assume_ranges: bool = False,
) -> Frontend:
    """Read a model, rewrite its graph for the DLA, and give INT8 its ranges.

    Ranges are those given, those measured over data, or made up. For kernels, numbers of rows that
    data decide then get bounds. `batch`: of a dynamic one; `assume_ranges`: where nothing gives
    INT8 its ranges, every tensor is taken to have one.

    Raises TandemError: the model, the data or the table cannot be used.
    """
    front = read_model(model, target, options, report, batch=batch, assume_ranges=assume_ranges)
    report("rewrite", 0.0)
    makes_float8 = options.precision == "fp8" and not has_qdq(front.graph)
    if front.bfloat16:
        front = _with_bfloat16(front)
    else:
        front = _with_float8(front) if makes_float8 else _with_ranges(front)
    if options.int4_weights is not None and options.data is not None:
        front = _with_int4(front, options.int4_weights, options.data)
    if target.profile.gpu is None:
        return front
    if not options.kernels:
        return replace(front, wide=_wide(front))
    from toolkit.gpu.data_dependent_shapes.rewrite import ROW_PASSES

    bounded, reports = run_passes(front.prepared.model, ROW_PASSES)
    notes = tuple(
        f"pass {step.name}{' left out' if step.failure else ''}: {step.failure or step.changes}"
        for step in reports
        if step.failure or step.changes
    )
    prepared = replace(front.prepared, model=bounded)
    front = replace(front, prepared=prepared, notes=(*front.notes, *notes))
    return replace(front, wide=_wide(front))


def _with_int4(front: Frontend, block: int, data: Source) -> Frontend:
    """Give large products weights of 4 bits, by what the model computes on the data."""
    front.report("calibrate", 0.0)
    graph, options = front.prepared.model, with_model(front.options.ranges, front.imported)
    accept_loss, samples = front.options.accept_loss, samples_of(graph, data, options)
    int4 = quantize_int4(graph, samples, block, ActivationRunner, accept_loss=accept_loss)
    if not accept_loss:
        int4.check(front.imported.name, block)
    prepared = replace(front.prepared, model=int4.model)
    return replace(front, prepared=prepared, int4=int4, notes=(*front.notes, *int4.notes))


def _with_float8(front: Frontend) -> Frontend:
    """Give products operands of FP8, by a table or by what the model computes on the data."""
    options, name, sha256 = front.options, front.imported.name, front.imported.sha256
    kept = dict.fromkeys(options.ranges.keep_float, "as asked")
    if options.table is not None:
        fitted = _from_table(front, for_float8(options.table))
        assert fitted.table is not None
        if not options.accept_loss:
            refuse_lossy(fitted.table, name)
        kept = dict.fromkeys(fitted.table.keep_float, "the calibration table keeps it so")
        notes = (*fitted.notes, *foreign_notes(options.table, sha256))
        front = replace(_rewritten(front), notes=notes)
        front = replace(front, prepared=fitted.prepared)
        graph, amax = front.prepared.model, fitted.table.tensors
        float8 = float8_by_table(graph, amax, _slow(front) | kept)
    else:
        assert options.data is not None  # else `read_model` refuses
        front = _rewritten(front)
        front.report("calibrate", 0.0)
        graph, ranges = front.prepared.model, with_model(options.ranges, front.imported)
        samples, accept_loss = samples_of(graph, options.data, ranges), options.accept_loss
        refuse_unknown(ranges.keep_float, graph)
        float8 = quantize_float8(
            graph, samples, ActivationRunner, _slow(front) | kept, accept_loss=accept_loss
        )
        if options.save_table is not None:
            table = table_of_float8(float8, samples.sha256(), sha256)
            write_table(Path(options.save_table), table)
        if not accept_loss:
            float8.check(name)
    prepared = replace(front.prepared, model=float8.model)
    notes = (*front.notes, *float8.notes)
    return replace(front, prepared=prepared, float8=float8, notes=notes)


def _with_bfloat16(front: Frontend) -> Frontend:
    """Judge BF16 on samples; raises BuildError if the outputs lose too much."""
    from toolkit.gpu.coordinates import coordinate_tensors  # imports what calibrations do not need

    front, options = _rewritten(front), front.options
    graph, name = front.prepared.model, front.imported.name
    if options.data is None:
        note = "what BF16 loses is not measured: give samples with `tandem build --data`"
        return replace(front, notes=(*front.notes, note))
    front.report("calibrate", 0.0)
    samples = samples_of(graph, options.data, with_model(options.ranges, front.imported))
    wide = frozenset(_wide(front)) | coordinate_tensors([graph])
    judgement = judge_bfloat16(graph, samples, wide)
    if judgement.broken and not options.accept_loss:
        raise BuildError(
            f"BF16 loses too much of {name}: {'; '.join(map(loss_text, judgement.broken))} "
            f"({samples_text(judgement)}). Build with --precision fp16; `tandem build "
            "--accept-loss` takes BF16 as it is."
        )
    losses = "; ".join(map(loss_text, judgement.losses)) or "nothing to lose"
    note = f"BF16: {losses} {samples_text(judgement)}"
    return replace(front, notes=(*front.notes, note))


def _slow(front: Frontend) -> dict[str, str]:
    """Return the products for which FP8 saves no time."""
    graph, profile = front.prepared.model, front.target.profile
    products = [str(node.name) for node in float8_products(graph)]
    return no_gain_of_float8(graph, products, profile, front.plan.power_mode)


def _wide(front: Frontend) -> Mapping[str, BeyondHalf]:
    """Return the tensors that FP16 does not hold: by samples or a table, else by the graph."""
    if front.plan.precision == "fp32":
        return {}
    graph, options, amax, table = front.prepared.model, front.options, None, None
    if front.bfloat16:
        return beyond_bfloat16(graph, from_bfloat16=front.imported.bfloat16)
    if front.float8 is not None:
        amax = front.float8.amax
    elif front.ranges is not None:
        amax = {name: histogram.amax for name, histogram in front.ranges.histograms.items()}
    elif front.table is not None and not front.table.dummy:
        table = front.table
    elif front.plan.precision == "fp16" and options.data is not None:
        ranges = with_model(options.ranges, front.imported)
        amax = measure_magnitudes(graph, options.data, ranges, front.report)
    elif front.plan.precision == "fp16" and options.table is not None:
        table = options.table
    if table is None:
        return beyond_half(graph, amax)
    observed = beyond_half(graph, table.tensors)
    # Ranges of another tool say where values are clipped, not how large they are.
    return {**beyond_half(graph, None), **observed} if table.method == IMPORTED else observed


def _with_ranges(front: Frontend) -> Frontend:
    options, plain, sha256 = front.options, front.plain, front.imported.sha256
    int8, table = front.plan.precision == "int8", options.table
    if int8 and options.data is not None:
        return _measured(front, options.data)
    if table is None and plain is not None and plain.amax and not options.dummy_ranges:
        table = table_of_plain(plain, sha256)
    if int8 and table is not None:
        return _from_table(front, table)
    front = _rewritten(front)
    if int8 and options.dummy_ranges:
        table = dummy_table(front.prepared.model, sha256)
        return _with_table(front, table, _harmed(front), _notes(front))
    return replace(front, floating=_harmed(front)) if int8 else front


def _rewritten(front: Frontend, keep_float: frozenset[str] = frozenset()) -> Frontend:
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
    front = _rewritten(front, requested)
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


def _from_table(front: Frontend, table: CalibrationTable) -> Frontend:
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
