"""A plan as plain text. Equal plans give equal text, so reports can be compared."""

from collections.abc import Sequence

from toolkit.partition.planning.advice import Advice
from toolkit.partition.planning.figures import Figures
from toolkit.partition.planning.figures_text import figures_lines
from toolkit.partition.planning.loadables import memory_text
from toolkit.partition.planning.objectives import goal_named
from toolkit.partition.planning.plan import Plan, Refusal, SharedPlan
from toolkit.partition.planning.verdict import verdict
from toolkit.partition.solver.assess import utilisation
from toolkit.partition.solver.baselines import costs_of

SHOWN = 3  # names listed per row, the rest counted


def render_plan(plan: Plan, advice: Sequence[Advice] = ()) -> str:
    """Return the report: verdict, segments, crossings, comparison, and what DLA and GPU refuse."""
    lines = [_title(plan), "", verdict(plan), ""]
    lines += _segments(plan)
    lines += ["", *_crossings(plan)]
    lines += ["", *memory_text(plan.memory)] if plan.memory and plan.memory.loadables else []
    lines += ["", *_compared(plan.figures), *figures_lines(plan), _simulated(plan)]
    lines += plan.batching.lines
    lines += _refusals(plan) + _portable(plan)
    if advice:
        lines += ["", *_advice(plan, advice)]
    return "\n".join(lines) + "\n"


def render_shared(shared: SharedPlan) -> str:
    """Return the processor utilisation of a workload and the latency of each model."""
    problem, solution = shared.placed.problem, shared.placed.solution
    busy = utilisation(problem, costs_of(problem, solution.placement))
    rated = all(plan.rate_hz is not None for plan in shared.plans)
    proof = "proven best" if solution.proven else f"at most {solution.gap:.1%} from the best"
    lines = [
        f"{len(shared.plans)} models share {shared.plans[0].profile}: {proof} by the model",
        "",
    ]
    rows = [("processor", "busy")]
    cores = {"dla0": "dla0 and dla1, each"} if problem.alternate_dlas else {}
    rows += [
        (cores.get(p, p), f"{b:.1%}" if rated else f"{b:.0f} us a frame") for p, b in busy.items()
    ]
    lines += [*table(rows, right=(1,)), ""]
    rows4 = [("model", "frames/s", "p50 us", "p99 us")]
    for plan in shared.plans:
        simulated = plan.simulated
        times = f"{simulated.p50_us:.0f}", f"{simulated.p99_us:.0f}"
        rows4.append((plan.name, f"{simulated.throughput_hz:.1f}", *times))
    lines += ["simulated, with contention for the memory", *table(rows4, right=(1, 2, 3))]
    return "\n".join(lines)


def _title(plan: Plan) -> str:
    parts: list[str] = [plan.precision]
    if plan.tensorrt:
        parts.append(f"TensorRT {plan.tensorrt}")
    parts.append(plan.power_mode or "highest clocks")
    if plan.rate_hz is not None:
        parts.append(f"{plan.rate_hz:g} frames/s")
    search = plan.search
    proof = "proven best" if search.proven else f"at most {search.gap:.1%} from the best"
    return f"plan for {plan.profile}, {', '.join(parts)}; {search.objective}: {proof} by the model"


def _segments(plan: Plan) -> list[str]:
    rows = [("segment", "nodes", "MMAC", "us", "mJ", "crossings", "bytes", "from", "to")]
    portable = {row.segment for row in plan.placements if row.node in plan.portable}
    for segment, cost in zip(plan.segments, plan.costs, strict=True):
        rows.append(
            (
                f"{segment.name} portable" if segment.name in portable else segment.name,
                str(cost.nodes),
                f"{cost.macs / 1e6:.1f}",
                f"{cost.predicted_us:.0f}",
                f"{cost.energy_mj:.2f}",
                str(cost.crossings),
                str(cost.crossing_bytes),
                segment.nodes[0],
                segment.nodes[-1],
            )
        )
    bodies = [name for cost in plan.costs for name in cost.bodies]
    return table(rows, right=(1, 2, 3, 4, 5, 6)) + _unpriced(bodies)


def _unpriced(bodies: Sequence[str]) -> list[str]:
    if not bodies:
        return []
    more = f" and {len(bodies) - SHOWN} more" if len(bodies) > SHOWN else ""
    names = ", ".join(bodies[:SHOWN])
    return [f"us and mJ leave out what these nodes run inside, which is not known: {names}{more}"]


