"""Enqueues a segment's launches: manifest values become arguments of the driver."""

import ctypes
from collections.abc import Callable, Sequence

from device.engine.cuda_manifest import Argument, Cuda, Int32, Launch, Null, Workspace
from device.engine.cuda_sizes import evaluate
from device.runtime.cuda.context import Parameter, Stream
from device.runtime.cuda.program import Program

Place = Callable[[int], int]
"""Returns the address of an offset in the workspace."""


class Launcher:
    """The launches of one segment; the caller releases the program."""

    def __init__(self, implementation: Cuda, program: Program) -> None:
        self._implementation = implementation
        self._program = program

    def start(
        self, launches: Sequence[Launch], point: Sequence[int], place: Place, stream: Stream
    ) -> None:
        """Enqueue launches, one after the other, at these sizes of the dynamic dimensions.

        Those whose kernels wait by themselves start early; the others wait for all before them.
        Raises CudaError.
        """
        for launch in launches:
            kernel = self._implementation.kernels[launch.kernel]
            stream.launch(
                self._program.function(launch.kernel),
                (
                    evaluate(launch.grid[0], point),
                    evaluate(launch.grid[1], point),
                    evaluate(launch.grid[2], point),
                ),
                kernel.threads,
                kernel.shared_bytes,
                [self._parameter(argument, point, place) for argument in launch.arguments],
                early=kernel.waits,
            )

    def _parameter(self, argument: Argument, point: Sequence[int], place: Place) -> Parameter:
        if isinstance(argument, Int32):
            return ctypes.c_int32(evaluate(argument.value, point))
        if isinstance(argument, Null):
            return ctypes.c_uint64(0)
        offset = evaluate(argument.offset, point)
        if isinstance(argument, Workspace):
            return ctypes.c_uint64(place(offset))
        return ctypes.c_uint64(self._program.weights + offset)
