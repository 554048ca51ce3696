"""The comparison: every sample through FP32, a GPU, the Q/DQ graph, and the DLA's arithmetic.

`gpu` is what a GPU alone would do with the same ranges (`toolkit.evaluate.compare.gpu`), `dla` the
run of the engine, error upon error. Each layer of the DLA is looked at by itself, too: for `own` it
reads the INT8 numbers of the engine's Q/DQ graph, so that only its own arithmetic differs; the
exact result on those numbers is what both are measured against.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from device.dla_emulator.options import Emulation
from device.engine.arithmetic import arithmetic_of, arithmetic_title
from device.engine.file import Engine
from device.engine.manifest import Manifest, Segment
from device.runtime.executors.emulated import LayerResult
from toolkit.errors import BuildError
from toolkit.evaluate.compare import causes
from toolkit.evaluate.compare.causes import SHARED_SCALE
from toolkit.evaluate.compare.gap import UNHEARD_DB, Gap, GapTally, Stages
from toolkit.evaluate.compare.gpu import GpuNetwork
from toolkit.evaluate.error_tally import Error, ErrorTally, Worst
from toolkit.evaluate.infer.traces import (
    Arrays,
    Emulations,
    Layer,
    SegmentTrace,
    exact_result,
)
from toolkit.export.joined_network import network_of
from toolkit.quantize.loss.parts import OutputPart, output_parts
from toolkit.quantize.observe import ActivationRunner

Array = NDArray[Any]
NO_GPU = (
    "the column of the GPU is the engine's own Q/DQ graph, which rounds what leaves the DLA: there "
    "is no graph for a GPU alone ({why})"
)
ELEMENT_WISE = frozenset({"Add", "Sub", "Sum", "Max", "Min", "Mul", "Concat"})
LEAST_COST_DB = 0.1
"""A layer whose own SQNR falls by less is not named as one where the DLA costs something."""
LEAST_SHARED_DB = 1.0
"""By so much a scale of its own must serve an operand better, to blame the shared one."""


@dataclass(frozen=True, slots=True)
class OwnError:
    """What a DLA layer does to the Q/DQ graph's INT8 inputs, beside what that graph does.

    SQNR in dB against the exact result, both rounded once; `differing` elements of `elements`, by
    `largest_steps` at most, with the first worst one (`expected` the graph's, `found` the DLA's, in
    steps) and their causes. `shared_scale_db`: see `causes.shared_scale_cost_db`; `clipped_db`:
    what the range of its result costs by clipping, `causes.clipping_cost_db`; `leaves`: the result
    leaves the segment.
    """

    gpu_sqnr_db: float
    dla_sqnr_db: float
    elements: int
    differing: int
    largest_steps: int
    worst: Worst | None
    causes: Mapping[str, int]
    shared_scale_db: float = 0.0
    shared_reason: str = SHARED_SCALE
    clipped_db: float = 0.0
    leaves: bool = False

    @property
    def cost_db(self) -> float:
        """What the DLA's arithmetic takes from the layer's SQNR, up to `UNHEARD_DB`."""
        return min(self.gpu_sqnr_db, UNHEARD_DB) - min(self.dla_sqnr_db, UNHEARD_DB)

    @property
    def most_db(self) -> float:
        """The largest of what the arithmetic, a shared scale and clipping cost."""
        return max(self.cost_db, self.shared_scale_db, self.clipped_db)

    @property
    def costs(self) -> bool:
        """Whether the layer is one of those to name."""
        by_range = max(self.shared_scale_db, self.clipped_db)
        return self.cost_db >= LEAST_COST_DB or by_range >= LEAST_SHARED_DB


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A tensor against FP32, so far in the network; None where FP32 has no tensor of that name."""

    tensor: str
    node: str
    op: str
    segment: str
    processor: str
    gpu: Error | None
    dla: Error | None
    own: OwnError | None = None


