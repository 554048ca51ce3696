"""Runs the steps, each in child processes: what crashes or hangs costs one item of one step.

A child works through the items of a step and writes a line of JSON for each. When it dies, or an
item takes longer than it may, that item gets a row with the reason and a new child goes on behind
it. A step that is out of time ends there, and the next one starts. What is done is handed on after
each item: a selftest that is ended in between has a report.
"""

import queue
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from device.selftest.kit import Kit
from device.selftest.private import scrub
from device.selftest.report import MAX_TEXT, StepRow
from device.selftest.steps import Step
from device.start.child_process import ChildExit, ChildProcess
from device.start.command import module_command

Progress = Callable[[str, int, int, str], None]
"""Gets the step, the items that are done, how many there are, and the item in work."""

Keep = Callable[[StepRow, tuple[Any, ...]], None]
"""Gets a step as far as it is done, and the rows of its items, after each item."""

_POLL_S = 0.05
_MORE_TIME = "give more with `tandem-agent selftest --minutes`"
_SCRUBBED = ("problem", "reason", "said")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What a child writes: the beginning of an item, then its row or why there is none."""

    item: str
    row: Any = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """Where a selftest runs. `kit_folder`: the kit, `folder`: for what it unpacks and writes."""

    kit: Kit
    kit_folder: Path
    folder: Path
    on_progress: Progress
    keep: Keep


@dataclass(slots=True)
class _Run:
    """A step in work: `rows` of its first items so far; it ends at `deadline` (monotonic)."""

    work: Work
    step: Step
    items: tuple[str, ...]
    begin: float
    deadline: float
    rows: list[Any]
    crashes: int = 0

    @property
    def over(self) -> bool:
        """All items have a row, or the time is up."""
        return len(self.rows) == len(self.items) or time.monotonic() >= self.deadline


def run_step(work: Work, step: Step, deadline: float) -> tuple[StepRow, tuple[Any, ...]]:
    """Run one step until `deadline`, a time of `time.monotonic`; return its row and its items'."""
    run = _Run(work, step, step.items(work.kit), time.monotonic(), deadline, [])
    while not run.over:
        reason = _run_child(run)
        if not run.over:  # the item in work is the one behind the last row
            run.crashes += 1
            item = run.items[len(run.rows)]
            _add(run, step.failed(work.kit, item, scrub(reason)))
    return _state(run, f"out of time, {{}} left out; {_MORE_TIME}"), tuple(run.rows)


def not_reached(kit: Kit, step: Step) -> StepRow:
    """Return the row of a step that the selftest has not come to."""
    items = step.items(kit)
    problem = f"not reached: the selftest was ended before it, {len(items)} left out"
    return StepRow(
        name=step.name, items=len(items), done=0, seconds=0.0,
        problem=problem if items else "", left_out=items,
    )  # fmt: skip


def _state(run: _Run, problem: str) -> StepRow:
    """Return a step as far as it is done; `problem`: why the rest is not there, {} for how many."""
    left_out = run.items[len(run.rows) :]
    return StepRow(
        name=run.step.name,
        items=len(run.items),
        done=len(run.rows),
        seconds=time.monotonic() - run.begin,
        crashes=run.crashes,
        problem=problem.format(len(left_out)) if left_out else "",
        left_out=left_out,
    )


def _add(run: _Run, row: Any) -> None:  # noqa: ANN401
    run.rows.append(row)
    run.work.keep(_state(run, "the selftest was ended here, {} left out"), tuple(run.rows))


def _run_child(run: _Run) -> str:
    """Run one child from the next item on, add the rows it gives; return why it ended early."""
    path = run.work.folder / f"{run.step.name}.lines"
    path.write_bytes(b"")
    command = module_command(
        "device.selftest.child", str(run.work.kit_folder), str(run.work.folder), run.step.name,
        str(len(run.rows)), str(path),
    )  # fmt: skip
    ends = queue.SimpleQueue[ChildExit]()
    # Native libraries print to stdout as they like: rows come by the file.
    child = ChildProcess(command, lambda _line: None, ends.put)
    try:
        return _follow(run, ends, path)
    finally:
        child.stop()


def _follow(run: _Run, ends: "queue.SimpleQueue[ChildExit]", path: Path) -> str:
    """Take the rows of a child as they come; return why it ended, or must be ended."""
    since = time.monotonic()
    with path.open("rb") as file:
        exit_: ChildExit | None = None
        while True:
            for line in _whole_lines(file):
                _add(run, _row(run.work.kit, run.step, line))
                since = time.monotonic()
            if run.over:
                return "the step is over"
            if exit_ is not None:
                return _death(exit_)
            item = run.items[len(run.rows)]
            run.work.on_progress(run.step.name, len(run.rows), len(run.items), item)
            if time.monotonic() - since > run.step.item_s:
                return f"it took longer than {run.step.item_s:.0f} s"
            with suppress(queue.Empty):
                exit_ = ends.get(timeout=_POLL_S)


def _whole_lines(file: Any) -> Iterator[bytes]:  # noqa: ANN401
    """Yield the lines that are complete; the rest is read again."""
    while True:
        place = file.tell()
        line = file.readline()
        if not line.endswith(b"\n"):
            file.seek(place)
            return
        yield line


def _row(kit: Kit, step: Step, data: bytes) -> Any:  # noqa: ANN401
    """Return the row of a line, with its free texts scrubbed."""
    line = msgspec.json.decode(data, type=Line)
    if line.problem or line.row is None:
        return step.failed(kit, line.item, scrub(line.problem or "it gave no row"))
    return msgspec.convert(_scrubbed(line.row), step.result)


def _scrubbed(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, list):
        return [_scrubbed(each) for each in value]
    if isinstance(value, dict):
        return {
            key: scrub(each) if key in _SCRUBBED and isinstance(each, str) else _scrubbed(each)
            for key, each in value.items()
        }
    return value


def _death(exit_: ChildExit) -> str:
    last = f": {exit_.tail[-1][:MAX_TEXT]}" if exit_.tail else ""
    if exit_.status < 0:
        return f"its process crashed ({signal.Signals(-exit_.status).name}){last}"
    return f"its process ended with status {exit_.status}{last}"
