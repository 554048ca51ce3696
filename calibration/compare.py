"""Compare two sets of ranges."""

import struct
from collections.abc import Mapping

import msgspec

from calibration.table import scale_of


class RangeChange(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor with another range, amax, in the second of two sets than in the first."""

    tensor: str
    first: float
    second: float

    @property
    def factor(self) -> float:
        """The larger range divided by the smaller."""
        return max(self.first, self.second) / min(self.first, self.second)


class RangesComparison(msgspec.Struct, frozen=True, kw_only=True):
    """`equal`: number of tensors with the same float32 scale; `changed`: the largest factor first;
    the others: names in only one of the two sets.
    """

    equal: int
    changed: tuple[RangeChange, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]


def compare_ranges(first: Mapping[str, float], second: Mapping[str, float]) -> RangesComparison:
    """Compare two sets of ranges, tensor -> amax."""
    both = [name for name in first if name in second]
    changed = [
        RangeChange(tensor=name, first=first[name], second=second[name])
        for name in both
        if _scale_bits(first[name]) != _scale_bits(second[name])
    ]
    return RangesComparison(
        equal=len(both) - len(changed),
        changed=tuple(sorted(changed, key=lambda change: (-change.factor, change.tensor))),
        only_first=tuple(name for name in first if name not in second),
        only_second=tuple(name for name in second if name not in first),
    )


def _scale_bits(amax: float) -> bytes:
    return struct.pack(">f", scale_of(amax))
