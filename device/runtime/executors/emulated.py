"""Runs a DLA segment with the DLA's INT8 arithmetic in software (`device/dla_emulator/arithmetic`).

It translates the portable implementation, a Q/DQ graph, into operations of the DLA
(`device/dla_emulator`). Where onnxruntime rounds halves to even, has scales in floating point
and averages in one step, this rounds halves away from zero, has scales of 16 bits, and rounds an
average twice. It is asked for, never chosen: silicon may differ (docs/emulator.md).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from device.dla_emulator import segment_graph
from device.dla_emulator.builder import Operation
from device.dla_emulator.forms import Form, QuantizedBuffer
from device.dla_emulator.options import Emulation
from device.dla_emulator.translate import translate
from device.engine.file import Engine
from device.engine.manifest import Portable, Segment
from device.errors import SessionError
from device.install_advice import why_missing
from device.runtime.executors.protocol import (
    Array,
    Arrays,
    Executor,
    SegmentContext,
    Sizes,
    Targets,
)

_BUFFER_NUMBERS = 1024


@dataclass(frozen=True, slots=True)
class LayerResult:
    """The result of one operation: node, ONNX tensor, the numbers, their scale if INT8."""

    node: str
    op: str
    tensor: str
    numbers: Array
    scale: float | None

    def real(self) -> Array:
        """Return the real numbers in float32."""
        if self.scale is None:
            return self.numbers
        return np.asarray(self.numbers.astype(np.float32) * np.float32(self.scale))


def why_not() -> str | None:
    """Return why segments cannot be emulated here, or None if they can."""
    return why_missing("threadpoolctl", "host") or segment_graph.why_not()


def requested(context: SegmentContext) -> bool:
    """Return whether a segment is for a DLA, and the session is to emulate those."""
    return context.options.emulation is not None and context.segment.processor.startswith("dla")


def load(context: SegmentContext, implementation: Portable) -> Executor:
    """Load a segment; see `EmulatedExecutor`."""
    options = context.options
    emulation = options.emulation or Emulation()
    return EmulatedExecutor(
        context.engine, context.segment, implementation, emulation, options.threads
    )


class EmulatedExecutor(Executor):
    """One DLA segment in software.

    Its products run in numpy's BLAS, on one thread unless told otherwise: the threads of a BLAS
    spin while they wait for each other, which on a busy machine costs far more than they gain.
    """

    def __init__(
        self,
        engine: Engine,
        segment: Segment,
        implementation: Portable,
        emulation: Emulation,
        threads: int | None,
    ) -> None:
        """Load the segment. Raises SessionError naming the node that has no arithmetic."""
        from threadpoolctl import ThreadpoolController

        self._libraries = ThreadpoolController()
        self._threads = threads or 1
        self._processor = segment.processor
        self._where = f"{engine.path}: segment {segment.name!r}"
        graph = segment_graph.read_graph(engine, implementation, self._where)
        emulated = translate(graph, self._where, emulation)
        self._operations = emulated.operations
        self._outputs = emulated.outputs
        self._zero_points = emulated.zero_points
        self._last_use = _last_uses(emulated.operations, emulated.outputs)
        self.floating: tuple[str, ...] = tuple(
            operation.node
            for operation in emulated.operations
            if operation.scale is None and operation.op != "Cast"
        )
        self._emulation = emulation

    @property
    def processors(self) -> tuple[str, ...]:
        """The core that it stands for."""
        return (self._processor,)

    @property
    def description(self) -> str:
        """The mode, the scales, and how many nodes have no INT8 arithmetic."""
        emulation, count = self._emulation, len(self.floating)
        return (
            f"the DLA's arithmetic in software, {emulation.mode}, {emulation.arithmetic} scales"
            + (f", {count} nodes in floating point" if count else "")
        )

    def run(self, inputs: Arrays, outputs: Targets, sizes: Sizes) -> dict[str, Array]:
        """Run every layer; see `Executor.run`. Sizes are read from the shapes."""
        values = dict(inputs)
        with self._limits():
            for i, operation in enumerate(self._operations):
                self._step(operation, values)
                self._drop_dead(i, values)
        results = {name: self._output(name, values) for name in outputs}
        for name, target in outputs.items():
            if target is not None:
                if target.shape != results[name].shape:
                    raise SessionError(
                        f"{self._where}: output {name!r} has the shape {results[name].shape}, the "
                        f"engine says {target.shape}; build it again"
                    )
                target[...] = results[name]
                results[name] = target
        return results

    def trace(
        self, inputs: Mapping[str, Array], replace: Callable[[LayerResult], Array] | None = None
    ) -> Iterator[LayerResult]:
        """Run and yield the result of each operation, in running order.

        `replace` returns the numbers that later operations read in place of the result.
        """
        values = dict(inputs)
        for i, operation in enumerate(self._operations):
            with self._limits():
                self._step(operation, values)
            result = LayerResult(
                operation.node,
                operation.op,
                operation.tensor,
                values[operation.output],
                operation.scale,
            )
            if replace is not None:
                values[operation.output] = replace(result)
            yield result
            self._drop_dead(i, values)

    @contextmanager
    def _limits(self) -> Iterator[None]:
        """Limit BLAS to its threads, and numpy's buffers, through which it broadcasts short rows.

        Through one of 8192 numbers, its own size, a factor for each channel costs twice the time.
        """
        size = np.setbufsize(_BUFFER_NUMBERS)
        try:
            with self._libraries.limit(limits=self._threads, user_api="blas"):
                yield
        finally:
            np.setbufsize(size)

    def _step(self, operation: Operation, values: dict[str, Array]) -> None:
        try:
            values[operation.output] = operation.run([values[name] for name in operation.inputs])
        except (ValueError, IndexError, MemoryError) as error:
            raise SessionError(
                f"{self._where}: node {operation.node!r} ({operation.op}) failed in the "
                f"emulation: {error}"
            ) from error

    def _drop_dead(self, number: int, values: dict[str, Array]) -> None:
        for name in self._last_use.get(number, ()):
            values.pop(name, None)

    def _output(self, name: str, values: Mapping[str, Array]) -> Array:
        form = self._outputs[name]
        array = values[form.buffer]
        if name in self._zero_points:  # stored: INT8, or UINT8 about 128
            zero = self._zero_points[name]
            return array if zero == 0 else (array.astype(np.int16) + zero).astype(np.uint8)
        if isinstance(form, QuantizedBuffer):
            return np.asarray(array.astype(np.float32) * np.float32(form.scale))
        return array


def _last_uses(
    operations: tuple[Operation, ...], outputs: Mapping[str, Form]
) -> dict[int, tuple[str, ...]]:
    """Return the buffers that are dead after each operation, by its number."""
    results = {form.buffer for form in outputs.values()}
    last: dict[str, int] = {}
    for i, operation in enumerate(operations):
        last.update(dict.fromkeys((*operation.inputs, operation.output), i))
    dead: dict[int, list[str]] = {}
    for name, i in last.items():
        if name not in results:
            dead.setdefault(i, []).append(name)
    return {i: tuple(names) for i, names in dead.items()}
