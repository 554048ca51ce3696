"""Say what the Super clocks of a module change: the same board, flashed for more power.

Published figures of a module may be of either: MLPerf's Orin NX takes the times of Super clocks.
"""

from collections.abc import Sequence

from device.profile import Profile, list_profiles, load_profile
from toolkit.graph.node_view import NodeView
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.plan import Plan
from toolkit.partition.planning.quantities import quantity

SUFFIX = "-super"


def super_notes(
    plan: Plan, seen: Sequence[NodeView], jetpack: str | None = None
) -> tuple[str, ...]:
    """Return a note for a plan at the highest clocks of a module that has Super clocks, too.

    `seen`: the nodes that were planned; `jetpack`: that of the board, None: any.
    """
    name = plan.profile + SUFFIX
    if plan.power_mode is not None or name not in {each.name for each in list_profiles()}:
        return ()
    usual, faster = load_profile(plan.profile), load_profile(name)
    if jetpack is not None and jetpack not in faster.jetpacks:
        return ()
    clocks = [
        f"{part} at {new:.0f} instead of {old:.0f} MHz"
        for part, old, new in (
            ("the GPU", _gpu_mhz(usual), _gpu_mhz(faster)),
            ("the DLA", _dla_mhz(usual), _dla_mhz(faster)),
        )
        if new > old > 0
    ]
    before, after = (_busy_us(plan, seen, profile) for profile in (usual, faster))
    return (
        f"with Super clocks ({faster.title}: {', '.join(clocks)}) the nodes of this plan take "
        f"{quantity(after, 'us')} instead of {quantity(before, 'us')} one after another "
        f"(profile {name})",
    )


def _gpu_mhz(profile: Profile) -> float:
    return profile.gpu.max_mhz.value if profile.gpu else 0.0


def _dla_mhz(profile: Profile) -> float:
    return profile.dla.max_mhz.value if profile.dla else 0.0


def _busy_us(plan: Plan, seen: Sequence[NodeView], profile: Profile) -> float:
    costs = CostModel(seen, profile, precision=plan.precision)
    return sum(
        costs.node(node, segment.processor).time_us
        for segment in plan.segments
        for node in segment.nodes
    )
