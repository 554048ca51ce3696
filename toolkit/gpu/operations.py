"""The operators that kernels compute: a row each, of which nodes, and by what lowering.

An element-wise operator is a row of `toolkit.gpu.ir.elementwise_ops`, and here too where nodes are
asked more than whether its tensors are known. A row without lowering is for what passes write as
other operators. The shapes of results are ONNX's; operators that compute with sizes have a rule in
`toolkit.gpu.shapes.shape_rules`.

Checks read one ONNX node, with the shapes, types and constants of its tensors, and refuse only what
no lowering computes (`toolkit.gpu.support`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from toolkit.gpu.data_dependent_shapes.symbolic import PADDED
from toolkit.gpu.emit import (
    attention,
    concat,
    convolution,
    convolution_nd,
    gather,
    gemm,
    grid_sample,
    layout,
    normalization,
    pad,
    pooling,
    reduction,
    resize,
    roi_align,
    scan,
    space_to_depth,
    suppression,
    top_k,
)
from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.ir.dtypes import OPERAND_TYPES
from toolkit.gpu.ir.network import Operation, SegmentTensors
from toolkit.gpu.passes.composites import DEEPEST_HEAD
from toolkit.gpu.passes.einsum import einsum_refusal
from toolkit.gpu.passes.float8 import usable_scale
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.passes.recurrent import ACTIVATIONS
from toolkit.gpu.reasons import Reason, reason
from toolkit.gpu.shapes.sizes import upper_bound
from toolkit.graph.dtypes import FLOAT8

MAX_INDICES = 4  # of one element, that kernels read
MAX_STEPS = 512  # of a recurrence: each starts up to four kernels
_QUANTIZED = ("int8", "uint8", "int16", "uint16", FLOAT8)

Emitter = Callable[[LoweringContext, Group], None]
Check = Callable[[Operation, SegmentTensors], Reason | None]
"""Why kernels do not compute an operation; None: they may."""


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """`lower` adds the launches of a group that begins with the operator; None: passes rewrite it.

    `epilogue`: its kernel can end in an expression, which may read so many tensors beside the
    result; None: it cannot. `checks` in the order in which they are asked.
    """

    lower: Emitter | None
    checks: tuple[Check, ...] = ()
    epilogue: int | None = None


def _keeps_keys(op: Operation, _: SegmentTensors) -> Reason | None:
    if op.input(4) or op.input(5) or op.input(6) or len(op.outputs) > 1:
        return reason("gpu.attention-outputs")
    return None


def _has_window(op: Operation, _: SegmentTensors) -> Reason | None:
    sides = (op.integer("left_window_size", -1), op.integer("right_window_size", -1))
    return None if sides == (-1, -1) else reason("gpu.attention-window")


def _heads(op: Operation, tensors: SegmentTensors) -> Reason | None:
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
    return reason("gpu.attention-heads", queries, depths[0], values, depths[1], DEEPEST_HEAD)


def _more_outputs(op: Operation, _: SegmentTensors) -> Reason | None:
    return None if len(op.outputs) == 1 else reason("gpu.normalization-outputs")


def _indices(op: Operation, tensors: SegmentTensors) -> Reason | None:
    shape = tensors.shape(op.inputs[1])
    if shape is None or shape[-1] <= MAX_INDICES:
        return None
    return reason("gpu.indices", shape[-1], MAX_INDICES)


def _sampled(op: Operation, tensors: SegmentTensors) -> Reason | None:
    shape = tensors.shape(op.inputs[0])
    if shape is None:
        return None
    dims, mode = len(shape) - 2, op.text("mode", "linear")
    mode = grid_sample.MODES.get(mode, mode)
    if dims == 2 or (dims == 3 and mode != "cubic"):
        return None
    return reason("gpu.grid-sample", dims, mode)


def _regions(op: Operation, _: SegmentTensors) -> Reason | None:
    if op.text("mode", "avg") != "avg":
        return reason("gpu.roi-align:mode")
    if op.integer("sampling_ratio", 0) <= 0:
        return reason("gpu.roi-align:samples")
    if "coordinate_transformation_mode" not in op.attributes:
        return reason("gpu.roi-align:corners")
    return None


def _boxes(op: Operation, tensors: SegmentTensors) -> Reason | None:
    shape = tensors.shape(op.inputs[1])
    if shape is None:
        return None
    rows, boxes = shape[0] * shape[1], shape[2]
    most, most_boxes = suppression.MAX_CLASSES, suppression.MAX_BOXES
    if upper_bound(rows) <= most and upper_bound(boxes) <= most_boxes:
        return None
    return reason("gpu.suppression", rows, boxes, most, most_boxes)


def _gates(op: Operation, _: SegmentTensors) -> Reason | None:
    if "clip" in op.attributes or op.integer("input_forget", 0):
        return reason("gpu.recurrent-gates")
    return None


def _activations(op: Operation, _: SegmentTensors) -> Reason | None:
    names = op.text("activations", "")
    if not names or set(names.split(",")) <= set(ACTIVATIONS):
        return None
    return reason("gpu.recurrent-activations", names, ACTIVATIONS)


def _integers(op: Operation, tensors: SegmentTensors) -> Reason | None:
    dtype = tensors.dtypes.get(op.outputs[0], _QUANTIZED[0])
    return None if dtype in _QUANTIZED else reason("gpu.quantized-type", dtype, FLOAT8)


def _float8_numbers(op: Operation, tensors: SegmentTensors) -> Reason | None:
    """FP8 of activations, and what rounds to it: no zero point, and the range is a limit."""
    rounds = op.kind == "QuantizeLinear"
    stored = op.outputs[0] if rounds else op.inputs[0]
    is_read = rounds or op.inputs[0] in tensors.computed
    if tensors.dtypes.get(stored) != FLOAT8 or not is_read:
        return None
    if not op.integer("saturate", 1):
        return reason("gpu.float8:saturate", FLOAT8)
    zero = tensors.constants.get(op.input(2))
    if op.input(2) and (zero is None or zero.astype(np.float32).any()):
        return reason("gpu.float8:zero", FLOAT8, op.inputs[2])
    return None


def _float8_scale(op: Operation, tensors: SegmentTensors) -> Reason | None:
    """Activations of FP8 have one constant scale."""
    stored = op.outputs[0] if op.kind == "QuantizeLinear" else op.inputs[0]
    if tensors.dtypes.get(stored) != FLOAT8 or op.inputs[0] not in tensors.computed:
        return None
    scale = tensors.constants.get(op.inputs[1])
    if scale is None:
        return reason("gpu.float8:computed", FLOAT8, op.inputs[1])
    if scale.size != 1:
        return reason("gpu.float8:scales", scale.size, FLOAT8)
    value = float(scale.reshape(()))
    return None if usable_scale(value) else reason("gpu.float8:scale", value)


def _cast_type(op: Operation, tensors: SegmentTensors) -> Reason | None:
    dtype = tensors.dtypes.get(op.outputs[0])
    if dtype is None or dtype in OPERAND_TYPES:
        return None
    return reason("gpu.cast", dtype, ", ".join(OPERAND_TYPES))


def _spatial(op: Operation, tensors: SegmentTensors) -> Reason | None:
    shape = tensors.shape(op.inputs[0])
    if shape is None or 3 <= len(shape) <= 5:
        return None
    return reason("gpu.spatial", len(shape) - 2)


def _steps(op: Operation, tensors: SegmentTensors) -> Reason | None:
    shape = tensors.shape(op.inputs[0])
    if shape is None:
        return None
    layout = op.integer("layout", 0)
    if layout not in (0, 1):
        return reason("gpu.recurrent-gates:layout", layout)
    steps = shape[layout]
    lengths = tensors.constants.get(op.input(4))
    if upper_bound(steps) > MAX_STEPS:
        return reason("gpu.recurrent-steps", steps, MAX_STEPS)
    if lengths is not None and (lengths != steps).any():
        return reason("gpu.recurrent-lengths", steps)
    return None


def _trains(op: Operation, tensors: SegmentTensors) -> Reason | None:
    training = tensors.constants.get(op.input(2))
    if op.kind == "Dropout" and (training is None or not training.any()):
        return None
    if op.kind == "BatchNormalization" and not op.integer("training_mode", 0):
        return None if len(op.outputs) == 1 else reason("gpu.normalization-outputs:batch")
    return reason("gpu.training")


def _equation(op: Operation, tensors: SegmentTensors) -> Reason | None:
    return einsum_refusal(op, [tensors.shape(n) for n in op.inputs], tensors.shape(op.outputs[0]))


def _parts(op: Operation, tensors: SegmentTensors) -> Reason | None:
    shapes = [tensors.shape(name) for name in (op.inputs[0], *op.outputs)]
    axis = op.integer("axis", 0)
    sizes = [shape[axis] for shape in shapes if shape is not None]
    if len(sizes) < len(shapes) or sum(sizes[1:]) == sizes[0]:
        return None
    return reason("gpu.left-out-output:part")


def _blocks(op: Operation, tensors: SegmentTensors) -> Reason | None:
    computed = [name for name in op.inputs[1:3] if name in tensors.computed]
    if not op.integer("block_size", 0) or not computed:
        return None
    return reason("gpu.scale-blocks", computed[0])


def _joins(op: Operation, _: SegmentTensors) -> Reason | None:
    joined = op.text("reduction", "none")
    if joined == "none" or joined in gather.ATOMIC_TYPES:
        return None
    return reason("gpu.joins", joined, ", ".join(gather.ATOMIC_TYPES))


def _columns(op: Operation, tensors: SegmentTensors) -> Reason | None:
    shape, result = (tensors.shape(name) for name in (op.inputs[0], op.outputs[0]))
    if shape is None or result is None:
        return None
    axis = op.integer("axis", -1)
    return top_k.too_many_columns(shape[axis], result[axis])


def _unpooled(op: Operation, tensors: SegmentTensors) -> Reason | None:
    shape, result = (tensors.shape(name) for name in (op.inputs[0], op.outputs[0]))
    if shape is None or result is None or result == pooling.unpooled_shape(op, shape, result):
        return None
    indexed = list(pooling.unpooled_shape(op, shape, result))
    return reason("gpu.unpooled-size", list(result), indexed)


def _resized(op: Operation, tensors: SegmentTensors) -> Reason | None:
    shape, result = (tensors.shape(name) for name in (op.inputs[0], op.outputs[0]))
    if shape is None or result is None:
        return None
    return resize.resize_refusal(op, tensors, shape, result)


def _constant(*operands: int, key: str = "gpu.constant") -> Check:
    """Return the check that these operands do not depend on the numbers of the inputs."""

    def check(op: Operation, tensors: SegmentTensors) -> Reason | None:
        names = (op.input(at) for at in operands)
        name = next((name for name in names if name in tensors.computed), None)
        return None if name is None else reason(key, name)

    return check


_AXES = _constant(1, key="gpu.constant-axes")
_RECURRENT = (
    _constant(1, 2, 3, 7, key="gpu.constant-weights:recurrent"),
    _constant(4, key="gpu.recurrent-lengths:computed"),
    *(_gates, _activations, _steps),
)


def _rows(kinds: str, row: OperatorRow) -> dict[str, OperatorRow]:
    return dict.fromkeys(kinds.split(), row)


OPERATIONS: dict[str, OperatorRow] = {
    "Conv": OperatorRow(convolution.emit_convolution, (_spatial,), epilogue=1),
    "ConvTranspose": OperatorRow(
        convolution_nd.emit_transposed_convolution,
        (_constant(1, 2, key="gpu.constant-weights"), _spatial),
        epilogue=1,
    ),
    "SpaceToDepthStem": OperatorRow(space_to_depth.emit_space_to_depth_stem, epilogue=0),
    "Gemm": OperatorRow(gemm.emit_gemm, epilogue=1),
    "MatMul": OperatorRow(gemm.emit_matmul, epilogue=1),
    **_rows("MaxPool AveragePool LpPool", OperatorRow(pooling.emit_pool, (_spatial,), epilogue=0)),
    "MaxUnpool": OperatorRow(pooling.emit_unpool, (_unpooled,)),
    "GlobalAveragePool": OperatorRow(pooling.emit_global_average, epilogue=0),
    **_rows("GlobalMaxPool GlobalLpPool", OperatorRow(reduction.emit_global_pool, epilogue=0)),
    **_rows("Resize Upsample", OperatorRow(resize.emit_resize, (_resized,))),
    "Pad": OperatorRow(pad.emit_pad, (_constant(2, 1, 3),)),
    "Gather": OperatorRow(gather.emit_gather),
    "GatherElements": OperatorRow(gather.emit_gather_elements),
    "GatherND": OperatorRow(gather.emit_gather_nd, (_indices,)),
    "ScatterElements": OperatorRow(gather.emit_scatter_elements, (_joins,)),
    "Scatter": OperatorRow(gather.emit_scatter_elements),
    "ScatterND": OperatorRow(gather.emit_scatter_nd, (_indices, _joins)),
    "GridSample": OperatorRow(grid_sample.emit_grid_sample, (_sampled,)),
    "RoiAlign": OperatorRow(roi_align.emit_roi_align, (_regions,)),
    PADDED: OperatorRow(suppression.emit_suppression, (_boxes,)),
    **_rows("CumSum CumProd", OperatorRow(scan.emit_scan, (_constant(1),))),
    "Attention": OperatorRow(
        attention.emit_attention, (_keeps_keys, _has_window, _heads), epilogue=0
    ),
    **_rows("ReduceMean ReduceL2", OperatorRow(reduction.emit_reduce, (_AXES,), epilogue=0)),
    **_rows(
        "ReduceSum ReduceMax ReduceMin ReduceProd ReduceL1 ReduceSumSquare ReduceLogSum "
        "ReduceLogSumExp",
        OperatorRow(reduction.emit_reduce, (_AXES,)),
    ),
    "TopK": OperatorRow(top_k.emit_top_k, (_columns,)),
    **_rows("ArgMax ArgMin", OperatorRow(reduction.emit_arg_reduce)),
    **_rows("Softmax LogSoftmax Hardmax", OperatorRow(normalization.emit_softmax, epilogue=0)),
    **_rows(
        "LayerNormalization RMSNormalization",
        OperatorRow(normalization.emit_layer_normalization, (_more_outputs,), epilogue=0),
    ),
    **_rows(
        "InstanceNormalization GroupNormalization",
        OperatorRow(normalization.emit_group_normalization, epilogue=0),
    ),
    **_rows(
        "MeanVarianceNormalization LpNormalization",
        OperatorRow(normalization.emit_plain_normalization, epilogue=0),
    ),
    "LRN": OperatorRow(normalization.emit_local_normalization, epilogue=0),
    "Identity": OperatorRow(layout.emit_same),
    "BitCast": OperatorRow(layout.emit_bit_cast),
    **_rows("Reshape Flatten Squeeze Unsqueeze", OperatorRow(layout.emit_reshape)),
    "Transpose": OperatorRow(layout.emit_transpose),
    "Slice": OperatorRow(layout.emit_slice, (_constant(1, 3, 4),)),
    "Split": OperatorRow(layout.emit_split, (_parts,)),
    "Expand": OperatorRow(layout.emit_expand),
    "Tile": OperatorRow(layout.emit_tile),
    **_rows("DepthToSpace SpaceToDepth", OperatorRow(layout.emit_depth_to_space)),
    "Concat": OperatorRow(concat.emit_concat),
    "ToIntegers": OperatorRow(layout.emit_to_integers),
    "FromIntegers": OperatorRow(layout.emit_from_integers),
    # Written as others, or element-wise.
    "BatchNormalization": OperatorRow(None, (_constant(1, 2, 3, 4), _trains)),
    **_rows("Cast CastLike", OperatorRow(None, (_cast_type,))),
    "DequantizeLinear": OperatorRow(None, (_blocks, _float8_numbers, _float8_scale)),
    "Dropout": OperatorRow(None, (_constant(2), _trains)),
    "Einsum": OperatorRow(None, (_equation,)),
    "QuantizeLinear": OperatorRow(None, (_blocks, _integers, _float8_numbers, _float8_scale)),
    "Trilu": OperatorRow(None, (_constant(1),)),
    **_rows("RNN GRU LSTM", OperatorRow(None, _RECURRENT)),
    **_rows("ConvInteger MatMulInteger QLinearConv QLinearMatMul", OperatorRow(None)),
    **_rows("EyeLike OneHot ReverseSequence", OperatorRow(None)),
}
"""By operator: those of ONNX, and those that passes add."""

EPILOGUES = {kind: row.epilogue for kind, row in OPERATIONS.items() if row.epilogue is not None}
