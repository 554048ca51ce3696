"""The makespan of networks cut at the tasks of an order: exact for chains, a start for others.

A network is a row of blocks, and a segment is some blocks that follow each other. A state says how
far each network is, on which processor, and when networks and processors are free. The search goes
from state to state by one block and keeps those that no other is better than in every time. With
too many states the least promising are dropped, and the result is no longer proven.

A network whose tasks form a chain has a block for each task. Of other networks the cheapest cuts
are taken, and all tensors that are alive at a cut count as crossing there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from device.engine.manifest import Processor
from toolkit.partition.solver.assess import direction_of
from toolkit.partition.solver.problem import Network, Problem, crossing_cost

STATES_PER_SECOND = 40_000
BLOCKS = 24  # of a network that is no chain
FIRST_WIDTH = 8  # states of a layer; small, so that a second of search ends with an answer
_WEIGHTS = (0.2, 0.35, 0.5, 0.65, 0.8)  # of the first processor, for the bound by work
_SAME = 1e-9  # us

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment: the blocks of a network from `first` to before `last`, on a processor."""

    network: int
    processor: Processor
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChainOrder:
    """Segments in the order in which they start; `exact`: no order of blocks ends earlier.

    `seconds`: what the search took, in the unit of its limit.
    """

    pieces: tuple[Piece, ...]
    value: float
    exact: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class _Row:
    """A network as blocks: times by processor (inf: not there), and crossings at each cut."""

    tasks: tuple[tuple[str, ...], ...]
    time_us: tuple[tuple[float, ...], ...]  # block, processor
    cross_us: tuple[tuple[tuple[float, ...], ...], ...]  # cut, from, to; cut 0 from the GPU
    chain: bool


@dataclass(frozen=True, slots=True)
class _State:
    """Times are in us; `open`: processors on which the last segment can go on."""

    at: tuple[int, ...]  # blocks done, by network
    on: tuple[int, ...]  # processor of the last segment, by network
    open: tuple[bool, ...]  # by network
    times: tuple[float, ...]  # when networks are free, then processors
    starts: tuple[int, ...]  # segments so far: by network, then by processor
    before: "_State | None"
    step: tuple[int, int, bool]  # network, processor, whether a segment begins


def is_chain(network: Network) -> bool:
    """Return True if each task reads only the task before, and inputs enter at the first."""
    rank = {task.name: index for index, task in enumerate(network.tasks)}
    last = len(rank) - 1
    for flow in network.flows:
        targets = [rank[name] for name in flow.targets]
        source = -1 if flow.source is None else rank[flow.source]
        if targets not in ([], [source + 1]) or (flow.output and source != last):
            return False
    linked = {(rank[f.source], rank[f.targets[0]]) for f in network.flows if f.source and f.targets}
    return linked >= {(index, index + 1) for index in range(last)}


def search_chains(
    problem: Problem, max_switches: int | None, seconds: float, below: float
) -> ChainOrder:
    """Return the order with the smallest makespan, an empty one if none is below a value.

    The limits of loadables must be far (`assess.limits_are_far`), and crossings without a limit.
    """
    search = _Search(problem, max_switches)
    width = FIRST_WIDTH
    best: tuple[float, _State] | None = None
    exact = False
    limit = seconds * STATES_PER_SECOND
    while not exact and search.states < limit:
        bound = below if best is None else best[0]
        state, exact = search.run(bound, width, limit)
        best = state or best
        width *= 8
    chains = all(row.chain for row in search.rows)
    used = search.states / STATES_PER_SECOND
    if best is None:
        return ChainOrder((), below, exact and chains, used)
    return ChainOrder(tuple(search.pieces(best[1])), best[0], exact and chains, used)


