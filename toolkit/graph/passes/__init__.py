"""Graph passes: each takes a model, returns a new one, and says what it changed.

The order is data: `PASSES` is the pipeline that every build runs.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from device.errors import TandemError
from toolkit.graph.passes.boxes import limit_boxes
from toolkit.graph.passes.fold import fold_constants, own_outputs, remove_no_ops, remove_unread
from toolkit.graph.passes.fuse import fuse_batch_norms, fuse_gemm_factors
from toolkit.graph.passes.shapes import infer_shapes

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pass:
    """One step: `run` changes the model that it is given and returns what it did, in words."""

    name: str
    run: Callable[[ir.Model], str]


@dataclass(frozen=True, slots=True)
class PassReport:
    """What a pass did; `changes` is "" when it found nothing to do.

    `failure` says why a pass was left out: foreign code in it failed on this model.
    """

    name: str
    changes: str
    failure: str = ""


PASSES: tuple[Pass, ...] = (
    Pass("remove-no-ops", remove_no_ops),
    Pass("fold-constants", fold_constants),
    Pass("remove-unread", remove_unread),
    Pass("fuse-batch-norms", fuse_batch_norms),
    Pass("fuse-gemm-factors", fuse_gemm_factors),
    Pass("limit-boxes", limit_boxes),
    Pass("own-outputs", own_outputs),
    Pass("infer-shapes", infer_shapes),
)

# What no size decides: done once where a model is planned at many batches.
SIZELESS_PASSES = tuple(step for step in PASSES if step.run is fuse_batch_norms)


def run_passes(
    model: ir.Model, passes: Sequence[Pass] = PASSES
) -> tuple[ir.Model, tuple[PassReport, ...]]:
    """Run the passes in order on a copy of the model; the model given is not changed.

    A pass improves a graph that is right without it, so one that fails is left out and named.
    Raises ImportModelError: the model crashes ONNX, or takes more than the limit of memory.
    """
    failures: dict[str, str] = {}
    while True:
        changed, reports = model.clone(), list[PassReport]()
        for step in passes:
            if step.name in failures:
                reports.append(PassReport(step.name, "", failures[step.name]))
                continue
            try:
                reports.append(PassReport(step.name, step.run(changed)))
            except TandemError:
                raise
            except Exception as err:  # noqa: BLE001  (passes of other libraries raise what they like)
                failures[step.name] = f"{type(err).__name__}: {err}"
                break  # the copy is half changed: once more from the start, without this pass
        else:
            for report in reports:
                LOG.debug("pass %s: %s", report.name, report.changes or report.failure or "nothing")
            return changed, tuple(reports)
