"""A plan as plain text. Equal plans give equal text, so reports can be compared."""

from collections import Counter
from collections.abc import Sequence

from toolkit.partition.costs.constants import Constant
from toolkit.partition.planning.advice import Advice
from toolkit.partition.planning.figures import Figures
from toolkit.partition.planning.loadables import memory_text
from toolkit.partition.planning.objectives import goal_named
from toolkit.partition.planning.plan import Plan, Refusal, Search, SharedPlan
from toolkit.partition.planning.quantities import between, number, quantity
from toolkit.partition.planning.trtexec import is_long, trtexec_lines
from toolkit.partition.planning.verdict import verdict
from toolkit.partition.solver.assess import utilisation
from toolkit.partition.solver.baselines import costs_of

SHOWN = 3  # names listed per row, the rest counted


_FIGURES = (
    ("latency_us", "us", ""),
    ("frames_per_second", "frames/s", ""),
    ("gpu_us", "us", " of the GPU"),
    ("energy_mj", "mJ", ""),
)


def figures_lines(plan: Plan) -> list[str]:
    """Return the intervals of the plan's figures, and what its energies hold."""
    intervals = plan.figures[0].intervals
    shown = ", ".join(
        between(intervals[name], unit) + what for name, unit, what in _FIGURES if name in intervals
    )
    lines = [f"this plan, 80 % of cases: {shown}"] if shown else []
    return [*lines, _energy_line(plan.idle, rated=plan.rate_hz is not None)]


def _energy_line(idle: Constant | None, *, rated: bool) -> str:
    """Say whether energies hold what the idle board takes, how much, and how well that is known."""
    if idle is None:
        return "mJ: beyond the idle board, whose power is not known"
    power = f"{idle.value:.3g} W, {idle.confidence} confidence"
    if rated:
        return f"mJ: beyond the idle board, which takes {power}"
    return (
        f"mJ of a frame: the whole board at the plug at full rate, of which idle {power}; "
        "of a segment: beyond the idle board"
    )


def render_plan(plan: Plan, advice: Sequence[Advice] = (), *, arithmetic: str | None = None) -> str:
    """Return the report: verdict, segments, crossings, comparison, and what DLA and GPU refuse.

    `arithmetic`: of an engine, None: the precision of the plan.
    """
    lines = [_title(plan, arithmetic or plan.arithmetic), "", verdict(plan), ""]
    lines += _segments(plan)
    lines += ["", *_crossings(plan)]
    lines += ["", *memory_text(plan.memory)] if plan.memory and plan.memory.loadables else []
    lines += ["", *_compared(plan.figures), *figures_lines(plan), _simulated(plan)]
    lines += plan.batching.lines
    lines += _refusals(plan) + _portable(plan) + _trtexec(plan)
    if advice:
        lines += ["", *_advice(plan, advice)]
    return "\n".join(lines) + "\n"


def render_shared(shared: SharedPlan) -> str:
    """Return the processor utilisation of a workload and the latency of each model."""
    problem, solution = shared.placed.problem, shared.placed.solution
    busy = utilisation(problem, costs_of(problem, solution.placement))
    rated = all(plan.rate_hz is not None for plan in shared.plans)
    proof = "proven best" if solution.proven else f"at most {solution.gap:.1%} from the best"
    who = f"{len(shared.plans)} model{'s' if len(shared.plans) > 1 else ''}"
    if shared.services:
        who += f" and {', '.join(service.name for service in shared.services)}"
    lines = [f"{who} share {shared.plans[0].profile}: {proof} by the model", ""]
    lines += [shared.memory.text, ""] if shared.memory else []
    rows = [("processor", "busy")]
    cores = {"dla0": "dla0 and dla1, each"} if problem.alternate_dlas else {}
    rows += [
        (cores.get(p, p), f"{b:.1%}" if rated else f"{quantity(b, 'us')} a frame")
        for p, b in busy.items()
    ]
    lines += [*table(rows, right=(1,)), ""]
    rows4 = [("model", "frames/s", "p50", "p99")]
    for plan in shared.plans:
        simulated = plan.simulated
        times = quantity(simulated.p50_us, "us"), quantity(simulated.p99_us, "us")
        rows4.append((plan.name, number(simulated.throughput_hz), *times))
    lines += ["simulated, with contention for the memory", *table(rows4, right=(1, 2, 3))]
    lines += ["", *_schedule(shared)] if solution.schedule else []
    return "\n".join(lines)


