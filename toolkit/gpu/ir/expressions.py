"""Fused element-wise expressions: ONNX operations as ops that a kernel evaluates on its operands.

`toolkit.gpu.ir.elementwise_ops` has the ops of each operator, `toolkit.gpu.kernels.expression`
computes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from toolkit.gpu.ir.elementwise_ops import (
    OPERATORS,
    Constants,
    ExprBuilder,
    ExprOp,
    is_number,
    reciprocal,
)
from toolkit.gpu.ir.network import Operation

_INT8_MAX = 127
# Ops whose number is a scale, or its reciprocal.
_FLOAT8 = ("to_float8", "gelu_to_float8", "from_float8")
_SCALED = ("real", "near_int8", "round_int8", "relu_int8", *_FLOAT8)
# Of `gelu_to_float8`: below, FP16 overflows where E4M3 does not; above, results are below 0.22.
_GELU_FACTORS = (2.0**-7, 2048.0)
# Faster variants for results that keep no more than the digits of FP16.
_HALF_PRECISION: Mapping[str, str] = MappingProxyType(
    {
        "gelu": "gelu_half",
        "gelu_tanh": "gelu_tanh_half",
        "silu": "silu_half",
        "tanh": "tanh_half",
    }
)


@dataclass(frozen=True, slots=True)
class Expression:
    """Values computed from `operands` by `ops`; the last op is the result.

    Without ops the result is the first operand.
    """

    operands: tuple[str, ...]
    ops: tuple[ExprOp, ...]


def is_elementwise(op: Operation) -> bool:
    """Whether the operation is a row of the table of operators."""
    return op.kind in OPERATORS


def tensors_read(op: Operation, constants: Constants) -> tuple[str, ...]:
    """Return the operands of an element-wise operation that are not single constant numbers."""
    return tuple(name for name in op.inputs if name and not is_number(name, constants))


def requantize_ops(source: float | None, target: float | None) -> tuple[ExprOp, ...]:
    """Return the ops from values with scale `source` to scale `target`; None: not INT8."""
    if source == target:
        return ()
    real: tuple[ExprOp, ...] = () if source is None else (("real", 0, source),)
    if target is None:
        return real
    return (*real, ("round_int8", len(real), reciprocal(target)))


def has_float8(ops: tuple[ExprOp, ...]) -> bool:
    """Whether ops round to FP8 or read it."""
    return any(op[0] in _FLOAT8 for op in ops)


def extract_scalars(ops: tuple[ExprOp, ...]) -> tuple[tuple[ExprOp, ...], tuple[float, ...]]:
    """Move the scales out of ops into run-time scalars, so that new scales compile nothing."""
    scalars: list[float] = []
    parametric: list[ExprOp] = []
    for op in ops:
        if op[0] in _SCALED:
            parametric.append((f"{op[0]}_by", op[1], len(scalars)))
            scalars.append(float(op[2]))  # type: ignore[arg-type]
        else:
            parametric.append(op)
    return tuple(parametric), tuple(scalars)


def operands_of(
    root: str | None, operations: Sequence[Operation], constants: Constants
) -> tuple[str, ...]:
    """Return the tensors that an expression reads, the root first."""
    computed = {name for op in operations for name in op.outputs}
    read = (name for op in operations for name in tensors_read(op, constants))
    external = (name for name in read if name not in computed)
    return tuple(dict.fromkeys((*((root,) if root else ()), *external)))


def expression_of(
    root: str | None,
    operations: Sequence[Operation],
    constants: Constants,
    scales: Mapping[str, float | None] = MappingProxyType({}),
    dtypes: Mapping[str, str] = MappingProxyType({}),
    *,
    half_precision: bool = False,
) -> Expression:
    """Fuse element-wise operations, in running order, into one expression.

    `root`: the tensor that a kernel computes and passes as first operand, if any. The result is the
    output of the last operation, as INT8 integers if that is a RoundInt8. `scales` of the operands
    that are INT8; `dtypes` of tensors, float32 by default. `half_precision`: results keep the
    digits of FP16, or fewer, and the GPU has instructions for that.
    """
    operands = operands_of(root, operations, constants)
    index = {name: at for at, name in enumerate(operands)}
    builder = ExprBuilder(index, constants, dtypes)
    for name in operands:
        scale = scales.get(name)
        if scale is not None:
            index[name] = builder.add("real", index[name], scale)
        elif builder.dtype(name) == "bool":
            index[name] = builder.add("is_nonzero", index[name])
    for op in operations:
        if op.kind == "RoundInt8" and op is not operations[-1]:
            scale = op.number("scale", 1.0)
            near = builder.add("near_int8", builder.value(op.inputs[0]), reciprocal(scale))
            index[op.outputs[0]] = builder.add("real", near, scale)
        else:
            index[op.outputs[0]] = OPERATORS[op.kind](builder, op)
    if operations and index[operations[-1].outputs[0]] != builder.last:
        builder.add("same", index[operations[-1].outputs[0]])
    ops = tuple(builder.ops)
    if half_precision:
        ops = tuple((_HALF_PRECISION.get(str(op[0]), op[0]), *op[1:]) for op in ops)
        ops = _fuse_gelu_float8(len(operands), ops)
    return Expression(operands, _fuse_relu_round(len(operands), ops))


def _fuse_gelu_float8(operands: int, ops: tuple[ExprOp, ...]) -> tuple[ExprOp, ...]:
    """Write a Gelu and the rounding to FP8 that ends an expression as one op."""
    if len(ops) < 2 or ops[-2][0] != "gelu_half":
        return ops
    factor = ops[-1][-1]
    rounds = ops[-1] == ("to_float8", operands + len(ops) - 2, factor)
    low, high = _GELU_FACTORS
    if not (rounds and isinstance(factor, float) and low <= factor <= high):
        return ops
    return (*ops[:-2], ("gelu_to_float8", ops[-2][1], factor))


def _fuse_relu_round(operands: int, ops: tuple[ExprOp, ...]) -> tuple[ExprOp, ...]:
    """Write a rectifier and the rounding that ends an expression as one op.

    Rounding x to q = clip(rte(fl(x f)), -128, 127) is monotone, so Relu first leaves the q of 0 or
    more; a Clip from 0 on does so where its upper limit is rounded to 127 or beyond.
    """
    if len(ops) < 2 or ops[-1][:2] != ("round_int8", operands + len(ops) - 2):
        return ops
    rectifier, factor = ops[-2], np.float32(ops[-1][2])  # type: ignore[arg-type]
    if rectifier[0] == "clip":
        low, high = (np.float32(limit) for limit in rectifier[2:])  # type: ignore[arg-type]
        rectifies = bool(low == 0 and np.rint(high * factor) >= _INT8_MAX)
    else:
        rectifies = rectifier[0] == "relu"
    if not rectifies:
        return ops
    return (*ops[:-2], ("relu_int8", rectifier[1], ops[-1][2]))
