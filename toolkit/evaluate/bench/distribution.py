"""Summary statistics of latencies."""

import math
from collections.abc import Sequence
from statistics import fmean

import msgspec

BINS = 40


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


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of times in equal bins from `low_ms` on; the last bin holds all times above, too."""

    low_ms: float
    width_ms: float
    counts: tuple[int, ...]


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


def histogram(times_ms: Sequence[float]) -> Histogram:
    """Return the histogram of at least one time; the last bin begins at p99."""
    ordered = sorted(times_ms)
    low_ms, high_ms = ordered[0], percentile(ordered, 99)
    if high_ms <= low_ms:
        return Histogram(low_ms=low_ms, width_ms=max(low_ms, 1e-6), counts=(len(ordered),))
    width_ms = (high_ms - low_ms) / (BINS - 1)
    counts = [0] * BINS
    for time_ms in ordered:
        counts[min(BINS - 1, int((time_ms - low_ms) / width_ms))] += 1
    return Histogram(low_ms=low_ms, width_ms=width_ms, counts=tuple(counts))
