"""Which kernels are INT8: the least time in all, at its limits and one step beyond."""

from collections.abc import Iterable, Sequence
from itertools import chain, combinations

import numpy as np
import pytest

from toolkit.partition.solver.precisions import (
    Island,
    KernelTimes,
    StoredTensor,
    choose_int8,
    islands_in_half,
)

NONE = frozenset[str]()


def tensor(
    maker: str = "",
    readers: Iterable[str] = "",
    *,
    half_read: bool = False,
    copy_us: float = 0.0,
    wider_us: float = 0.0,
) -> StoredTensor:
    return StoredTensor(maker, frozenset(readers), half_read, copy_us, wider_us)


@pytest.mark.parametrize(
    ("int8_us", "copy_us", "wider_us", "in_int8"),
    [
        (9.79, 0.0, 0.0, True),  # it must gain 2 % of 10 us
        (9.81, 0.0, 0.0, False),
        (8.0, 1.79, 0.0, True),  # what reads FP16 beside it costs a second copy
        (8.0, 1.81, 0.0, False),
        (8.0, 0.0, 1.79, True),  # its result is written in FP16 and takes longer
        (8.0, 0.0, 1.81, False),
        (8.0, 1.0, 0.79, True),
        (8.0, 1.0, 0.81, False),
        (12.0, 0.0, 0.0, False),
    ],
)
def test_a_kernel_is_int8_where_it_gains_more_than_its_conversions(
    int8_us: float, copy_us: float, wider_us: float, in_int8: bool
) -> None:
    kernels = [KernelTimes("k", int8_us, 10.0)]
    tensors = [
        tensor("", "k", half_read=True, copy_us=copy_us),
        tensor("k", "", half_read=True, wider_us=wider_us),
    ]
    chosen = choose_int8(kernels, tensors, 0.02)
    assert chosen == ({"k"} if in_int8 else NONE)
    islands = islands_in_half(kernels, tensors, chosen)
    expected = Island(("k",), int8_us, 10.0, copy_us + wider_us)
    assert islands == (() if in_int8 else (expected,))


@pytest.mark.parametrize(("copy_us", "in_int8"), [(3.9, "ab"), (4.1, "")])
def test_an_island_goes_back_as_a_whole(copy_us: float, in_int8: str) -> None:
    """b alone loses 1 us, but FP16 of it beside a would take the copy of what b reads."""
    kernels = [KernelTimes("a", 5.0, 10.0), KernelTimes("b", 10.0, 9.0)]
    tensors = [
        tensor("", "a", half_read=True, copy_us=copy_us),
        tensor("a", "b", wider_us=2.0),
        tensor("b", "", half_read=True),
    ]
    assert choose_int8(kernels, tensors, 0.0) == frozenset(in_int8)
    assert choose_int8(kernels, [], 0.0) == {"a"}


def cost(
    kernels: Sequence[KernelTimes], tensors: Sequence[StoredTensor], in_int8: frozenset[str]
) -> float:
    """Added up as the module's docstring says it."""
    total = sum(k.int8_us if k.name in in_int8 else k.half_us for k in kernels)
    for row in tensors:
        mixed = row.half_read or not row.readers <= in_int8
        total += row.copy_us * (mixed and bool(row.readers & in_int8))
        total += row.wider_us * (mixed and row.maker in in_int8)
    return total


def least(kernels: Sequence[KernelTimes], tensors: Sequence[StoredTensor]) -> float:
    names = [kernel.name for kernel in kernels]
    subsets = chain.from_iterable(combinations(names, n) for n in range(len(names) + 1))
    return min(cost(kernels, tensors, frozenset(subset)) for subset in subsets)


@pytest.mark.parametrize("draw", range(40))
def test_no_other_choice_takes_less_time(draw: int, rng: np.random.Generator) -> None:
    """Against all choices of small random graphs."""
    names = "abcdef"
    kernels = [KernelTimes(name, *rng.uniform(1, 10, 2)) for name in names]
    tensors = [
        StoredTensor(
            str(rng.choice(["", *names])),
            frozenset(rng.choice(list(names), rng.integers(0, 4))),
            bool(rng.integers(0, 2)),
            *rng.uniform(0, 4, 2),
        )
        for _ in range(8)
    ]
    chosen = choose_int8(kernels, tensors, 0.0)
    assert cost(kernels, tensors, chosen) == pytest.approx(least(kernels, tensors))
    back = [name for row in islands_in_half(kernels, tensors, chosen) for name in row.kernels]
    assert sorted([*back, *chosen]) == list(names)


def test_a_kernel_that_takes_no_time_follows_its_neighbours() -> None:
    """Such as a Concat in place: INT8 between INT8, else FP16."""
    kernels = [KernelTimes("a", 5.0, 10.0), KernelTimes("concat", 0.0, 0.0)]
    joined = [tensor("a", ("concat",), copy_us=1.0, wider_us=1.0)]
    assert choose_int8(kernels, joined, 0.02) == {"a", "concat"}
    slower = [KernelTimes("a", 10.0, 10.0), kernels[1]]
    beside = [tensor("a", ("concat",), half_read=True, copy_us=1.0)]
    assert choose_int8(slower, beside, 0.02) == NONE


def test_nothing_to_choose() -> None:
    assert choose_int8([], [tensor("", "", half_read=True, copy_us=1.0)], 0.02) == NONE
    assert islands_in_half([], [], NONE) == ()
