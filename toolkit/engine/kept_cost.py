"""What the nodes cost in speed that a calibration keeps in floating point for its targets."""

from collections.abc import Callable
from dataclasses import replace

import msgspec

from device.profile import Profile
from toolkit.engine.calibrate import Calibrated
from toolkit.graph.node_view import NodeView, views
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.objectives import goal_named
from toolkit.partition.planning.plan import Plan

Planner = Callable[[Calibrated], Plan]


def kept_cost_notes(
    calibrated: Calibrated, plan: Plan, profile: Profile, make_plan: Planner
) -> tuple[str, ...]:
    """Return a note on the predicted times with and without the kept nodes, none without any.

    `plan` has the kept nodes where they may run; it prices those on the GPU as in INT8, so what
    FP16 takes longer there is added. Times are those that the plan makes short: see `frame_us`.
    """
    nodes = calibrated.kept_for_targets
    if not nodes or calibrated.table is None or profile.gpu is None:
        return ()
    others = tuple(name for name in calibrated.table.keep_float if name not in nodes)
    table = msgspec.structs.replace(calibrated.table, keep_float=others)
    int8_us = frame_us(make_plan(replace(calibrated, table=table)))
    on_gpu = {row.node for row in plan.placements if row.processor == "gpu"}
    graph = views(calibrated.prepared.model.graph)
    longer_us = half_us(graph, nodes & on_gpu, profile, plan.power_mode) / plan.batching.size
    kept_us = frame_us(plan) + longer_us
    return (
        f"the {len(nodes)} nodes kept in floating point for the targets cost "
        f"{max(0.0, kept_us - int8_us):.0f} us: {kept_us:.0f} us a frame predicted, "
        f"{int8_us:.0f} us with all in INT8 (`tandem build --keep none`)",
    )


def frame_us(plan: Plan) -> float:
    """Return the time of a frame: from one to the next with frames in flight, else its latency.

    A plan for throughput may have more latency for more frames a second.
    """
    if goal_named(plan.search.objective).frames_in_flight:
        return 1e6 / plan.figures[0].frames_per_second
    return plan.total_us / plan.batching.size


def half_us(
    nodes: tuple[NodeView, ...], kept: frozenset[str], profile: Profile, power_mode: str | None
) -> float:
    """Return by how much FP16 is predicted to be slower than INT8 on the GPU, over `kept` nodes."""
    int8, half = (
        CostModel(nodes, profile, precision=precision, power_mode=power_mode)
        for precision in ("int8", "fp16")
    )
    kernels = [kernel for kernel in int8.kernels if not kept.isdisjoint(kernel)]
    return sum(
        max(0.0, half.node(name, "gpu").time_us - int8.node(name, "gpu").time_us)
        for kernel in kernels
        for name in kernel
    )
