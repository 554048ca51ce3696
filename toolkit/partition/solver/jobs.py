"""Segments in the order in which they start, and the schedule that follows from it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from device.engine.manifest import Processor
from toolkit.partition.solver.assess import crossings_of
from toolkit.partition.solver.problem import (
    Interval,
    Network,
    Problem,
    Segment,
    crossing_cost,
)


@dataclass(frozen=True, slots=True)
class Job:
    """A segment of one frame: its time, and the waiting for crossings before it and after it."""

    segment: Segment
    time_us: float
    wait_us: float
    wait_after_us: float


def jobs_of(problem: Problem, segments: Sequence[Segment]) -> tuple[Job, ...]:
    """Return segments as jobs; each tensor crosses before the first segment that reads it.

    `segments` of all networks are in the order in which they start.
    """
    jobs: dict[int, Job] = {}
    for network in problem.networks:
        places = [index for index, row in enumerate(segments) if row.network == network.name]
        placed = placement_of(segments[index] for index in places)[network.name]
        waits = [0.0] * (len(places) + 1)
        for crossing in crossings_of(network, placed, [segments[index] for index in places]):
            waits[crossing.before] += crossing_cost(crossing.flow.crossing_us, crossing.direction)
        for number, index in enumerate(places):
            after = waits[-1] if number == len(places) - 1 else 0.0
            time_us = segment_us(problem, network, segments[index])
            jobs[index] = Job(segments[index], time_us, waits[number], after)
    return tuple(jobs[index] for index in range(len(segments)))


def segment_us(problem: Problem, network: Network, segment: Segment) -> float:
    """Return the time of a segment with its start."""
    inside = set(segment.tasks)
    work = sum(t.time_us[segment.processor] for t in network.tasks if t.name in inside)
    return work + problem.segment_us.get(segment.processor, 0.0)


def schedule_of(jobs: Iterable[Job]) -> tuple[tuple[Interval, ...], float]:
    """Start each job as early as its network and processor allow; return when all have ended."""
    free: dict[str, float] = {}
    numbers: dict[str, int] = {}
    schedule, end = [], 0.0
    for job in jobs:
        network, processor = job.segment.network, job.segment.processor
        start = max(free.get(network, 0.0) + job.wait_us, free.get(processor, 0.0))
        free[network] = free[processor] = start + job.time_us
        number = numbers.get(network, 0)
        numbers[network] = number + 1
        schedule.append(Interval(network, 0, number, processor, start, start + job.time_us))
        end = max(end, start + job.time_us + job.wait_after_us)
    return tuple(schedule), end


def placement_of(segments: Iterable[Segment]) -> dict[str, dict[str, Processor]]:
    """Return the processor of each task."""
    placement: dict[str, dict[str, Processor]] = {}
    for segment in segments:
        homes = placement.setdefault(segment.network, {})
        homes |= dict.fromkeys(segment.tasks, segment.processor)
    return placement
