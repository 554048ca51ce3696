"""A plan as plain text: the same for the same plan, so that it can be kept and compared."""

from collections.abc import Sequence

from toolkit.planning.plan import Plan, Refusal

SHOWN = 3  # names listed per row, the rest counted


def render_plan(plan: Plan) -> str:
    """Return the plan in words: segments, crossings, times, and why nodes are not on the DLA."""
    version = f", TensorRT {plan.tensorrt}" if plan.tensorrt else ""
    lines = [f"plan for {plan.profile}, {plan.precision}{version}", ""]
    lines += _segments(plan)
    lines += ["", *_crossings(plan)]
    lines += ["", *_times(plan)]
    lines += ["", *_refusals(plan)]
    return "\n".join(lines) + "\n"


def _segments(plan: Plan) -> list[str]:
    rows = [("segment", "nodes", "MMAC", "us", "from", "to")]
    for segment, cost in zip(plan.segments, plan.costs, strict=True):
        rows.append(
            (
                segment.name,
                str(cost.nodes),
                f"{cost.macs / 1e6:.1f}",
                f"{cost.predicted_us:.0f}",
                segment.nodes[0],
                segment.nodes[-1],
            )
        )
    return _table(rows, right=(1, 2, 3))


def _crossings(plan: Plan) -> list[str]:
    if not plan.crossings:
        return ["no crossings"]
    rows = [("crossing", "bytes", "from", "to")]
    for crossing in plan.crossings:
        size = "unknown" if crossing.bytes is None else str(crossing.bytes)
        rows.append((crossing.tensor, size, crossing.source, ", ".join(crossing.targets)))
    return _table(rows, right=(1,))


def _times(plan: Plan) -> list[str]:
    rows = [("predicted (uncalibrated)", "us")]
    rows += [(processor, f"{time:.0f}") for processor, time in plan.latency_us]
    rows += [("crossings", f"{plan.crossings_us:.0f}"), ("total", f"{plan.total_us:.0f}")]
    if plan.gpu_only_us is not None and len(plan.segments) > 1:
        rows.append(("all on the GPU", f"{plan.gpu_only_us:.0f}"))
    return _table(rows, right=(1,)) + _price(plan)


def _price(plan: Plan) -> list[str]:
    """Say plainly what the DLA costs where the GPU alone would be faster."""
    split = any(processor.startswith("dla") for processor, _ in plan.latency_us)
    if plan.gpu_only_us is None or not split or plan.total_us <= plan.gpu_only_us:
        return []
    longer = plan.total_us - plan.gpu_only_us
    freed = plan.gpu_only_us - dict(plan.latency_us).get("gpu", 0.0)
    return [
        f"SLOWER than the GPU alone by {longer:.0f} us ({plan.total_us / plan.gpu_only_us:.2f} "
        f"times as long); in return {freed:.0f} us of GPU time are free for other work"
    ]


def _refusals(plan: Plan) -> list[str]:
    if not plan.refusals:
        return ["every node is on the DLA"]
    lines = ["not on the DLA"]
    for refusal in sorted(plan.refusals, key=lambda row: -len(row.nodes)):
        lines += _refusal(refusal)
    return lines


def _refusal(refusal: Refusal) -> list[str]:
    label = refusal.rule if refusal.same_reason else f"{refusal.rule}, for example"
    label = f"{label}: " if refusal.rule else ""
    names = ", ".join(refusal.nodes[:SHOWN])
    more = f" and {len(refusal.nodes) - SHOWN} more" if len(refusal.nodes) > SHOWN else ""
    lines = [f"  {len(refusal.nodes)} x {label}{refusal.reason}", f"      nodes: {names}{more}"]
    return lines + ([f"      helps: {refusal.hint}"] if refusal.hint else [])


def _table(rows: Sequence[tuple[str, ...]], right: tuple[int, ...]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
