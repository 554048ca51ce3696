"""The batch of a plan for throughput: the fastest that keeps a bound on latency.

The latency that counts is that of a frame while the board is busy: 99 of 100 simulated frames take
no longer. A plan of throughput that is too slow for the bound gives way to one of latency.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from toolkit.errors import PlanError
from toolkit.partition.planning.batch import Batching, BatchRow
from toolkit.partition.planning.plan import Plan, PlanOptions

T = TypeVar("T")
BATCHES = (1, 2, 4, 8, 16, 32)
NEEDS_DIMENSION = (
    "the model has a fixed first dimension; exported with a dynamic one it could run in batches"
)


@dataclass(frozen=True, slots=True)
class Choice(Generic[T]):
    """What was planned at the best batch, with the options that led to it."""

    planned: T
    options: PlanOptions
    batching: Batching


def chooses_batch(options: PlanOptions, *, rated: bool, models: int) -> bool:
    """Return True if the batch is part of the plan: for throughput, with a bound on latency.

    Raises PlanError: a bound is given where no batch is chosen.
    """
    if options.max_latency_ms is None:
        return False
    if options.objective != "throughput" or rated or models > 1:
        raise PlanError(
            "a bound on latency chooses the batch for the throughput of one model as fast as it "
            "goes; leave the bound out, or the objective, the rate and the other models"
        )
    return True


def choose_batch(
    plan_at: Callable[[int, PlanOptions], tuple[T, Plan]],
    options: PlanOptions,
    *,
    dynamic: bool,
) -> Choice[T]:
    """Plan at every batch and return the fastest; `dynamic`: the model has a dynamic batch.

    `plan_at` plans at a batch. Raises PlanError: no batch keeps the bound.
    """
    assert options.max_latency_ms is not None
    bound_us = options.max_latency_ms * 1e3
    rows: list[BatchRow] = []
    best: tuple[float, int, PlanOptions, T] | None = None
    shortest_us = float("inf")
    for batch in BATCHES if dynamic else BATCHES[:1]:
        within = False
        for objective in ("throughput", "latency"):
            tried = replace(options, objective=objective)
            planned, plan = plan_at(batch, tried)
            rate, latency_us = plan.figures[0].frames_per_second, plan.simulated.p99_us
            shortest_us = min(shortest_us, latency_us)
            within = latency_us <= bound_us
            if within:
                break
        rows.append(BatchRow(batch, rate, latency_us, within))
        if not within:
            break  # a larger batch takes longer
        if best is None or rate > best[0]:
            best = rate, batch, tried, planned
    if best is None:
        raise PlanError(
            f"a frame takes {shortest_us / 1e3:.3g} ms at best, and the bound on latency is "
            f"{options.max_latency_ms:g} ms; raise it, or take a smaller model or a faster board"
        )
    batching = Batching(best[1], tuple(rows), options.max_latency_ms, _note(dynamic))
    return Choice(best[3], best[2], batching)


def bound_notes(plan: Plan) -> tuple[str, ...]:
    """Return a note where a plan does not keep the bound that chose its batch.

    The batch is chosen before calibration, which may keep nodes in floating point, off the DLA.
    """
    bound_ms, latency_ms = plan.batching.max_latency_ms, plan.simulated.p99_us / 1e3
    if bound_ms is None or latency_ms <= bound_ms:
        return ()
    return (
        f"a frame takes {latency_ms:.3g} ms, more than the bound of {bound_ms:g} ms, because nodes "
        "stay in floating point; build with a lower `tandem build --max-latency-ms`",
    )


def _note(dynamic: bool) -> str:
    return "" if dynamic else NEEDS_DIMENSION