@dataclass(frozen=True, slots=True)
class Metric:
    """The task's metric of the three, in points of 0 to 100; `stages`: from the GPU to the DLA."""

    name: str
    fp32: float
    gpu: float
    dla: float
    stages: Stages | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything to report. `matched` of `nodes` rows have an FP32 tensor of the same name.

    `graph` titles the column beside the DLA's: processor and precision. `gap`: what the DLA loses
    against a GPU; None without a DLA in INT8, or where the notes say why.
    """

    engine: str
    model: str
    graph: str
    precision: str
    samples: int
    emulation: Emulation
    dla_segments: int
    uncalibrated: bool
    outputs: tuple[TensorRow, ...]
    nodes: tuple[TensorRow, ...]
    metric: Metric | None = None
    notes: tuple[str, ...] = field(default=())
    sample_names: tuple[str, ...] = field(default=())
    gap: Gap | None = None

    @property
    def by_cost(self) -> tuple[TensorRow, ...]:
        """The rows of DLA layers, those where the DLA costs most first; then all others."""
        return tuple(
            sorted(self.nodes, key=lambda row: 1.0 if row.own is None else -row.own.most_db)
        )

    @property
    def matched(self) -> int:
        """How many rows could be compared with FP32."""
        return sum(row.gpu is not None for row in self.nodes)


class _Own:
    """Adds up one layer's own error."""

    def __init__(self) -> None:
        self.gpu, self.dla, self.steps = ErrorTally(), ErrorTally(), ErrorTally()
        self.elements = self.differing = 0
        self.causes: dict[str, int] = {}
        self.shared_db: float | None = None
        self.shared_reason = SHARED_SCALE
        self.clipped_db = 0.0
        self.leaves = False

    def result(self) -> OwnError:
        worst = self.steps.error().worst
        return OwnError(
            gpu_sqnr_db=self.gpu.error().sqnr_db,
            dla_sqnr_db=self.dla.error().sqnr_db,
            elements=self.elements,
            differing=self.differing,
            largest_steps=0 if worst is None else round(abs(worst.found - worst.expected)),
            worst=worst,
            causes=dict(self.causes),
            shared_scale_db=self.shared_db or 0.0,
            shared_reason=self.shared_reason,
            clipped_db=self.clipped_db,
            leaves=self.leaves,
        )


@dataclass(slots=True)
class _Row:
    """A row while it grows."""

    row: TensorRow
    gpu: ErrorTally = field(default_factory=ErrorTally)
    dla: ErrorTally = field(default_factory=ErrorTally)
    own: _Own | None = None
    matched: bool = False

    def add(self, exact: Array | None, gpu: Array | None, dla: Array, sample: int) -> None:
        if exact is None or gpu is None:
            return
        if exact.shape == gpu.shape == dla.shape:
            self.gpu.add(exact, gpu, sample)
            self.dla.add(exact, dla, sample)
            self.matched = True

    def result(self) -> TensorRow:
        return replace(
            self.row,
            gpu=self.gpu.error() if self.matched else None,
            dla=self.dla.error() if self.matched else None,
            own=None if self.own is None else self.own.result(),
        )


