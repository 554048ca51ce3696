"""Which kernels of a GPU compute in INT8: the choice with the least time, conversions included.

A tensor that is read both in INT8 and in FP16 is stored twice, and a kernel makes the second copy.
A kernel in INT8 whose result is read in FP16 writes twice the bytes that its time in INT8 counts.

All costs are of a kernel or of a difference of two choices, so that this is a minimum cut: the
vertices of the linear program are whole numbers.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from toolkit.partition.solver.milp import Expr, Program, total

_FREE_US = (
    1e-3  # FP16 of a kernel that takes no time in either precision: it follows its neighbours
)


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """The times of a kernel in both precisions, in us."""

    name: str
    int8_us: float
    half_us: float


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor between kernels, and what its conversions take, in us.

    `maker`: the kernel that writes it, "" for one whose precision is no choice; `readers`: those
    that read it in INT8 if they compute in INT8; `half_read`: others read it in FP16, too.
    `copy_us`: the kernel that makes a second copy; `wider_us`: what the maker takes longer in INT8
    if it writes FP16.
    """

    maker: str
    readers: frozenset[str]
    half_read: bool
    copy_us: float
    wider_us: float


@dataclass(frozen=True, slots=True)
class Island:
    """Kernels that go back to FP16 together, with their times, in us.

    `conversions_us`: what conversions would take more if they were INT8.
    """

    kernels: tuple[str, ...]
    int8_us: float
    half_us: float
    conversions_us: float


def choose_int8(
    kernels: Sequence[KernelTimes], tensors: Sequence[StoredTensor], min_gain: float
) -> frozenset[str]:
    """Return the kernels that compute in INT8, by name, so that the total time is the least.

    `min_gain`: the share of its time in FP16 that a kernel must gain.
    """
    if not kernels:
        return frozenset()
    program = Program()
    column = {kernel.name: program.column(0.0, 1.0) for kernel in kernels}
    costs = []
    for kernel in kernels:
        half_us = max((1.0 - min_gain) * kernel.half_us, _FREE_US if not kernel.int8_us else 0.0)
        costs.append(Expr(half_us).add(column[kernel.name], kernel.int8_us - half_us))
    for tensor in tensors:
        all_int8 = program.column(0.0, 0.0 if tensor.half_read else 1.0)
        for name in tensor.readers:
            program.at_least(column[name] - all_int8)
        if tensor.readers and tensor.copy_us:
            copied = program.column(0.0, 1.0)
            for name in tensor.readers:
                program.at_least((copied + all_int8) - column[name])
            costs.append(Expr().add(copied, tensor.copy_us))
        if tensor.maker and tensor.wider_us:
            wider = program.column(0.0, 1.0)
            program.at_least((wider + all_int8) - column[tensor.maker])
            costs.append(Expr().add(wider, tensor.wider_us))
    solution = program.relaxed(total(costs))
    assert solution is not None  # all in FP16 is one
    values, _ = solution
    return frozenset(name for name, expr in column.items() if expr.at(values) > 0.5)


def islands_in_half(
    kernels: Sequence[KernelTimes], tensors: Sequence[StoredTensor], in_int8: Collection[str]
) -> tuple[Island, ...]:
    """Return the kernels that are not in INT8, those together that a tensor connects."""
    back = {kernel.name: kernel for kernel in kernels if kernel.name not in in_int8}
    joined = {name: {name} for name in back}
    for tensor in tensors:
        touching = [name for name in (*tensor.readers, tensor.maker) if name in back]
        union = set[str]().union(*(joined[name] for name in touching))
        joined |= dict.fromkeys(union, union)
    groups = {id(group): group for group in joined.values()}.values()
    now_us, islands = _conversions_us(tensors, in_int8), []
    for group in groups:
        rows = [kernel for name, kernel in back.items() if name in group]
        islands.append(
            Island(
                tuple(kernel.name for kernel in rows),
                sum(kernel.int8_us for kernel in rows),
                sum(kernel.half_us for kernel in rows),
                _conversions_us(tensors, {*in_int8, *group}) - now_us,
            )
        )
    return tuple(islands)


def _conversions_us(tensors: Sequence[StoredTensor], in_int8: Collection[str]) -> float:
    """Return what copies and wider results take where `in_int8` compute in INT8."""
    time_us = 0.0
    for tensor in tensors:
        int8_readers = sum(name in in_int8 for name in tensor.readers)
        if tensor.half_read or int8_readers < len(tensor.readers):
            time_us += tensor.copy_us if int8_readers else 0.0
            time_us += tensor.wider_us if tensor.maker in in_int8 else 0.0
    return time_us
