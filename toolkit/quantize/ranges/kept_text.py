"""The nodes that a calibration keeps in floating point for its targets, as text and for JSON."""

from typing import Any

from toolkit.quantize.loss.judge import loss_text
from toolkit.quantize.ranges.measure import Ranges
from toolkit.quantize.trials.keep import AIM, FloatNodes

SHOWN = 12  # nodes; the JSON holds all
LARGER = 0.5  # the share that is proposed where less was allowed


def kept_lines(ranges: Ranges) -> list[str]:
    """Return the nodes, why they are kept, and what that brings."""
    chosen = ranges.float_nodes
    if chosen is None:
        return []
    if not chosen.nodes and chosen.search.met:
        return []
    if not chosen.nodes:
        problem = "is missed" if chosen.before.missed else "has little left for other samples"
        return [
            f"  a target {problem}, but no set of nodes in floating point with at most "
            f"{100 * chosen.most_float:g} % of the multiplications loses less"
        ]
    lines = [
        f"  kept in floating point: {len(chosen.nodes)} nodes with {100 * chosen.float_share:.1f} "
        "% of the multiplications, as their error may exceed a target on other samples; "
        f"{_basis(chosen)}; `tandem build --keep none` keeps none"
    ]
    after = {(loss.part, loss.metric.name): loss for loss in ranges.judgement.losses}
    for loss in chosen.before.missed:
        now = after.get((loss.part, loss.metric.name))
        value = "-" if now is None else f"{now.value:.3f}"
        lines.append(f"    {loss_text(loss)}, now {value}")
    if not chosen.search.met:
        larger = (
            "; a larger share may lose less (`tandem build --keep 50%`)"
            if chosen.most_float < LARGER
            else ""
        )
        lines.append(
            f"    {100 * chosen.most_float:g} % of the multiplications leave less than "
            f"{100 * AIM.amount:g} % of a target for other samples than those that choose{larger}"
        )
    shares = list(chosen.error_shares().items())
    lines += [
        f"    {node}: its INT8 makes {100 * share:.1f} % of the error"
        for node, share in shares[:SHOWN]
    ]
    return lines + ([f"    and {len(shares) - SHOWN} more"] if len(shares) > SHOWN else [])


def kept_builtins(ranges: Ranges) -> dict[str, Any] | None:
    """Return the nodes and their figures for programs."""
    chosen = ranges.float_nodes
    if chosen is None:
        return None
    return {
        "nodes": chosen.error_shares(),
        "float_share": chosen.float_share,
        "most_float": chosen.most_float,
        "chosen_on": chosen.samples,
        "judged_apart": chosen.apart,
        "aim_met": chosen.search.met,
        "before": [
            {
                "output": loss.part,
                "metric": loss.metric.name,
                "value": loss.value,
                "beyond_target": loss.missed,
            }
            for loss in chosen.before.losses
        ],
    }


def _basis(chosen: FloatNodes) -> str:
    count = f"{chosen.samples} sample{'' if chosen.samples == 1 else 's'}"
    if chosen.apart:
        return f"chosen on {count} that do not judge"
    return f"chosen on {count}, those that judge among them: give more data to judge apart"
