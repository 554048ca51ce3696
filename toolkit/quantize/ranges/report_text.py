"""The report of a calibration, as text and as plain values for JSON."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from calibration.table import fingerprint
from toolkit.quantize.corrections.corrections import (
    CORRECTION,
    EQUALISATION,
    ROUNDING,
    CorrectionOutcome,
)
from toolkit.quantize.corrections.effect import Effect
from toolkit.quantize.loss.judge import Judgement, loss_text, samples_text
from toolkit.quantize.loss.metrics import OutputLoss
from toolkit.quantize.preprocess.decide import Decision
from toolkit.quantize.ranges.kept_text import kept_builtins, kept_lines
from toolkit.quantize.ranges.measure import Ranges

SHOWN = 12  # of long lists; the JSON holds all
NO_INT8 = (
    "INT8 has nothing to quantize: no node outside the branches of If and Loop has an INT8 form, "
    "so the outputs are those of FP32"
)
_CHANGES = MappingProxyType(
    {
        EQUALISATION: "tensors rescaled",
        ROUNDING: "weights rounded",
        CORRECTION: "biases changed",
    }
)


def ranges_text(ranges: Ranges) -> str:
    """Return the report of a calibration for people."""
    table = ranges.table
    lines = [
        f"calibration: {table.method} over {ranges.samples} of {ranges.requested} samples, "
        f"{len(table.tensors)} tensors"
    ]
    lines += [f"  {line}" for line in preprocessing_lines(ranges)]
    lines += [f"  REMARK: {remark}" for remark in ranges.remarks]
    lines.append(f"  fingerprint of the table: {fingerprint(table)[:16]}")
    lines += [f"  skipped {item.name}: {item.reason}" for item in ranges.skipped]
    for title, names in (("always zero", ranges.dead), ("constant", ranges.constant)):
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(f"  {title}: {', '.join(names[:SHOWN])}{more}")
    if not ranges.fit.trial.nodes:
        lines.append(f"  {NO_INT8}")
    lines += _dead_channels(ranges)
    lines += [f"  {line}" for line in judgement_lines(ranges.judgement)]
    lines += [f"  {correction_text(outcome)}" for outcome in ranges.corrections]
    return "\n".join(lines + _auto(ranges) + _budget(ranges) + kept_lines(ranges))


def preprocessing_lines(ranges: Ranges) -> list[str]:
    """Return how images became inputs, and where that is from."""
    if ranges.preprocessing is None:
        return [
            "preprocessing: not recorded, as the samples are arrays and are taken as they are; "
            "--preprocess states what made them"
        ]
    return ranges.preprocessing.lines()


def assumed_lines(ranges: Ranges, model: Path | None = None) -> list[str]:
    """Return what a report ends with where the preprocessing of its images is assumed.

    `model`: its file; a model file of the same name beside it is named, as it may state it.
    """
    if ranges.preprocessing is None or not ranges.preprocessing.assumed:
        return []
    # The folder "." of a SavedModel has no name.
    beside = model.with_suffix(".toml") if model is not None and model.name else None
    known = beside is not None and beside.is_file()
    option = f"--preprocess {shlex.quote(str(beside))}" if known else "--preprocess"
    return [
        "WARNING: nothing says how the model's images are prepared, so"
        f" {', '.join(ranges.preprocessing.assumed)} are ASSUMED ({ranges.preprocessing.in_words});"
        f" a classifier wants others, and its ranges are wrong then. `tandem build {option}`"
        " states it, `tandem build --strict` refuses to assume it."
    ]


def preprocessing_builtins(decision: Decision | None) -> dict[str, Any] | None:
    """Return how images became inputs for programs."""
    if decision is None:
        return None
    return {
        **msgspec.to_builtins(decision.config),
        "origins": dict(decision.origins),
        "applied": decision.applied,
    }


def judgement_lines(judgement: Judgement) -> list[str]:
    """Return what the outputs lose, a line for each metric."""
    lines = [f"INT8 against FP32, {samples_text(judgement)}:"]
    lines += [f"  {loss_text(loss)}{_verdict(loss)}" for loss in judgement.losses]
    for part in judgement.nothing_to_lose:
        lines.append(
            f"  output {part}: no detection and no certain class in these samples, so its loss is "
            "not judged; give data that show what the model is for"
        )
    for part in judgement.no_signal:
        lines.append(
            f"  output {part}: zero or not finite in FP32 in all of these samples, so there is "
            "nothing to compare with"
        )
    for part in judgement.varying:
        lines.append(
            f"  output {part}: its size depends on the data, and it is no part of detections "
            "(boxes, scores, labels), so its loss is not judged"
        )
    if not (judgement.losses or judgement.no_signal or judgement.varying):
        lines.append("  no output is in floating point, so no loss is judged")
    return lines


def _verdict(loss: OutputLoss) -> str:
    """Return what a loss is beyond."""
    if loss.broken:
        return ": BEYOND THE LIMIT"
    return f": beyond the target of {loss.metric.target:g}" if loss.missed else ""


def judgement_builtins(judgement: Judgement) -> dict[str, Any]:
    """Return what the outputs lose for programs."""
    return {
        "samples": judgement.samples,
        "basis": judgement.basis,
        "losses": [
            {
                "output": loss.part,
                "metric": loss.metric.name,
                "unit": loss.metric.unit,
                "value": loss.value,
                "limit": loss.metric.limit if loss.judged else None,
                "target": loss.metric.target if loss.judged else None,
                "of": loss.of,
                "beyond_limit": loss.broken,
                "beyond_target": loss.missed,
            }
            for loss in judgement.losses
        ],
        "not_judged": list(judgement.nothing_to_lose),
        "no_signal": list(judgement.no_signal),
        "varying": list(judgement.varying),
    }


def correction_text(outcome: CorrectionOutcome) -> str:
    """Return the outcome of a correction in one line."""
    worst = outcome.worst
    verdict = "kept" if outcome.applied else "left out"
    if worst is None:
        return f"{outcome.name}: {verdict}: {outcome.reason or 'no output shows its effect'}"
    figures = f"{worst.before:.1f} -> {worst.after:.1f} dB at the worst output"
    if outcome.applied and not worst.helps():
        if outcome.requested == "on":
            verdict += " as asked, though it brings nothing"
        elif worst.gain < 0:
            verdict += ", as a loss may be chance"
    because = f"; {outcome.reason}" if outcome.reason else ""
    changes = f"{outcome.changed} {_CHANGES[outcome.name]}"
    changes += f", {outcome.by_mul} by a Mul" if outcome.by_mul else ""
    return f"{outcome.name}: {verdict}, {figures} ({changes}{because})"


def ranges_builtins(ranges: Ranges) -> dict[str, Any]:
    """Return the report of a calibration for programs."""
    table = ranges.table
    return {
        "method": table.method,
        "asked": ranges.requested,
        "samples": ranges.samples,
        "preprocessing": preprocessing_builtins(ranges.preprocessing),
        "remarks": list(ranges.remarks),
        "fingerprint": fingerprint(table),
        "skipped": {item.name: item.reason for item in ranges.skipped},
        "dead": list(ranges.dead),
        "constant": list(ranges.constant),
        "dead_channels": {
            name: {"dead": channels.dead, "channels": channels.channels}
            for name, channels in ranges.dead_channels.items()
        },
        "dead_channels_samples": ranges.channel_samples,
        "steps": [_correction_builtins(outcome) for outcome in ranges.corrections],
        "sqnr_db": dict(ranges.sqnr_db),
        "validated_on_unseen_samples": ranges.judgement.basis == "held out",
        "loss": judgement_builtins(ranges.judgement),
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
        "kept": kept_builtins(ranges),
    }


def _correction_builtins(outcome: CorrectionOutcome) -> dict[str, Any]:
    return {
        "name": outcome.name,
        "asked": outcome.requested,
        "kept": outcome.applied,
        "changed": outcome.changed,
        "by_mul": outcome.by_mul,
        "reason": outcome.reason,
        "sqnr_db": effects_builtins(outcome.effects),
    }


def effects_builtins(effects: Mapping[str, Effect]) -> dict[str, dict[str, float]]:
    """Return effects by output for programs."""
    return {
        name: {"before": effect.before, "after": effect.after} for name, effect in effects.items()
    }


def _dead_channels(ranges: Ranges) -> list[str]:
    dead_channels = ranges.dead_channels
    if not dead_channels:
        return []
    by_share = sorted(
        dead_channels,
        key=lambda name: (-dead_channels[name].dead / dead_channels[name].channels, name),
    )
    shown = [
        f"{name} {dead_channels[name].dead} of {dead_channels[name].channels}"
        for name in by_share[:SHOWN]
    ]
    more = f" and {len(by_share) - SHOWN} more" if len(by_share) > SHOWN else ""
    count = sum(channels.dead for channels in dead_channels.values())
    return [
        f"  {count} channels of {len(dead_channels)} tensors are zero in all of "
        f"{ranges.channel_samples} samples: {', '.join(shown)}{more}"
    ]


def _auto(ranges: Ranges) -> list[str]:
    auto = ranges.auto
    if auto is None:
        return []
    gains = ", ".join(f"{gain:+.2f} dB over {name}" for name, gain in auto.gain_db.items())
    ending = "" if auto.complete else "; the search was ended by its limit"
    counts: dict[str, int] = {}
    for choice in auto.choices:
        counts[choice.method] = counts.get(choice.method, 0) + 1
    shares = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    return [
        f"  auto: {gains} ({auto.trials} trials{ending})",
        f"  tensors by method: {shares}",
    ]


def _budget(ranges: Ranges) -> list[str]:
    budget = ranges.budget
    if budget is None:
        return []
    lines = [
        f"  budget: {budget.value:.3f} with {100 * budget.share:.1f} % of the work in INT8 "
        f"(float {budget.float_value:.3f}, all INT8 {budget.int8_value:.3f}, "
        f"at least {budget.limit:.3f})"
    ]
    costliest = [cost for cost in budget.costs if cost.node in budget.keep_float]
    lines += [
        f"    kept in float: {cost.node} (costs {cost.cost:.3f})" for cost in costliest[:SHOWN]
    ]
    return lines
