"""`--precision best`: INT8 where it costs little accuracy and saves time, FP16 for the other nodes.

A node stays in floating point

1. where INT8 saves nothing: by the cost model its kernel saves less than MIN_GAIN of its time,
   and the kernels that make its operands are not bound by memory, so that they write FP16 as fast.
   A node stays INT8 beside others that read its operand in INT8, for which the tensor would be
   made twice; and so does every node where there is a DLA, which is made for INT8;
2. where the budget asks for it (`calibration.budget`); by default the noise of INT8 may have 1 % of
   the power of the signal at every output.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from calibration.budget import Budget, BudgetResult
from device.profile import Profile
from toolkit.graph.node_view import view
from toolkit.quantize.quantize import QuantizedOp, int8_nodes, is_activation
from toolkit.quantize.ranges.measure import RangeOptions

# Of a kernel's time in FP16; the cost model is fitted to whole networks and knows no smaller gain.
MIN_GAIN = 0.02
DEFAULT_BUDGET = Budget("sqnr", "least", 20.0)


def idle_nodes(graph: ir.Model, profile: Profile, power_mode: str | None) -> dict[str, str]:
    """Return the nodes for which INT8 saves no time on the GPU, with the predicted times.

    Raises ProfileError: the board has no such power mode.
    """
    from toolkit.partition.costs.model import CostModel

    if profile.gpu is None or profile.dla is not None:
        return {}
    views = [view(node) for node in graph.graph]
    int8, fp16 = (
        CostModel(views, profile, precision=precision, power_mode=power_mode)
        for precision in ("int8", "fp16")
    )
    kernel_of = {name: kernel for kernel in int8.kernels for name in kernel}
    rows = int8_nodes(graph)
    readers = Counter(name for node, row in rows for name in _operands(node, row))
    idle: dict[str, str] = {}
    for node, row in rows:
        kernel = kernel_of[str(node.name)]
        times = [sum(model.node(name, "gpu").time_us for name in kernel) for model in (int8, fp16)]
        operands = _operands(node, row)
        made_by = {kernel_of[name] for name in operands.values() if name in kernel_of}
        slower = any(
            int8.node(producer[0], "gpu").bound_by == "memory" for producer in made_by - {kernel}
        )
        alone = all(readers[name] == 1 for name in operands)
        if times[0] > (1 - MIN_GAIN) * times[1] and alone and not slower:
            idle[str(node.name)] = (
                f"INT8 saves nothing: {times[0]:.1f} us, FP16 {times[1]:.1f} us predicted"
            )
    return idle


def best_options(options: RangeOptions, graph: ir.Model, idle: Mapping[str, str]) -> RangeOptions:
    """Return the options with idle nodes in floating point and a budget for the others."""
    keep = frozenset({*options.keep_float, *idle})
    quantizes = any(str(node.name) not in keep for node, _ in int8_nodes(graph))
    return replace(
        options, keep_float=keep, budget=(options.budget or DEFAULT_BUDGET) if quantizes else None
    )


def kept_nodes(
    keep_float: tuple[str, ...], idle: Mapping[str, str], budget: BudgetResult | None
) -> dict[str, str]:
    """Return the reason for each node that stays in floating point."""
    costs = {row.node: row.cost for row in budget.costs} if budget is not None else {}
    spent = budget.keep_float if budget is not None else frozenset()

    def reason(node: str) -> str:
        if node in spent:
            return f"the budget: INT8 of it alone costs {costs.get(node, float('nan')):.3g}"
        return idle.get(node, "as asked")

    return {node: reason(node) for node in keep_float}


def _operands(node: ir.Node, row: QuantizedOp) -> dict[str, str]:
    """Return the activations that a node reads in INT8, with their producers ("": an input)."""
    indexes = range(len(node.inputs)) if row.activations is None else row.activations
    values = (node.inputs[at] for at in indexes if at < len(node.inputs))
    operands = {}
    for value in values:
        if value is not None and is_activation(value):
            maker = value.producer()
            operands[str(value.name)] = "" if maker is None else str(maker.name)
    return operands
