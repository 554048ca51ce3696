"""Steps 1 to 4 of the build: model file -> graph, rewritten for the DLA, with its number formats.

All that plans, builds or calibrates comes through `run_frontend`, so that all decide alike; a shard
of a calibration needs its first steps alone (`toolkit.engine.measure.measure_shard`). The ranges of
INT8 are made by `toolkit.engine.int8_ranges`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from calibration.table import write_table
from device.engine.manifest import IMPORTED
from toolkit.engine.frontend_result import Frontend
from toolkit.engine.int8_ranges import from_table, rewritten, with_ranges
from toolkit.engine.options import BuildOptions
from toolkit.engine.read import read_model
from toolkit.engine.target import Target
from toolkit.errors import BuildError
from toolkit.gpu.beyond_half import BeyondHalf, beyond_bfloat16, beyond_half
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import ModelSource, OpenModel
from toolkit.partition.best_precision import no_gain_of_float8
from toolkit.progress import Progress, silent
from toolkit.quantize.float8.model import float8_by_table, quantize_float8
from toolkit.quantize.float8.products import float8_products
from toolkit.quantize.float8.table import for_float8, table_of_float8
from toolkit.quantize.int4.model import quantize_int4
from toolkit.quantize.loss.judge import loss_text, samples_text
from toolkit.quantize.loss.rounded import judge_bfloat16
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.ranges.data import Source
from toolkit.quantize.ranges.measure import measure_magnitudes, with_model
from toolkit.quantize.ranges.steps import refuse_unknown, samples_of
from toolkit.quantize.ranges.table_file import foreign_notes, has_qdq, refuse_lossy


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
        front = _with_float8(front) if makes_float8 else with_ranges(front)
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
    in_float = dict.fromkeys(options.ranges.keep_float, "as asked")
    if options.table is not None:
        fitted = from_table(front, for_float8(options.table))
        assert fitted.table is not None
        if not options.accept_loss:
            refuse_lossy(fitted.table, name)
        in_float = dict.fromkeys(fitted.table.keep_float, "the calibration table keeps it so")
        notes = (*fitted.notes, *foreign_notes(options.table, sha256))
        front = replace(rewritten(front), notes=notes)
        front = replace(front, prepared=fitted.prepared)
        graph, amax = front.prepared.model, fitted.table.tensors
        float8 = float8_by_table(graph, amax, _slow(front) | in_float)
    else:
        assert options.data is not None  # else `read_model` refuses
        front = rewritten(front)
        front.report("calibrate", 0.0)
        graph, ranges = front.prepared.model, with_model(options.ranges, front.imported)
        samples, accept_loss = samples_of(graph, options.data, ranges), options.accept_loss
        refuse_unknown(ranges.keep_float, graph)
        float8 = quantize_float8(
            graph, samples, ActivationRunner, _slow(front) | in_float, accept_loss=accept_loss
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

    front, options = rewritten(front), front.options
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
