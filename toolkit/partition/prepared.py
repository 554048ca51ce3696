"""A graph to plan, as `prepare_graph` makes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

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
