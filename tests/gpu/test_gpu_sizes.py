"""Sizes that remember their formula, and formulas as an engine carries them."""

import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device.engine.cuda_sizes import MAX_CHARACTERS, evaluate
from device.engine.manifest import DimRange
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.shapes import formulas
from toolkit.gpu.shapes.sizes import (
    Size,
    Space,
    amount,
    ceil_div,
    fixed,
    opt,
    power_of_two,
    upper_bound,
)

DIMS = (
    DimRange(name="batch", min=1, opt=4, max=8),
    DimRange(name="height", min=32, opt=64, max=640),
)
POINTS = ((1, 32), (4, 64), (8, 640), (3, 333))
OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}


def spaces() -> list[Space]:
    return [Space(DIMS, point) for point in POINTS]


def texts(sizes: list[int]) -> set[object]:
    return {amount(size) for size in sizes}


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_sizes_compute_as_numbers_do_and_their_formulas_hold_everywhere(seed: int) -> None:
    choose = random.Random(seed)
    plain = [[*point, 3] for point in POINTS]
    sized = [[space.dim(0), space.dim(1), 3] for space in spaces()]
    for _ in range(6):
        name = choose.choice(list(OPERATIONS))
        left, right = (choose.randrange(len(plain[0])) for _ in range(2))
        number = choose.choice([None, 1, 2, 3, 16, 32, -2])
        operands = [(row[left], row[right] if number is None else number) for row in plain]
        if name in ("//", "%") and min(b for _, b in operands) < 1:
            continue
        rule = OPERATIONS[name]
        for row, (a, b) in zip(plain, operands, strict=True):
            row.append(rule(a, b))
        for row in sized:
            row.append(rule(row[left], row[right] if number is None else number))
        result = [row[-1] for row in sized]
        assert [int(size) for size in result] == [row[-1] for row in plain]
        assert len(texts(result)) == 1  # one form, wherever it was computed
        assert all(size == result[0] for size in result)
        for point, row in zip(POINTS, plain, strict=True):
            assert evaluate(amount(result[0]), point) == row[-1]


@settings(max_examples=100)
@given(a=st.integers(-40, 40), b=st.integers(-40, 40), c=st.integers(1, 33), d=st.integers(1, 9))
def test_a_size_is_never_beyond_its_bounds(a: int, b: int, c: int, d: int) -> None:
    for space in spaces():
        batch, height = space.dim(0), space.dim(1)
        size = (a * batch * height + b * height) // c * d + batch % d
        if not fixed(size):
            low, high = formulas.bounds(size.formula, space.ranges)
            assert low <= int(size) <= high == upper_bound(size)


EQUAL = {  # two ways to say the same everywhere
    "halved three times": lambda n, h: (((h + 1) // 2 + 1) // 2 + 1) // 2 - (h + 7) // 8,
    "a convolution and its ceiling": lambda n, h: (h + 2 - 3) // 2 + 1 - ceil_div(h, 2),
    "a whole number of blocks": lambda n, h: (64 * n * h) // 16 - 4 * n * h,
    "a part of a product": lambda n, h: (n * ((h + 1) // 2) * 6) // ((h + 1) // 2) - 6 * n,
    "a sum that divides": lambda n, h: (n * h + 3 * n) // (h + 3) - n,
    "common factors": lambda n, h: (6 * h + 3) // 9 - (2 * h + 1) // 3,
    "a rest of nothing": lambda n, h: (48 * n) % 16,
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_equal_everywhere_is_known_to_be(name: str) -> None:
    for space in spaces():
        difference = EQUAL[name](space.dim(0), space.dim(1))
        assert fixed(difference)
        assert difference == 0


def test_what_is_equal_at_one_point_only_is_not_equal() -> None:
    space = Space(DIMS, (1, 32))
    batch, height = space.dim(0), space.dim(1)
    assert int(batch) == 1
    assert batch != 1
    assert batch != 1.0
    assert 32 * batch != height
    assert batch not in (1, 2)
    assert batch + 0 == batch


def test_floats_take_the_number_and_lose_the_formula() -> None:
    size = Space(DIMS, (4, 64)).dim(0)
    assert size * 0.5 == 2.0
    assert not isinstance(size * 0.5, Size)


def test_a_step_makes_multiples_known() -> None:
    dims = (DimRange(name="width", min=32, opt=64, max=96, step=32),)
    width = Space(dims, (64,)).dim(0)
    assert width % 32 == 0
    assert 4 * ceil_div(width, 4) == width
    assert upper_bound(width) == 96


def test_blocks_are_chosen_at_the_optimum() -> None:
    for space in spaces():
        assert opt(space.dim(1) + 1) == 65
        assert power_of_two(space.dim(1) + 1) == 128
        assert upper_bound(space.dim(0) * space.dim(1)) == 8 * 640


def test_a_dimension_of_one_size_is_a_plain_number() -> None:
    size = Space((DimRange(name="n", min=3, opt=3, max=3),), (3,)).dim(0)
    assert type(size) is int


def test_a_formula_that_no_device_reads_is_refused() -> None:
    space = Space(DIMS, (4, 64))
    size = space.dim(1)
    for divisor in range(3, 400, 2):
        size = size + (space.dim(1) * space.dim(0) + 1) // divisor
    with pytest.raises(NotCoveredError, match=str(MAX_CHARACTERS)):
        amount(size)


@settings(max_examples=400)
@given(
    st.lists(
        st.sampled_from(["d0", "d1", "7", "40", "+", "-", "*", "//", "(", ")"]), max_size=12
    ).map("".join)
)
def test_a_formula_means_what_python_means_by_it(text: str) -> None:
    try:
        outputs = evaluate(text, (5, 9))
    except ValueError:
        return
    assert outputs == eval(text, {"d0": 5, "d1": 9})


HOSTILE = {
    "nothing": "",
    "no formula": "import os",
    "white space": "d0 + 1",
    "an unknown dimension": "d2",
    "a dimension far off": "d" + "9" * 18,
    "a sign before a value": "-d0",
    "two operators": "d0+*d1",
    "a power": "d0**9",
    "two values": "d0d1",
    "an open bracket": "(d0+1",
    "a closed bracket": "d0+1)",
    "brackets in the wrong order": ")d0(",
    "empty brackets": "()",
    "division by zero": "d0//0",
    "division by what is zero": "d0//(d0-5)",
    "division by less": "d0//(d0-9)",
    "a product beyond any size": "*".join(["999999999999"] * 20),
    "a number beyond any size": "9" * 19,
    "deep brackets": "(" * 3000 + "d0" + ")" * 3000,
    "a long sum": "+".join(["d0"] * 3000),
    "other digits": "d0+\u0663",
    "a line after it": "d0\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_formula_is_refused(name: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (the words are tested where they are read)
        evaluate(HOSTILE[name], (5, 9))


@settings(max_examples=300)
@given(st.text(max_size=60))
def test_no_text_does_more_than_be_refused(text: str) -> None:
    with suppress(ValueError):
        assert isinstance(evaluate(text, (5, 9)), int)


def test_deep_brackets_within_the_limit_are_read() -> None:
    deep = (MAX_CHARACTERS - 2) // 2
    assert evaluate("(" * deep + "d0" + ")" * deep, (5,)) == 5