def _schedule(shared: SharedPlan) -> list[str]:
    """Return when each segment of the first frames runs."""
    solution = shared.placed.solution
    rows = [("model", "segment", "processor", "from", "to")]
    for row in solution.schedule:
        times = quantity(row.start_us, "us"), quantity(row.end_us, "us")
        rows.append((row.network, str(row.segment), row.processor, *times))
    done = f"a frame of each model is done after {quantity(solution.value, 'us')}"
    return [f"{done}, without contention", *table(rows, right=(1, 3, 4))]


def _title(plan: Plan, arithmetic: str) -> str:
    parts = [arithmetic]
    if plan.tensorrt:
        parts.append(f"TensorRT {plan.tensorrt}")
    parts.append(plan.power_mode or "highest clocks")
    if plan.rate_hz is not None:
        parts.append(f"{plan.rate_hz:g} frames/s")
    search = plan.search
    return f"plan for {plan.profile}, {', '.join(parts)}; {search.objective}: {_proof(search)}"


def _proof(search: Search) -> str:
    """Say how good the printed figure is, by the model, and among which placements."""
    proof = "proven best by the model"
    if not search.proven:
        proof = f"at most {search.gap:.1%} from the best by the model"
        if search.placement_proven:
            proof = f"proven best but for contention for the memory, {proof}"
    if search.min_gain > 0:
        proof += f", of moves to the DLA that gain {search.min_gain:.0%} or more"
    return proof


def _segments(plan: Plan) -> list[str]:
    ranges = any(cost.intervals for cost in plan.costs)
    heads = ("time", "80 % of cases", "energy", "80 % of cases") if ranges else ("time", "energy")
    rows = [("segment", "nodes", "MMAC", *heads, "crossings", "size", "from", "to")]
    portable = {row.segment for row in plan.placements if row.node in plan.portable}
    for segment, cost in zip(plan.segments, plan.costs, strict=True):
        figures: list[str] = []
        for name, value, unit in (
            ("predicted_us", cost.predicted_us, "us"),
            ("energy_mj", cost.energy_mj, "mJ"),
        ):
            bounds = cost.intervals.get(name)
            figures.append(quantity(value, unit))
            figures += [between(bounds, unit) if bounds else ""] if ranges else []
        rows.append(
            (
                f"{segment.name} portable" if segment.name in portable else segment.name,
                str(cost.nodes),
                f"{cost.macs / 1e6:.1f}",
                *figures,
                str(cost.crossings),
                quantity(cost.crossing_bytes, "bytes"),
                segment.nodes[0],
                segment.nodes[-1],
            )
        )
    bodies = [name for cost in plan.costs for name in cost.bodies]
    return table(rows, right=tuple(range(1, len(heads) + 5))) + _unpriced(bodies)


def _unpriced(bodies: Sequence[str]) -> list[str]:
    if not bodies:
        return []
    more = f" and {len(bodies) - SHOWN} more" if len(bodies) > SHOWN else ""
    names = ", ".join(bodies[:SHOWN])
    return [
        f"time and energy leave out what these nodes run inside, which is not known: {names}{more}"
    ]


def _crossings(plan: Plan) -> list[str]:
    if not plan.crossings:
        return ["no crossings"]
    rows = [("crossing", "size", "from", "to")]
    for crossing in plan.crossings:
        size = "unknown" if crossing.bytes is None else quantity(crossing.bytes, "bytes")
        rows.append((crossing.tensor, size, crossing.source, ", ".join(crossing.targets)))
    return table(rows, right=(1,))