class Comparer:
    """An engine and the FP32 graph that it was made of; takes samples, gives a comparison."""

    def __init__(
        self,
        engine: Engine,
        graph: ir.Model,
        emulation: Emulation,
        ranges: Mapping[str, float] | None = None,
    ) -> None:
        """Load all three. `ranges`: what a GPU would be given; None: those of the engine.

        Raises TandemError naming what cannot be run.
        """
        self._engine, self._emulation = engine, emulation
        self.traces = tuple(SegmentTrace(engine, segment) for segment in engine.manifest.segments)
        self.emulations = {
            trace.segment.name: Emulations(engine, trace, emulation)
            for trace in self.traces
            if trace.segment.processor.startswith("dla")
        }
        known = {str(v.name) for v in graph.graph.inputs}
        known |= {str(v.name) for n in graph.graph for v in n.outputs if v.name}
        seen = {
            name for t in self.traces for n in t.graph.nodes for name in (*n.inputs, *n.outputs)
        }
        self._outputs = engine.manifest.outputs
        observed = sorted((seen | set(self._outputs)) & known)
        self._exact = ActivationRunner(graph, observed)
        self._rows: dict[tuple[str, str], _Row] = {}
        self._of_outputs: dict[str, _Row] = {}
        self._samples: list[str] = []
        self.gap, self.notes = _gap_tally(engine, self.traces, output_parts(graph), ranges)

    def add(self, feeds: Mapping[str, Array], name: str = "") -> None:
        """Run one sample through all three; `name`: what reports call it."""
        exact = self._exact(feeds)
        graph, dla = self._engine_runs(feeds)
        outputs = [{name: run[name] for name in self._outputs} for run in (graph, dla)]
        gpu = graph if self.gap is None else self.gap.add(feeds, exact, *outputs)
        number = len(self._samples)
        for trace in self.traces:
            emulations = self.emulations.get(trace.segment.name)
            if emulations is None:
                self._add_nodes(trace, (exact, gpu, dla))
            else:
                self._add_segment(trace, emulations, (exact, gpu, graph, dla))
        for tensor in self._outputs:
            row = self._of_outputs.setdefault(
                tensor, _Row(TensorRow(tensor, "", "", "", "", None, None))
            )
            row.add(exact.get(tensor), gpu.get(tensor), dla[tensor], number)
        self._samples.append(name or f"sample {number}")

    def _engine_runs(self, feeds: Mapping[str, Array]) -> tuple[Arrays, Arrays]:
        """Return the tensors of the engine's Q/DQ graph, and those with the DLA's arithmetic.

        Of a segment in the DLA's arithmetic these are its outputs.
        """
        graph, dla = dict(feeds), dict(feeds)
        for trace in self.traces:
            segment = trace.segment
            graph |= trace.run(graph)
            emulations = self.emulations.get(segment.name)
            if emulations is None:
                dla |= trace.run(dla)
                continue
            inputs = {name: dla[name] for name in segment.inputs}
            results = emulations.requested.run(inputs, dict.fromkeys(segment.outputs), {})
            dla |= {name: results[name] for name in segment.outputs}
        return graph, dla

    def comparison(
        self, model: str, metric: Metric | None = None, notes: tuple[str, ...] = ()
    ) -> Comparison:
        """Return what all samples gave. Raises BuildError: there was none."""
        if not self._samples:
            raise BuildError("There is no sample to compare on; give --data with at least one.")
        return Comparison(
            engine=str(self._engine.path),
            model=model,
            graph=_graph_title(self._engine.manifest),
            precision=arithmetic_of(self._engine.manifest),
            samples=len(self._samples),
            emulation=self._emulation,
            dla_segments=len(self.emulations),
            uncalibrated=self._engine.manifest.uncalibrated,
            outputs=tuple(row.result() for row in self._of_outputs.values()),
            nodes=tuple(row.result() for row in self._rows.values()),
            metric=metric,
            notes=(*notes, *self.notes),
            sample_names=tuple(self._samples),
            gap=self._gap_of(metric),
        )

    def _gap_of(self, metric: Metric | None) -> Gap | None:
        if self.gap is None:
            return None
        if metric is not None and metric.stages is not None:
            return self.gap.of_metric(metric.name, metric.stages)
        return self.gap.worst()

    def _add_nodes(self, trace: SegmentTrace, runs: tuple[Arrays, Arrays, Arrays]) -> None:
        exact, gpu, dla = runs
        for node in trace.nodes:
            for tensor in node.outputs:
                if tensor in dla and dla[tensor].dtype.kind == "f":
                    row = self._row(trace.segment, node.name, node.op, tensor)
                    row.add(exact.get(tensor), gpu.get(tensor), dla[tensor], len(self._samples))

    def _row(self, segment: Segment, node: str, op: str, tensor: str) -> _Row:
        empty = TensorRow(tensor, node, op, segment.name, segment.processor, None, None)
        return self._rows.setdefault((segment.name, tensor), _Row(empty))

    def _add_segment(
        self,
        trace: SegmentTrace,
        emulations: Emulations,
        runs: tuple[Arrays, Arrays, Arrays, Arrays],
    ) -> None:
        """Count the layers of a DLA segment: by itself, and each on the Q/DQ graph's numbers."""
        exact, gpu, graph, dla = runs

        def graphs_own(result: LayerResult) -> Array:
            tensor = trace.layer_of(result).tensor
            value = graph.get(tensor)
            if result.op == "Cast" or value is None or value.shape != result.numbers.shape:
                return result.numbers
            return value if result.scale is None else causes.quantized(value, result.scale)

        inputs = {name: dla[name] for name in trace.segment.inputs}
        graph_inputs = {name: graph[name] for name in trace.segment.inputs}
        runs_of = zip(
            emulations.requested.trace(inputs),
            emulations.requested.trace(graph_inputs, graphs_own),
            emulations.exact_bias.trace(graph_inputs, graphs_own),
            emulations.ideal.trace(graph_inputs, graphs_own),
            strict=True,
        )
        for free, alone, exact_bias, ideal in runs_of:
            layer = trace.layer_of(free)
            if free.op == "Cast" or layer.tensor not in graph:
                continue
            if graph[layer.tensor].shape != free.numbers.shape:
                continue
            row = self._row(trace.segment, free.node, free.op, layer.tensor)
            graphs = graphs_own(alone)
            on_gpu = gpu.get(layer.tensor) if self.gap is not None else _real(graphs, alone.scale)
            row.add(exact.get(layer.tensor), on_gpu, free.real(), len(self._samples))
            row.own = row.own or _Own()
            row.own.leaves = layer.tensor in trace.leaving
            result = exact_result(layer, graph)
            variants = causes.Variants(exact_bias.numbers, ideal.numbers)
            _add_own(row.own, layer, alone, variants, (graphs, result), sample=len(self._samples))
            if layer.ops & ELEMENT_WISE:
                _add_shared(row.own, layer, exact)
            elif layer.ops & causes.AVERAGES and alone.scale is not None:
                row.own.shared_reason = causes.POOL_SCALE
                _add_cost(row.own, causes.shared_scale_cost_db(result, alone.scale))


