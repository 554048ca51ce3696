"""`python -m device.selftest`: what `tandem-agent selftest` runs."""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from device.board_files import tandem_version
from device.errors import TandemError
from device.selftest.kit import LIST, Kit, KitError, load_kit
from device.selftest.report import (
    MAX_ENTRY_BYTES,
    RECORDED,
    TIMINGS,
    Machine,
    Report,
    ReportError,
    StepRow,
    as_builtins,
    read_report,
    write_report,
)
from device.selftest.runner import Work, not_reached, run_step
from device.selftest.steps import MINUTES, STEPS, deadlines_s

_SHOWN_EVERY_S = 1.0
_WRITTEN_EVERY_S = 20.0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="tandem-agent selftest", description=(
        "Run all that only this board can prove, and write one file about it: kernels, DLA rules, "
        "times, power. It holds no names, addresses or serial numbers; --list shows all of it."
    ))  # fmt: skip
    parser.add_argument("--kit", type=Path, default=Path(), help="the folder of the kit (here)")
    parser.add_argument("--out", type=Path, help="the report to write")
    parser.add_argument("--list", type=Path, metavar="REPORT", help="show what a report holds")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time for all (20)")
    parser.add_argument(
        "--only", action="append", choices=[step.name for step in STEPS], help="these steps alone"
    )
    parser.add_argument("--json", action="store_true", help="print the steps as JSON")
    return parser


def main() -> int:
    """Run the selftest; the exit status is 1 only if there is no report."""
    parser = make_parser()
    arguments = parser.parse_args()
    if (arguments.out is None) == (arguments.list is None):
        parser.error("give --out FILE to run, or --list REPORT to look into one")
    if not 0 < arguments.minutes < 10_000:
        parser.error(f"--minutes {arguments.minutes}: give more than 0")
    try:
        if arguments.list is not None:
            return _show(arguments.list)
        report = run_kit(arguments.kit, arguments.out, arguments.minutes, arguments.only or ())
    except TandemError as error:
        sys.stderr.write(f"tandem-agent: {error}\n")
        return 1
    if arguments.json:
        steps = as_builtins(report)["steps"]
        sys.stdout.write(msgspec.json.encode({"steps": steps}).decode() + "\n")
    else:
        sys.stdout.write("".join(f"{_line(step)}\n" for step in report.steps))
        size = arguments.out.stat().st_size
        sys.stdout.write(
            f"{arguments.out}: {size / 1e6:.1f} MB, the file to send; --list shows it\n"
        )
    return 0


def run_kit(kit_path: Path, out: Path, minutes: float, only: Sequence[str] = ()) -> Report:
    """Run the steps of a kit (`only`: these alone) and write the report. Raises TandemError."""
    kit_folder = kit_path.absolute()
    if not (kit_folder / LIST).exists():
        raise KitError(
            f"{kit_path} holds no {LIST}; give the kit's folder with `tandem-agent selftest --kit`"
        )
    if not out.absolute().parent.is_dir():
        raise ReportError(f"{out} cannot be written: there is no such folder; make it")
    kit = load_kit(kit_folder)
    chosen = [step for step in STEPS if step.name in (only or [s.name for s in STEPS])]
    begin = time.monotonic()
    deadlines = dict(zip(STEPS, deadlines_s(minutes), strict=True))
    with tempfile.TemporaryDirectory(prefix="tandem-selftest-") as name:
        progress = _Kept(out, kit, Path(name), [not_reached(kit, step) for step in chosen])
        work = Work(kit, kit_folder, Path(name), _Shown(), progress)
        progress.write()  # it can be written there: said now, not after the work
        with suppress(KeyboardInterrupt), _ending_is_an_interrupt():
            for step in chosen:
                progress(*run_step(work, step, begin + deadlines[step]))
                progress.write()
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K")
        progress.write()
    return progress.report


class _Kept:
    """The report as far as it goes. It is written after each step and now and then in between.

    Called with a step and the rows of its items; `folder` has the files beside the JSON.
    """

    def __init__(self, path: Path, kit: Kit, folder: Path, steps: Sequence[StepRow]) -> None:
        self._path, self._kit, self._folder = path, kit, folder
        self._begin = self._written = time.monotonic()
        self._steps = {step.name: step for step in steps}
        self._rows: dict[str, tuple[Any, ...]] = {}

    def __call__(self, step: StepRow, rows: tuple[Any, ...]) -> None:
        self._steps[step.name], self._rows[step.name] = step, rows
        if time.monotonic() - self._written > _WRITTEN_EVERY_S:
            self.write()

    @property
    def report(self) -> Report:
        rows = dict(self._rows)
        machines = rows.pop("machine", ())
        return Report(
            tandem=tandem_version(),
            kit=self._kit.sha256,
            profile=self._kit.profile,
            seconds=time.monotonic() - self._begin,
            steps=tuple(self._steps.values()),
            machine=machines[0] if machines else Machine(),
            recorded=rows.pop("dla", ()),
            **rows,
        )

    def write(self) -> None:
        """Write what there is. Raises ReportError."""
        write_report(self._path, self.report, _files(self._folder))
        self._written = time.monotonic()


@contextmanager
def _ending_is_an_interrupt() -> Iterator[None]:
    """Treat the end of the connection (SIGHUP) and SIGTERM as Ctrl-C, within the block.

    What nohup ignores stays ignored.
    """
    signals = [
        number for number in (signal.SIGHUP, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]  # fmt: skip
    before = {number: signal.signal(number, signal.default_int_handler) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _files(folder: Path) -> Mapping[str, bytes]:
    """The files beside the JSON: timings, and what was recorded."""
    paths = {TIMINGS: folder / TIMINGS}
    paths |= {f"{RECORDED}{path.name}": path for path in sorted((folder / RECORDED).glob("*.npz"))}
    return {
        name: path.read_bytes()
        for name, path in paths.items()
        if path.exists() and path.stat().st_size <= MAX_ENTRY_BYTES
    }


class _Shown:
    """The progress line: on a terminal all the time, else a line for each step and minute."""

    def __init__(self) -> None:
        self._next = 0.0
        self._step = ""

    def __call__(self, step: str, done: int, total: int, item: str) -> None:
        now = time.monotonic()
        if step == self._step and now < self._next:
            return
        terminal = sys.stderr.isatty()
        self._step, self._next = step, now + (_SHOWN_EVERY_S if terminal else 60.0)
        text = f"{step}: {done} of {total}, {item}"
        width = 79 if not terminal else os.get_terminal_size(sys.stderr.fileno()).columns - 1
        sys.stderr.write(f"\r\033[K{text[:width]}" if terminal else f"{text}\n")
        sys.stderr.flush()


def _line(step: StepRow) -> str:
    text = f"{step.name}: {step.done} of {step.items} in {step.seconds:.0f} s"
    if step.crashes:
        text += f", {step.crashes} ended their process"
    return f"{text}; {step.problem}" if step.problem else text


def _show(path: Path) -> int:
    """Print all that a report holds, as JSON, and its other files."""
    file = read_report(path)
    sys.stdout.write(
        msgspec.json.format(msgspec.json.encode(file.report), indent=2).decode() + "\n"
    )
    for name, data in file.files.items():
        sys.stdout.write(f"{name}: {len(data)} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
