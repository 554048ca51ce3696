"""Cuts GPU segments into pieces with kernels and pieces that run portable.

A segment that kernels cover in part is cut into the fewest pieces that can run one after the other,
each with kernels for all of its nodes or for none. What passes between two such pieces crosses
between GPU and CPU, so a piece gets kernels only where the cost model says that they save more than
its crossings take.

The GPU backend is asked for the support of nodes after the plan, not before: the plan has a
processor for each node, "cpu" is none of a board with a GPU, and which pieces are worth their
crossings shows only once the plan has placed their neighbours.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir
from msgspec import structs

from device.engine.manifest import Manifest, NodePlacement, Processor, largest_bytes
from device.profile import Profile
from toolkit.gpu.segments import (
    GpuBackend,
    GpuSegments,
    compile_gpu_segments,
    lower_gpu_segments,
    unsupported_nodes,
)
from toolkit.gpu.shapes.inference import traces_of
from toolkit.graph.extract import ExtractedSegment, extract_segments
from toolkit.graph.node_view import NodeView, views
from toolkit.graph.segment import PlannedSegment
from toolkit.graph.window import Shape
from toolkit.partition.costs.bytes import tensor_bytes
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.plan import Plan
from toolkit.partition.planning.segments import find_crossings
from toolkit.partition.solver.problem import Flow, Network, Task
from toolkit.partition.solver.segmentation import segments_of
from toolkit.quantize.quantize import QuantizedModel

_MOST_REASONS = 5  # in one note; the manifest lists all nodes


@dataclass(frozen=True, slots=True)
class Piece:
    """A planned segment or a part of one.

    `refused`: its nodes that have no kernel, and why. `along`: nodes that have one and run portable
    beside those. With either, the piece gets no kernels.
    """

    segment: PlannedSegment
    refused: Mapping[str, str] = field(default_factory=dict)
    along: tuple[str, ...] = ()

    @property
    def portable(self) -> bool:
        """Whether it is left to its portable implementation."""
        return bool(self.refused or self.along)


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """A graph with its plan for a profile.

    `quantizer` takes the segment of each node and returns the graph with its Q/DQ. `backend`: None
    where no kernels are made.
    """

    graph: ir.Model
    plan: Plan
    profile: Profile
    quantizer: Callable[[Mapping[str, str]], QuantizedModel]
    backend: GpuBackend | None


@dataclass(frozen=True, slots=True)
class Covered:
    """The pieces of a plan, each extracted, and the kernels of those that have some, by name."""

    quantized: QuantizedModel
    pieces: tuple[Piece, ...]
    extracted: tuple[ExtractedSegment, ...]
    gpu: GpuSegments


def cover_plan(planned: PlannedGraph) -> Covered:
    """Cut a plan's segments where nodes have no kernel, and make the kernels of the others.

    What only lowering and compiling know of (`toolkit.gpu.support` names it) comes too late for the
    cut, so the plan is cut once more with all nodes that they refuse. A piece that is refused then
    runs portable as a whole.
    Raises as `toolkit.gpu.segments.lower_gpu_segments` and `compile_gpu_segments`.
    """
    refused = _unsupported(planned)
    covered = _cover(planned, refused)
    if covered.gpu.refused:
        covered = _cover(planned, {**refused, **covered.gpu.refused}, again=True)
    return replace(covered, pieces=_with_refused(covered.pieces, covered.gpu.refused))


def _unsupported(planned: PlannedGraph) -> Mapping[str, str]:
    """Return the GPU nodes for which the backend has no kernel, known before lowering."""
    if planned.backend is None:
        return {}
    segments = (segment for segment in planned.plan.segments if segment.processor == "gpu")
    names = frozenset(node for segment in segments for node in segment.nodes)
    return unsupported_nodes(planned.backend, planned.graph, names)


def _cover(planned: PlannedGraph, refused: Mapping[str, str], *, again: bool = False) -> Covered:
    """Cut, quantize, extract, lower and compile. `again`: what is still refused stops nothing."""
    pieces = _cut_plan(planned, refused)
    segments = [piece.segment for piece in pieces]
    quantized = planned.quantizer({node: s.name for s in segments for node in s.nodes})
    names = [segment.name for segment in segments]
    extracted = extract_segments(quantized.model, quantized.segment_of, names)
    if planned.backend is None:
        return Covered(quantized, pieces, extracted, GpuSegments())
    on_gpu = [p.segment for p in pieces if p.segment.processor == "gpu" and not p.portable]
    programs = lower_gpu_segments(planned.backend, on_gpu, extracted)
    if programs.refused and not again:
        return Covered(quantized, pieces, extracted, GpuSegments(refused=programs.refused))
    gpu = compile_gpu_segments(planned.backend, on_gpu, programs)
    gpu = replace(gpu, refused={**programs.refused, **gpu.refused})
    return Covered(quantized, pieces, extracted, gpu)


def _cut_plan(planned: PlannedGraph, refused: Mapping[str, str]) -> tuple[Piece, ...]:
    plan = planned.plan
    if not refused:
        return tuple(Piece(segment) for segment in plan.segments)
    nodes = views(planned.graph.graph, _shapes_at_best(planned))
    costs = CostModel(nodes, planned.profile, precision=plan.precision, power_mode=plan.power_mode)
    return cut_segments(plan.segments, nodes, refused, costs)


def _shapes_at_best(planned: PlannedGraph) -> dict[str, Shape]:
    """Return the shapes of all tensors at the sizes that tiles are chosen for.

    What a piece costs depends on sizes that the graph leaves open.
    """
    backend = planned.backend
    if backend is None or not backend.dims:
        return {}
    trace = traces_of(backend.dims, backend.plugins)[0].after(planned.graph)
    return {name: tuple(map(int, shape)) for name, shape in trace.known.shapes.items()}


def _with_refused(pieces: Sequence[Piece], refused: Mapping[str, str]) -> tuple[Piece, ...]:
    """Leave the pieces to their portable implementation whose nodes were refused in the end."""
    return tuple(
        replace(
            piece,
            refused=piece.refused
            or {node: refused[node] for node in piece.segment.nodes if node in refused},
        )
        for piece in pieces
    )


def cut_segments(
    planned: Sequence[PlannedSegment],
    views: Sequence[NodeView],
    refused: Mapping[str, str],
    costs: CostModel,
) -> tuple[Piece, ...]:
    """Cut segments where nodes have no kernel: `refused`, with the reason.

    `planned` are in running order, and so are the pieces; those of segment "gpu.0" are called
    "gpu.0.0", "gpu.0.1" and so on. Segments without such nodes stay as they are.
    """
    pieces: list[Piece] = []
    for segment in planned:
        without = {name: refused[name] for name in segment.nodes if name in refused}
        nodes = set(segment.nodes) if without else ()
        inside = [view for view in views if view.name in nodes]
        pieces += _cut(segment, inside, without, costs) if without else (Piece(segment),)
    return tuple(pieces)


def place_in_pieces(
    placements: Iterable[NodePlacement], pieces: Iterable[Piece]
) -> tuple[NodePlacement, ...]:
    """Return the plan's rows with the piece of each node."""
    segment_of = {node: piece.segment.name for piece in pieces for node in piece.segment.nodes}
    return tuple(structs.replace(row, segment=segment_of[row.node]) for row in placements)


