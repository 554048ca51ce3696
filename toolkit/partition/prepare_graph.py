"""Prepares a graph for planning: its rewrites, which come before the calibration, as what they
make needs ranges of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from device.profile import Profile
from toolkit.partition.planning.options import PlanOptions

if TYPE_CHECKING:
    from toolkit.dla.legalize.rewrite import Applied, Cut, Declined
    from toolkit.partition.planning.placement import Trial


@dataclass(frozen=True, slots=True)
class Prepared:
    """A graph to plan, with the rewrites applied to it.

    `ranges`: those given, and those of new tensors that follow from them. `unused` rewrites were
    possible, but the plan is better without; `declined` ones were not possible. `gain`: the share
    of the objective that those applied save the model alone, None where there are none.
    `trial`: its placement, a start for the plan.
    """

    model: ir.Model
    ranges: Mapping[str, float]
    applied: tuple["Applied", ...] = ()
    unused: tuple["Applied", ...] = ()
    declined: tuple["Declined", ...] = ()
    cuts: tuple["Cut", ...] = ()
    gain: float | None = None
    trial: "Trial | None" = None


def prepare_graph(
    model: ir.Model,
    profile: Profile,
    options: PlanOptions,
    ranges: Mapping[str, float] | None = None,
    keep_float: frozenset[str] = frozenset(),
) -> Prepared:
    """Return the graph to plan; `model` has gone through the passes.

    `ranges` None: they will be measured on the result. With ranges, rewrites whose new tensors
    would have none are left out. `keep_float`: nodes that stay in floating point, which no rewrite
    touches in INT8: what it makes would run in INT8.
    """
    fixed = options.precision == "fp32" or not options.rewrites
    if profile.gpu is None or profile.dla is None or fixed:
        return Prepared(model, dict(ranges or {}))
    from toolkit.partition.rewrites import keep_useful  # a GPU and a CPU alone need no trial plans

    return keep_useful(model, profile, options, ranges, keep_float)
