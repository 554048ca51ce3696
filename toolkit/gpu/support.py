"""Which nodes have GPU kernels, asked of nodes alone: before the plan, and before any lowering.

A rule reads one ONNX node, with the shapes, types and constants of its tensors. Where a rule
refuses a node that ONNX defines by others, its definition is asked instead, level by level.

Rules refuse only what no lowering computes. What more than the node decides is refused in lowering
or compiling, for these reasons:

* storage: the type and the grid in which a tensor lies, which the precision and Q/DQ decide;
* numbers: weights that do not fit the storage type;
* the cut: the types and the memory of tensors at the border of a segment;
* dynamic sizes: formulas, and steps of dimensions, at which kernels fit;
* tactics: what plugins and the compiler say.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import onnx_ir as ir

from toolkit.gpu.emit.gather import ATOMIC_TYPES
from toolkit.gpu.emit.pooling import unpooled_shape
from toolkit.gpu.emit.resize import reads_parameters
from toolkit.gpu.emit.table import EMITTERS
from toolkit.gpu.emit.top_k import too_many_columns
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.dtypes import ELEMENT_TYPES
from toolkit.gpu.ir.expressions import is_elementwise
from toolkit.gpu.ir.network import (
    Operation,
    SegmentTensors,
    read_operation,
    read_tensors,
    unknown_operand,
)
from toolkit.gpu.passes.composites import DEEPEST_HEAD
from toolkit.gpu.passes.einsum import read_equation
from toolkit.gpu.passes.functions import expand_functions
from toolkit.gpu.passes.recurrent import ACTIVATIONS, MAX_STEPS
from toolkit.gpu.shapes.inference import Trace

MAX_INDICES = 4  # of one element, that kernels read

# Operators without a kernel of their own that passes write as others.
REWRITTEN = frozenset(
    {"BatchNormalization", "CastLike", "ConvInteger", "DequantizeLinear", "Dropout", "Einsum"}
    | {"EyeLike", "GRU", "LSTM", "MatMulInteger", "OneHot", "QLinearConv", "QLinearMatMul"}
    | {"QuantizeLinear", "RNN", "ReverseSequence", "Trilu"}
)
REDUCTIONS = (
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean"),
    *("ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"),
)
_PARAMETER = "reads {name!r}, which is computed; kernels are compiled for constant parameters"
_QUANTIZED = ("int8", "uint8", "int16", "uint16")
_SAMPLED = {"bilinear": "linear", "bicubic": "cubic"}  # as they were named before opset 20

Reason: TypeAlias = str
"""Why no kernel computes a node: a sentence that names the node."""

Check = Callable[[Operation, SegmentTensors], "str | None"]
"""Why kernels do not compute an operation, after "node 'name' (Operator) "; None: they may."""


def _keeps_keys(op: Operation, _: SegmentTensors) -> str | None:
    if op.input(4) or op.input(5) or op.input(6) or len(op.outputs) > 1:
        return "keeps keys or returns weights; kernels return 1 tensor made from 4"
    return None


def _has_window(op: Operation, _: SegmentTensors) -> str | None:
    sides = (op.integer("left_window_size", -1), op.integer("right_window_size", -1))
    return None if sides == (-1, -1) else "has a window; kernels look at all keys"


def _heads(op: Operation, tensors: SegmentTensors) -> str | None:
    """The queries and keys of (batch, heads, rows, depth) or (batch, rows, heads x depth)."""
    q, k, v = (tensors.shape(name) for name in op.inputs[:3])
    if q is None or k is None or v is None:
        return None
    queries = op.integer("q_num_heads", 1)
    values = op.integer("kv_num_heads", queries)
    if len(q) == 4:
        queries, values, depths = q[1], k[1], (q[3], v[3])
    else:
        depths = (q[2] // queries, v[2] // values)
    if max(depths) <= DEEPEST_HEAD and queries % values == 0:
        return None
    return (
        f"has {queries} queries of {depths[0]} for {values} values of {depths[1]}; kernels take up "
        f"to {DEEPEST_HEAD}, shared evenly"
    )


def _more_outputs(op: Operation, _: SegmentTensors) -> str | None:
    if len(op.outputs) == 1:
        return None
    return "returns what it normalized by; kernels return 1 tensor"


def _indices(op: Operation, tensors: SegmentTensors) -> str | None:
    shape = tensors.shape(op.inputs[1])
    if shape is None or shape[-1] <= MAX_INDICES:
        return None
    return f"takes {shape[-1]} indices for an element; kernels take {MAX_INDICES}"


def _sampled(op: Operation, tensors: SegmentTensors) -> str | None:
    shape = tensors.shape(op.inputs[0])
    if shape is None:
        return None
    dims, mode = len(shape) - 2, op.text("mode", "linear")
    mode = _SAMPLED.get(mode, mode)
    if dims == 2 or (dims == 3 and mode != "cubic"):
        return None
    return f"samples {dims} dimensions ({mode}); kernels take 2, and 3 by linear and nearest"


def _regions(op: Operation, _: SegmentTensors) -> str | None:
    if op.text("mode", "avg") != "avg":
        return "takes the largest sample of a bin; kernels average"
    if op.integer("sampling_ratio", 0) <= 0:
        return "has as many samples as a region is large; kernels take a fixed sampling_ratio"
    if "coordinate_transformation_mode" not in op.attributes:
        return (
            "leaves coordinate_transformation_mode to its opset, and opsets differ; kernels take "
            "one that the node states"
        )
    return None


def _gates(op: Operation, _: SegmentTensors) -> str | None:
    if "clip" in op.attributes or op.integer("input_forget", 0):
        return "clips its sums or couples its gates; kernels do not"
    return None


def _activations(op: Operation, _: SegmentTensors) -> str | None:
    names = op.text("activations", "")
    if not names or set(names.split(",")) <= set(ACTIVATIONS):
        return None
    return f"has the activations {names}; kernels take {ACTIVATIONS}"


def _integers(op: Operation, tensors: SegmentTensors) -> str | None:
    dtype = tensors.dtypes.get(op.outputs[0], _QUANTIZED[0])
    if dtype in _QUANTIZED:
        return None
    return f"makes {dtype}; kernels make int8, uint8, int16 and uint16"


def _cast_type(op: Operation, tensors: SegmentTensors) -> str | None:
    dtype = tensors.dtypes.get(op.outputs[0])
    if dtype is None or dtype in ELEMENT_TYPES:
        return None
    return f"makes {dtype}; kernels make {', '.join(ELEMENT_TYPES)}"


def _spatial(op: Operation, tensors: SegmentTensors) -> str | None:
    shape = tensors.shape(op.inputs[0])
    if shape is None or 3 <= len(shape) <= 5:
        return None
    return f"has {len(shape) - 2} spatial dimensions; kernels take 1 to 3"


def _steps(op: Operation, tensors: SegmentTensors) -> str | None:
    shape = tensors.shape(op.inputs[0])
    if shape is None:
        return None
    layout = op.integer("layout", 0)
    if layout not in (0, 1):
        return f"has layout {layout}; kernels take 0 and 1"
    steps = shape[layout]
    lengths = tensors.constants.get(op.input(4))
    if steps > MAX_STEPS:
        return f"has {steps} steps; kernels take {MAX_STEPS}"
    if lengths is not None and (lengths != steps).any():
        return f"has sequences of other lengths than {steps}"
    return None


def _trains(op: Operation, tensors: SegmentTensors) -> str | None:
    training = tensors.constants.get(op.input(2))
    if op.kind == "Dropout" and (training is None or not training.any()):
        return None
    if op.kind == "BatchNormalization" and not op.integer("training_mode", 0):
        return None if len(op.outputs) == 1 else "returns statistics; kernels return 1 tensor"
    return "is in training mode; kernels are for inference"


def _equation(op: Operation, _: SegmentTensors) -> str | None:
    if read_equation(op) is not None:
        return None
    return (
        f"has the equation {op.text('equation', '')!r} of {len(op.inputs)} tensors; kernels take 1 "
        "or 2, without diagonals and '...'"
    )


def _blocks(op: Operation, tensors: SegmentTensors) -> str | None:
    computed = [name for name in op.inputs[1:3] if name in tensors.computed]
    if not op.integer("block_size", 0) or not computed:
        return None
    return f"has blocks with scales of their own, {computed[0]!r}, that are not constant"


def _joins(op: Operation, _: SegmentTensors) -> str | None:
    reduction = op.text("reduction", "none")
    if reduction == "none" or reduction in ATOMIC_TYPES:
        return None
    return f"joins by {reduction!r}; kernels join by {', '.join(ATOMIC_TYPES)}"


def _columns(op: Operation, tensors: SegmentTensors) -> str | None:
    shape, result = (tensors.shape(name) for name in (op.inputs[0], op.outputs[0]))
    if shape is None or result is None:
        return None
    axis = op.integer("axis", -1)
    return too_many_columns(shape[axis], result[axis])


def _unpooled(op: Operation, tensors: SegmentTensors) -> str | None:
    shape, result = (tensors.shape(name) for name in (op.inputs[0], op.outputs[0]))
    if shape is None or result is None or result == unpooled_shape(op, shape, result):
        return None
    indexed = list(unpooled_shape(op, shape, result))
    return f"writes {list(result)} by indices in {indexed}; kernels take equal sizes"


def _resized(op: Operation, tensors: SegmentTensors) -> str | None:
    shape, result = (tensors.shape(name) for name in (op.inputs[0], op.outputs[0]))
    if shape is None or result is None:
        return None
    parameters = reads_parameters(op, shape, result)
    name = next((name for name in parameters if name in tensors.computed), None)
    return None if name is None else _PARAMETER.format(name=name)


RULES: tuple[tuple[tuple[str, ...], Check], ...] = (
    (("Attention",), _keeps_keys),
    (("Attention",), _has_window),
    (("Attention",), _heads),
    (("LayerNormalization", "RMSNormalization"), _more_outputs),
    (("GatherND", "ScatterND"), _indices),
    (("GridSample",), _sampled),
    (("RoiAlign",), _regions),
    (("RNN", "GRU", "LSTM"), _gates),
    (("RNN", "GRU", "LSTM"), _activations),
    (("RNN", "GRU", "LSTM"), _steps),
    (("BatchNormalization", "Dropout"), _trains),
    (("Einsum",), _equation),
    (("QuantizeLinear", "DequantizeLinear"), _blocks),
    (("ScatterElements", "ScatterND"), _joins),
    (("TopK",), _columns),
    (("MaxUnpool",), _unpooled),
    (("Resize", "Upsample"), _resized),
    (("QuantizeLinear",), _integers),
    (("Cast", "CastLike"), _cast_type),
    (("Conv", "ConvTranspose"), _spatial),
    (("MaxPool", "AveragePool", "LpPool"), _spatial),
)
"""Operators and what they are asked, in order; all operators are asked for a kernel before."""

CONSTANTS: tuple[tuple[tuple[str, ...], tuple[int, ...], str], ...] = (
    (("Pad",), (2, 1, 3), _PARAMETER),
    (("Slice",), (1, 3, 4), _PARAMETER),
    (("CumSum", "CumProd", "Trilu"), (1,), _PARAMETER),
    (("Dropout",), (2,), _PARAMETER),
    (("BatchNormalization",), (1, 2, 3, 4), _PARAMETER),
    (("ConvTranspose",), (1,), "has weights that are not constant ({name!r})"),
    (REDUCTIONS, (1,), "has axes that are not constant ({name!r})"),
    (("RNN", "GRU", "LSTM"), (1, 2, 3, 7), "has weights that are not constant"),
    (("RNN", "GRU", "LSTM"), (4,), "has lengths of sequences that are not constant ({name!r})"),
)
"""Operators, their operands that must not depend on the numbers of the inputs, and the reason."""


def supports(
    node: ir.Node, tensors: SegmentTensors, plugged: Collection[str] = ()
) -> Reason | None:
    """Return why no kernel computes a node, or None where one may.

    `plugged`: operators of other domains that plugins compute, such as "my.domain::Op".
    """
    try:
        op = read_operation(node, plugged)
    except NotCoveredError as error:
        return str(error)
    reason = unknown_operand(op, tensors)
    if reason is not None:
        return reason
    if not (op.kind in EMITTERS or op.kind in {*plugged, *REWRITTEN} or is_elementwise(op)):
        return f"node {op.name!r} ({op.kind}) has no kernel yet"
    for kinds, indices, text in CONSTANTS:
        name = next((op.input(at) for at in indices if op.input(at) in tensors.computed), None)
        if op.kind in kinds and name is not None:
            return f"node {op.name!r} ({op.kind}) {text.format(name=name)}"
    for kinds, check in RULES:
        reason = check(op, tensors) if op.kind in kinds else None
        if reason is not None:
            return f"node {op.name!r} ({op.kind}) {reason}"
    return None


@dataclass(frozen=True, slots=True)
class Supported:
    """A model with definitions in the place of nodes that have kernels only so.

    `refused`: nodes that have none, and why; of an operator with a definition what was said of
    the operator. `last`: what was said of the nodes of their definitions.
    """

    model: ir.Model
    refused: Mapping[str, Reason]
    last: Mapping[str, Reason]


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
    first: dict[str, Reason] = {}  # what is said of an operator itself, before its definition
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
) -> dict[str, Reason]:
    tensors = read_tensors(model, trace)
    nodes: Sequence[ir.Node] = tensors.nodes
    if dynamic:
        nodes = [node for node in nodes if _is_computed(node, tensors)]
        tensors = replace(tensors, unknown={})
    reasons: dict[str, Reason] = {}
    for node in nodes:
        reason = supports(node, tensors, plugged)
        if reason is not None:
            reasons.setdefault(str(node.name), reason)
    return reasons


def _is_computed(node: ir.Node, tensors: SegmentTensors) -> bool:
    return any(value.name in tensors.computed for value in node.outputs)
