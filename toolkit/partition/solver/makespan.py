"""The shortest time in which one frame of each network is done, and the order of its segments.

Restricted answers come first: no switch, one, two. Each begins with the best one before, so that
more switches are never worse. Networks that are chains are searched by states, which proves the
answer for any number of switches; others by states over their cheapest cuts, then by a program.
Two networks with a DLA core for each need none of that where `pair_search` proves their order.
Contention is not modelled.
"""

import time
from collections.abc import Iterator, Sequence

from toolkit.errors import PlanError
from toolkit.partition.solver.assess import limits_are_far
from toolkit.partition.solver.chain_search import is_chain, search_chains
from toolkit.partition.solver.jobs import Job, jobs_of, placement_of, schedule_of
from toolkit.partition.solver.milp import GAP
from toolkit.partition.solver.milp_makespan import solve_slots
from toolkit.partition.solver.pair_search import search_pair
from toolkit.partition.solver.problem import Problem, Segment, Solution

DEFAULT_SWITCHES = 3  # HaX-CoNN and AxoNN: one or two switches are usually best
_SHARE = 0.5  # of the seconds that are left, for the next restricted answer
_SEARCH_SHARE = 0.25  # of these, for the search by states
_PAIR_SHARE = 0.75  # of the seconds, for two networks with a core for each


def solve_makespan(problem: Problem, seconds: float) -> Solution:
    """Return the placement and order with the shortest makespan; see the module docstring.

    A network has at most `limits.max_switches` switches. If that is None chains have any number,
    and other networks too if `pair_search` ends; else `DEFAULT_SWITCHES`. Raises PlanError if the
    limits are infeasible, or no solution was found in the time.
    """
    began = time.process_time()
    search = _Makespan(problem, seconds)
    infeasible = False
    if not search.prove_pair():
        for max_switches in _restrictions(problem):
            infeasible = search.improve(max_switches)
    if not search.jobs:
        raise PlanError(_why_not(problem, infeasible))
    schedule, end = schedule_of(search.jobs)
    bound = min(max(search.bound, search.least, _least_end(problem)), end)
    segments = [job.segment for job in search.jobs]
    return Solution(
        objective="makespan",
        placement=placement_of(segments),
        segments=tuple(sorted(segments, key=lambda segment: segment.network)),
        value=end,
        bound=bound,
        proven=end - bound <= GAP * max(1.0, end),
        seconds=time.process_time() - began,
        schedule=schedule,
    )


def _restrictions(problem: Problem) -> Iterator[int | None]:
    """Yield limits of switches, each less strict than the one before; the last is the asked one.

    The same restrictions come before every larger limit, with the same seconds.
    """
    limit = problem.limits.max_switches
    yield from range(min(DEFAULT_SWITCHES if limit is None else limit, DEFAULT_SWITCHES) + 1)
    if (limit is None and _all_chains(problem)) or (limit or 0) > DEFAULT_SWITCHES:
        yield limit


def _all_chains(problem: Problem) -> bool:
    return _searchable(problem) and all(map(is_chain, problem.networks))


def _searchable(problem: Problem) -> bool:
    """Return True if the search by states keeps all limits."""
    return problem.limits.max_crossings is None and all(
        limits_are_far(problem, network) for network in problem.networks
    )