def _crossings(plan: Plan) -> list[str]:
    if not plan.crossings:
        return ["no crossings"]
    rows = [("crossing", "bytes", "from", "to")]
    for crossing in plan.crossings:
        size = "unknown" if crossing.bytes is None else str(crossing.bytes)
        rows.append((crossing.tensor, size, crossing.source, ", ".join(crossing.targets)))
    return table(rows, right=(1,))


def _compared(rows: Sequence[Figures]) -> list[str]:
    if len(rows) == 1:
        return [f"predicted: {rows[0].latency_us:.0f} us a frame, {rows[0].energy_mj:.2f} mJ"]
    lines = [("predicted", "us", "frames/s", "GPU us", "mJ", "segments", "crossings", "")]
    for row in rows:
        lines.append(
            (
                row.name,
                f"{row.latency_us:.0f}",
                f"{row.frames_per_second:.0f}",
                f"{row.gpu_us:.0f}",
                f"{row.energy_mj:.2f}",
                str(row.segments),
                str(row.crossings),
                f"breaks a limit: {row.broken[0]}" if row.broken else "",
            )
        )
    return table(lines, right=(1, 2, 3, 4, 5, 6))


def _simulated(plan: Plan) -> str:
    simulated = plan.simulated
    how = "as they come" if plan.rate_hz is not None else f"{plan.in_flight} in flight"
    return (
        f"simulated, {how}, with contention for the memory: "
        f"{simulated.throughput_hz:.0f} frames/s, "
        f"latency {simulated.p50_us:.0f} us at the median, {simulated.p99_us:.0f} us at p99"
    )


def render_nodes(plan: Plan) -> str:
    """Return every node in running order: where it runs, how long, and why."""
    rows = [("node", "operator", "segment", "us", "rule", "reason")]
    for row in plan.placements:
        time = f"{row.predicted_us:.1f}"
        rows.append((row.node, row.op, row.segment, time, row.rule, row.reason))
    return "\n".join(table(rows, right=(3,)))


def _refusals(plan: Plan) -> list[str]:
    if not plan.refusals:
        return ["", "every node is on the DLA"]
    by_rule = [row for row in plan.refusals if row.rule]
    if not by_rule:  # the profile has nothing to choose between, which the verdict has said
        return []
    lines = ["", "not on the DLA"]
    for refusal in sorted(by_rule, key=lambda row: -len(row.nodes)):
        lines += _refusal(refusal)
    return lines


def _refusal(refusal: Refusal) -> list[str]:
    label = refusal.rule if refusal.same_reason else f"{refusal.rule}, for example"
    lines = [f"  {len(refusal.nodes)} x {label}: {refusal.reason}", _names(refusal.nodes)]
    return lines + ([f"      helps: {refusal.hint}"] if refusal.hint else [])


def _names(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - SHOWN} more" if len(nodes) > SHOWN else ""
    return f"      nodes: {', '.join(nodes[:SHOWN])}{more}"


def _portable(plan: Plan) -> list[str]:
    """Return the nodes without GPU kernels by operator, the reason being that of the first."""
    groups: dict[str, list[str]] = {}
    ops = {row.node: row.op for row in plan.placements}
    for node in plan.portable:
        groups.setdefault(ops[node], []).append(node)
    lines = ["", "on the GPU without a kernel: portable, at the predicted times of the GPU"]
    for op, nodes in sorted(groups.items(), key=lambda group: -len(group[1])):
        same = len({plan.portable[node].replace(repr(node), "") for node in nodes}) == 1
        label = op if same else f"{op}, for example"
        lines += [f"  {len(nodes)} x {label}: {plan.portable[nodes[0]]}", _names(nodes)]
    return lines if groups else []


def _advice(plan: Plan, advice: Sequence[Advice]) -> list[str]:
    text, unit = goal_named(plan.search.objective).quantity(rated=plan.rate_hz is not None)
    lines = [f"what to change (predicted {text}, now {plan.search.value:.4g} {unit})"]
    for row in advice:
        change = f"{row.value:.4g} {unit}, {row.gain:.1%} less"
        names = ", ".join(row.nodes[:SHOWN]) + (" ..." if len(row.nodes) > SHOWN else "")
        lines += [f"  {change}: if the DLA took {names} ({row.rule})", f"      {row.how}"]
    return lines


def table(rows: Sequence[tuple[str, ...]], right: tuple[int, ...]) -> list[str]:
    """Lay rows out in columns; those in `right` are aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
