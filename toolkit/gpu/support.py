"""Which nodes have GPU kernels, asked of nodes alone: before the plan, and before any lowering.

A node is asked the checks of its operator's row in `toolkit.gpu.operations`. Where they refuse a
node that ONNX defines by others, its definition is asked instead, level by level.

What more than the node decides is refused in lowering or compiling, for these reasons:

* storage: the type and the grid in which a tensor lies, which the precision and Q/DQ decide;
* numbers: weights that do not fit the storage type;
* the cut: the types and the memory of tensors at the border of a segment;
* dynamic sizes: formulas, and steps of dimensions, at which kernels fit;
* tactics: what plugins and the compiler say.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.dtypes import OPERAND_TYPES
from toolkit.gpu.ir.expressions import is_elementwise
from toolkit.gpu.ir.network import Operation, SegmentTensors, read_operation, read_tensors
from toolkit.gpu.operations import OPERATIONS
from toolkit.gpu.passes.functions import expand_functions
from toolkit.gpu.reasons import Reason, reason
from toolkit.gpu.shapes.inference import Trace


def supports(node: ir.Node, tensors: SegmentTensors, plugged: Collection[str] = ()) -> str | None:
    """Return why no kernel computes a node, in words that name it, or None where one may.

    `plugged`: operators of other domains that plugins compute, such as "my.domain::Op".
    """
    try:
        op = read_operation(node, plugged)
    except NotCoveredError as error:
        return str(error)
    for name in (*op.inputs, *op.outputs):
        if name in tensors.unknown:
            return tensors.unknown[name]
    refusal = _refusal(op, tensors, plugged)
    return f"node {op.name!r} ({op.kind}) {refusal}" if refusal else None


def _refusal(op: Operation, tensors: SegmentTensors, plugged: Collection[str]) -> Reason | None:
    checks = OPERATIONS[op.kind].checks if op.kind in OPERATIONS else ()
    if is_elementwise(op):
        checks = (_is_read, *checks)
    elif op.kind not in OPERATIONS and op.kind not in plugged:
        return reason("gpu.no-kernel")
    return next(filter(None, (check(op, tensors) for check in checks)), None)


def _is_read(op: Operation, tensors: SegmentTensors) -> Reason | None:
    for name in op.inputs:
        constant = tensors.constants.get(name)
        dtype = tensors.dtypes.get(name, "float32") if constant is None else constant.dtype.name
        sizes = constant is not None and dtype == "object"  # of dynamic dimensions: lowering says
        if name and dtype not in OPERAND_TYPES and not sizes:
            return reason("gpu.element-type", name, dtype, ", ".join(OPERAND_TYPES))
    return None


@dataclass(frozen=True, slots=True)
class Supported:
    """A model with definitions in the place of nodes that have kernels only so.

    `refused`: nodes that have none, and why; of an operator with a definition what was said of
    the operator. `last`: what was said of the nodes of their definitions.
    """

    model: ir.Model
    refused: Mapping[str, str]
    last: Mapping[str, str]


def ask_support(
    model: ir.Model,
    plugged: Collection[str] = (),
    trace: Trace | None = None,
    *,
    dynamic: bool = False,
) -> Supported:
    """Ask for all nodes of a model. Nodes of a definition are named as the node.

    `trace`: a point of the dynamic dimensions, as in `toolkit.gpu.ir.network.read_network`.
    `dynamic`: sizes are open, which only lowering knows; tensors of unknown shape and what is
    computed from sizes alone are left to it.
    """
    first: dict[str, str] = {}  # what is said of an operator itself, before its definition
    while True:
        reasons = _refusals(model, plugged, trace, dynamic=dynamic)
        first = {**reasons, **first}
        expanded = expand_functions(model, reasons) if reasons else None
        if expanded is None:
            return Supported(model, {name: first[name] for name in reasons}, reasons)
        model = expanded


def _refusals(
    model: ir.Model,
    plugged: Collection[str],
    trace: Trace | None,
    *,
    dynamic: bool,
) -> dict[str, str]:
    tensors = read_tensors(model, trace)
    nodes: Sequence[ir.Node] = tensors.nodes
    if dynamic:
        nodes = [node for node in nodes if _is_computed(node, tensors)]
        tensors = replace(tensors, unknown={})
    else:
        tensors = replace(tensors, computed=frozenset(tensors.shapes) - _folded(tensors))
    reasons: dict[str, str] = {}
    for node in nodes:
        refusal = supports(node, tensors, plugged)
        if refusal is not None:
            reasons.setdefault(str(node.name), refusal)
    return reasons


def _folded(tensors: SegmentTensors) -> set[str]:
    """Return the tensors that lowering turns into constants: those with Q/DQ of constants."""
    constants = set(tensors.constants)
    for node in tensors.nodes:
        source = node.inputs[0] if node.inputs else None
        of_constant = source is not None and source.name in constants
        if of_constant and node.op_type in ("DequantizeLinear", "QuantizeLinear"):
            constants.update(str(value.name) for value in node.outputs)
    return constants


def _is_computed(node: ir.Node, tensors: SegmentTensors) -> bool:
    return any(value.name in tensors.computed for value in node.outputs)
