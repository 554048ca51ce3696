"""A piece of a graph on one processor."""

from dataclasses import dataclass

from device.engine.manifest import Processor


@dataclass(frozen=True, slots=True)
class PlannedSegment:
    """A maximal piece of the graph on one processor; nodes are in running order."""

    name: str
    processor: Processor
    nodes: tuple[str, ...]
