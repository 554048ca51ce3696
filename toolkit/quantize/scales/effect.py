"""The effect of the DLA scale rules on the error of an engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from toolkit.quantize.corrections.effect import Effect, effects_of
from toolkit.quantize.ranges.measure import Ranges
from toolkit.quantize.scales.rules import UnifiedRanges
from toolkit.quantize.trials.metrics import OutputNoise


@dataclass(frozen=True, slots=True)
class ScaleEffect:
    """Number of ranges that the scale rules changed, and the largest factor.

    `effects`: SQNR by output in dB before and after, empty without samples.
    """

    changes: int
    worst_factor: float
    effects: Mapping[str, Effect] = field(default_factory=dict)


def scale_effect(unified: UnifiedRanges, ranges: Ranges | None) -> ScaleEffect:
    """Measure the effect with the ranges of all samples; without ranges, only count."""
    count, factor = len(unified.changes), unified.worst_factor
    if ranges is None or not count:
        return ScaleEffect(count, factor)
    final = ranges.fit
    after = {name: unified.amax[name] for name in final.ranges}
    samples, exact = zip(*ranges.judges, strict=True)
    noise = OutputNoise(final.trial, samples, exact)
    effects = effects_of(lambda amax: noise.sqnr_db(amax, final.keep_float), final.ranges, after)
    return ScaleEffect(count, factor, effects)


def scale_notes(effect: ScaleEffect) -> tuple[str, ...]:
    """One line about the effect; none if no range was changed."""
    if not effect.changes:
        return ()
    summary = (
        f"{effect.changes} tensors share a scale because of DLA rules; the worst is "
        f"{effect.worst_factor:.2f} times coarser than its own range"
    )
    if not effect.effects:
        return (f"{summary}. Give --data to measure the effect on the outputs",)
    rows = (
        f"{name} {output.before:.1f} -> {output.after:.1f} dB"
        for name, output in effect.effects.items()
    )
    return (f"{summary}. SQNR: {', '.join(rows)}",)
