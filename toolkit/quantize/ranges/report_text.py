"""What a calibration says: as text, and as plain values for JSON."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from toolkit.quantize.corrections.effect import Effect
from toolkit.quantize.corrections.steps import CORRECTION, EQUALISATION, Step
from toolkit.quantize.ranges.measure import Ranges

SHOWN = 12  # of long lists; the JSON holds all
_CHANGES = MappingProxyType({EQUALISATION: "tensors rescaled", CORRECTION: "biases changed"})


def ranges_text(ranges: Ranges) -> str:
    """Return the report of a calibration for people."""
    table = ranges.table
    lines = [
        f"calibration: {table.method} over {ranges.samples} of {ranges.asked} samples, "
        f"{len(table.tensors)} tensors"
    ]
    lines += [f"  skipped {item.name}: {item.reason}" for item in ranges.skipped]
    for title, names in (("always zero", ranges.dead), ("constant", ranges.constant)):
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(f"  {title}: {', '.join(names[:SHOWN])}{more}")
    lines += _dead_channels(ranges)
    where = (
        "samples that judged the choices" if ranges.unseen else "samples of the calibration data"
    )
    for output, decibels in ranges.sqnr_db.items():
        lines.append(f"  output {output}: {decibels:.1f} dB signal to INT8 noise, on {where}")
    lines += [f"  {step_text(step)}" for step in ranges.steps]
    return "\n".join(lines + _auto(ranges) + _budget(ranges))


def step_text(step: Step) -> str:
    """Return what became of an optional step, in one line."""
    worst = step.worst
    if worst is None:
        return f"{step.name}: left out: {step.reason}"
    figures = f"{worst.before:.1f} -> {worst.after:.1f} dB at the worst output"
    verdict = "kept" if step.kept else "left out"
    if step.kept and not worst.helps():
        verdict = "kept as asked, though it brings nothing"
    because = f"; {step.reason}" if step.reason else ""
    return f"{step.name}: {verdict}, {figures} ({step.changed} {_CHANGES[step.name]}{because})"


def ranges_builtins(ranges: Ranges) -> dict[str, Any]:
    """Return the report of a calibration for programs."""
    table = ranges.table
    return {
        "method": table.method,
        "asked": ranges.asked,
        "samples": ranges.samples,
        "skipped": {item.name: item.reason for item in ranges.skipped},
        "dead": list(ranges.dead),
        "constant": list(ranges.constant),
        "dead_channels": {
            name: {"dead": found.dead, "channels": found.channels}
            for name, found in ranges.dead_channels.items()
        },
        "dead_channels_samples": ranges.channel_samples,
        "steps": [_step(step) for step in ranges.steps],
        "sqnr_db": dict(ranges.sqnr_db),
        "validated_on_unseen_samples": ranges.unseen,
        "tensors": {
            name: {
                "amax": amax,
                "method": table.methods.get(name, table.method),
                "largest_seen": ranges.histograms[name].amax,
            }
            for name, amax in table.tensors.items()
            if name in ranges.histograms
        },
        "auto": None
        if ranges.auto is None
        else {"gain_db": dict(ranges.auto.gain_db), "trials": ranges.auto.trials},
        "budget": None
        if ranges.budget is None
        else {
            "keep_float": sorted(ranges.budget.keep_float),
            "metric_float": ranges.budget.float_value,
            "metric_all_int8": ranges.budget.int8_value,
            "metric": ranges.budget.value,
            "limit": ranges.budget.limit,
            "int8_share": ranges.budget.share,
        },
    }


def _step(step: Step) -> dict[str, Any]:
    return {
        "name": step.name,
        "asked": step.asked,
        "kept": step.kept,
        "changed": step.changed,
        "reason": step.reason,
        "sqnr_db": effects_builtins(step.effects),
    }


def effects_builtins(effects: Mapping[str, Effect]) -> dict[str, dict[str, float]]:
    """Return effects by output for programs."""
    return {name: {"before": one.before, "after": one.after} for name, one in effects.items()}


def _dead_channels(ranges: Ranges) -> list[str]:
    found = ranges.dead_channels
    if not found:
        return []
    most = sorted(found, key=lambda name: (-found[name].dead / found[name].channels, name))
    shown = [f"{name} {found[name].dead} of {found[name].channels}" for name in most[:SHOWN]]
    more = f" and {len(most) - SHOWN} more" if len(most) > SHOWN else ""
    count = sum(one.dead for one in found.values())
    return [
        f"  {count} channels of {len(found)} tensors are zero in all of "
        f"{ranges.channel_samples} samples: {', '.join(shown)}{more}"
    ]


def _auto(ranges: Ranges) -> list[str]:
    found = ranges.auto
    if found is None:
        return []
    gains = ", ".join(f"{gain:+.2f} dB over {name}" for name, gain in found.gain_db.items())
    ending = "" if found.complete else "; the search was ended by its limit"
    counts: dict[str, int] = {}
    for choice in found.choices:
        counts[choice.method] = counts.get(choice.method, 0) + 1
    shares = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    return [
        f"  auto: {gains} ({found.trials} trials{ending})",
        f"  tensors by method: {shares}",
    ]


def _budget(ranges: Ranges) -> list[str]:
    found = ranges.budget
    if found is None:
        return []
    lines = [
        f"  budget: {found.value:.3f} with {100 * found.share:.1f} % of the work in INT8 "
        f"(float {found.float_value:.3f}, all INT8 {found.int8_value:.3f}, "
        f"at least {found.limit:.3f})"
    ]
    dearest = [cost for cost in found.costs if cost.node in found.keep_float]
    lines += [f"    kept in float: {cost.node} (costs {cost.cost:.3f})" for cost in dearest[:SHOWN]]
    return lines
