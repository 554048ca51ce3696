"""Measures launches by the GPU's clock, without the CPU's cost of each launch.

The work is recorded several times into one graph, so that its launches follow each other without
the CPU, and two events around the graph give the time of all. It repeats on the same memory: what
fits the L2 cache is read from there, as most activations of a running network are, and large
weights are not.
"""

import statistics
from collections.abc import Callable

from device.runtime.cuda.context import Stream

# A graph of about this length makes the events' resolution (0.5 us, CUDA Driver API reference,
# cuEventElapsedTime) and its start matter less than 2 %.
_GRAPH_US = 400.0
_MOST_REPEATS = 100
_GRAPHS = 5  # timed; their median counts


def repeated_us(stream: Stream, work: Callable[[], None], graphs: int = _GRAPHS) -> float:
    """Return the time of the launches that `work` enqueues, in microseconds.

    It is the median over `graphs` launches of the graph.
    """
    work()  # the driver loads some code at the first launch
    stream.wait()
    once = max(stream.time_us(work), 0.1)
    repeats = max(3, min(_MOST_REPEATS, round(_GRAPH_US / once)))

    def repeat() -> None:
        for _ in range(repeats):
            work()

    graph = stream.capture(repeat)
    try:
        graph.launch()
        return statistics.median(stream.time_us(graph.launch) for _ in range(graphs)) / repeats
    finally:
        stream.wait()
        graph.close()