def coverage_notes(pieces: Iterable[Piece], manifest: Manifest) -> tuple[str, ...]:
    """Return a note for each piece without kernels: refused nodes, reasons and crossings."""
    return tuple(_note(piece, manifest) for piece in pieces if piece.portable)


def _cut(
    segment: PlannedSegment,
    views: Sequence[NodeView],
    refused: Mapping[str, str],
    costs: CostModel,
) -> tuple[Piece, ...]:
    """Cut one segment, and join the covered pieces that are not worth their crossings."""
    portable = set(refused)
    while True:
        parts = _parts(segment, views, portable)
        idle = {
            node
            for part in parts
            if part.processor == "gpu" and not _pays(part, parts, views, costs)
            for node in part.nodes
        }
        if not idle:
            break
        portable |= idle
    whole = len(parts) == 1
    return tuple(
        Piece(
            PlannedSegment(
                segment.name if whole else f"{segment.name}.{number}",
                segment.processor,
                part.nodes,
            ),
            {node: refused[node] for node in part.nodes if node in refused},
            tuple(n for n in part.nodes if n in portable and n not in refused),
        )
        for number, part in enumerate(parts)
    )


def _parts(
    segment: PlannedSegment, views: Sequence[NodeView], portable: set[str]
) -> tuple[PlannedSegment, ...]:
    """Return the fewest parts: portable ones on the "cpu", others on the "gpu"."""
    processor_of: dict[str, Processor] = {
        node: "cpu" if node in portable else "gpu" for node in segment.nodes
    }
    readers: dict[str, list[str]] = {}
    for view in views:
        for tensor in view.reads:
            readers.setdefault(tensor, []).append(view.name)
    network = Network(
        segment.name,
        tuple(Task(node, {processor_of[node]: 0.0}) for node in segment.nodes),
        tuple(
            Flow(output.name, view.name, tuple(readers[output.name]))
            for view in views
            for output in view.outputs
            if output.name in readers
        ),
    )
    cut = segments_of(network, processor_of, {})
    return tuple(
        PlannedSegment(f"{segment.name}.{number}", part.processor, part.tasks)
        for number, part in enumerate(cut)
    )


