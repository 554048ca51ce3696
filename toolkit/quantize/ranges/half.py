"""Values that FP16 does not hold: seen in FP32, they are infinite where a GPU computes in FP16."""

from collections.abc import Mapping

import onnx_ir as ir

from calibration.observer import Histogram

LARGEST_HALF = 65504.0
_SHOWN = 3  # nodes in the remark


def half_remark(graph: ir.Model, histograms: Mapping[str, Histogram]) -> str | None:
    """Return a sentence about the nodes whose results exceed FP16, None without any."""
    largest = {name: histogram.amax for name, histogram in histograms.items()}
    overflows = [
        (max(largest.get(str(out.name), 0.0) for out in node.outputs), node) for node in graph.graph
    ]
    beyond = [(amax, node) for amax, node in overflows if amax > LARGEST_HALF]
    if not beyond:
        return None
    shown = ", ".join(f"{node.name} ({node.op_type}, {amax:.3g})" for amax, node in beyond[:_SHOWN])
    more = f" and {len(beyond) - _SHOWN} more" if len(beyond) > _SHOWN else ""
    return (
        f"{len(beyond)} node{'' if len(beyond) == 1 else 's'} gave values above {LARGEST_HALF:g}, "
        f"the largest of FP16: {shown}{more}. In FP16 on a GPU they are infinite, and NaN follows; "
        "build with --precision fp32, or scale the operands in the model"
    )
