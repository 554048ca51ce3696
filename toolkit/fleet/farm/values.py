"""The values of a farm: tasks and rules, events and effects, its state, and the table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Times = Mapping[str, float]
"""Microseconds by what was timed."""


@dataclass(frozen=True, slots=True)
class Task:
    """What one job measures: a result has a time of each key, and of no other."""

    name: str
    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class Rules:
    """How a farm measures.

    `repeats`: boards that must agree on a task, so fewer than that cannot pass a wrong time.
    `most`: boards that are asked for it at most. `tolerance`: times agree if the larger is at most
    so much above the smaller, as a share. `lease_s`: a board that has not answered then is dead.
    """

    repeats: int = 3
    most: int = 7
    tolerance: float = 0.25
    lease_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Farm:
    """What is measured, by the names of the tasks, and how."""

    tasks: Mapping[str, Task]
    rules: Rules


def make_farm(tasks: Iterable[Task], rules: Rules | None = None) -> Farm:
    """Return the farm of some tasks."""
    return Farm({task.name: task for task in tasks}, rules or Rules())


# Events
@dataclass(frozen=True, slots=True)
class Joined:
    """A board may be given jobs."""

    board: str


@dataclass(frozen=True, slots=True)
class Lost:
    """A board cannot be given jobs any more."""

    board: str
    reason: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A job has ended with times."""

    job: int
    times: Times


@dataclass(frozen=True, slots=True)
class Failed:
    """A job has no times. `board`: that is the board's fault, not the task's."""

    job: int
    reason: str
    board: bool


@dataclass(frozen=True, slots=True)
class Busy:
    """A job was not given: another run has leased the board."""

    job: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Joined | Lost | Measured | Failed | Busy | Tick


# Effects
@dataclass(frozen=True, slots=True)
class Job:
    """Lease the board and give it the task; the answer comes before `until_s`."""

    number: int
    board: str
    task: str
    until_s: float


@dataclass(frozen=True, slots=True)
class Release:
    """Give the lease of a board back."""

    board: str


Effect = Job | Release


@dataclass(frozen=True, slots=True)
class Board:
    """`free_s`: no job before; `jobs`: those it was given; `out`: why it gets no more."""

    free_s: float = 0.0
    jobs: int = 0
    out: str = ""


@dataclass(frozen=True, slots=True)
class Judged:
    """What the results say: who agrees on each task, how many more boards it wants, and who lies by
    which factor."""

    agreed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lacking: Mapping[str, int] = field(default_factory=dict)
    liars: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class State:
    """The state of a run. `results`, `failures`: by task, then board; `judged`: the results."""

    boards: Mapping[str, Board] = field(default_factory=dict)
    running: Mapping[int, Job] = field(default_factory=dict)
    results: Mapping[str, Mapping[str, Times]] = field(default_factory=dict)
    failures: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    judged: Judged = Judged()
    given: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """The time of a key: the median over `boards`, the smallest and the largest."""

    time_us: float
    low_us: float
    high_us: float
    boards: tuple[str, ...]


Verdict = Literal["agreed", "unchecked", "partly", "missing"]


@dataclass(frozen=True, slots=True)
class Table:
    """What came of a run.

    `error`: the share by which any single board may differ from a time, infinite if none was
    measured twice. `verdicts`: by task; "unchecked" ones are of fewer boards than were asked for,
    of "partly" ones some times are left out. `liars`: how many times slower (below 1: faster) than
    the others. `out`: boards that dropped out, with the reason. `reasons`: of tasks that lack
    times.
    """

    rows: Mapping[str, Row]
    error: float
    verdicts: Mapping[str, Verdict]
    liars: Mapping[str, float]
    out: Mapping[str, str]
    reasons: Mapping[str, str]

    @property
    def times(self) -> dict[str, float]:
        """The times alone."""
        return {key: row.time_us for key, row in self.rows.items()}

    @property
    def boards(self) -> tuple[str, ...]:
        """The boards whose times are in the table."""
        return tuple(sorted({board for row in self.rows.values() for board in row.boards}))