def _pays(
    part: PlannedSegment,
    parts: Sequence[PlannedSegment],
    views: Sequence[NodeView],
    costs: CostModel,
) -> bool:
    """Whether the kernels of a part save more time than its crossings cost."""
    nodes = set(part.nodes)
    saved_us = sum(costs.node(n, "cpu").time_us - costs.node(n, "gpu").time_us for n in nodes)
    sizes = {output.name: output for view in views for output in view.outputs}
    paid_us = sum(
        costs.crossing(tensor_bytes(sizes[crossing.tensor], "fp32") or 0, "gpu", "cpu").time_us
        for crossing in find_crossings(parts, views, lambda _: None)
        if part.name in (crossing.source, *crossing.targets)
    )
    return saved_us > paid_us


def _note(piece: Piece, manifest: Manifest) -> str:
    reasons = list(dict.fromkeys(piece.refused.values()))
    clauses = reasons[:_MOST_REASONS]
    if len(reasons) > _MOST_REASONS:
        clauses.append(f"and {len(reasons) - _MOST_REASONS} more reasons")
    if piece.along:
        clauses.append(f"kernels for {len(piece.along)} more nodes would not save their crossings")
    into, out = _crossing_bytes(piece.segment.name, manifest)
    if into or out:
        clauses.append(f"{into} bytes cross to the CPU and {out} back in every inference")
    return (
        f"segment {piece.segment.name} has no GPU kernels, it runs portable: {'; '.join(clauses)}"
    )


def _crossing_bytes(name: str, manifest: Manifest) -> tuple[int, int]:
    """Return the bytes that cross into a segment from, and out to, segments with kernels."""
    kinds = {
        s.name: {item.__struct_config__.tag for item in s.implementations}
        for s in manifest.segments
    }
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    ranges = {dim.name: dim for dim in manifest.dims}
    own = next(segment for segment in manifest.segments if segment.name == name)
    accelerated = [s for s in manifest.segments if "cuda" in kinds[s.name]]
    written = {tensor for segment in accelerated for tensor in segment.outputs}
    read = {tensor for segment in accelerated for tensor in segment.inputs}

    def total(names: Iterable[str]) -> int:
        return sum(largest_bytes(tensors[item], ranges) or 0 for item in names)

    return total(n for n in own.inputs if n in written), total(n for n in own.outputs if n in read)
