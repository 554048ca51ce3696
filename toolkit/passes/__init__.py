"""Graph passes: each takes a model, returns a new one, and says what it changed.

The order is data: `PASSES` is the pipeline that every build runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from toolkit.errors import ImportModelError
from toolkit.passes.fold import fold_constants, own_outputs, remove_no_ops
from toolkit.passes.fuse import fuse_batch_norms
from toolkit.passes.shapes import infer_shapes


@dataclass(frozen=True, slots=True)
class Pass:
    """One step: `run` changes the model that it is given and returns what it did, in words."""

    name: str
    run: Callable[[ir.Model], str]


@dataclass(frozen=True, slots=True)
class PassReport:
    """What a pass did; `changes` is "" when it found nothing to do."""

    name: str
    changes: str


PASSES: tuple[Pass, ...] = (
    Pass("remove-no-ops", remove_no_ops),
    Pass("fold-constants", fold_constants),
    Pass("fuse-batch-norms", fuse_batch_norms),
    Pass("own-outputs", own_outputs),
    Pass("infer-shapes", infer_shapes),
)


def run_passes(
    model: ir.Model, passes: Sequence[Pass] = PASSES
) -> tuple[ir.Model, tuple[PassReport, ...]]:
    """Run the passes in order on a copy of the model; the model given is not changed.

    Raises ImportModelError: a pass fails, which malformed models can make foreign code do.
    """
    result = model.clone()
    reports = []
    for step in passes:
        try:
            reports.append(PassReport(step.name, step.run(result)))
        except Exception as err:
            raise ImportModelError(
                f"Pass {step.name} fails on this model ({type(err).__name__}: {err}); "
                "the model is malformed, or uses something that Tandem should name: report it."
            ) from err
    return result, tuple(reports)
