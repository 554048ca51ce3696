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
from scripts.operators_page import SEVERAL, general, render
from tests import gpu_interpreter

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "OPERATORS.md"
PASSING = ROOT / "tests" / "golden" / "onnx_backend_gpu.txt"
SLOWEST = 10  # tests whose times are printed
LONGEST_S = 600.0  # for one test: VGG-19 takes minutes in the interpreter


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="tests whose kind/name holds this pattern")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--missing", type=Path, help="write the reasons, the commonest first")
    parser.add_argument("--write", action="store_true", help="replace the page and the list")
    given = parser.parse_args()
    cases = {n: c for n, c in load_cases().items() if re.search(given.only, n)}
    started = time.monotonic()
    results = list(run_all(cases, given.jobs))
    outcomes = {name: outcome for name, outcome, _ in results}
    print(f"{len(outcomes)} tests in {time.monotonic() - started:.0f} s")
    for status, count in Counter(one.status for one in outcomes.values()).most_common():
        print(f"{count:5} {status}")
    for name, _, seconds in sorted(results, key=lambda one: -one[2])[:SLOWEST]:
        print(f"{seconds:7.1f} s  {name}")
    if given.missing is not None:
        given.missing.write_text(missing_text(outcomes))
    if given.write and not given.only:
        write(cases, outcomes)


def run_all(
    cases: Mapping[str, Callable[[], Case]], jobs: int
) -> Iterator[tuple[str, Outcome, float]]:
    """Yield the outcome of each test and its seconds; `jobs` at a time, each in its own process."""
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
            name, process, since = running.pop(pipe)
            yield name, _answer(pipe, process), time.monotonic() - since
        for pipe, (name, process, since) in list(running.items()):
            if time.monotonic() - since > LONGEST_S:
                process.kill()
                process.join()
                del running[pipe]
                late = Outcome("error", reasons=(f"takes longer than {LONGEST_S:.0f} s",))
                yield name, late, LONGEST_S


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


def operators_of(cases: Mapping[str, Callable[[], Case]]) -> dict[str, str]:
    """Return the operator of each node test; a test of a definition has the one that it defines."""
    single = {
        name: found[0] if len(found := read().operators) == 1 else SEVERAL
        for name, read in cases.items()
        if name.startswith("node/")
    }
    plain = {name: re.sub(r"_expanded(_ver\d+)?$", "", name) for name in single}
    return {name: single.get(plain[name], single[name]) for name in single}


def listing(outcomes: Mapping[str, Outcome]) -> str:
    """Return the tests that pass, one a line; "*": with parameters as constants."""
    passed = {name: one for name, one in outcomes.items() if one.status == "passed"}
    return "".join(f"{name}{' *' * one.fixed}\n" for name, one in sorted(passed.items()))


def write(cases: Mapping[str, Callable[[], Case]], outcomes: Mapping[str, Outcome]) -> None:
    """Replace the page and the list."""
    PAGE.write_text(render(outcomes, operators_of(cases)))
    PASSING.write_text(listing(outcomes))


if __name__ == "__main__":
    main()
