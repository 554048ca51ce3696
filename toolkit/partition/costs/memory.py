"""How much slower a processor runs while others use the same memory."""

from toolkit.partition.costs.constants import Contention


def slowdown(own_gbps: float, other_gbps: float, peak_gbps: float, given: Contention) -> float:
    """Return the factor by which a processor's time grows, at least 1.

    `own_gbps` is what it moves alone, `other_gbps` what all others move together. The form is that
    of PCCS (Xu et al., MICRO 2021): nothing happens to those who need little; above that the factor
    grows with both demands, until the others have their full share. Piecewise linear in each.
    """
    own = max(0.0, own_gbps / peak_gbps - given.free_share.value)
    other = min(max(0.0, other_gbps / peak_gbps), given.full_share.value)
    return 1.0 + given.slope.value * own * other
