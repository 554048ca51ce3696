"""Cuts GPU segments where the GPU backend has no kernel: those pieces run portable.

A segment that kernels cover in part is cut into the fewest pieces that can run one after the other,
each with kernels for all of its nodes or for none. What passes between two such pieces crosses
between GPU and CPU, so a piece gets kernels only where the cost model says that they save more than
its crossings take.

The costs of a plan count a portable node as one on the GPU, so that missing kernels move no node
to or from the DLA: TensorRT on a board would run it on the GPU, and no published figure says what
ONNX Runtime takes for it on a board's CPU.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from device.engine.manifest import Processor
from toolkit.graph.node_view import NodeView
from toolkit.graph.segment import PlannedSegment
from toolkit.graph.window import Shape
from toolkit.partition.costs.bytes import tensor_bytes
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.segments import find_crossings
from toolkit.partition.solver.problem import Flow, Network, Task
from toolkit.partition.solver.segmentation import segments_of

_UNPAID = "a kernel would not save its crossings"
_BESIDE = "other nodes of its segment have no kernel"


@dataclass(frozen=True, slots=True)
class KernelSupport:
    """What the GPU backend says of the nodes of a graph, asked before the plan.

    `no_kernel`: nodes without a kernel, and why; all others have one. `opt_shapes`: of all tensors
    at the sizes that kernels are made for, where the graph leaves sizes open.
    """

    no_kernel: Mapping[str, str] = field(default_factory=dict)
    opt_shapes: Mapping[str, Shape] = field(default_factory=dict)


def portable_nodes(segments: Iterable[PlannedSegment]) -> dict[str, str]:
    """Return the nodes of GPU segments without kernels, in order, and why each has none."""
    return {
        node: segment.no_kernel.get(node, _UNPAID if node in segment.unpaid else _BESIDE)
        for segment in segments
        if segment.processor == "gpu" and segment.place == "portable"
        for node in segment.nodes
    }


def cut_segments(
    segments: Iterable[PlannedSegment],
    views: Sequence[NodeView],
    no_kernel: Mapping[str, str],
    costs: CostModel,
) -> tuple[PlannedSegment, ...]:
    """Cut segments of the GPU where nodes have no kernel: `no_kernel`, with the reason.

    `segments` are in running order, and so are the pieces; those of segment "gpu.0" are called
    "gpu.0.0", "gpu.0.1" and so on. Segments without such nodes stay as they are.
    """
    pieces: list[PlannedSegment] = []
    for segment in segments:
        reasons = {name: no_kernel[name] for name in segment.nodes if name in no_kernel}
        if segment.processor != "gpu" or not reasons:
            pieces.append(segment)
            continue
        nodes = set(segment.nodes)
        pieces += _cut(segment, [view for view in views if view.name in nodes], reasons, costs)
    return tuple(pieces)


def _cut(
    segment: PlannedSegment,
    views: Sequence[NodeView],
    no_kernel: Mapping[str, str],
    costs: CostModel,
) -> tuple[PlannedSegment, ...]:
    """Cut one segment, and join the covered pieces that are not worth their crossings."""
    portable = set(no_kernel)
    while True:
        pieces = _pieces(segment, views, portable)
        unpaid = {
            node
            for piece in pieces
            if piece.processor == "gpu" and not _pays(piece, pieces, views, costs)
            for node in piece.nodes
        }
        if not unpaid:
            break
        portable |= unpaid
    return tuple(
        PlannedSegment(
            segment.name if len(pieces) == 1 else piece.name,
            segment.processor,
            piece.nodes,
            {node: no_kernel[node] for node in piece.nodes if node in no_kernel},
            tuple(node for node in piece.nodes if node in portable and node not in no_kernel),
        )
        for piece in pieces
    )


def _pieces(
    segment: PlannedSegment, views: Sequence[NodeView], portable: set[str]
) -> tuple[PlannedSegment, ...]:
    """Return the fewest pieces: portable ones on the "cpu", others on the "gpu"."""
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
    return tuple(
        PlannedSegment(f"{segment.name}.{number}", piece.processor, piece.tasks)
        for number, piece in enumerate(segments_of(network, processor_of, {}))
    )


def _pays(
    piece: PlannedSegment,
    pieces: Sequence[PlannedSegment],
    views: Sequence[NodeView],
    costs: CostModel,
) -> bool:
    """Whether the kernels of a piece save more time than its crossings cost."""
    saved_us = sum(costs.node(n, "cpu").time_us - costs.node(n, "gpu").time_us for n in piece.nodes)
    outputs = {output.name: output for view in views for output in view.outputs}
    crossings_us = sum(
        costs.crossing(tensor_bytes(outputs[crossing.tensor], "fp32") or 0, "gpu", "cpu").time_us
        for crossing in find_crossings(pieces, views, lambda _: None)
        if piece.name in (crossing.source, *crossing.targets)
    )
    return saved_us > crossings_us