class _Search:
    """The states of networks on processors, layer by layer of finished blocks."""

    def __init__(self, problem: Problem, max_switches: int | None) -> None:
        self.rows = tuple(_row(problem, network) for network in problem.networks)
        self._processors = problem.processors
        self._start_us = [problem.segment_us.get(p, 0.0) for p in problem.processors]
        self._most = None if max_switches is None else max_switches + 1
        self._loadables = problem.limits.max_loadables
        self._gpu = [p == "gpu" for p in problem.processors]
        count, blocks = len(self.rows), sum(len(row.tasks) for row in self.rows)
        # The counts of segments that a limit can bind: fewer are better.
        self._counted = [] if max_switches is None else list(range(count))
        most = blocks if self._most is None else min(blocks, count * self._most)
        if most > self._loadables:
            self._counted += [count + p for p, gpu in enumerate(self._gpu) if not gpu]
        self._rest = [self._least_rest(row) for row in self.rows]
        self._work = [
            [self._least_work(row, weights) for weights in self._weights()] for row in self.rows
        ]
        self.states = 0

    def run(
        self, below: float, width: int, limit: float
    ) -> tuple[tuple[float, _State] | None, bool]:
        """Return the best end below a value, and whether all states were looked at.

        `width`: states that are kept of a layer; the search ends at `limit` states in all.
        """
        count = len(self.rows)
        home = self._processors.index("gpu") if "gpu" in self._processors else 0
        times = (0.0,) * (count + len(self._processors))
        starts = (0,) * len(times)
        first = _State(
            (0,) * count, (home,) * count, (False,) * count, times, starts, None, (0, 0, True)
        )
        layer, complete = [first], True
        for _ in range(sum(len(row.tasks) for row in self.rows)):
            if self.states >= limit:
                return None, False
            groups: dict[tuple[object, ...], list[_State]] = {}
            for state in layer:
                for after in self._after(state):
                    if self._bound(after) < below - _SAME:
                        groups.setdefault((after.at, after.on, after.open), []).append(after)
            layer = [state for group in groups.values() for state in self._undominated(group)]
            if len(layer) > width:
                layer = sorted(layer, key=lambda state: (self._bound(state), state.times))[:width]
                complete = False
        best = min(layer, key=self._bound, default=None)
        return None if best is None else (self._bound(best), best), complete

    def pieces(self, state: _State) -> Iterator[Piece]:
        """Yield the segments of a final state in the order in which they start."""
        steps: list[tuple[int, int, int, bool]] = []
        last: _State | None = state
        while last is not None and last.before is not None:
            network, processor, begins = last.step
            steps.append((network, last.at[network] - 1, processor, begins))
            last = last.before
        open_pieces: dict[int, int] = {}
        pieces: list[Piece] = []
        for network, block, processor, begins in reversed(steps):
            tasks = self.rows[network].tasks[block]
            if begins:
                open_pieces[network] = len(pieces)
                pieces.append(Piece(network, self._processors[processor], tasks))
            else:
                at = open_pieces[network]
                pieces[at] = Piece(network, pieces[at].processor, pieces[at].tasks + tasks)
        yield from pieces

    def _after(self, state: _State) -> Iterator[_State]:
        """Yield the states after one more block of one network."""
        count = len(self.rows)
        for network, row in enumerate(self.rows):
            block = state.at[network]
            if block == len(row.tasks):
                continue
            for processor, time in enumerate(row.time_us[block]):
                same = processor == state.on[network] and state.starts[network] > 0
                if time == float("inf"):
                    continue
                free, busy = state.times[network], state.times[count + processor]
                if same and state.open[network]:
                    yield self._step(state, network, processor, free + time, begins=False)
                if same and busy <= free:
                    continue  # nothing came between: going on is better
                if self._full(state, network, processor):
                    continue
                free += row.cross_us[block][state.on[network]][processor]
                end = max(free, busy) + self._start_us[processor] + time
                yield self._step(state, network, processor, end, begins=True)

    def _full(self, state: _State, network: int, processor: int) -> bool:
        if self._most is not None and state.starts[network] >= self._most:
            return True
        used = state.starts[len(self.rows) + processor]
        return not self._gpu[processor] and used >= self._loadables

    def _step(
        self, state: _State, network: int, processor: int, end: float, *, begins: bool
    ) -> _State:
        self.states += 1
        count = len(self.rows)
        others = (
            False if on == processor and begins else flag
            for on, flag in zip(state.on, state.open, strict=True)
        )
        times, starts = list(state.times), list(state.starts)
        times[network] = times[count + processor] = end
        if begins:
            starts[network] += 1
            starts[count + processor] += 1
        at = _with(state.at, network, state.at[network] + 1)
        going_on = _with(tuple(others), network, True)
        return _State(
            at=at,
            on=_with(state.on, network, processor),
            open=going_on,
            times=tuple(times),
            starts=tuple(starts),
            before=state,
            step=(network, processor, begins),
        )

    def _bound(self, state: _State) -> float:
        """Return a time before which no continuation ends; of a final state, its end."""
        count = len(self.rows)
        bound = max(state.times[n] + self._rest[n][state.at[n]][state.on[n]] for n in range(count))
        for index, weights in enumerate(self._weights()):
            work = sum(w * t for w, t in zip(weights, state.times[count:], strict=True))
            work += sum(self._work[n][index][state.at[n]] for n in range(count))
            bound = max(bound, work)
        return bound

    def _weights(self) -> Iterator[tuple[float, ...]]:
        others = len(self._processors) - 1
        for weight in _WEIGHTS if others else (1.0,):
            yield (weight, *((1 - weight) / others for _ in range(others)))

    def _least_rest(self, row: _Row) -> list[list[float]]:
        """Return the time of a network alone from each cut, by the processor before the cut."""
        count = len(self._processors)
        last = len(row.tasks)
        home = self._processors.index("gpu") if "gpu" in self._processors else 0
        rest = [[0.0] * count for _ in range(last + 1)]
        rest[last] = [row.cross_us[last][p][home] for p in range(count)]
        for block in range(last - 1, -1, -1):
            for before in range(count):
                rest[block][before] = min(
                    row.cross_us[block][before][p]
                    + (0.0 if p == before and block else self._start_us[p])
                    + row.time_us[block][p]
                    + rest[block + 1][p]
                    for p in range(count)
                )
        return rest

    def _least_work(self, row: _Row, weights: Sequence[float]) -> list[float]:
        """Return the least weighted work from each cut: a bound of the processors' mean end."""
        work = [0.0]
        for times in reversed(row.time_us):
            work.append(work[-1] + min(w * t for w, t in zip(weights, times, strict=True)))
        return work[::-1]

    def _undominated(self, states: list[_State]) -> list[_State]:
        """Return the states that no other equals or betters in every time and limited count."""
        front: list[tuple[float, ...]] = []
        best: list[_State] = []
        rows = ((s.times + tuple(s.starts[i] for i in self._counted), s) for s in states)
        for row, state in sorted(rows, key=lambda pair: pair[0]):
            if not any(all(map(_no_later, front_row, row)) for front_row in front):
                front.append(row)
                best.append(state)
        return best


