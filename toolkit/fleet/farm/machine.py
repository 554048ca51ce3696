"""The machine of a farm: (state, event) -> (state, effects). Pure; times are of a steady clock.

A task counts once so many boards agree on it that fewer liars could not. Whom its result does not
agree with in more than half of the tasks that count is a liar: none of its times are used, and what
counted through it is measured again. A liar may lie about a few keys alone, so each time is
believed only if so many boards agree on it.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from toolkit.fleet.farm.values import (
    Board,
    Busy,
    Effect,
    Event,
    Failed,
    Farm,
    Job,
    Joined,
    Judged,
    Lost,
    Measured,
    Release,
    Row,
    Rules,
    State,
    Table,
    Task,
    Times,
    Verdict,
)

BUSY_S = 5.0  # before a board that another run has leased is asked for again
MAX_FAILURES = 3  # boards on which a task fails before it is given up; tasks that fail on a board
SURE = 4.0  # standard deviations within which a board's time lies


def step(farm: Farm, state: State, event: Event, now_s: float) -> tuple[State, tuple[Effect, ...]]:
    """Take an event; return the new state and what is to be done."""
    state, released = _take(farm, state, event, now_s)
    for job in [job for job in state.running.values() if job.until_s <= now_s]:
        reason = f"it gave no answer within {farm.rules.lease_s:g} s"
        state, late = _dead(state, job, reason)
        released = (*released, *late)
    free = {n: replace(b, free_s=0.0) for n, b in state.boards.items() if 0.0 < b.free_s <= now_s}
    state = replace(state, boards={**state.boards, **free})
    state, jobs = _hand_out(farm, state, now_s)
    return state, (*released, *jobs)


def is_over(farm: Farm, state: State) -> bool:
    """Whether nothing runs, and nothing that is missing can be given to a board."""
    if state.running:
        return False
    return not any(
        _lacks(farm, state, name) and _eligible(state, name, math.inf) for name in farm.tasks
    )


def due_s(state: State) -> float | None:
    """When a tick may change something, None: never."""
    times = [job.until_s for job in state.running.values()]
    times += [board.free_s for board in state.boards.values() if board.free_s and not board.out]
    return min(times, default=None)


def _take(farm: Farm, state: State, event: Event, now_s: float) -> tuple[State, tuple[Effect, ...]]:
    if isinstance(event, Joined):
        return replace(state, boards={event.board: Board(), **state.boards}), ()
    if isinstance(event, Lost) and event.board in state.boards:
        job = next((job for job in state.running.values() if job.board == event.board), None)
        if job is None:
            return _out(state, event.board, event.reason), ()
        return _dead(state, job, event.reason)
    if isinstance(event, Measured | Failed | Busy) and event.job in state.running:
        job = state.running[event.job]
        after, released = _ended(state, event.job)
        if isinstance(event, Busy):
            board = replace(state.boards[job.board], free_s=now_s + BUSY_S)
            return replace(after, boards={**state.boards, job.board: board}), ()
        return _answered(farm, after, job, event), released
    return state, ()  # also what comes after its lease: the task was given to another board


def _answered(farm: Farm, state: State, job: Job, event: Measured | Failed) -> State:
    if isinstance(event, Failed):
        if event.board:
            return _out(state, job.board, event.reason)
        return _note_failure(state, job, event.reason)
    problem = _problem(farm.tasks[job.task], event.times)
    if problem:
        return _note_failure(state, job, problem)
    of_task = {**state.results.get(job.task, {}), job.board: event.times}
    results = {**state.results, job.task: of_task}
    return replace(state, results=results, judged=_judge(farm, results))


def _ended(state: State, number: int) -> tuple[State, tuple[Effect, ...]]:
    running = {key: job for key, job in state.running.items() if key != number}
    return replace(state, running=running), (Release(state.running[number].board),)


def _dead(state: State, job: Job, reason: str) -> tuple[State, tuple[Effect, ...]]:
    """A board is gone while it had a task, which may have killed it."""
    after, released = _ended(state, job.number)
    return _note_failure(_out(after, job.board, reason), job, reason), released


def _out(state: State, name: str, reason: str) -> State:
    board = state.boards[name]
    return replace(state, boards={**state.boards, name: replace(board, out=board.out or reason)})


def _note_failure(state: State, job: Job, reason: str) -> State:
    of_task = {**state.failures.get(job.task, {}), job.board: reason}
    state = replace(state, failures={**state.failures, job.task: of_task})
    if sum(job.board in rows for rows in state.failures.values()) >= MAX_FAILURES:
        return _out(state, job.board, f"{MAX_FAILURES} tasks failed there, the last: {reason}")
    return state


def _problem(task: Task, times: Times) -> str:
    """Return why times cannot be those of a task, "" if they can."""
    if times.keys() != task.keys:
        return (
            f"it has times of {len(times)} things, {len(times.keys() & task.keys)} of the "
            f"{len(task.keys)} that were asked for"
        )
    key = next((key for key, us in times.items() if not 0.0 < us < math.inf), None)
    return "" if key is None else f"it has a time of {times[key]} us for {key}"


# -- who gets what


def _hand_out(farm: Farm, state: State, now_s: float) -> tuple[State, tuple[Job, ...]]:
    """Give jobs to the boards that are free, first those of tasks with the fewest results."""
    jobs: list[Job] = []
    order = sorted(farm.tasks, key=lambda name: len(state.results.get(name, {})))
    for name in order:
        for _ in range(_lacks(farm, state, name)):
            boards = _eligible(state, name, now_s)
            if not boards:
                break
            board = min(boards, key=lambda one: (state.boards[one].jobs, one))
            job = Job(state.given + 1, board, name, now_s + farm.rules.lease_s)
            row = replace(state.boards[board], jobs=state.boards[board].jobs + 1, free_s=0.0)
            state = replace(
                state, boards={**state.boards, board: row}, given=job.number,
                running={**state.running, job.number: job},
            )  # fmt: skip
            jobs.append(job)
    return state, tuple(jobs)


def _lacks(farm: Farm, state: State, name: str) -> int:
    """Return how many more boards a task is to be given to.

    One that may have killed a board is risked on so few that it kills MAX_FAILURES at most.
    """
    failures = state.failures.get(name, {})
    if len(failures) >= MAX_FAILURES:
        return 0
    running = sum(job.task == name for job in state.running.values())
    lacking = state.judged.lacking.get(name, farm.rules.repeats) - running
    if any(state.boards[board].out == reason for board, reason in failures.items()):
        lacking = min(lacking, MAX_FAILURES - len(failures) - running)
    return max(0, lacking)


def _eligible(state: State, name: str, now_s: float) -> list[str]:
    """Return the boards that are free and have not had a task."""
    used = {job.board for job in state.running.values()}
    used |= state.results.get(name, {}).keys() | state.failures.get(name, {}).keys()
    return [
        key
        for key, board in state.boards.items()
        if not board.out and board.free_s <= now_s
        and key not in used and key not in state.judged.liars
    ]  # fmt: skip


# -- who agrees


def _judge(farm: Farm, results: Mapping[str, Mapping[str, Times]]) -> Judged:
    """Find liars, and who agrees on each task without them, until nothing changes."""
    rules, limit, liars = farm.rules, math.log1p(farm.rules.tolerance), dict[str, float]()
    while True:
        honest = {
            name: {board: times for board, times in rows.items() if board not in liars}
            for name, rows in results.items()
        }
        agreed = {name: _largest(rows, limit) for name, rows in honest.items()}
        apart: dict[str, list[float]] = {}
        for name, boards in agreed.items():
            if len(boards) >= rules.repeats:
                median = _medians(honest[name], boards)
                for board, times in honest[name].items():
                    apart.setdefault(board, []).append(_apart(times, median))
        outliers = {
            board: math.exp(statistics.median(logs))
            for board, logs in apart.items()
            if 2 * sum(abs(log) > limit for log in logs) > len(logs)
        }
        if not outliers:
            break
        liars |= outliers
    runs_missing = dict[str, int]()
    for name, boards in agreed.items():
        lacking = rules.repeats - len(boards)
        if lacking <= 0 and not _all_agree(honest[name], boards, rules):
            lacking = 1
        runs_missing[name] = max(0, min(lacking, rules.most - len(honest[name])))
    return Judged(agreed, runs_missing, liars)


def _largest(results: Mapping[str, Times], limit: float) -> tuple[str, ...]:
    """Return the most boards that agree with one of them."""
    groups = [
        tuple(sorted(b for b in results if abs(_apart(results[b], results[a])) <= limit))
        for a in sorted(results)
    ]
    return max(groups, key=len, default=())


def _apart(times: Times, others: Times) -> float:
    """Return the median over the keys of the log of the ratio of two boards' times."""
    return statistics.median(math.log(times[key] / others[key]) for key in times)


