"""Slowdown of a processor while others use the same memory."""

from toolkit.partition.costs.constants import Contention


def slowdown(own_gbps: float, other_gbps: float, peak_gbps: float, constants: Contention) -> float:
    """Return the factor by which a processor's time grows, at least 1.

    `own_gbps`: its demand when alone; `other_gbps`: the demand of all others. The form is that of
    PCCS (Xu et al., MICRO 2021): no slowdown at low demand; above, the factor grows with both
    demands, until that of the others saturates. Piecewise linear in each.
    """
    own_excess = max(0.0, own_gbps / peak_gbps - constants.free_share.value)
    other_share = min(max(0.0, other_gbps / peak_gbps), constants.full_share.value)
    return 1.0 + constants.slope.value * own_excess * other_share
