"""The kernels of one port of a DLA segment: a tensor in C order into the port's format, or back.

The tensor may lie anywhere on both sides: the two places of the kernels' workspace are replaced by
the addresses of a launch.
"""

from functools import partial

from device.engine.cuda_manifest import Cuda
from device.engine.file import Engine
from device.runtime.cuda.context import Context, Stream
from device.runtime.cuda.launcher import Launcher
from device.runtime.cuda.program import acquire_program, release_program


class PortKernels:
    """Loaded kernels; they are released with the context."""

    def __init__(self, context: Context, engine: Engine, implementation: Cuda) -> None:
        """Load the kernels. Raises CudaError if the driver refuses."""
        key, program = acquire_program(engine, implementation)
        context.on_close(partial(release_program, key))
        for kernel in range(len(implementation.kernels)):
            program.function(kernel)  # old drivers cannot load while a graph is captured
        self._launches = tuple(
            launch for work in implementation.works for launch in work.tactics[0].launches
        )
        self._launcher = Launcher(implementation, program)
        (self._source,), (self._target,) = implementation.inputs, implementation.outputs

    def enqueue(self, source: int, target: int, stream: Stream) -> None:
        """Enqueue the kernels that read the tensor at `source` and write it at `target`."""

        def place(offset: int) -> int:
            start = self._source.offset
            if start <= offset < start + self._source.bytes:
                return source + offset - start
            return target + offset - self._target.offset

        self._launcher.start(self._launches, (), place, stream)
