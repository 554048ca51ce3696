"""What a change of a model or of its ranges does to a figure of merit, and whether to keep it.

Measure on samples that the change was not made with.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Made = TypeVar("Made")

LEAST_GAIN = 0.1
"""In the unit of the figure (dB of SQNR); for less, a model had better stay as it came."""


@dataclass(frozen=True, slots=True)
class Effect:
    """A figure of merit (larger is better, such as SQNR in dB) before and after a change."""

    before: float
    after: float

    @property
    def gain(self) -> float:
        """after - before; 0 where both are infinite alike."""
        return 0.0 if self.before == self.after else self.after - self.before

    def helps(self, least_gain: float = LEAST_GAIN) -> bool:
        """Whether the gain is worth a change; a figure that is not a number never wins."""
        return self.gain >= least_gain


def effects_of(
    measure: Callable[[Made], Mapping[str, float]], before: Made, after: Made
) -> dict[str, Effect]:
    """Measure both by name, such as ranges before and after a pass; equal ones only once."""
    first = measure(before)
    return effects_between(first, first if after == before else measure(after))


def effects_between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Effect]:
    """The effects on figures that were measured already."""
    return {name: Effect(figure, after[name]) for name, figure in before.items()}


def worst_of(effects: Mapping[str, Effect]) -> Effect:
    """The least figure before and the least after: what the worst output has."""
    return Effect(
        _least([effect.before for effect in effects.values()]),
        _least([effect.after for effect in effects.values()]),
    )


def _least(figures: Sequence[float]) -> float:
    """Nothing is worse than what is not a number."""
    return math.nan if any(map(math.isnan, figures)) else min(figures)
