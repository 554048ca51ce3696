"""Run the ONNX backend suite through the GPU path, and write what passes.

    python -m scripts.onnx_backend [--only REGEX] [--jobs 2] [--missing FILE] [--write]

Every test runs in Triton's interpreter on the CPU, in a process of its own: one that ends a process
or takes too long is an error of its own. --write replaces docs/OPERATORS.md and
tests/golden/onnx_backend_gpu.txt.
"""

import argparse
import multiprocessing
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path

from scripts.backend_suite import Case, Outcome, load_cases, run_case
from tests import gpu_interpreter

LONGEST_S = 120.0  # for one test


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="tests whose kind/name holds this pattern")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--missing", type=Path, help="write the reasons, the commonest first")
    given = parser.parse_args()
    cases = {n: c for n, c in load_cases().items() if re.search(given.only, n)}
    started = time.monotonic()
    outcomes = dict(run_all(cases, given.jobs))
    print(f"{len(outcomes)} tests in {time.monotonic() - started:.0f} s")
    for status, count in Counter(one.status for one in outcomes.values()).most_common():
        print(f"{count:5} {status}")
    if given.missing is not None:
        given.missing.write_text(missing_text(outcomes))


def run_all(cases: Mapping[str, Callable[[], Case]], jobs: int) -> Iterator[tuple[str, Outcome]]:
    """Yield the outcome of each test, `jobs` at a time, each in a process of its own."""
    context = multiprocessing.get_context("fork")  # the suite is loaded once, not for each test
    waiting = iter(cases.items())
    running: dict[Connection, tuple[str, multiprocessing.process.BaseProcess, float]] = {}
    while True:
        while len(running) < jobs and (entry := next(waiting, None)) is not None:
            name, read = entry
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run_one, args=(read, theirs))
            process.start()
            theirs.close()
            running[ours] = (name, process, time.monotonic())
        if not running:
            return
        for pipe in wait(list(running), timeout=1.0):
            assert isinstance(pipe, Connection)
            name, process, _ = running.pop(pipe)
            yield name, _answer(pipe, process)
        for pipe, (name, process, since) in list(running.items()):
            if time.monotonic() - since > LONGEST_S:
                process.kill()
                process.join()
                del running[pipe]
                yield name, Outcome("error", reasons=(f"takes longer than {LONGEST_S:.0f} s",))


def _run_one(read: Callable[[], Case], pipe: Connection) -> None:
    pipe.send(run_case(read(), gpu_interpreter.run))


def _answer(pipe: Connection, process: multiprocessing.process.BaseProcess) -> Outcome:
    try:
        outcome = pipe.recv()
    except EOFError:
        outcome = None
    process.join()
    if isinstance(outcome, Outcome):
        return outcome
    return Outcome("error", reasons=(f"the process ended with {process.exitcode}",))


def missing_text(outcomes: Mapping[str, Outcome]) -> str:
    """Say why tests did not pass: what stops most tests first, then what alone stops how many."""
    groups: dict[str, list[str]] = {}
    alone: Counter[str] = Counter()
    for name, outcome in outcomes.items():
        reasons = {f"{outcome.status}: {general(reason)}" for reason in outcome.reasons}
        for reason in reasons:
            groups.setdefault(reason, []).append(name)
        if len(reasons) == 1:
            alone.update(reasons)
    lines = ["tests (alone)  reason"]
    for reason, names in sorted(groups.items(), key=lambda one: (-len(one[1]), one[0])):
        shown = " ".join(name.split("/", 1)[1].removeprefix("test_") for name in names[:6])
        lines.append(f"{len(names):5} ({alone[reason]})  {reason}")
        lines.append(f"         {shown}{' ...' if names[6:] else ''}")
    return "\n".join(lines) + "\n"


def general(reason: str) -> str:
    """Return a reason without the names and numbers of one model."""
    reason = re.sub(r"model\.onnx( \S+)?[: ]+", "", reason)
    reason = re.sub(r"'[^']*'", "...", reason)
    return re.sub(r"\[[^\]]*\]|(?<![\w.])-?\d+(\.\d+)?(e[+-]?\d+)?(?![\w.])", "N", reason)[:160]


if __name__ == "__main__":
    main()
