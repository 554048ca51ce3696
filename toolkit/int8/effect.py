"""What a change of a model or of its ranges does to a figure of merit, and whether to keep it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import onnx_ir as ir

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


def effect_of(measure: Callable[[Made], float], before: Made, after: Made) -> Effect:
    """Measure both, such as ranges before and after a pass; equal ones only once."""
    first = measure(before)
    return Effect(first, first if after == before else measure(after))


def effects_of(
    measure: Callable[[Made], Mapping[str, float]], before: Made, after: Made
) -> dict[str, Effect]:
    """`effect_of` for each of several figures, such as SQNR by output."""
    return effects_between(first := measure(before), first if after == before else measure(after))


def effects_between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Effect]:
    """The same from figures that were measured already."""
    return {name: Effect(figure, after[name]) for name, figure in before.items()}


def worst_of(effects: Mapping[str, Effect]) -> Effect:
    """The least figure before and the least after: what the worst output has."""
    return Effect(
        min(effect.before for effect in effects.values()),
        min(effect.after for effect in effects.values()),
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """The model to go on with: the changed one only if it was measured to be better."""

    model: ir.Model
    effect: Effect
    kept: bool


def keep_if_better(
    measure: Callable[[ir.Model], float],
    before: ir.Model,
    after: ir.Model,
    least_gain: float = LEAST_GAIN,
) -> Choice:
    """Measure both models, on samples that the change was not made with, and choose."""
    effect = Effect(measure(before), measure(after))
    kept = effect.helps(least_gain)
    return Choice(after if kept else before, effect, kept)
