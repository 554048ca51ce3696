"""Enqueues a segment's launches: manifest values become arguments of the driver."""

import ctypes
from collections.abc import Sequence

from device.engine.cuda_manifest import Argument, Cuda, Int32, Launch, Null, Workspace
from device.engine.cuda_sizes import evaluate
from device.runtime.cuda.context import Parameter, Stream
from device.runtime.cuda.program import Program


class Launcher:
    """The launches of one segment, in one workspace."""

    def __init__(
        self, implementation: Cuda, program: Program, workspace: int, stream: Stream
    ) -> None:
        """Take the address of the workspace; the caller releases the program."""
        self._implementation = implementation
        self._program = program
        self._workspace = workspace
        self._stream = stream

    def start(self, launches: Sequence[Launch], point: Sequence[int]) -> None:
        """Enqueue launches, one after the other, at these sizes of the dynamic dimensions.

        Those whose kernels wait by themselves start early; the others wait for all before them.
        Raises CudaError.
        """
        for launch in launches:
            kernel = self._implementation.kernels[launch.kernel]
            self._stream.launch(
                self._program.function(launch.kernel),
                (
                    evaluate(launch.grid[0], point),
                    evaluate(launch.grid[1], point),
                    evaluate(launch.grid[2], point),
                ),
                kernel.threads,
                kernel.shared_bytes,
                [self._parameter(argument, point) for argument in launch.arguments],
                early=kernel.waits,
            )

    def _parameter(self, argument: Argument, point: Sequence[int]) -> Parameter:
        if isinstance(argument, Int32):
            return ctypes.c_int32(evaluate(argument.value, point))
        if isinstance(argument, Null):
            return ctypes.c_uint64(0)
        base = self._workspace if isinstance(argument, Workspace) else self._program.weights
        return ctypes.c_uint64(base + evaluate(argument.offset, point))
