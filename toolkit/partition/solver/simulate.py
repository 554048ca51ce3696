"""Discrete-event simulation of a placement under traffic: frames, queues, processors.

A frame runs its segments in sequence, each after its crossings. A processor runs one segment at a
time, first come first served. Under contention all speeds change when a segment starts or ends.
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from device.engine.manifest import Processor
from toolkit.errors import PlanError
from toolkit.partition.solver.assess import Cost, assess
from toolkit.partition.solver.problem import Interval, Network, Placement, Problem, crossing_cost

CROSSING = -1  # the segment number of intervals in which tensors cross


@dataclass(frozen=True, slots=True)
class Traffic:
    """Arrivals of a network: every 1 / `rate_hz`, or `in_flight` frames back to back.

    Networks without traffic arrive at their rate, or one frame at a time without a rate.
    """

    network: str
    rate_hz: float | None = None
    in_flight: int = 1
    offset_us: float = 0.0


@dataclass(frozen=True, slots=True)
class NetworkReport:
    """Statistics of the frames of a network that ended after the warm-up."""

    network: str
    frames: int
    throughput_hz: float
    mean_us: float
    p50_us: float
    p90_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class Report:
    """Statistics of a simulation after the warm-up; `power_mw` is without idle power."""

    networks: tuple[NetworkReport, ...]
    utilisation: Mapping[Processor, float]
    power_mw: float
    intervals: tuple[Interval, ...]  # from time 0, in order of their ends

    def of(self, network: str) -> NetworkReport:
        """Return the report of one network."""
        return next(report for report in self.networks if report.network == network)


@dataclass(frozen=True, slots=True)
class Leg:
    """One part of a frame: work on a processor, or a delay if that is None."""

    segment: int
    processor: Processor | None
    time_us: float
    memory_gbps: float = 0.0


def simulate(
    problem: Problem,
    placement: Placement,
    traffic: Sequence[Traffic] = (),
    *,
    duration_us: float,
    warmup_us: float = 0.0,
) -> Report:
    """Simulate from 0 to `duration_us`; statistics start at `warmup_us`.

    Raises PlanError for traffic of a network that is not in the problem.
    """
    traffic_of = {entry.network: entry for entry in traffic}
    if unknown := traffic_of.keys() - {network.name for network in problem.networks}:
        raise PlanError(f"traffic names network '{min(unknown)}', which the problem does not hold")
    streams = []
    for network in problem.networks:
        cost = assess(problem, network, placement[network.name])
        entry = traffic_of.get(network.name, Traffic(network.name, network.rate_hz))
        streams.append(_Stream(network.name, legs_of(problem, network, cost), cost, entry))
    run = _Simulation(problem, streams, duration_us)
    run.go()
    return _report(problem, run, warmup_us, duration_us)


def legs_of(problem: Problem, network: Network, cost: Cost) -> tuple[Leg, ...]:
    """Return the legs of a frame in order; a segment has the mean memory demand of its tasks."""
    tasks = {task.name: task for task in network.tasks}
    legs: list[Leg] = []
    for number in range(len(cost.segments) + 1):
        waits = sum(
            crossing_cost(crossing.flow.crossing_us, crossing.direction)
            for crossing in cost.crossings
            if crossing.before == number
        )
        if waits:
            legs.append(Leg(CROSSING, problem.crossing_on, waits))
        if number < len(cost.segments):
            processor = cost.segments[number].processor
            inside = [tasks[name] for name in cost.segments[number].tasks]
            work = sum(task.time_us[processor] for task in inside)
            moved = sum(
                task.time_us[processor] * task.memory_gbps.get(processor, 0.0) for task in inside
            )
            time = work + problem.segment_us.get(processor, 0.0)
            legs.append(Leg(number, processor, time, moved / time if time else 0.0))
    return tuple(legs)


@dataclass(slots=True)
class _Stream:
    """A network with its traffic, and the latencies of its frames."""

    name: str
    legs: tuple[Leg, ...]
    cost: Cost
    traffic: Traffic
    started: int = 0
    latencies: list[tuple[float, float]] = field(default_factory=list)  # (end, latency), us


@dataclass(slots=True)
class _Frame:
    stream: int
    number: int
    arrival_us: float
    leg: int = 0


@dataclass(slots=True)
class _Running:
    """A running leg: processor, start, and end at its current speed."""

    frame: _Frame
    leg: Leg
    processor: Processor | None
    start_us: float
    end_us: float
    speed: float = 1.0


class _Simulation:
    """The state of a simulation: time, running legs, queues, arrivals."""

    def __init__(self, problem: Problem, streams: Sequence[_Stream], duration_us: float) -> None:
        self._contention = problem.contention
        self._speeds: dict[tuple[Processor, float, float], float] = {}
        self._alternate = problem.alternate_dlas
        self.streams, self._duration = streams, duration_us
        self._now = 0.0
        self._running: list[_Running] = []
        self._queues: dict[Processor, deque[_Frame]] = {}
        self._arrivals: list[tuple[float, int]] = []  # (time, stream)
        self.intervals: list[Interval] = []

    def go(self) -> None:
        """Run until there are no events or the time is up."""
        for index, stream in enumerate(self.streams):
            first = stream.traffic.offset_us
            count = 1 if stream.traffic.rate_hz else stream.traffic.in_flight
            for _ in range(count):
                heapq.heappush(self._arrivals, (first, index))
        while self._arrivals or self._running:
            ends = min((item.end_us for item in self._running), default=float("inf"))
            comes = self._arrivals[0][0] if self._arrivals else float("inf")
            self._now = min(ends, comes)
            if self._now > self._duration:
                return
            if ends <= comes:
                self._finish(min(self._running, key=_by_end))
            else:
                self._arrive(heapq.heappop(self._arrivals)[1])
            self._start_what_can()
            self._set_speeds()

    def unfinished(self) -> list[tuple[Processor, float]]:
        """Return each processor that was busy at the end, and since when."""
        return [(i.processor, i.start_us) for i in self._running if i.processor is not None]

    def _arrive(self, index: int) -> None:
        stream = self.streams[index]
        frame = _Frame(index, stream.started, self._now)
        stream.started += 1
        if stream.traffic.rate_hz:
            due = stream.traffic.offset_us + stream.started * 1e6 / stream.traffic.rate_hz
            heapq.heappush(self._arrivals, (due, index))
        self._next_leg(frame)

    def _next_leg(self, frame: _Frame) -> None:
        """Queue a frame for its next leg, start a wait, or end the frame."""
        stream = self.streams[frame.stream]
        if frame.leg == len(stream.legs):
            stream.latencies.append((self._now, self._now - frame.arrival_us))
            if not stream.traffic.rate_hz:
                heapq.heappush(self._arrivals, (self._now, frame.stream))
            return
        leg = stream.legs[frame.leg]
        processor = self._core(leg, frame)
        if processor is None:
            self._begin(frame, leg, None)
        else:
            self._queues.setdefault(processor, deque()).append(frame)

    def _core(self, leg: Leg, frame: _Frame) -> Processor | None:
        turn = self._alternate and frame.number % 2 == 1
        return "dla1" if turn and leg.processor == "dla0" else leg.processor

    def _begin(self, frame: _Frame, leg: Leg, processor: Processor | None) -> None:
        end = self._now + leg.time_us
        self._running.append(_Running(frame, leg, processor, self._now, end))

    def _start_what_can(self) -> None:
        busy = {item.processor for item in self._running}
        for processor, queue in self._queues.items():
            if queue and processor not in busy:
                frame = queue.popleft()
                self._begin(frame, self.streams[frame.stream].legs[frame.leg], processor)

    def _finish(self, item: _Running) -> None:
        self._running.remove(item)
        frame = item.frame
        if item.processor is not None:
            self.intervals.append(
                Interval(
                    network=self.streams[frame.stream].name,
                    frame=frame.number,
                    segment=item.leg.segment,
                    processor=item.processor,
                    start_us=item.start_us,
                    end_us=self._now,
                )
            )
        frame.leg += 1
        self._next_leg(frame)

    def _set_speeds(self) -> None:
        """Update the speeds of running legs under contention, and their ends."""
        if self._contention is None:
            return
        demand = sum(item.leg.memory_gbps for item in self._running)
        for item in self._running:
            if item.processor is None:
                continue
            own_demand = item.leg.memory_gbps
            demands = (item.processor, own_demand, demand)
            speed = self._speeds.get(demands)
            if speed is None:  # the same few legs meet again and again
                speed = self._contention.speed(
                    item.processor, own_demand, max(0.0, demand - own_demand)
                )
                self._speeds[demands] = speed
            if speed != item.speed:
                remaining = (item.end_us - self._now) * item.speed
                item.end_us, item.speed = self._now + remaining / speed, speed


def _by_end(item: _Running) -> tuple[float, int, int]:
    return item.end_us, item.frame.stream, item.frame.number


def _report(problem: Problem, run: _Simulation, warmup_us: float, duration_us: float) -> Report:
    energy = 0.0
    reports = []
    for stream in run.streams:
        ended = [entry for entry in stream.latencies if entry[0] >= warmup_us]
        energy += len(ended) * stream.cost.energy_mj
        reports.append(_network_report(stream.name, ended))
    cores: tuple[Processor, ...] = ("dla1",) if problem.alternate_dlas else ()
    window = duration_us - warmup_us
    busy = dict.fromkeys((*problem.processors, *cores), 0.0)
    ran = [(item.processor, item.start_us, item.end_us) for item in run.intervals]
    ran += [(p, start_us, duration_us) for p, start_us in run.unfinished()]
    for processor, start_us, end_us in ran:
        busy[processor] += max(0.0, end_us - max(warmup_us, start_us))
    shares = {processor: time / window for processor, time in busy.items()}
    return Report(tuple(reports), shares, energy / window * 1e6, tuple(run.intervals))


def _network_report(name: str, ended: Sequence[tuple[float, float]]) -> NetworkReport:
    times = np.array([time for _, time in ended])
    if not len(times):
        return NetworkReport(name, 0, 0.0, *[float("nan")] * 4)
    span = ended[-1][0] - ended[0][0]
    p50, p90, p99 = (float(p) for p in np.percentile(times, (50, 90, 99)))
    throughput = (len(ended) - 1) / span * 1e6 if span > 0 else 0.0
    return NetworkReport(name, len(ended), throughput, float(times.mean()), p50, p90, p99)
