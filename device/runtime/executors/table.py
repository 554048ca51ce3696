"""The ways to run segments, best first, and the choice among them."""

import logging
from collections.abc import Collection
from dataclasses import dataclass

from device.board_files import tensorrt_version
from device.engine.manifest import Processor, Segment
from device.errors import SessionError
from device.runtime.executors import cuda, emulated, openvino, portable, tensorrt, tensorrt_gpu
from device.runtime.executors.protocol import (
    Executor,
    ExecutorKind,
    LoadRefusedError,
    SegmentContext,
)
from device.runtime.tensorrt.board import read_board

LOG = logging.getLogger("tandem.session")
_THROUGH_TENSORRT = (tensorrt.TAG, tensorrt_gpu.TAG)

EXECUTORS: tuple[ExecutorKind, ...] = (
    ExecutorKind(
        "emulated",
        "portable",
        emulated.load,
        emulated.why_not,
        requested=emulated.requested,
        remark="asked for; silicon may differ",
    ),
    ExecutorKind(
        "openvino",
        "portable",
        openvino.load,
        openvino.why_not,
        requested=openvino.requested,
        remark="asked for; INT8 rounds otherwise than in onnxruntime",
    ),
    ExecutorKind("tensorrt", tensorrt.TAG, tensorrt.load, tensorrt.why_not, tensorrt.misfit),
    ExecutorKind(
        "tensorrt",
        tensorrt_gpu.TAG,
        tensorrt_gpu.load,
        tensorrt_gpu.why_not,
        tensorrt_gpu.misfit,
    ),
    ExecutorKind("cuda", cuda.TAG, cuda.load, cuda.why_not, cuda.misfit),
    ExecutorKind("portable", "portable", portable.load, portable.why_not),
)


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """How one segment runs: which implementation, and why not a better one.

    `processor`: that of the plan; `runs_on`: those that it runs on here, DLA cores in turn.
    `degraded`: why a DLA segment does not run on the DLA of a board that has one, whatever the
    reason, a GPU segment not with its kernels on a Jetson, or one that has none not through its
    TensorRT, else "".
    """

    segment: str
    processor: Processor
    implementation: str
    reason: str
    degraded: str = ""
    runs_on: tuple[str, ...] = ()


def load_segment(context: SegmentContext) -> tuple[Executor, SegmentReport]:
    """Load a segment with the first kind of EXECUTORS that can run it here.

    Raises SessionError naming what each kind lacks.
    """
    segment = context.segment
    by_tag = {str(i.__struct_config__.tag): i for i in segment.implementations}
    absent: list[str] = []
    refused: list[str] = []
    for kind in _candidates(context):
        implementation = by_tag.get(kind.tag)
        if implementation is None:
            if kind.tag not in _not_missed(by_tag):
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
        degraded = _degraded(segment, kind, why, is_refused=bool(refused))
        if degraded:
            LOG.warning("%s: %s", context.where, degraded)
        report = SegmentReport(
            segment.name, segment.processor, kind.name, reason, degraded, executor.processors
        )
        return executor, report
    why = "; ".join(refused or _reasons([], absent))
    raise SessionError(f"{context.where} cannot be run here: {why}{_remedy(absent)}")


def other_ways(context: SegmentContext) -> tuple[str, ...]:
    """Return the kinds that can run a segment here without TensorRT, best first."""
    by_tag = {str(i.__struct_config__.tag): i for i in context.segment.implementations}
    return tuple(
        kind.name
        for kind in EXECUTORS
        if kind.requested is None and kind.tag in by_tag and kind.tag not in _THROUGH_TENSORRT
        if not (kind.why_not() or kind.misfit(context, by_tag[kind.tag]))
    )


def _not_missed(tags: Collection[str]) -> tuple[str, ...]:
    """Return the tags that no reason names: TensorRT on the GPU is asked for, and one is enough."""
    return _THROUGH_TENSORRT if tensorrt_gpu.TAG in tags else (tensorrt_gpu.TAG,)


def _degraded(segment: Segment, kind: ExecutorKind, why: str, *, is_refused: bool) -> str:
    """Return why a segment runs otherwise than it was built for, "" on machines that are no board.

    They have no TensorRT, no GPU of the kernels and no DLA; the report gives the reason.
    `is_refused`: a better kind, which the engine carries, cannot run here.
    """
    if kind.tag in _THROUGH_TENSORRT:
        return ""
    tags = {str(i.__struct_config__.tag) for i in segment.implementations}
    is_dla = segment.processor.startswith("dla")
    if is_dla and tensorrt_version() and read_board().dla_cores:
        where = "on the DLA"
    elif kind.requested is not None or not is_refused:
        return ""
    elif is_dla:
        if kind.tag != cuda.TAG and not tensorrt_version() and not read_board().dla_cores:
            return ""
        where = "on the DLA"
    elif tensorrt_gpu.TAG in tags and cuda.TAG not in tags and tensorrt_version():
        where = "through TensorRT"
    elif cuda.TAG in tags and kind.tag != cuda.TAG and read_board().l4t:
        where = "on the GPU"
    else:
        return ""
    return f"segment {segment.name} runs as {kind.name}, not {where}: {why}"


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
