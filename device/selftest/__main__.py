"""`python -m device.selftest`: what `tandem-agent selftest` runs."""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from device.errors import TandemError
from device.selftest.kit import LIST, KitError, load_kit
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
from device.selftest.runner import Work, run_step
from device.selftest.steps import MINUTES, STEPS, deadlines_s

_SHOWN_EVERY_S = 1.0


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
    """Run the selftest; the exit status is 1 if a step has a problem."""
    parser = make_parser()
    arguments = parser.parse_args()
    if (arguments.out is None) == (arguments.list is None):
        parser.error("give --out FILE to run, or --list REPORT to look into one")
    if not 0 < arguments.minutes < 10_000:
        parser.error(f"--minutes {arguments.minutes}: give more than 0")
    try:
        if arguments.list is not None:
            return _show(arguments.list)
        report = _run(arguments)
    except TandemError as error:
        sys.stderr.write(f"tandem-agent: {error}\n")
        return 1
    if arguments.json:
        steps = as_builtins(report)["steps"]
        sys.stdout.write(msgspec.json.encode({"steps": steps}).decode() + "\n")
    else:
        sys.stdout.write("".join(f"{_line(step)}\n" for step in report.steps))
        size = arguments.out.stat().st_size
        sys.stdout.write(f"{arguments.out}: {size / 1e6:.1f} MB; --list shows what it holds\n")
    return int(any(step.problem or step.crashes for step in report.steps))


def _run(arguments: argparse.Namespace) -> Report:
    """Run the steps and write the report."""
    kit_folder = arguments.kit.absolute()
    if not (kit_folder / LIST).exists():
        raise KitError(
            f"{arguments.kit} holds no {LIST}; give the kit's folder with "
            "`tandem-agent selftest --kit`"
        )
    if not arguments.out.absolute().parent.is_dir():
        raise ReportError(f"{arguments.out} cannot be written: there is no such folder; make it")
    kit = load_kit(kit_folder)
    chosen = arguments.only or [step.name for step in STEPS]
    begin = time.monotonic()
    rows: dict[str, tuple[Any, ...]] = {}
    steps: list[StepRow] = []
    with tempfile.TemporaryDirectory(prefix="tandem-selftest-") as name:
        work = Work(kit, kit_folder, Path(name), _Shown())
        for step, deadline_s in zip(STEPS, deadlines_s(arguments.minutes), strict=True):
            if step.name in chosen:
                row, rows[step.name] = run_step(work, step, begin + deadline_s)
                steps.append(row)
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K")
        files = _files(work.folder)
    machines = rows.pop("machine", ())
    report = Report(
        tandem=_version(),
        kit=kit.sha256,
        profile=kit.profile,
        seconds=time.monotonic() - begin,
        steps=tuple(steps),
        machine=machines[0] if machines else Machine(),
        recorded=rows.pop("dla", ()),
        **rows,
    )
    write_report(arguments.out, report, files)
    return report


def _version() -> str:
    try:
        return metadata.version("tandem-edge")
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return ""


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
