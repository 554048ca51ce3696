"""What one range for several tensors does to the error of an engine, measured and in words."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from toolkit.quantize.corrections.effect import Effect, effects_of
from toolkit.quantize.ranges.measure import Ranges
from toolkit.quantize.scales.rules import UnifiedRanges


@dataclass(frozen=True, slots=True)
class ScaleEffect:
    """What the scale rules did: how many ranges they changed, and by what at most.

    `effects`: SQNR by output in dB before and after, empty without samples to measure it on.
    """

    changes: int
    worst_factor: float
    effects: Mapping[str, Effect] = field(default_factory=dict)


def scale_effect(unified: UnifiedRanges, ranges: Ranges | None) -> ScaleEffect:
    """Measure the rules' effect on the samples that judged the ranges; without any, only count."""
    count, factor = len(unified.changes), unified.worst_factor
    if ranges is None or not count:
        return ScaleEffect(count, factor)
    end = ranges.end
    after = {name: unified.amax[name] for name in end.ranges}
    effects = effects_of(lambda amax: end.noise.sqnr_db(amax, end.keep_float), end.ranges, after)
    return ScaleEffect(count, factor, effects)


def scale_notes(found: ScaleEffect) -> tuple[str, ...]:
    """Say it in a line; in none where no range was changed."""
    if not found.changes:
        return ()
    said = f"scale rules widened {found.changes} ranges, the worst {found.worst_factor:.2f} times"
    if not found.effects:
        return (f"{said}; without --data their effect on error is not measured",)
    rows = (f"{name} {one.before:.1f} -> {one.after:.1f} dB" for name, one in found.effects.items())
    return (f"{said}; signal to INT8 noise: {', '.join(rows)}",)
