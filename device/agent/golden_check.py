"""Runs the golden inputs of a release in a child, before its trial.

The child is `python -m device.runtime.golden`: each engine runs there as it will in the pipeline.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device.protocol.documents import InstallPolicy
from device.start.child_process import ChildExit, ChildLimits, ChildProcess, OneChild
from device.start.command import module_command
from device.update.bundle import read_folder_info

MIN_AGREEMENT = 0.95  # where the policy says nothing
TIMEOUT_S = 600.0  # of the child that runs the golden inputs
MISSING = (
    "the policy asks how well golden inputs agree (min_golden_agreement), and the bundle has none: "
    "write it with `tandem bundle --golden`"
)
_VALUES = module_command("device.runtime.golden")
_TASKS = module_command("pipelines.golden")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What the child prints, see `device.runtime.golden.GoldenResult`, and `pipelines.golden`: of
    the model `worst` what was counted, and what the bundle asks for. `garbage`: what shows that an
    engine gives no results at all."""

    samples: int
    agreement: float
    worst: str
    latency_p95_ms: float
    task: str = "values"
    min_agreement: float | None = None
    sqnr_db: float | None = None
    min_sqnr_db: float | None = None
    noisiest: str = ""
    garbage: str = ""


@dataclass(frozen=True, slots=True)
class GoldenEnded:
    """The child has ended. `result` None: without one, `problem` says how.

    `passing`: the system is to blame, and another try may go well.
    """

    run: int
    result: Result | None
    problem: str = ""
    passing: bool = False


def golden_refusal(event: GoldenEnded, policy: InstallPolicy) -> str | None:
    """Return why the release must not be tried, None if it may."""
    result = event.result
    if result is None:
        return f"its golden inputs cannot be run on this board: {event.problem}"
    if result.garbage:
        return (
            f"{result.garbage} for its {result.samples} golden inputs on this board, without any "
            "error: what runs it here gives no results"
        )
    least, asks = policy.min_golden_agreement, "min_golden_agreement of the policy"
    if least is None:
        least, asks = result.min_agreement, "the bundle's own limit"
    if least is None:
        least, asks = MIN_AGREEMENT, "min_golden_agreement"
    if result.agreement < least:
        return (
            f"{result.agreement:.2%} of the {result.task} of its output {result.worst} agree with "
            f"what the bundle recorded for {result.samples} golden inputs, at least {least:.2%} "
            f"must ({asks}): the engine computes something else on this board"
        )
    sqnr_db, min_sqnr_db = result.sqnr_db, result.min_sqnr_db
    if sqnr_db is not None and min_sqnr_db is not None and sqnr_db < min_sqnr_db:
        return (
            f"its output {result.noisiest} differs from what the bundle recorded for golden "
            f"inputs: the signal is {sqnr_db:.1f} dB above the difference, at least "
            f"{min_sqnr_db:.1f} dB are needed (the bundle's own limit): the engine computes "
            "something else on this board"
        )
    limit_ms = policy.max_latency_p95_ms
    if limit_ms is not None and result.latency_p95_ms > limit_ms:
        return (
            f"95 % of its inferences of golden inputs took up to {result.latency_p95_ms:.1f} ms, "
            f"the policy allows {limit_ms:g} ms (max_latency_p95_ms)"
        )
    return None


class GoldenCheck(OneChild):
    """The child that runs golden inputs; see `OneChild`."""

    def __init__(
        self,
        put: Callable[[GoldenEnded], None],
        *,
        plans: Path | None = None,
        command: tuple[str, ...] = _VALUES,
    ) -> None:
        """`plans`: where finished segments are kept; `command`: compares values."""
        super().__init__()
        self._put = put
        self._plans = plans
        too_long = f"they took longer than {TIMEOUT_S:g} s"
        self._limits = ChildLimits(seconds=TIMEOUT_S, too_long=too_long)
        self._command = command

    def start(self, folder: Path, min_agreement: float | None = None) -> bool:
        """Check the release in a slot; False: it has no golden inputs.

        `min_agreement`: what the policy asks of every model in place of its own limit. Raises
        BundleError: its bundle.json cannot be read.
        """
        self.stop()
        info = read_folder_info(folder)
        golden = info.golden
        if golden is None:
            return False
        pairs = dict.fromkeys((run.engine, run.golden) for run in info.runs)
        files = [str(folder / name) for pair in pairs for name in pair]
        agreement_option = () if min_agreement is None else ("--min-agreement", repr(min_agreement))
        what = (
            (*_TASKS, str(folder), *agreement_option) if golden.limits
            else (*self._command, *files, "--tolerance", repr(golden.tolerance))
        )  # fmt: skip
        command = (*what, *(() if self._plans is None else ("--plans", str(self._plans))))
        try:
            self._child = self._start(command)
        except OSError as error:
            self._put(GoldenEnded(self._run, None, str(error.strerror), passing=True))
        return True

    def _start(self, command: tuple[str, ...]) -> ChildProcess:
        run, result = self._run, None

        def on_line(line: bytes) -> None:
            nonlocal result
            with contextlib.suppress(ValueError):  # a stray print
                result = msgspec.json.decode(line, type=Result)

        def on_exit(exit_: ChildExit) -> None:
            late = None if exit_.cause else result
            self._put(GoldenEnded(run, late, "" if late is not None else exit_.reason))

        return ChildProcess(command, on_line, on_exit, limits=self._limits)