class _Makespan:
    """The best order so far, and the bound with the switches of the last restriction."""

    def __init__(self, problem: Problem, seconds: float) -> None:
        self._problem, self._seconds = problem, seconds
        self.jobs: tuple[Job, ...] = ()
        self.bound = 0.0
        self.least = 0.0  # with any number of switches
        self._end = float("inf")
        self._consider(self._in_turn())

    def prove_pair(self) -> bool:
        """Search two networks with a core for each; return whether no order is better.

        The restricted answers have the same seconds after it, so that it never makes one worse.
        """
        pair = search_pair(self._problem, _PAIR_SHARE * self._seconds, self._end)
        if pair is None:
            return False
        self._consider(pair.jobs)
        self.least = self._end if pair.exact else pair.bound
        return pair.exact

    def improve(self, max_switches: int | None) -> bool:
        """Search with a limit of switches; return whether it leaves no order at all."""
        seconds = _SHARE * self._seconds
        if _searchable(self._problem):
            used, exact = self._search(max_switches, _SEARCH_SHARE * seconds)
            self._seconds -= used
            if exact:
                few = max_switches is not None and self.least > 0
                self.bound = 0.0 if few else self._end
                return not self.jobs
        if max_switches is None:  # chains too long to search; no program has so many slots
            self.bound = 0.0
            return False
        outcome = solve_slots(
            self._problem, max_switches, seconds, [job.segment for job in self.jobs]
        )
        self._seconds -= outcome.seconds
        self._consider(outcome.jobs or ())
        # Beside a bound for any number of switches, one for few says nothing.
        self.bound = 0.0 if self.least else min(outcome.bound, self._end)
        return outcome.infeasible

    def _search(self, max_switches: int | None, seconds: float) -> tuple[float, bool]:
        """Search by states; return the seconds that it took, and whether it proves its answer."""
        order = search_chains(self._problem, max_switches, seconds, self._end)
        segments = []
        for piece in order.pieces:
            network, names = self._problem.networks[piece.network], set(piece.tasks)
            tasks = tuple(task.name for task in network.tasks if task.name in names)
            segments.append(Segment(network.name, piece.processor, tasks))
        if segments:
            self._consider(jobs_of(self._problem, segments))
        return order.seconds, order.exact

    def _simplify(self) -> None:
        """Move segments to the processor of a neighbour where nothing ends later for it."""
        latest_us, index = self._end * (1 + GAP), 0
        while _searchable(self._problem) and index < len(self.jobs):
            segments = [job.segment for job in self.jobs]
            for fewer in _joined(self._problem, segments, index):
                jobs = jobs_of(self._problem, fewer)
                end = schedule_of(jobs)[1]
                if end <= latest_us:
                    self.jobs, self._end, index = jobs, end, -1
                    break
            index += 1

    def _consider(self, jobs: tuple[Job, ...]) -> None:
        if jobs:
            _, end = schedule_of(jobs)
            if end < self._end:
                self.jobs, self._end = jobs, end
                self._simplify()

    def _in_turn(self) -> tuple[Job, ...]:
        """Return each network after the one before, on the GPU; nothing where that cannot be."""
        problem = self._problem
        if any("gpu" not in task.time_us for net in problem.networks for task in net.tasks):
            return ()
        return jobs_of(
            problem,
            [
                Segment(net.name, "gpu", tuple(task.name for task in net.tasks))
                for net in problem.networks
            ],
        )


def _joined(
    problem: Problem, segments: Sequence[Segment], index: int
) -> Iterator[tuple[Segment, ...]]:
    """Yield orders in which a segment is part of the one before it, or of the one after."""
    this_segment = segments[index]
    row = [i for i, segment in enumerate(segments) if segment.network == this_segment.network]
    at = row.index(index)
    tasks = {
        t.name: t for net in problem.networks if net.name == this_segment.network for t in net.tasks
    }
    for neighbour in (row[at - 1 : at] if at else []) + row[at + 1 : at + 2]:
        home = segments[neighbour].processor
        if all(home in tasks[name].time_us for name in this_segment.tasks):
            first, last = sorted((index, neighbour))
            whole = Segment(
                this_segment.network, home, segments[first].tasks + segments[last].tasks
            )
            yield (*segments[:first], whole, *segments[first + 1 : last], *segments[last + 1 :])


def _least_end(problem: Problem) -> float:
    """Return a time before which no order ends, with any switches: work and length alone."""
    tasks = [task for network in problem.networks for task in network.tasks]
    longest = max(sum(min(task.time_us.values()) for task in net.tasks) for net in problem.networks)
    shares = [0.1 * step for step in range(1, 10)] if len(problem.processors) > 1 else [1.0]
    for share in shares:
        rest = (1 - share) / max(1, len(problem.processors) - 1)
        weights = {p: rest if index else share for index, p in enumerate(problem.processors)}
        work = sum(min(weights[p] * time for p, time in task.time_us.items()) for task in tasks)
        longest = max(longest, work)
    return longest


def _why_not(problem: Problem, infeasible: bool) -> str:
    names = ", ".join(network.name for network in problem.networks)
    if infeasible:
        return f"no order of {names} keeps the limits ({problem.limits}); relax one"
    return f"no order of {names} was found in the time; allow more seconds or fewer switches"
