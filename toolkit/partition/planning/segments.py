"""Segments of a placed graph and the tensors that cross between them."""

from collections.abc import Callable, Sequence

from device.engine.manifest import Crossing
from toolkit.graph.node_view import NodeView
from toolkit.graph.segment import PlannedSegment


def find_crossings(
    segments: Sequence[PlannedSegment],
    views: Sequence[NodeView],
    size_of: Callable[[str], int | None],
) -> tuple[Crossing, ...]:
    """Return the tensors that cross to another processor, in the order they are computed.

    `segments` are in running order and hold every node of `views`.
    """
    segment_of = {node: segment for segment in segments for node in segment.nodes}
    rank = {segment.name: index for index, segment in enumerate(segments)}
    readers: dict[str, list[PlannedSegment]] = {}
    for view in views:
        for tensor in view.reads:
            readers.setdefault(tensor, []).append(segment_of[view.name])
    crossings = []
    for view in sorted(views, key=lambda view: rank[segment_of[view.name].name]):
        source = segment_of[view.name]
        for output in view.outputs:
            users = [s for s in readers.get(output.name, ()) if s.processor != source.processor]
            targets = tuple(sorted({s.name for s in users}, key=rank.__getitem__))
            if targets:
                size = size_of(output.name)
                crossings.append(
                    Crossing(tensor=output.name, source=source.name, targets=targets, bytes=size)
                )
    return tuple(crossings)
