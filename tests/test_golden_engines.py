"""Engines before their kernels are compiled are the kept ones: see `scripts/golden_engines.py`."""

from dataclasses import fields, replace

import pytest

from scripts import golden_engines
from scripts.golden_engines import (
    CASES,
    Case,
    check_coverage,
    differences,
    measure,
    measure_all,
    read_goldens,
)


def test_every_case_is_kept_and_makes_its_kernels() -> None:
    kept = read_goldens()
    assert list(kept) == [case.name for case in CASES]
    check_coverage(kept)


@pytest.mark.parametrize("case", [c for c in CASES if c.quick], ids=lambda case: case.name)
def test_a_small_engine_is_the_kept_one(case: Case) -> None:
    assert differences(read_goldens()[case.name], measure(case)) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_engines_are_the_kept_ones() -> None:
    kept = read_goldens()
    found = measure_all(CASES, print)
    wrong = {name: differences(kept[name], one) for name, one in found.items()}
    assert {name: lines for name, lines in wrong.items() if lines} == {}


def test_a_renamed_kernel_or_parameter_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables give the kept names, so that what has another name now is found the same."""
    (case,) = (case for case in CASES if case.name == "moves agx-thor fp16")
    plain = measure(case)
    renamed = dict(golden_engines.RENAMED_KERNELS)
    monkeypatch.setattr(golden_engines, "RENAMED_KERNELS", renamed | {"pad": "padding"})
    assert "padding" in measure(case).kernels
    monkeypatch.setattr(golden_engines, "RENAMED_KERNELS", renamed)
    parameters = golden_engines.RENAMED_PARAMETERS | {"x": "source"}
    monkeypatch.setattr(golden_engines, "RENAMED_PARAMETERS", parameters)
    names = [line.split(":")[0] for line in differences(plain, measure(case))]
    assert names == ["launches"]


def test_a_difference_tells_where_it_is() -> None:
    kept = next(iter(read_goldens().values()))
    for one in fields(kept):
        changed = replace(kept, **{one.name: None})
        assert [line.split(":")[0] for line in differences(kept, changed)] == [one.name]
