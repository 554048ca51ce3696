"""Run the ONNX backend suite through the GPU path, and record which tests pass.

    python -m scripts.onnx_backend [--only REGEX] [--jobs 2] [--missing FILE] [--write]
    python -m scripts.onnx_backend --gpu [--only REGEX] [--jobs 16] [--within SECONDS]

Every test runs in Triton's interpreter on the CPU, in a separate process: a crash or timeout is an
error of that test alone. --write replaces docs/operators.md and
tests/golden/onnx_backend_gpu.txt.

With --gpu kernels are compiled and run on this machine's GPU, and the results are added to
tests/golden/onnx_backend_h200.txt, which the page reads. Recorded tests are not run again, so a
stopped run resumes. Tests are shuffled, so that a stopped run covers all operators.
"""

import argparse
import math
import multiprocessing
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from multiprocessing.connection import Connection, wait
from pathlib import Path

from scripts.backend_suite import Case, Outcome, load_cases, run_case
from scripts.operators_page import SEVERAL, general, render

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "operators.md"
PASSING = ROOT / "tests" / "golden" / "onnx_backend_gpu.txt"
COMPILED = ROOT / "tests" / "golden" / "onnx_backend_h200.txt"
QUICK_S = 90.0  # of CPU: what the tests that always run may take
SLOWEST = 10  # tests whose times are printed


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="tests whose kind/name holds this pattern")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--missing", type=Path, help="write the reasons, the commonest first")
    parser.add_argument("--longest", type=float, default=600.0, help="seconds for one test")
    parser.add_argument("--write", action="store_true", help="replace the page and the list")
    parser.add_argument("--gpu", action="store_true", help="compile, and run on this GPU")
    parser.add_argument("--within", type=float, default=math.inf, help="begin no test after that")
    arguments = parser.parse_args()
    cases = {n: c for n, c in load_cases().items() if re.search(arguments.only, n)}
    started = time.monotonic()
    known = read_compiled(COMPILED.read_text() if COMPILED.exists() else "")
    if arguments.gpu:
        waiting = [name for name in cases if name not in known]
        random.Random(0).shuffle(waiting)
        cases = {name: cases[name] for name in waiting}
    results = list(
        run_all(cases, runner(arguments.gpu), arguments.jobs, arguments.longest, arguments.within)
    )
    outcomes = {name: outcome for name, outcome, _ in results}
    print(f"{len(outcomes)} tests in {time.monotonic() - started:.0f} s")
    for status, count in Counter(outcome.status for outcome in outcomes.values()).most_common():
        print(f"{count:5} {status}")
    for name, _, seconds in sorted(results, key=lambda result: -result[2])[:SLOWEST]:
        print(f"{seconds:7.1f} s  {name}")
    if arguments.missing is not None:
        arguments.missing.write_text(missing_text(outcomes))
    if arguments.gpu:
        COMPILED.write_text(compiled_listing({**known, **statuses(outcomes)}))
    elif arguments.write and not arguments.only:
        PAGE.write_text(render(outcomes, operators_of(cases), known))
        PASSING.write_text(listing(outcomes, {name: seconds for name, _, seconds in results}))


def runner(on_gpu: bool) -> Callable[[Case], Outcome]:
    """Return the runner of a test: compiled on this machine's GPU, or in Triton's interpreter."""
    if on_gpu:
        from scripts import gpu_suite

        return partial(run_case, run=gpu_suite.run_compiled, gpu=gpu_suite.target())
    sys.path.insert(0, str(ROOT / "tests" / "fixtures"))
    import gpu_interpreter  # it makes kernels interpretable for the whole process

    return partial(run_case, run=gpu_interpreter.run)


