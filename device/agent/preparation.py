"""Finishes the segments of a slot with this board's TensorRT, in a child, before it runs.

The child is `tandem-agent prepare`: it keeps plans on the disk, so that most starts take no longer
than its own. What it says and that it ended arrive as events.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec

from device.errors import BundleError, BundleReadError
from device.start.child_process import ChildExit, ChildLimits, ChildProcess, OneChild
from device.start.command import module_command
from device.start.memory_watch import default_limit_bytes
from device.update.bundle import read_folder_info

LOG = logging.getLogger("tandem.agent")
PLANS = "plans"  # folder of the state folder
_COMMAND = module_command("device.runtime.prepare")
_GRACE_S = 60.0  # the child keeps its limit itself, unless it hangs


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A segment. `problem`: why it has no plan; `others`: the ways that it can run in then.

    `kernels_run`: the board timed its plan, and its kernels are faster.
    """

    segment: str
    cached: bool = True
    problem: str | None = None
    others: tuple[str, ...] = ()
    kernels_run: bool = False


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the child: progress, or the result."""

    segment: str = ""
    seconds: float = 0.0
    rows: tuple[Row, ...] | None = None


@dataclass(frozen=True, slots=True)
class Preparing:
    """TensorRT builds a segment, since so many seconds."""

    run: int
    segment: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PreparationEnded:
    """The child has ended. `rows` None: without a result, `problem` says how."""

    run: int
    rows: tuple[Row, ...] | None
    problem: str = ""


PreparationEvent = Preparing | PreparationEnded


def refusal(rows: tuple[Row, ...]) -> str | None:
    """Return why a slot cannot run on this board, None if every segment can in some way."""
    for row in rows:
        if row.problem is not None and not row.others:
            return (
                f"segment {row.segment} cannot run on this board: {row.problem}; the engine "
                "carries no other implementation of it that runs here: build it again, not with "
                "`tandem build --no-fallback`"
            )
    return None


def built_now(rows: tuple[Row, ...]) -> bool:
    """Whether a plan was built that was not there before, and runs."""
    return any(row.problem is None and not row.cached and not row.kernels_run for row in rows)


class Preparation(OneChild):
    """The child that finishes the segments of a slot; see `OneChild`."""

    def __init__(
        self,
        put: Callable[[PreparationEvent], None],
        state_dir: Path,
        *,
        timeout_s: float,
        memory_mb: int | None,
        total_timeout_s: float = 7200.0,
        grace_s: float = _GRACE_S,
        command: tuple[str, ...] = _COMMAND,
    ) -> None:
        """`timeout_s`, `memory_mb`: of the build of one segment, see `[prepare]` of agent.toml.

        `total_timeout_s`: of the child, which has `grace_s` more to end by itself.
        """
        super().__init__()
        self.plans = state_dir / PLANS
        self._put = put
        limit_mb = max(1, default_limit_bytes() >> 20) if memory_mb is None else memory_mb
        self._options = (
            "--plans", str(self.plans), "--timeout-s", f"{timeout_s:g}",
            "--total-timeout-s", f"{total_timeout_s:g}",
            "--max-memory-mb", str(limit_mb), "--events",
        )  # fmt: skip
        self._limits = ChildLimits(
            seconds=total_timeout_s + grace_s,
            too_long=f"it took longer than {total_timeout_s:.0f} s in all, the limit "
            "total_timeout_s of [prepare] in agent.toml; what it has built is kept",
        )
        self._command = command

    def start(self, folder: Path) -> bool:
        """Prepare the engines of a slot; False where there is nothing to do: no TensorRT is here.

        A slot that cannot be read is left to the pipeline, which says so when it starts.
        """
        if find_spec("tensorrt") is None:
            return False
        self.stop()
        try:
            runs = read_folder_info(folder).runs
        except (BundleError, BundleReadError) as error:
            LOG.error("the segments cannot be prepared: %s", error)
            return False
        engines = dict.fromkeys(str(folder / run.engine) for run in runs)
        command = (*self._command, *engines, *self._options)
        try:
            self._child = self._start(command)
        except OSError as error:
            LOG.error("the segments cannot be prepared: %s", error.strerror)
            return False
        return True

    def _start(self, command: tuple[str, ...]) -> ChildProcess:
        run, rows = self._run, None

        def on_line(text: bytes) -> None:
            nonlocal rows
            try:
                line = msgspec.json.decode(text, type=_Line)
            except ValueError:  # a stray print
                return
            if line.rows is not None:
                rows = line.rows
            elif line.segment:
                self._put(Preparing(run, line.segment, line.seconds))

        def on_exit(exit_: ChildExit) -> None:
            self._put(PreparationEnded(run, rows, "" if rows is not None else exit_.reason))

        return ChildProcess(command, on_line, on_exit, limits=self._limits)
