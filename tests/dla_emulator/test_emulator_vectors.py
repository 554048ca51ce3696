"""The DLA's stages give the known answers, and would not with any other rounding."""

from collections.abc import Callable

import numpy as np
import pytest
from emulator_vectors import CHECKS, vectors
from emulator_vectors_fixtures import WRONG, half_even, half_up

from device.dla_emulator.arithmetic import rounding

ROWS = {
    "output_converter": 1275,
    "stage_x": 597,
    "operand_converter": 200,
    "stage_y": 300,
    "average": 896,
    "accumulator": 1553,
    "input_converter": 300,
    "lookup_index": 400,
    "lookup_value": 400,
}


def test_every_known_answer_is_checked() -> None:
    assert {
        name: len(rows["out" if "out" in rows else "x"]) for name, rows in vectors().items()
    } == ROWS
    assert CHECKS.keys() == ROWS.keys()


@pytest.mark.parametrize("group", ROWS)
def test_the_stages_give_the_known_answers(group: str) -> None:
    rows = vectors()[group]
    wrong = np.flatnonzero(CHECKS[group](rows))
    assert [{name: int(column[i]) for name, column in rows.items()} for i in wrong[:3]] == []


# What the known answers do not tell apart; test_emulator_stages.py tells all apart by halves.
UNTOLD = {
    ("input_converter", half_up),
    ("input_converter", half_even),
    ("stage_y", half_up),
}
# Where only an index is looked for, nothing is rounded.
TOLD = [
    (group, wrong)
    for group in ROWS
    for wrong in WRONG
    if group != "lookup_index" and (group, wrong) not in UNTOLD
]


@pytest.mark.parametrize(
    ("group", "wrong"), TOLD, ids=[f"{group}-{wrong.__name__}" for group, wrong in TOLD]
)
def test_no_other_rounding_gives_them(
    group: str, wrong: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "shift_right", wrong)
    assert CHECKS[group](vectors()[group]).any()


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_wrong_roundings_are_wrong_only_in_how_they_round(wrong: Callable[..., np.ndarray]) -> None:
    values = np.arange(-4096, 4096, 16)
    assert (wrong(values, 4) == rounding.shift_right(values, 4)).all()
