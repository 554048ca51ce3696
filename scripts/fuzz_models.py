"""Give damaged models to commands: each ends in a result or in one sentence that names the file.

    python -m scripts.fuzz_models --count 2000 --seed 1 --jobs 2          pieces, in plan and build
    python -m scripts.fuzz_models --whole --count 3000 --seed 1 --jobs 2  whole files, all commands
    python -m scripts.fuzz_models --count 100000 --jobs 16 --seconds 1500
    python -m scripts.fuzz_models --only 1234 --keep bad/

Mutants are made in child processes with a limit of memory and of time, so that a crash, a hang and
a hunger for memory show as what they are. A seed always gives the same model and the same command.
"""

import argparse
import faulthandler
import json
import math
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import click

from device.engine.manifest import Precision
from device.errors import TandemError
from scripts.fuzz_commands import command_of, run_command, run_process
from scripts.mutants.mutant import mutant
from scripts.mutants.whole import damaged, name_of
from scripts.mutants.whole import whole as undamaged
from toolkit.build import plan
from toolkit.cli.crashes import CANNOT_COMPARE
from toolkit.engine.build import build_engine
from toolkit.engine.options import BuildOptions
from toolkit.graph import run_limit
from toolkit.graph.max_memory import set_max_memory
from toolkit.importers.onnx import ModelBytes
from toolkit.partition.planning.plan import PlanOptions

MEMORY_BYTES = 6 << 30  # address space of a child, libraries included
MODEL_BYTES = 2 << 30  # what a model may take
MAX_SECONDS = 60.0  # for one mutant, on a busy machine
BATCH = 100  # mutants of one child
NAME = "mutant.onnx"
OUTCOMES = ("done", "refused", "crash said", "faulty")
SEARCH = PlanOptions(seconds=0.2)


@dataclass(frozen=True, slots=True)
class MutantCommand:
    """A command to give a mutant to; `precision` None: the default."""

    command: str
    profile: str
    precision: Precision | None = None


