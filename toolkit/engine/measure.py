"""Measure the INT8 ranges of a model without building it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from toolkit.engine.target import choose_target
from toolkit.errors import BuildError, about
from toolkit.graph.check import check_nodes
from toolkit.graph.memory_limit import check_host_memory
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import ImportedModel, ModelSource, import_model
from toolkit.plugins import Plugin
from toolkit.quantize.loss.judge import check
from toolkit.quantize.ranges.data import Source
from toolkit.quantize.ranges.measure import (
    RangeOptions,
    Ranges,
    Report,
    measure_ranges,
    with_model,
)
from toolkit.quantize.ranges.table_file import has_qdq


@dataclass(frozen=True, slots=True)
class CalibrateRequest:
    """What to calibrate; `profile` None: the graph as it is, without rewrites for a DLA.

    `accept_loss`: keep the ranges even if INT8 loses too much.
    """

    model: ModelSource
    data: Source
    profile: str | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    plugins: tuple[Plugin, ...] = ()
    options: RangeOptions = field(default_factory=RangeOptions)
    accept_loss: bool = False


def measure_model(request: CalibrateRequest, report: Report) -> tuple[Ranges, str]:
    """Measure the ranges of a model; second, its name.

    Raises TandemError: the model is quantized already, the data cannot be used, or INT8 loses too
    much.
    """
    imported = import_model(
        request.model, shapes=request.shapes, plugins=request.plugins, report=report
    )
    with about(imported.name):
        graph = _graph_of(imported, request.profile)
        options = with_model(request.options, imported)
        ranges = measure_ranges(graph, request.data, imported.sha256, options, report)
    if not request.accept_loss:
        check(ranges.judgement, imported.name)
    return ranges, imported.name


def _graph_of(imported: ImportedModel, profile: str | None) -> ir.Model:
    """Return the graph after the passes and, for a profile, the rewrites for its DLA."""
    if has_qdq(imported.model):
        raise BuildError(
            f"{imported.name} is quantized already: `tandem ranges` takes the ranges that its Q/DQ "
            "hold; to measure others give the plain model (`tandem ranges ... --plain`)."
        )
    graph, _ = run_passes(imported.model)
    check_nodes(graph)
    check_host_memory(graph.graph)
    if profile is None:
        return graph
    from toolkit.partition.planning.plan import PlanOptions  # a solver; nothing else here needs it
    from toolkit.partition.prepare import prepare

    target = choose_target(profile)
    return prepare(graph, target.profile, PlanOptions(tensorrt=target.tensorrt)).model
