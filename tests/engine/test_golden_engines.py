"""Uncompiled engines equal the golden file: see `scripts/golden_engines.py`."""

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


def test_every_case_is_in_the_golden_file_and_launches_its_kernels() -> None:
    expected = read_goldens()
    assert list(expected) == [case.name for case in CASES]
    check_coverage(expected)


@pytest.mark.parametrize("case", [c for c in CASES if c.quick], ids=lambda case: case.name)
def test_a_small_engine_equals_its_golden_row(case: Case) -> None:
    assert differences(read_goldens()[case.name], measure(case)) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_engines_equal_their_golden_rows() -> None:
    expected = read_goldens()
    measured = measure_all(CASES, print)
    wrong = {name: differences(expected[name], golden) for name, golden in measured.items()}
    assert {name: lines for name, lines in wrong.items() if lines} == {}


def test_a_renamed_kernel_or_parameter_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables map new names to those in the file, so renamed code compares equal."""
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
    expected = next(iter(read_goldens().values()))
    for field in fields(expected):
        changed = replace(expected, **{field.name: None})
        assert [line.split(":")[0] for line in differences(expected, changed)] == [field.name]
