"""The effect of a change of weights or ranges on a figure of merit, and whether to keep it.

Measure on samples that were not used to make the change.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Measured = TypeVar("Measured")

MIN_GAIN = 0.1
"""In dB of SQNR; a change that gains less does not help."""


@dataclass(frozen=True, slots=True)
class Effect:
    """A figure of merit (larger is better, such as SQNR in dB) before and after a change."""

    before: float
    after: float

    @property
    def gain(self) -> float:
        """after - before; 0 where both are infinite alike."""
        return 0.0 if self.before == self.after else self.after - self.before

    def helps(self, least: float = MIN_GAIN) -> bool:
        """True if the gain is large enough; NaN never is."""
        return self.gain >= least


def effects_of(
    measure: Callable[[Measured], Mapping[str, float]], before: Measured, after: Measured
) -> dict[str, Effect]:
    """Measure the figures of both, such as ranges before and after a pass; equal values once."""
    first = measure(before)
    return effects_between(first, first if after == before else measure(after))


def effects_between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Effect]:
    """The effects between two sets of figures."""
    return {name: Effect(figure, after[name]) for name, figure in before.items()}


def worst_of(effects: Mapping[str, Effect]) -> Effect:
    """The lowest figure before and the lowest after: the effect on the worst output."""
    return Effect(
        _lowest([effect.before for effect in effects.values()]),
        _lowest([effect.after for effect in effects.values()]),
    )


def _lowest(figures: Sequence[float]) -> float:
    """The minimum; NaN if there is one, infinite where no output is compared."""
    return math.nan if any(map(math.isnan, figures)) else min(figures, default=math.inf)