def _compared(rows: Sequence[Figures]) -> list[str]:
    if len(rows) == 1:
        time, energy = quantity(rows[0].latency_us, "us"), quantity(rows[0].energy_mj, "mJ")
        return [f"predicted: {time} a frame, {energy}"]
    lines = [("predicted", "latency", "frames/s", "GPU", "energy", "segments", "crossings", "")]
    for row in rows:
        lines.append(
            (
                row.name,
                quantity(row.latency_us, "us"),
                number(row.frames_per_second),
                quantity(row.gpu_us, "us"),
                quantity(row.energy_mj, "mJ"),
                str(row.segments),
                str(row.crossings),
                f"breaks a limit: {row.broken[0]}" if row.broken else "",
            )
        )
    return table(lines, right=(1, 2, 3, 4, 5, 6)) + _faster(rows[0], rows[1:])


def _faster(plan: Figures, others: Sequence[Figures]) -> list[str]:
    """Say why a split that the plan beats may show more frames per second."""
    return [
        f"{row.name} reaches more frames/s although its busiest processor takes "
        f"{quantity(row.busiest_us, 'us')} of a frame, {quantity(plan.busiest_us, 'us')} here: "
        "this plan loses more to contention for the memory"
        for row in others
        if row.frames_per_second > plan.frames_per_second
        and row.busiest_us > plan.busiest_us
        and not row.broken
    ]


def _simulated(plan: Plan) -> str:
    simulated = plan.simulated
    how = "simulated at the rate"
    if plan.rate_hz is None:
        how = f"at full rate, {plan.in_flight} frame{'s' if plan.in_flight > 1 else ''} in flight"
    return (
        f"{how}, with contention for the memory: "
        f"{number(simulated.throughput_hz)} frames/s, latency {quantity(simulated.p50_us, 'us')} "
        f"at the median, {quantity(simulated.p99_us, 'us')} at p99"
    )


def render_nodes(plan: Plan) -> str:
    """Return every node in running order: where it runs, how long, and why."""
    rows = [("node", "operator", "segment", "time", "rule", "reason")]
    for row in plan.placements:
        time = quantity(row.predicted_us, "us")
        rows.append((row.node, row.op, row.segment, time, row.rule, row.reason))
    return "\n".join(table(rows, right=(3,)))


def _refusals(plan: Plan) -> list[str]:
    if not plan.refusals:
        return ["", "every node is on the DLA"]
    by_rule = [row for row in plan.refusals if row.rule]
    if not by_rule:  # the profile has nothing to choose between, which the verdict has said
        return []
    by_id: dict[str, list[Refusal]] = {}
    for row in by_rule:
        by_id.setdefault(row.rule, []).append(row)
    lines = ["", "not on the DLA"]
    for rows in sorted(by_id.values(), key=lambda rows: -sum(len(row.nodes) for row in rows)):
        lines += _refusal(plan, sorted(rows, key=lambda row: -len(row.nodes)))
    return lines


def _refusal(plan: Plan, rows: Sequence[Refusal]) -> list[str]:
    """Return the nodes that one rule keeps off the DLA; `rows` differ in operator or remedy."""
    nodes = [node for row in rows for node in row.nodes]
    alike = len(rows) == 1 and rows[0].same_reason
    label = rows[0].rule if alike else f"{rows[0].rule}, for example"
    lines = [f"  {len(nodes)} x {label}: {rows[0].reason}"]
    if len(rows) > 1:
        ops = {row.node: row.op for row in plan.placements}
        counts = Counter(ops[node] for node in nodes)
        lines.append("      operators: " + ", ".join(f"{n} {op}" for op, n in counts.most_common()))
    lines.append(_names(nodes))
    hints = dict.fromkeys(row.hint for row in rows if row.hint)
    return lines + [f"      helps: {hint}" for hint in hints]


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


def _trtexec(plan: Plan) -> list[str]:
    lines = trtexec_lines(plan)
    if not lines:
        return []
    if is_long(lines):
        return ["", "with trtexec: `tandem plan --trtexec` prints the options"]
    return ["", "with trtexec", *(f"  {line}" for line in lines)]


def _advice(plan: Plan, advice: Sequence[Advice]) -> list[str]:
    goal = goal_named(plan.search.objective)
    text, unit = goal.quantity(rated=plan.rate_hz is not None, batch=plan.batching.size)
    lines = [f"what to change (predicted {text}, now {quantity(plan.search.value, unit, 4)})"]
    for row in advice:
        change = f"{quantity(row.value, unit, 4)}, {row.gain:.1%} less"
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
