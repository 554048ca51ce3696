"""The makespan of two networks with a DLA core for each: exact, for any number of switches.

The cores are alike, so nothing is lost if each network keeps to its own. Then only the GPU is
shared: a state says how far each network is, and when it and the GPU are free. Steps on the GPU
are taken in the order in which it runs them, and of two states at the same nodes one is dropped if
the other is nowhere later.

What is left of a state is bounded by ways of each network alone: the least time of the GPU for any
time of its own, as if the networks only had to fit onto the GPU together. With too many states the
least promising are dropped, and the search is repeated with more, below the best end so far.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from device.engine.manifest import Processor
from toolkit.partition.solver.assess import dlas, limits_are_far
from toolkit.partition.solver.jobs import Job
from toolkit.partition.solver.problem import Problem, Segment
from toolkit.partition.solver.steps import Crossing, Step, StepGraph, step_graph

STATES_PER_SECOND = 250_000
_FIRST_WIDTH = 32
_WIDER = 8
_SAME = 1e-9  # us
_INF = float("inf")

_Early = frozenset[Crossing]
_NONE: _Early = frozenset()
# Nodes of the networks, which must go on (-1: either), and what has crossed early of each.
_Key = tuple[int, int, int, tuple[_Early, _Early]]


class _State(NamedTuple):
    """Times when networks and GPU are free, and the step that led here with its crossings, us."""

    first: float
    second: float
    gpu: float
    before: "_State | None"
    network: int
    step: Step | None
    wait: float

    def free(self, network: int) -> float:
        """Return when a network is free."""
        return self.first if network == 0 else self.second


_START = _State(0.0, 0.0, 0.0, None, 0, None, 0.0)


@dataclass(frozen=True, slots=True)
class PairOrder:
    """Jobs in the order in which they start, none if none ends earlier than asked.

    `bound`: no order of any number of switches ends before it. `exact`: the jobs are the best.
    """

    jobs: tuple[Job, ...]
    bound: float
    exact: bool


def search_pair(problem: Problem, seconds: float, below: float) -> PairOrder | None:
    """Return the order with the shortest makespan below a value.

    None: the problem is of another kind (see `_is_pair`), or a network has too many ways.
    """
    if not _is_pair(problem):
        return None
    graphs = []
    for network, core in zip(problem.networks, dlas(problem), strict=False):
        graph = step_graph(problem, network, core)
        if graph is None:
            return None
        graphs.append(graph)
    search = _PairSearch(graphs[0], graphs[1])
    limit, width, exact = int(seconds * STATES_PER_SECOND), _FIRST_WIDTH, False
    best: _State | None = None
    while not exact and search.states < limit:
        end = below if best is None else max(best.first, best.second)
        state, exact = search.run(end, width, limit)
        best = state or best
        width *= _WIDER
    bound = search.bound
    if best is None:
        return PairOrder((), max(bound, below) if exact else bound, exact)
    jobs = tuple(_jobs(problem, best))
    if _too_many_loadables(problem, jobs):
        return PairOrder((), max(best.first, best.second) if exact else bound, exact=False)
    return PairOrder(jobs, max(best.first, best.second) if exact else bound, exact)


def _is_pair(problem: Problem) -> bool:
    """Return True for two networks and two equal cores, with limits that never bind.

    Starting a segment on the GPU must be free: then it can be cut anywhere.
    """
    cores, limits = dlas(problem), problem.limits
    return (
        len(problem.networks) == len(cores) == 2
        and "gpu" in problem.processors
        and limits.max_switches is None
        and limits.max_crossings is None
        and not problem.segment_us.get("gpu", 0.0)
        and len({problem.segment_us.get(core, 0.0) for core in cores}) == 1
        and all(limits_are_far(problem, network) for network in problem.networks)
        and all(len({task.lane for task in net.tasks}) == 1 for net in problem.networks)
        and all(
            len({task.time_us.get(core) for core in cores}) == 1
            for network in problem.networks
            for task in network.tasks
        )
    )


def _too_many_loadables(problem: Problem, jobs: tuple[Job, ...]) -> bool:
    used = [job.segment.processor for job in jobs]
    return any(used.count(core) > problem.limits.max_loadables for core in dlas(problem))


class _PairSearch:
    """The states of two networks by the sum of their ranks."""

    def __init__(self, first: StepGraph, second: StepGraph) -> None:
        self._graphs = (first, second)
        self._rests = (first.rests(), second.rests())
        self.states = 0
        # A time before which no order ends.
        self.bound = self._bound((0, 0, -1, (_NONE, _NONE)), _START, 0.0, _INF)

    def run(self, below: float, width: int, limit: int) -> tuple[_State | None, bool]:
        """Return the best final state that ends below a value, and whether it is proven.

        `width`: states that are kept of a layer; the search ends at `limit` states in all.
        """
        first, second = self._graphs
        key: _Key = (0, 0, -1, (_NONE, _NONE))
        start = {key: [(_START, self.bound)]}
        layers: list[dict[_Key, list[tuple[_State, float]]]] = [start]
        layers += [{} for _ in range(first.rank[first.end] + second.rank[second.end])]
        complete = True
        for number, layer in enumerate(layers):
            rows = [
                (bound, state[:3], key, state)
                for key, states in layer.items()
                for state, bound in _undominated(states)
            ]
            if number == len(layers) - 1:
                best = min(rows, key=lambda row: row[:2], default=None)
                return (None if best is None else best[3]), complete
            if len(rows) > width:
                rows = sorted(rows, key=lambda row: row[:3])[:width]
                complete = False
            if self.states >= limit:
                break
            for least, _, key, state in rows:
                for after, new in self._after(key, state):
                    bound = self._bound(after, new, least, below - _SAME)
                    if bound < below - _SAME:
                        rank = first.rank[after[0]] + second.rank[after[1]]
                        layers[rank].setdefault(after, []).append((new, bound))
            layers[number] = {}
        return None, False

    def _after(self, key: _Key, state: _State) -> Iterator[tuple[_Key, _State]]:
        """Yield the states after one more step; what began without the GPU goes on to it."""
        for network in (0, 1) if key[2] < 0 else (key[2],):
            early = key[3][network]
            for step in self._graphs[network].steps[key[:2][network]]:
                wait = step.wait_us
                if early:
                    wait -= sum(row[1] for row in early.intersection(step.crossings))
                yield self._moved(key, state, network, step, wait)
                idle = state.gpu - (state.free(network) + step.alone_us + wait - step.wait_us)
                if step.processor == "gpu" and idle > 0:
                    yield from self._crossing_early(key, state, network, step, wait=wait, idle=idle)

    def _crossing_early(
        self, key: _Key, state: _State, network: int, step: Step, *, wait: float, idle: float
    ) -> Iterator[tuple[_Key, _State]]:
        """Yield the states where tensors cross while the network waits for the GPU.

        What would not even begin before the GPU is free can as well cross later.
        """
        early = key[3]
        now = {*step.crossings, *early[network]}
        free = [row for row in self._graphs[network].early[key[:2][network]] if row not in now]
        for count in range(1, len(free) + 1):
            for rows in combinations(free, count):
                times = [time for _, time in rows]
                if sum(times) - max(times) < idle:
                    both = (
                        (early[0].union(rows), early[1])
                        if network == 0
                        else (early[0], early[1].union(rows))
                    )
                    with_these = (key[0], key[1], key[2], both)
                    yield self._moved(with_these, state, network, step, wait + sum(times))

    def _moved(
        self, key: _Key, state: _State, network: int, step: Step, wait: float
    ) -> tuple[_Key, _State]:
        """Return the state after a step of a network that waits this long for crossings."""
        self.states += 1
        on_gpu = step.processor == "gpu"
        graph = self._graphs[network]
        only = -1 if on_gpu or step.to == graph.end else network
        ready = state.free(network) + step.alone_us + (wait - step.wait_us)
        end = max(ready, state.gpu) + step.gpu_us if on_gpu else ready
        gpu = end if on_gpu else state.gpu
        first_early, second_early = key[3]
        if key[3][network]:
            early = key[3][network].difference(step.crossings).intersection(graph.early[step.to])
            if network == 0:
                first_early = early
            else:
                second_early = early
        if network == 0:
            after: _Key = (step.to, key[1], only, (first_early, second_early))
            return after, _State(end, state.second, gpu, state, 0, step, wait)
        after = (key[0], step.to, only, (first_early, second_early))
        return after, _State(state.first, end, gpu, state, 1, step, wait)

    def _bound(self, key: _Key, state: _State, least: float, enough: float) -> float:
        """Return a time before which no continuation ends, or one that is at least `enough`.

        `least`: a time that is known to be one.
        """
        a, b, _, (early_first, early_second) = key
        first, second = state.first, state.second
        if early_first:
            first -= sum(time for _, time in early_first)
        if early_second:
            second -= sum(time for _, time in early_second)
        gpu_first, own_first = self._rests[0][a]
        gpu_second, own_second = self._rests[1][b]
        bound = max(least, first - own_first[-1], second - own_second[-1])
        # At most the last, which a rounded bound may seem to miss.
        i = bisect_left(own_first, first - bound, 0, len(own_first) - 1)
        j = bisect_left(own_second, second - bound, 0, len(own_second) - 1)
        while bound < enough:
            gpu = state.gpu + gpu_first[i] + gpu_second[j]
            if gpu <= bound:
                break
            next_first = first - own_first[i - 1] if i else _INF
            next_second = second - own_second[j - 1] if j else _INF
            bound = min(gpu, next_first, next_second)
            if bound == gpu:
                break
            if bound == next_first:
                i -= 1
            else:
                j -= 1
        return bound


def _undominated(states: list[tuple[_State, float]]) -> list[tuple[_State, float]]:
    """Return the states that no other equals or betters in every time, with their bounds."""
    if len(states) == 1:
        return states
    times: list[tuple[float, float]] = []
    front: list[tuple[_State, float]] = []
    for row in sorted(states, key=lambda row: row[0][:3]):
        _, second, gpu, *_ = row[0]
        second, gpu = second + _SAME, gpu + _SAME
        for other_second, other_gpu in times:
            if other_second <= second and other_gpu <= gpu:
                break
        else:
            times.append((second - _SAME, gpu - _SAME))
            front.append(row)
    return front


@dataclass(slots=True)
class _Open:
    """A segment that is being put together; times are in us."""

    network: int
    processor: Processor
    tasks: list[int]
    end: float
    time: float
    wait: float
    wait_after: float = 0.0


def _jobs(problem: Problem, last: _State) -> Iterator[Job]:
    """Yield the segments of a final state with their waits, in the order in which they start."""
    done: list[_Open] = []
    latest: dict[int, _Open] = {}  # of each network
    waiting = [0.0, 0.0]
    for before, state in _path(last):
        step, network = state.step, state.network
        if step is None:
            continue
        waiting[network] += state.wait
        if step.processor is None or step.task is None:
            continue
        time = step.gpu_us + step.alone_us - step.wait_us
        previous = latest.get(network)
        if previous is not None and previous.processor == step.processor:
            # Waits within a segment on the DLA can come before it, but not those on the GPU.
            free = before.free(network) == before.gpu and not waiting[network]
            if free or step.processor != "gpu":
                previous.tasks.append(step.task)
                previous.end, previous.time = state.free(network), previous.time + time
                previous.wait += waiting[network]
                waiting[network] = 0.0
                continue
        piece = _Open(
            network, step.processor, [step.task], state.free(network), time, waiting[network]
        )
        waiting[network] = 0.0
        latest[network] = piece
        done.append(piece)
    for network, piece in latest.items():
        piece.wait_after = waiting[network]
    for piece in sorted(done, key=lambda row: row.end - row.time):
        owner = problem.networks[piece.network]
        tasks = tuple(owner.tasks[task].name for task in sorted(set(piece.tasks)))
        segment = Segment(owner.name, piece.processor, tasks)
        yield Job(segment, piece.time, piece.wait, piece.wait_after)


def _path(last: _State) -> list[tuple[_State, _State]]:
    """Return the pairs of states that follow each other."""
    path = []
    state = last
    while state.before is not None:
        path.append((state.before, state))
        state = state.before
    return path[::-1]
