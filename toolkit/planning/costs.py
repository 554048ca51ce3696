"""Costs of single nodes by the fitted model of `toolkit.costs`, for callers without a graph.

`CostModel` prices the nodes of a whole graph, with the kernels that they make together; these
functions look at one node and the operators that make its inputs.
"""

from functools import lru_cache

from device.manifest import Precision, Processor
from device.profile import Profile
from toolkit.costs.bytes import tensor_bytes
from toolkit.costs.constants import Costs, load_costs
from toolkit.costs.fusion import MATRIX, POINTWISE
from toolkit.costs.model import CostModel
from toolkit.planning.node_view import NodeView

__all__ = ["Costs", "crossing_us", "load_costs", "predicted_us", "tensor_bytes"]


def predicted_us(
    view: NodeView, processor: Processor, profile: Profile, precision: Precision
) -> float:
    """Return the predicted time of a node in microseconds.

    Pointwise work behind a product or other pointwise work runs in the kernel before it, and only
    reads its other operands. A dynamic leading dimension counts as 1; a node of unknown shapes
    costs its launch. Raises ValueError: the profile has no such processor.
    """
    cost = _model(profile, precision).alone(view, processor)
    if view.op in POINTWISE and frozenset(view.before) & (MATRIX | POINTWISE):
        others = view.activations[1:] + view.constants
        moved = sum(tensor_bytes(tensor, precision) or 0 for tensor in others)
        share = load_costs().gpu.bandwidth_share.value
        return moved / (profile.memory.bandwidth_gbps.value * 1e3 * share)
    return cost.time_us


def crossing_us(size: int, profile: Profile) -> float:
    """Return the predicted time of passing `size` bytes to another processor and its format."""
    return _model(profile, "int8").crossing(size, "gpu", "dla0").time_us


@lru_cache(maxsize=64)
def _model(profile: Profile, precision: Precision) -> CostModel:
    return CostModel((), profile, precision=precision)
