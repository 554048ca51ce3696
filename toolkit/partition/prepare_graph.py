"""Prepares a graph for planning: its rewrites, before the calibration: new tensors need ranges."""

from collections.abc import Mapping

import onnx_ir as ir

from device.profile import Profile
from toolkit.partition.planning.options import PlanOptions
from toolkit.partition.prepared import Prepared


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
