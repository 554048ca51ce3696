"""The ways to run segments, best first, and the choice among them."""

import logging
from dataclasses import dataclass

from device.engine.manifest import Processor, Segment
from device.errors import SessionError
from device.runtime.executors import cuda, emulated, portable, tensorrt
from device.runtime.executors.protocol import (
    Executor,
    ExecutorKind,
    LoadRefusedError,
    SegmentContext,
)
from device.runtime.tensorrt.board import read_board, tensorrt_version

LOG = logging.getLogger("tandem.session")

EXECUTORS: tuple[ExecutorKind, ...] = (
    ExecutorKind(
        "emulated",
        "portable",
        emulated.load,
        emulated.why_not,
        requested=emulated.requested,
        remark="asked for; silicon may differ",
    ),
    ExecutorKind("tensorrt", tensorrt.TAG, tensorrt.load, tensorrt.why_not, tensorrt.misfit),
    ExecutorKind("cuda", cuda.TAG, cuda.load, cuda.why_not, cuda.misfit),
    ExecutorKind("portable", "portable", portable.load, portable.why_not),
)


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """How one segment runs: which implementation, and why not a better one.

    `degraded`: why a DLA segment does not run on the DLA of a board that has one, else "".
    """

    segment: str
    processor: Processor
    implementation: str
    reason: str
    degraded: str = ""


def load_segment(context: SegmentContext) -> tuple[Executor, SegmentReport]:
    """Load a segment with the first kind of EXECUTORS that can run it here.

    Raises SessionError naming what each kind lacks.
    """
    segment = context.segment
    carried = {str(i.__struct_config__.tag): i for i in segment.implementations}
    absent: list[str] = []
    refused: list[str] = []
    for kind in _candidates(context):
        implementation = carried.get(kind.tag)
        if implementation is None:
            absent.append(kind.tag)
            continue
        problem = kind.why_not() or kind.misfit(context, implementation)
        if problem is not None:
            refused.append(f"{kind.name}: {problem}")
            continue
        try:
            executor = kind.load(context, implementation)
        except LoadRefusedError as error:
            refused.append(f"{kind.name}: {error}")
            continue
        why = "; ".join(_reasons(refused, absent)) or kind.remark
        reason = f"{kind.name} ({executor.description}): {why}"
        degraded = _degraded(segment, kind, refused)
        if degraded:
            LOG.warning("%s: %s", context.where, degraded)
        return executor, SegmentReport(segment.name, segment.processor, kind.name, reason, degraded)
    why = "; ".join(refused or _reasons([], absent))
    raise SessionError(f"{context.where} cannot be run here: {why}{_remedy(absent)}")


def other_ways(context: SegmentContext) -> tuple[str, ...]:
    """Return the kinds that can run a DLA segment here without TensorRT, best first."""
    carried = {str(i.__struct_config__.tag): i for i in context.segment.implementations}
    return tuple(
        kind.name
        for kind in EXECUTORS
        if kind.requested is None and kind.tag in carried and kind.tag != tensorrt.TAG
        if not (kind.why_not() or kind.misfit(context, carried[kind.tag]))
    )


def _degraded(segment: Segment, kind: ExecutorKind, refused: list[str]) -> str:
    """Return why a DLA segment runs on another processor, "" on machines that are no such board.

    They have no TensorRT, no GPU of the kernels and no DLA; the report gives the reason.
    """
    on_dla = segment.processor.startswith("dla")
    if not on_dla or kind.tag == tensorrt.TAG or kind.requested is not None or not refused:
        return ""
    if kind.tag != cuda.TAG and not tensorrt_version() and not read_board().dla_cores:
        return ""
    return f"segment {segment.name} runs as {kind.name}, not on the DLA: {'; '.join(refused)}"


def _candidates(context: SegmentContext) -> list[ExecutorKind]:
    """Return the kinds to try, best first: those that are requested for the segment, if any."""
    requested = [k for k in EXECUTORS if k.requested is not None and k.requested(context)]
    return requested or [kind for kind in EXECUTORS if kind.requested is None]


def _remedy(absent: list[str]) -> str:
    if "portable" not in absent:
        return ""
    return "; it carries no portable form, which `tandem bundle --portable` keeps"


def _reasons(refused: list[str], absent: list[str]) -> list[str]:
    if not absent:
        return refused
    return [*refused, f"the engine carries no {' or '.join(absent)} implementation of it"]