def run_all(
    cases: Mapping[str, Callable[[], Case]],
    run: Callable[[Case], Outcome],
    jobs: int,
    longest_s: float,
    within_s: float,
) -> Iterator[tuple[str, Outcome, float]]:
    """Yield each test's outcome and seconds of CPU; `jobs` at a time, each in its own process.

    No test starts after `within_s`.
    """
    began = time.monotonic()
    context = multiprocessing.get_context("fork")  # the suite is loaded once, not for each test
    waiting = iter(cases.items())
    running: dict[Connection, tuple[str, multiprocessing.process.BaseProcess, float]] = {}
    while True:
        while len(running) < jobs and time.monotonic() - began < within_s:
            entry = next(waiting, None)
            if entry is None:
                break
            name, read = entry
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run_one, args=(read, run, theirs))
            process.start()
            theirs.close()
            running[ours] = (name, process, time.monotonic())
        if not running:
            return
        for pipe in wait(list(running), timeout=1.0):
            assert isinstance(pipe, Connection)
            name, process, _ = running.pop(pipe)
            yield name, *_answer(pipe, process)
        for pipe, (name, process, since) in list(running.items()):
            if time.monotonic() - since > longest_s:
                process.kill()
                process.join()
                del running[pipe]
                late = Outcome("error", reasons=(f"takes longer than {longest_s:.0f} s",))
                yield name, late, longest_s


def _run_one(read: Callable[[], Case], run: Callable[[Case], Outcome], pipe: Connection) -> None:
    pipe.send((run(read()), time.process_time()))


def _answer(
    pipe: Connection, process: multiprocessing.process.BaseProcess
) -> tuple[Outcome, float]:
    try:
        answer: tuple[Outcome, float] | None = pipe.recv()
    except EOFError:
        answer = None
    process.join()
    if answer is not None:
        return answer
    return Outcome("error", reasons=(f"the process ended with {process.exitcode}",)), 0.0


def missing_text(outcomes: Mapping[str, Outcome]) -> str:
    """List why tests did not pass, the most frequent reason first; "alone": the only reason."""
    groups: dict[str, list[str]] = {}
    alone: Counter[str] = Counter()
    for name, outcome in outcomes.items():
        reasons = {f"{outcome.status}: {general(reason)}" for reason in outcome.reasons}
        for reason in reasons:
            groups.setdefault(reason, []).append(name)
        if len(reasons) == 1:
            alone.update(reasons)
    lines = ["tests (alone)  reason"]
    for reason, names in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        shown = " ".join(name.split("/", 1)[1].removeprefix("test_") for name in names[:6])
        lines.append(f"{len(names):5} ({alone[reason]})  {reason}")
        lines.append(f"         {shown}{' ...' if names[6:] else ''}")
    return "\n".join(lines) + "\n"


def operators_of(cases: Mapping[str, Callable[[], Case]]) -> dict[str, str]:
    """Return the operator of each node test; a function test has the operator it defines."""
    single = {
        name: operators[0] if len(operators := read().operators) == 1 else SEVERAL
        for name, read in cases.items()
        if name.startswith("node/")
    }
    plain = {name: re.sub(r"_expanded(_ver\d+)?$", "", name) for name in single}
    return {name: single.get(plain[name], single[name]) for name in single}


def listing(outcomes: Mapping[str, Outcome], seconds: Mapping[str, float]) -> str:
    """Return the tests that pass, one a line, each with its marks.

    "constants": with parameters as constants; "slow": not among the quickest that together take
    QUICK_S.
    """
    passed = [name for name, outcome in outcomes.items() if outcome.status == "passed"]
    quickest = sorted(passed, key=seconds.__getitem__)
    sums = accumulate(seconds[name] for name in quickest)
    spent = dict(zip(quickest, sums, strict=True))
    lines = []
    for name in sorted(passed):
        marks = ("constants" * outcomes[name].fixed, "slow" * (spent[name] > QUICK_S))
        lines.append(" ".join(filter(None, (name, *marks))))
    return "".join(f"{line}\n" for line in lines)


def statuses(outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """Return the status of each test, with the reason if it is wrong or an error."""
    return {
        name: " ".join((outcome.status, *"".join(outcome.reasons[:1]).split()))
        if outcome.status in ("wrong", "error")
        else outcome.status
        for name, outcome in outcomes.items()
    }


def compiled_listing(status_of: Mapping[str, str]) -> str:
    """Return the tests that ran on a GPU and their status, one per line."""
    return "".join(f"{name} {status_of[name]}\n" for name in sorted(status_of))


def read_compiled(text: str) -> dict[str, str]:
    """Read what `compiled_listing` wrote."""
    return dict(line.split(" ", 1) for line in text.splitlines())


if __name__ == "__main__":
    main()
