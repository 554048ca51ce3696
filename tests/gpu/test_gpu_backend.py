"""The tests of the ONNX backend suite that pass on the GPU path pass again, and no others do."""

import sys
from functools import partial
from pathlib import Path

import gpu_interpreter
import pytest
from backend_fixtures import stored_case, stored_cases

from scripts.backend_suite import Outcome, load_cases, run_case, with_parameters
from scripts.onnx_backend import (
    PASSING,
    QUICK_S,
    compiled_listing,
    listing,
    read_compiled,
    runner,
    statuses,
)
from scripts.operators_page import compiled_text, render

pytest.importorskip("triton", reason="Triton is not installed")

LISTED = {line.split()[0]: line.split()[1:] for line in PASSING.read_text().splitlines()}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored_cases(tmp_path_factory)


EACH = 3  # of so many quick tests one runs always, in the order of their names


def named(at: int, name: str) -> object:
    slow = "slow" in LISTED[name] or at % EACH > 0
    return pytest.param(name, marks=pytest.mark.slow if slow else ())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [named(*row) for row in enumerate(LISTED)])
def test_a_listed_test_passes(name: str, stored: Path) -> None:
    case = stored_case(stored / name)
    if "constants" in LISTED[name]:
        fixed = with_parameters(case)
        assert fixed is not None
        case = fixed
    outcome = run_case(case, gpu_interpreter.run)
    assert (outcome.status, outcome.reasons) == ("passed", ())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_test_that_passes_is_listed() -> None:
    unlisted = {name: read for name, read in load_cases().items() if name not in LISTED}
    results = {name: run_case(read(), gpu_interpreter.run) for name, read in unlisted.items()}
    assert [name for name, one in results.items() if one.status == "passed"] == []


def test_the_script_runs_in_the_interpreter_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    run = runner(on_gpu=False)
    assert isinstance(run, partial)
    assert run.keywords == {"run": gpu_interpreter.run}


def test_the_page_counts_what_came_out() -> None:
    outcomes = {
        "node/test_add": Outcome("passed"),
        "node/test_clip": Outcome("passed", fixed=True),
        "node/test_less": Outcome("not covered", reasons=("node 'a' (Less) has no kernel yet",)),
        "simple/test_x": Outcome("wrong", reasons=("3 of 4 differ",)),
    }
    operators = {"node/test_add": "Add", "node/test_clip": "Clip", "node/test_less": "Less"}
    page = render(outcomes, operators).splitlines()
    assert any(line.startswith("| node | 3 | 2 (66.7 %) | 1 | 1 | 1 | 0 |") for line in page)
    assert any(line.startswith("| all | 4 | 2 (50.0 %) | 1 | 1 | 1 | 1 |") for line in page)
    assert "| Add | steps | 1 | 1 | 0 |  |" in page
    assert any("`test_x`" in line for line in page)


def test_the_quickest_tests_run_always() -> None:
    outcomes = {
        "a": Outcome("passed"),
        "b": Outcome("passed", fixed=True),
        "c": Outcome("wrong", reasons=("all differ",)),
        "d": Outcome("passed", fixed=True),
    }
    seconds = {"a": QUICK_S / 2, "b": 0.7 * QUICK_S, "c": 0.0, "d": QUICK_S / 2}
    assert listing(outcomes, seconds).splitlines() == ["a", "b constants slow", "d constants"]


def test_the_page_says_what_came_out_on_a_gpu() -> None:
    outcomes = {
        "node/test_add": Outcome("passed"),
        "node/test_clip": Outcome("passed"),
        "node/test_exp": Outcome("passed"),
        "node/test_less": Outcome("not covered", reasons=("node 'a' (Less) has no kernel yet",)),
        "real/test_large": Outcome("error", reasons=("takes longer than 600 s",)),
    }
    on_gpu = {
        "node/test_add": Outcome("passed"),
        "node/test_clip": Outcome("wrong", reasons=("3 of 4 differ:\n by 2",)),
        "node/test_less": Outcome("not covered", reasons=("node 'a' (Less) has no kernel yet",)),
        "real/test_large": Outcome("passed"),
    }
    text = compiled_listing(statuses(on_gpu))
    assert "node/test_clip wrong 3 of 4 differ: by 2\n" in text
    report = compiled_text(outcomes, read_compiled(text))
    assert "2 of the 3 tests that pass in the interpreter, of which 1 gave" in report
    assert report.endswith("does not finish 1 of 1. Not: `test_clip`.")
    assert "Compiled for an H200" in render(outcomes, {}, read_compiled(text))
