"""What low precision gains in time, and what the nodes cost that stay in floating point."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from device.profile import Profile
from toolkit.engine.frontend_result import Frontend
from toolkit.engine.int8_ranges import CLIPPED
from toolkit.graph.node_view import NodeView, views
from toolkit.partition.best_precision import GpuNodes, gpu_costs, int8_on_gpu
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.objectives import goal_named
from toolkit.partition.planning.plan import Plan
from toolkit.quantize.float8.model import Float8Model
from toolkit.quantize.float8.products import float8_products
from toolkit.quantize.int4.model import Int4Model
from toolkit.quantize.quantize import int8_nodes

INT8, FLOAT8, INT4 = "INT8", "FP8", "INT4"
FloatedModel = Float8Model | Int4Model


@dataclass(frozen=True, slots=True)
class LayerGain:
    """A node that could be INT8, or of another `form`: its times in us, and what it does.

    `processor`: where it runs. Times are predicted unless boards have measured both. `int8_us`: in
    the form. `error_share`: of the error of all nodes at the outputs, each alone in INT8, None
    where that was not measured. `kept`: why it stays in floating point, "" if it does not.
    `error`: of FP8 and INT4 weights, the relative norm of the difference of its results; None: not
    measured.
    """

    node: str
    processor: str
    int8_us: float
    half_us: float
    error_share: float | None
    kept: str
    form: str = INT8
    error: float | None = None


def layer_gains(front: Frontend, plan: Plan) -> tuple[LayerGain, ...]:
    """Return what low precision gains and loses at each node that could have it.

    What crosses processors is in the plan. Nothing without a GPU, with whose FP16 it is compared,
    and of INT8 nothing without ranges.
    """
    profile = front.target.profile
    if profile.gpu is not None and (front.float8 is not None or front.int4 is not None):
        return (*_float8_gains(front, plan), *_int4_gains(front, plan))
    if front.table is None or profile.gpu is None:
        return ()
    graph = front.prepared.model
    costs_in = gpu_costs(graph, profile, plan.power_mode, front.node_times())
    runs_on = {row.node: row.processor for row in plan.placements}
    on_gpu = {node for node, processor in runs_on.items() if processor == "gpu"}
    read = int8_on_gpu(graph, GpuNodes(on_gpu, front.keep_float, front.table.tensors))
    reasons = {
        **dict.fromkeys(on_gpu - read, "no operand of it is read in INT8"),
        **front.float_reasons(),
    }
    search = (
        None
        if front.ranges is None or front.ranges.float_nodes is None
        else front.ranges.float_nodes.search
    )
    costs = {} if search is None else {row.node: row.cost for row in search.costs}
    total = sum(costs.values())
    gains = []
    for node, _ in int8_nodes(graph):
        name = str(node.name)
        processor = runs_on[name]
        share = costs[name] / total if name in costs and 0.0 < total < math.inf else None
        int8_us, half_us = (
            costs.node(name, processor).time_us for costs in (costs_in.int8, costs_in.half)
        )
        gains.append(LayerGain(name, processor, int8_us, half_us, share, reasons.get(name, "")))
    return tuple(gains)


def _float8_gains(front: Frontend, plan: Plan) -> tuple[LayerGain, ...]:
    if front.float8 is None:
        return ()
    # FP8 has the rates and sizes of INT8.
    costs = gpu_costs(front.graph, front.target.profile, plan.power_mode, ())
    names = [str(node.name) for node in float8_products(front.graph)]
    return _gains(FLOAT8, names, (costs.int8, costs.half), front.float8)


def _int4_gains(front: Frontend, plan: Plan) -> tuple[LayerGain, ...]:
    if front.int4 is None:
        return ()
    profile, graphs = front.target.profile, (front.prepared.model.graph, front.graph.graph)
    # The DLA's rewrites may have replaced some.
    names = front.int4.errors.keys() & {str(node.name) for node in graphs[1]}
    packed, half = (
        CostModel(views(graph), profile, precision="fp16", power_mode=plan.power_mode)
        for graph in graphs
    )
    return _gains(INT4, sorted(names), (packed, half), front.int4)


def _gains(
    form: str, names: Sequence[str], costs: tuple[CostModel, CostModel], model: FloatedModel
) -> tuple[LayerGain, ...]:
    """Return the gains of products; `costs`: in the form, and in FP16."""
    return tuple(
        LayerGain(
            node=name,
            processor="gpu",
            int8_us=costs[0].node(name, "gpu").time_us,
            half_us=costs[1].node(name, "gpu").time_us,
            error_share=None,
            kept=model.floats.get(name, ""),
            form=form,
            error=model.errors.get(name),
        )
        for name in names
    )


def gain_notes(front: Frontend) -> tuple[str, ...]:
    """Return a note on the nodes that INT8 does not speed up, where they are INT8."""
    if front.table is None or not front.no_gain or not front.why_all_int8:
        return ()
    (node, why), count = next(iter(front.no_gain.items())), len(front.no_gain)
    return (
        f"{count} node{'s' if count > 1 else ''} on the GPU gain{'' if count > 1 else 's'} nothing "
        f"by INT8, such as {node} ({why}); {front.why_all_int8}",
    )


Planner = Callable[[Frontend], Plan]


def kept_cost_notes(front: Frontend, plan: Plan, make_plan: Planner) -> tuple[str, ...]:
    """Return a note on the predicted times with and without each group of kept nodes that is there.

    `plan` has the kept nodes where they may run; it prices those on the GPU as in INT8, so what
    FP16 takes longer there is added. Times are those that the plan makes short: see `frame_us`.
    """
    if front.table is None or front.target.profile.gpu is None:
        return ()
    clipped = {node for node in front.off_dla if front.floating[node] == CLIPPED}
    groups = (
        (front.kept_for_targets, "for the targets", "`tandem build --keep none`"),
        (clipped, f"because {CLIPPED}", "`tandem build --accept-loss`"),
        (front.off_dla - clipped, "because they mix scores with other outputs", ""),
    )
    present = [(frozenset(nodes), why, instead) for nodes, why, instead in groups if nodes]
    return tuple(
        _note(nodes, why, instead, _times(nodes, front, plan, make_plan))
        for nodes, why, instead in present
    )


def _note(nodes: frozenset[str], why: str, instead: str, times: tuple[float, float]) -> str:
    """`instead`: how to build with them in INT8, "" where there is no way."""
    kept_us, int8_us = times
    return (
        f"the {len(nodes)} node{'s' if len(nodes) > 1 else ''} kept in floating point {why} cost "
        f"{max(0.0, kept_us - int8_us):.0f} us: {kept_us:.0f} us a frame predicted, "
        f"{int8_us:.0f} us with all in INT8{f' ({instead})' if instead else ''}"
    )


def _times(
    nodes: frozenset[str], front: Frontend, plan: Plan, make_plan: Planner
) -> tuple[float, float]:
    """Return the times of a frame with nodes kept in floating point, and with them in INT8."""
    table = front.table
    assert table is not None
    others = tuple(name for name in table.keep_float if name not in nodes)
    without = msgspec.structs.replace(table, keep_float=others)
    int8_us = frame_us(make_plan(replace(front, table=without)))
    on_gpu = {row.node for row in plan.placements if row.processor == "gpu"}
    graph = views(front.prepared.model.graph)
    longer_us = (
        half_us(graph, nodes & on_gpu, front.target.profile, plan.power_mode) / plan.batching.size
    )
    return frame_us(plan) + longer_us, int8_us


def frame_us(plan: Plan) -> float:
    """Return the time of a frame: from one to the next with frames in flight, else its latency.

    A plan for throughput may have more latency for more frames a second.
    """
    if goal_named(plan.search.objective).frames_in_flight:
        return 1e6 / plan.figures[0].frames_per_second
    return plan.total_us / plan.batching.size


def half_us(
    nodes: tuple[NodeView, ...], slowed: frozenset[str], profile: Profile, power_mode: str | None
) -> float:
    """Return by how much FP16 is predicted to be slower than INT8 on the GPU, over `kept` nodes."""
    int8, half = (
        CostModel(nodes, profile, precision=precision, power_mode=power_mode)
        for precision in ("int8", "fp16")
    )
    kernels = [kernel for kernel in int8.kernels if not slowed.isdisjoint(kernel)]
    return sum(
        max(0.0, half.node(name, "gpu").time_us - int8.node(name, "gpu").time_us)
        for kernel in kernels
        for name in kernel
    )