def _gap_tally(
    engine: Engine,
    traces: Sequence[SegmentTrace],
    parts: Sequence[OutputPart],
    ranges: Mapping[str, float] | None,
) -> tuple[GapTally | None, tuple[str, ...]]:
    """Return the GPU beside a DLA in INT8; notes say why there is none.

    Raises BuildError: the ranges are those of another model, or one is no positive number.
    """
    on_dla = {
        node.inputs[0]
        for trace in traces
        if trace.segment.processor.startswith("dla")
        for node in trace.graph.nodes
        if node.op == "QuantizeLinear"
    }
    if not on_dla:
        return None, ()
    try:
        network = network_of(engine)
        gpu = GpuNetwork(network, network.amax, on_dla)
    except BuildError as error:
        return None, (NO_GPU.format(why=error),)
    if ranges is None:
        return GapTally(gpu, gpu, parts), ()
    known = {name: amax for name, amax in ranges.items() if name in network.amax}
    if not known:
        raise BuildError(
            f"The table has {len(ranges)} tensors, but none of the {len(network.amax)} of "
            f"{engine.path} that have a range; give the --table that the engine was built with."
        )
    by_table = GpuNetwork(network, {**network.amax, **known})
    return GapTally(gpu, by_table, parts), ()


def _real(numbers: Array, scale: float | None) -> Array:
    return numbers if scale is None else numbers.astype(np.float32) * np.float32(scale)


def _graph_title(manifest: Manifest) -> str:
    on_cpu = all(segment.processor == "cpu" for segment in manifest.segments)
    return f"{'CPU' if on_cpu else 'GPU'} {arithmetic_title(manifest)}"


def _add_own(
    tally: _Own,
    layer: Layer,
    alone: LayerResult,
    variants: causes.Variants,
    of_graph: tuple[Array, Array],
    *,
    sample: int,
) -> None:
    """`of_graph`: the layer's numbers in the Q/DQ graph, and its result before rounding."""
    graphs, result = of_graph
    different = alone.numbers != graphs
    count = int(np.count_nonzero(different))
    tally.elements += different.size
    tally.differing += count
    if alone.scale is None:
        tally.gpu.add(result, graphs, sample)
        tally.dla.add(result, alone.numbers, sample)
        if count:
            tally.causes[causes.FP16] = tally.causes.get(causes.FP16, 0) + count
        return
    steps = np.asarray(result, np.float64) / alone.scale
    inside = np.clip(steps, -128, 127)  # what both clip is no difference of arithmetic
    tally.gpu.add(inside, graphs, sample)
    tally.dla.add(inside, alone.numbers, sample)
    tally.steps.add(graphs, alone.numbers, sample)
    tally.clipped_db = max(tally.clipped_db, causes.clipping_cost_db(result, alone.scale))
    counts = causes.causes_of(alone.numbers, graphs, variants, steps, layer.ops)
    for cause, number in counts.items():
        tally.causes[cause] = tally.causes.get(cause, 0) + number


def _add_shared(tally: _Own, layer: Layer, exact: Arrays) -> None:
    """Measure what one scale for all operands costs the one that it serves worst."""
    scales = {operand.scale for operand in layer.operands}
    known = [o for o in layer.operands if o.tensor in exact and o.scale is not None]
    if len(layer.operands) < 2 or len(scales) > 1 or not known:
        return
    costs_db = (causes.shared_scale_cost_db(exact[o.tensor], o.scale or 0.0) for o in known)
    _add_cost(tally, max(costs_db))


def _add_cost(tally: _Own, cost_db: float) -> None:
    """Keep the least of all samples: a scale of its own must serve all of them."""
    tally.shared_db = cost_db if tally.shared_db is None else min(tally.shared_db, cost_db)
