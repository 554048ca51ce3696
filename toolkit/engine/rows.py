"""Rows whose number data decide, bounded for the kernels of a board, after calibration.

Calibration runs the graph as it was, on as many rows as there are: padding would make it slow. The
tensors keep their names, and so their ranges.
"""

from dataclasses import replace

from device.profile import Profile
from toolkit.gpu.rows.rewrite import ROW_PASSES
from toolkit.graph.passes import run_passes
from toolkit.partition.prepare import Prepared


def bounded_rows(prepared: Prepared, profile: Profile) -> tuple[Prepared, tuple[str, ...]]:
    """Return a graph whose rows have bounds, and notes on them; as it is without a GPU."""
    if profile.gpu is None:
        return prepared, ()
    model, reports = run_passes(prepared.model, ROW_PASSES)
    notes = tuple(
        f"pass {step.name}{' left out' if step.failure else ''}: {step.failure or step.changes}"
        for step in reports
        if step.failure or step.changes
    )
    return replace(prepared, model=model), notes