def _medians(results: Mapping[str, Times], boards: Sequence[str]) -> Times:
    return {k: statistics.median(results[b][k] for b in boards) for k in results[boards[0]]}


def _all_agree(results: Mapping[str, Times], boards: Sequence[str], rules: Rules) -> bool:
    """Return whether enough boards agree on every key, not only on most."""
    limit = math.log1p(rules.tolerance)
    return all(
        len(_kept(results, boards, key, limit)) >= rules.repeats for key in results[boards[0]]
    )


def _kept(
    results: Mapping[str, Times], boards: Sequence[str], key: str, limit: float
) -> tuple[str, ...]:
    """Return the boards whose time of a key is near the median: one may have been disturbed."""
    middle = statistics.median(results[board][key] for board in boards)
    return tuple(b for b in boards if abs(math.log(results[b][key] / middle)) <= limit)


# -- the table


def table(farm: Farm, state: State) -> Table:
    """Return what is measured by now."""
    judged = state.judged
    rows, verdicts, reasons = dict[str, Row](), dict[str, Verdict](), dict[str, str]()
    logs: list[float] = []
    limit = math.log1p(farm.rules.tolerance)
    for name in farm.tasks:
        results, boards = state.results.get(name, {}), judged.agreed.get(name, ())
        honest = [board for board in results if board not in judged.liars]
        if 2 * len(boards) <= len(honest) or not boards:
            verdicts[name] = "missing"
            reasons[name] = _why_missing(state, name, honest)
            continue
        keys = results[boards[0]]
        # Fewer than `repeats` are believed only where no other board has measured the same.
        least = min(farm.rules.repeats, len(honest))
        agreeing = {
            key: alike for key in keys if len(alike := _kept(results, boards, key, limit)) >= least
        }
        verdicts[name] = "agreed" if least == farm.rules.repeats else "unchecked"
        if len(agreeing) < len(keys):
            verdicts[name] = "partly" if agreeing else "missing"
            reasons[name] = (
                f"of {len(keys)} times {len(keys) - len(agreeing)} are left out: fewer than "
                f"{least} of {', '.join(sorted(honest))} agree on them"
            )
        for key, measurers in agreeing.items():
            times = sorted(results[board][key] for board in measurers)
            middle = statistics.median(times)
            rows[key] = Row(middle, times[0], times[-1], measurers)
            if len(times) > 1:  # of n values the median lies nearer to them than the true time
                wide = math.sqrt(len(times) / (len(times) - 1))
                logs += [wide * math.log(time / middle) for time in times]
    sigma = math.sqrt(statistics.fmean(log * log for log in logs)) if logs else math.inf
    error = math.expm1(max(SURE * sigma, *map(abs, logs), 0.0))
    out = {name: board.out for name, board in state.boards.items() if board.out}
    return Table(rows, error, verdicts, judged.liars, out, reasons)


def _why_missing(state: State, name: str, honest: Sequence[str]) -> str:
    failures = state.failures.get(name, {})
    if failures:
        board, reason = next(iter(failures.items()))
        return f"it failed on {len(failures)} boards; {board}: {reason}"
    if honest:
        return f"the times of {', '.join(sorted(honest))} do not agree"
    return "no board was left that could measure it"
