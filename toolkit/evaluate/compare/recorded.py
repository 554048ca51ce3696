"""A run recorded on a board, laid beside the emulation of the same inputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.array_files import read_arrays
from device.errors import ArrayFileError
from device.runtime.executors.emulated import LayerResult
from toolkit.errors import BuildError
from toolkit.evaluate.compare.causes import quantized
from toolkit.evaluate.error_tally import ErrorTally, Worst
from toolkit.evaluate.infer.traces import Arrays, Emulations, SegmentTrace, tensor_of
from toolkit.graph.max_memory import max_memory_bytes

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """A recorded tensor: how many elements differ from the emulation, and by how much at most.

    In steps of its scale where `scale` is set, else in real numbers. `worst`: `expected` is the
    board's number, `found` the emulation's.
    """

    tensor: str
    node: str
    op: str
    segment: str
    scale: float | None
    elements: int
    differing: int
    largest: float
    worst: Worst | None


@dataclass(frozen=True, slots=True)
class Recorded:
    """All recorded tensors in running order; `unknown` are not in the engine."""

    rows: tuple[RecordedRow, ...]
    unknown: tuple[str, ...]

    @property
    def first(self) -> RecordedRow | None:
        """The first that differs, None where all agree."""
        return next((row for row in self.rows if row.differing), None)


def load_recorded(path: Path) -> Arrays:
    """Return the arrays of an .npz file. Raises BuildError naming what is wrong with it."""
    try:
        arrays = read_arrays(path, max_memory_bytes())
    except (OSError, ArrayFileError) as error:
        raise BuildError(
            f"{path} cannot be read as .npz of arrays ({error}); save the run with numpy.savez."
        ) from error
    if not isinstance(arrays, dict):
        raise BuildError(f"{path} holds one array; save the run with numpy.savez.")
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise BuildError(
                f"{path}: {name!r} holds {array.dtype}, not numbers; save what the board returned."
            )
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise BuildError(f"{path}: {name!r} holds NaN; record the run of the board again.")
    return arrays


def lay_beside(
    traces: tuple[SegmentTrace, ...],
    emulations: Mapping[str, Emulations],
    feeds: Mapping[str, Array],
    recorded: Mapping[str, Array],
) -> Recorded:
    """Run the engine with its DLA segments emulated and compare every recorded tensor.

    Raises BuildError: nothing recorded is a tensor of the engine, or a shape does not fit.
    """
    values, rows = dict(feeds), list[RecordedRow]()
    done = set(feeds)
    for trace in traces:
        segment, emulation = trace.segment, emulations.get(trace.segment.name)
        inputs = {name: values[name] for name in segment.inputs}
        if emulation is None:
            results = trace.run(values)
        else:
            for result in emulation.requested.trace(inputs):
                tensor = tensor_of(result)
                if tensor in recorded and tensor not in done and result.op != "Cast":
                    done.add(tensor)
                    rows.append(_of_result(tensor, segment.name, result, recorded[tensor]))
            results = emulation.requested.run(inputs, dict.fromkeys(segment.outputs), {})
        producers = {name: node for node in trace.graph.nodes for name in node.outputs}
        for name, array in results.items():
            if name in recorded and name not in done:
                done.add(name)
                node = producers[name]
                rows.append(_row((name, node.name, node.op), segment.name, array, recorded[name]))
        values.update({name: results[name] for name in segment.outputs})
    if not rows:
        names = ", ".join(sorted(set(recorded) - set(feeds))) or "none"
        raise BuildError(
            f"None of the recorded tensors ({names}) "
            "is one that the engine makes; record them under the names of the engine's tensors."
        )
    return Recorded(tuple(rows), tuple(sorted(set(recorded) - done)))


def _of_result(tensor: str, segment: str, result: LayerResult, board: Array) -> RecordedRow:
    what = (tensor, result.node, result.op)
    if result.scale is None:
        return _row(what, segment, result.numbers, board)
    stored = board if board.dtype.kind in "iu" else quantized(board, result.scale)
    return _row(what, segment, result.numbers, stored, result.scale)


def _row(
    what: tuple[str, str, str], segment: str, ours: Array, board: Array, scale: float | None = None
) -> RecordedRow:
    tensor, node, op = what
    if ours.shape != board.shape:
        raise BuildError(
            f"The recorded tensor {tensor!r} has shape {list(board.shape)}, the engine makes "
            f"{list(ours.shape)}; record the run of one sample."
        )
    distance = np.abs(ours.astype(np.float64) - board.astype(np.float64))
    tally = ErrorTally()
    tally.add(board, ours, 0, distance)
    count, worst = int(np.count_nonzero(distance)), tally.error().worst
    return RecordedRow(tensor, node, op, segment, scale, ours.size, count, tally.largest, worst)