def _no_later(first: float, second: float) -> bool:
    return first <= second + _SAME


def _row(problem: Problem, network: Network) -> _Row:
    chain = is_chain(network)
    cuts = list(range(len(network.tasks) + 1)) if chain else _cheap_cuts(problem, network)
    blocks = [network.tasks[first:last] for first, last in pairwise(cuts)]
    inf = float("inf")
    return _Row(
        tasks=tuple(tuple(task.name for task in block) for block in blocks),
        time_us=tuple(
            tuple(sum(task.time_us.get(p, inf) for task in block) for p in problem.processors)
            for block in blocks
        ),
        cross_us=tuple(_crossings(problem, network, cut) for cut in cuts),
        chain=chain,
    )


def _cheap_cuts(problem: Problem, network: Network) -> list[int]:
    """Return cuts spread over the work of a network: of each stretch the cheapest to cross."""
    count = len(network.tasks)
    work, total = [0.0], 0.0
    for task in network.tasks:
        total += min(task.time_us.values())
        work.append(total)
    allowed = [tuple(sorted(task.time_us)) for task in network.tasks]
    borders = {i for i in range(1, count) if allowed[i] != allowed[i - 1]}
    stretches: dict[int, list[int]] = {}
    for cut in range(1, count):
        stretches.setdefault(int(BLOCKS * work[cut] / max(total, 1e-9)), []).append(cut)

    def price(cut: int) -> float:
        return max(max(row) for row in _crossings(problem, network, cut))

    cheap = {min(cuts, key=lambda cut: (price(cut), cut)) for cuts in stretches.values()}
    if len(borders) <= BLOCKS:
        cheap |= borders
    return sorted({0, count, *cheap})


def _crossings(problem: Problem, network: Network, cut: int) -> tuple[tuple[float, ...], ...]:
    """Return the time of all tensors alive at a cut, from each processor to each."""
    rank = {task.name: index for index, task in enumerate(network.tasks)}
    count = len(network.tasks)
    alive = []
    for flow in network.flows:
        source = -1 if flow.source is None else rank[flow.source]
        used = count if flow.output else max((rank[name] for name in flow.targets), default=-1)
        first = min((rank[name] for name in flow.targets), default=count)
        if source < cut <= used and (source >= 0 or cut == first):
            alive.append(flow)
    return tuple(
        tuple(
            0.0 if a == b else sum(crossing_cost(f.crossing_us, direction_of(a, b)) for f in alive)
            for b in problem.processors
        )
        for a in problem.processors
    )


def _with(row: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*row[:index], value, *row[index + 1 :])
