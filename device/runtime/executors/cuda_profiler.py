"""Times of a segment by the GPU's clock: kernels, copies, and each operation by itself."""

import time
from functools import partial

from device.runtime.cuda.segment import LoadedSegment, SegmentRun
from device.runtime.cuda.timing import repeated_us
from device.runtime.executors.protocol import LayerTime, Phases


class CudaProfiler:
    """Times one run of a segment; see `device.runtime.executors.protocol.Profiler`."""

    def __init__(self, gpu: LoadedSegment, run: SegmentRun) -> None:
        self._gpu = gpu
        self._run = run

    def compute_us(self, runs: int) -> list[float]:
        """Return the GPU's time for the kernels as one graph, run by run."""
        self._gpu.context.activate()
        graph = self._gpu.stream.capture(self._launch_all)
        try:
            return [self._gpu.stream.time_us(graph.launch) for _ in range(runs)]
        finally:
            graph.close()

    def phases(self, runs: int) -> list[Phases]:
        """Return the GPU's time for copies in, kernels and copies out, run by run."""
        self._gpu.context.activate()
        graph = self._gpu.stream.capture(self._launch_all)
        enqueued_us: list[float] = []

        def launch() -> None:
            begin = time.perf_counter()
            graph.launch()
            enqueued_us.append((time.perf_counter() - begin) * 1e6)

        parts = (
            partial(self._gpu.copy_in, self._run),
            launch,
            partial(self._gpu.copy_out, self._run),
        )
        try:
            laps = [self._gpu.stream.laps_us(parts) for _ in range(runs)]
        finally:
            graph.close()
        return [Phases(us, *lap) for us, lap in zip(enqueued_us, laps, strict=True)]

    def layer_times(self, runs: int) -> list[LayerTime]:
        """Return the median time of each operation by itself.

        See `device.runtime.cuda.timing` for what is in the L2 cache then.
        """
        self._gpu.context.activate()
        implementation = self._gpu.implementation
        layers = []
        for op, number in zip(implementation.works, self._run.tactics, strict=True):
            tactic = op.tactics[number]
            launch = partial(self._gpu.launch, tactic, self._run.point)
            kernels = (implementation.kernels[start.kernel] for start in tactic.launches)
            layers.append(
                LayerTime(
                    op.nodes,
                    tuple(kernel.function for kernel in kernels),
                    number,
                    len(op.tactics),
                    repeated_us(self._gpu.stream, launch, runs),
                )
            )
        return layers

    def _launch_all(self) -> None:
        self._gpu.launch_all(self._run)