WAYS = (
    MutantCommand("build", "laptop"),
    MutantCommand("build", "agx-orin-64gb", "fp16"),
    MutantCommand("build", "xavier-nx-16gb", "int8"),
    MutantCommand("build", "jetson-nano"),
    MutantCommand("plan", "agx-orin-64gb", "int8"),
    MutantCommand("plan", "xavier-nx-16gb", "fp16"),
    MutantCommand("plan", "laptop", "fp32"),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A mutant that ended otherwise: `where` is the place of the fault, equal for equal faults."""

    seed: int
    where: str
    details: str


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of the mutants of a run."""

    outcomes: Counter[str] = field(default_factory=Counter)
    commands: Counter[tuple[str, str]] = field(default_factory=Counter)  # with the outcome
    faults: list[Fault] = field(default_factory=list)


def run_way(way: MutantCommand, data: bytes, folder: Path) -> None:
    """Give a model to a command. Raises what the command raises."""
    source = ModelBytes(NAME, data)
    if way.command == "plan":
        path = folder / NAME
        path.write_bytes(data)
        plan(path, profile=way.profile, precision=way.precision or "fp16", options=SEARCH)
        return
    options = BuildOptions(
        precision=way.precision, dummy_ranges=way.precision == "int8", kernels=False, plan=SEARCH
    )
    build_engine(source, way.profile, folder / "mutant.engine", options)


def outcome_of(seed: int, folder: Path, *, whole: bool = False) -> str | Fault:
    """Return "done" or "refused", or what went wrong. `whole`: the seed is one of a whole file."""
    title, run = _attempt(seed, folder, whole=whole)
    try:
        run()
    except (TandemError, click.ClickException) as err:
        return _judged(
            seed, title, err.message if isinstance(err, click.ClickException) else str(err)
        )
    except BaseException as err:
        if isinstance(err, KeyboardInterrupt):
            raise
        return Fault(seed, f"{title}: {type(err).__name__} {_place(err)}", traceback.format_exc())
    return "done"


def _attempt(seed: int, folder: Path, *, whole: bool) -> tuple[str, Callable[[], None]]:
    """Return the name of a seed's command, and what runs it."""
    if whole:
        line, name = command_of(seed), name_of(seed)
        data = damaged(seed)
        return f"{line.title} of {name}", lambda: run_command(line, data, undamaged(name), folder)
    way = _way(seed)
    return way.command, lambda: run_way(way, mutant(seed), folder)


def _title(seed: int, *, whole: bool) -> str:
    """Name the command of a seed."""
    return command_of(seed).title if whole else _way(seed).command


def _way(seed: int) -> MutantCommand:
    return WAYS[random.Random(f"way {seed}").randrange(len(WAYS))]


def _judged(seed: int, title: str, message: str) -> str | Fault:
    """Judge the sentence of a refusal: one line that names the file."""
    if "does not start" in message:
        return Fault(seed, "the child of ONNX does not start", message)
    if Path(NAME).stem not in message:
        return Fault(seed, f"{title}: no file in {_shape(message)}", message)
    if "\n" in message or len(message) > 7000:
        return Fault(seed, f"{title}: a long message", message)
    return "refused"


def _place(err: BaseException) -> str:
    """Name the innermost line of ours and the line that raised."""
    frames = traceback.extract_tb(err.__traceback__)
    root = str(Path(__file__).parents[1])
    ours = [f for f in frames if f.filename.startswith(root) and "/scripts/" not in f.filename]
    places = [f"{Path(f.filename).name}:{f.lineno}" for f in (*ours[-1:], *frames[-1:])]
    return " ".join(dict.fromkeys(places))


def _shape(message: str) -> str:
    """Return a message without its names and numbers."""
    return re.sub(r"'[^']*'|\d+", "_", message)[:90]


class _TooSlow(BaseException):
    """A mutant took longer than MAX_SECONDS."""


def _end_mutant(number: int, frame: FrameType | None) -> None:
    raise _TooSlow


def child(first: int, count: int, *, whole: bool) -> None:
    """Try some seeds; print a JSON line for each."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    set_max_memory(MODEL_BYTES)
    run_limit.MAX_RUN_SECONDS = MAX_SECONDS / 4  # a loop without an end is refused, not waited for
    signal.signal(signal.SIGALRM, _end_mutant)
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what native libraries print is no row
    for seed in range(first, first + count):
        print(f"seed {seed}", file=sys.stderr, flush=True)  # the last one is the culprit
        with tempfile.TemporaryDirectory() as folder:
            signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
            faulthandler.dump_traceback_later(2 * MAX_SECONDS, exit=True)
            outcome = outcome_of(seed, Path(folder), whole=whole)
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(_row(seed, outcome)), file=rows, flush=True)


def _row(seed: int, outcome: str | Fault) -> dict[str, object]:
    if isinstance(outcome, Fault):
        return {"seed": seed, "where": outcome.where, "details": outcome.details}
    return {"seed": seed, "outcome": outcome}


def run(
    first: int,
    count: int,
    jobs: int = 1,
    report: Callable[[str], None] = lambda line: None,
    seconds: float = math.inf,
    *,
    whole: bool = False,
) -> Tally:
    """Try `count` seeds from `first` in children; after a crash the next child goes on.

    After `seconds` no further child is started. `whole`: seeds of whole files, in all commands.
    """
    tally, until_s = Tally(), time.monotonic() + seconds
    spans = [
        (begin, min(BATCH, first + count - begin)) for begin in range(first, first + count, BATCH)
    ]
    kind = ("--whole",) if whole else ()
    with ThreadPoolExecutor(jobs) as threads:
        for rows in threads.map(lambda span: _run_span(span, until_s, kind), spans):
            for row in rows:
                outcome = row.get("outcome", "faulty")
                tally.outcomes[outcome] += 1
                tally.commands[_title(row["seed"], whole=whole), outcome] += 1
                if "where" in row:
                    tally.faults.append(Fault(row["seed"], row["where"], row["details"]))
            report(f"{sum(tally.outcomes.values())} mutants, {len(tally.faults)} faults")
    return tally


def _run_span(span: tuple[int, int], until_s: float, kind: Sequence[str]) -> list[dict[str, Any]]:
    first, count = span
    rows: list[dict[str, Any]] = []
    while len(rows) < count and time.monotonic() < until_s:
        process = subprocess.run(
            [
                *(sys.executable, "-m", "scripts.fuzz_models"),
                *("--child", str(first + len(rows)), str(count - len(rows)), *kind),
            ],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            cwd=Path(__file__).parents[1],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        rows += [json.loads(line) for line in process.stdout.splitlines()]
        if len(rows) < count:
            crash = _crash(first + len(rows), process.returncode, process.stderr)
            whole = "--whole" in kind and process.returncode < 0
            rows.append(_survived(crash) if whole else _row(crash.seed, crash))
    return rows


def _survived(crash: Fault) -> dict[str, Any]:
    """Give a mutant that crashed to the command as a process, which has to say so."""
    seed, line, name = crash.seed, command_of(crash.seed), name_of(crash.seed)
    with tempfile.TemporaryDirectory() as folder:
        status, message = run_process(line, damaged(seed), undamaged(name), Path(folder))
    if status not in (1, CANNOT_COMPARE) or "crashed in" not in message:
        return _row(seed, crash)
    judged = _judged(seed, f"{line.title} of {name}", message)
    return _row(seed, "crash said" if judged == "refused" else judged)


def _crash(seed: int, code: int, errors: str) -> Fault:
    """Return the fault of a mutant that took its process with it."""
    if f"seed {seed}" not in errors:
        raise RuntimeError(f"a child did not start: {errors[-2000:]}")
    place = next(iter(re.findall(r'File "[^"]*/([^/"]+)", line (\d+)', errors)), ("?", "?"))
    return Fault(seed, f"exit {code} at {':'.join(place)}", errors[-3000:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the fuzzer; exit status 1 if any mutant was neither built nor refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=2000, help="mutants to try (2000)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--jobs", type=int, default=1, help="child processes at a time (1)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no more after these")
    parser.add_argument("--whole", action="store_true", help="whole files, in all commands")
    parser.add_argument("--only", type=int, help="try this seed alone, here")
    parser.add_argument("--keep", type=Path, help="folder for the models of faulty seeds")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(*options.child, whole=options.whole)
        return 0
    if options.only is not None:
        options.seed, options.count, options.jobs = options.only, 1, 1
    begin = time.monotonic()
    tally = run(
        options.seed,
        options.count,
        options.jobs,
        lambda line: print(line, file=sys.stderr),
        options.seconds,
        whole=options.whole,
    )
    if options.keep is not None:
        options.keep.mkdir(exist_ok=True)
        for fault in tally.faults:
            data = damaged(fault.seed) if options.whole else mutant(fault.seed)
            (options.keep / f"{fault.seed}.onnx").write_bytes(data)
    _print(tally, time.monotonic() - begin, as_json=options.json)
    return 1 if tally.faults else 0


def _print(tally: Tally, seconds: float, *, as_json: bool) -> None:
    if as_json:
        faults = [{"seed": f.seed, "where": f.where, "details": f.details} for f in tally.faults]
        rows = [[*row, count] for row, count in sorted(tally.commands.items())]
        result = {"outcomes": tally.outcomes, "commands": rows, "faults": faults}
        print(json.dumps(result | {"seconds": seconds}))
        return
    total = sum(tally.outcomes.values())
    print(f"{total} mutants: {dict(tally.outcomes)} in {seconds:.0f} s")
    for command in sorted({command for command, _ in tally.commands}):
        counts = {name: tally.commands[command, name] for name in OUTCOMES}
        print(f"{command:18}" + "".join(f"{count:6} {name}" for name, count in counts.items()))
    places = Counter(fault.where for fault in tally.faults)
    for where, count in places.most_common():
        fault = next(fault for fault in tally.faults if fault.where == where)
        print(f"\n{count} x {where}, as of seed {fault.seed}:\n{fault.details[-1500:]}")


if __name__ == "__main__":
    sys.exit(main())
