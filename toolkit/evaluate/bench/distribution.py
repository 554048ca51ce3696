"""Summary statistics of latencies."""

import math
from collections.abc import Sequence
from statistics import fmean

import msgspec


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a series of times, in milliseconds.

    p90 is the smallest time that at least 90 % of the times do not exceed (nearest rank, no
    interpolation): a time that was measured. The median is p50 by the same rule.
    """

    count: int
    min_ms: float
    mean_ms: float
    median_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


def distribution(times_ms: Sequence[float]) -> Distribution:
    """Return the figures of at least one time."""
    ordered = sorted(times_ms)
    return Distribution(
        count=len(ordered),
        min_ms=ordered[0],
        mean_ms=fmean(ordered),
        median_ms=percentile(ordered, 50),
        p90_ms=percentile(ordered, 90),
        p95_ms=percentile(ordered, 95),
        p99_ms=percentile(ordered, 99),
        max_ms=ordered[-1],
    )


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the smallest value that at least `percent` % of the ordered values do not exceed."""
    return ordered[max(1, math.ceil(percent * len(ordered) / 100)) - 1]
