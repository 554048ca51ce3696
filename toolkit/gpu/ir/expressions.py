"""ONNX element-wise operations as expressions, which kernels evaluate on what they read.

`graph.operators` says for each operator which steps it is; `toolkit.gpu.kernels.expression`
computes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.elementwise_ops import OPERATORS, Constants, ExprBuilder, ExprOp, is_number
from toolkit.gpu.ir.network import Operation

_MOST = 127  # of INT8
# Steps whose number is a scale, or one over it.
_SCALED = ("real", "near_int8", "round_int8", "relu_int8")
# Steps that are shorter where no more than the digits of FP16 are kept.
_IN_HALF: Mapping[str, str] = MappingProxyType(
    {
        "gelu": "gelu_half",
        "gelu_tanh": "gelu_tanh_half",
        "silu": "silu_half",
        "tanh": "tanh_half",
    }
)


@dataclass(frozen=True, slots=True)
class Expression:
    """Values computed from `operands` by `steps`; the last step is the result.

    Without steps it is the first operand itself.
    """

    operands: tuple[str, ...]
    steps: tuple[ExprOp, ...]


def is_elementwise(op: Operation) -> bool:
    """Whether the operation is a row of the table of operators."""
    return op.kind in OPERATORS


def tensors_read(op: Operation, constants: Constants) -> tuple[str, ...]:
    """Return the operands of an element-wise operation that are not single constant numbers."""
    return tuple(name for name in op.inputs if name and not is_number(name, constants))


def inverse(scale: float) -> float:
    """Return 1 / scale in float32: rounding to a grid multiplies by it."""
    return float(np.float32(1) / np.float32(scale))


def converting(source: float | None, target: float | None) -> tuple[ExprOp, ...]:
    """Return the steps from numbers stored with one scale (None: real ones) to another."""
    if source == target:
        return ()
    real: tuple[ExprOp, ...] = () if source is None else (("real", 0, source),)
    if target is None:
        return real
    return (*real, ("round_int8", len(real), inverse(target)))


def with_numbers(steps: tuple[ExprOp, ...]) -> tuple[tuple[ExprOp, ...], tuple[float, ...]]:
    """Take the scales out of steps: kernels are given them, and differ in nothing else."""
    numbers: list[float] = []
    found: list[ExprOp] = []
    for step in steps:
        if step[0] not in _SCALED:
            found.append(step)
            continue
        found.append((f"{step[0]}_by", step[1], len(numbers)))
        numbers.append(float(step[2]))  # type: ignore[arg-type]
    return tuple(found), tuple(numbers)


def operands_of(
    root: str | None, operations: Sequence[Operation], constants: Constants
) -> tuple[str, ...]:
    """Return the tensors that an expression reads, the root first."""
    made = {name for op in operations for name in op.outputs}
    read = (name for op in operations for name in tensors_read(op, constants))
    return tuple(dict.fromkeys((*((root,) if root else ()), *(n for n in read if n not in made))))


def expression_of(
    root: str | None,
    operations: Sequence[Operation],
    constants: Constants,
    scales: Mapping[str, float | None] = MappingProxyType({}),
    dtypes: Mapping[str, str] = MappingProxyType({}),
    *,
    in_half: bool = False,
) -> Expression:
    """Join element-wise operations in running order into one expression.

    `root`: the tensor that a kernel hands to it as its first operand, if any. The result is the
    output of the last operation, on a grid as integers if that is a RoundInt8. `scales` of the
    operands that are read as integers on a grid; `dtypes` of tensors, float32 where it has none.
    `in_half`: results keep the digits of FP16, or fewer, and the GPU has instructions for that.
    Raises NotCoveredError: an operation that only some parameters of are covered, named.
    """
    operands = operands_of(root, operations, constants)
    index = {name: at for at, name in enumerate(operands)}
    steps = ExprBuilder(index, constants, dtypes)
    for name in operands:
        scale = scales.get(name)
        if scale is not None:
            index[name] = steps.add("real", index[name], scale)
        elif steps.dtype(name) == "bool":
            index[name] = steps.add("bool", index[name])
    for op in operations:
        if op.kind == "RoundInt8" and op is not operations[-1]:
            scale = op.number("scale", 1.0)
            near = steps.add("near_int8", steps.value(op.inputs[0]), inverse(scale))
            index[op.outputs[0]] = steps.add("real", near, scale)
        else:
            index[op.outputs[0]] = _add(steps, op)
    if operations and index[operations[-1].outputs[0]] != steps.last:
        steps.add("same", index[operations[-1].outputs[0]])
    found = tuple(steps.found)
    if in_half:
        found = tuple((_IN_HALF.get(str(step[0]), step[0]), *step[1:]) for step in found)
    return Expression(operands, _rectified_at_once(len(operands), found))


def _rectified_at_once(operands: int, steps: tuple[ExprOp, ...]) -> tuple[ExprOp, ...]:
    """Write a rectifier and the rounding that ends an expression as one step.

    Rounding x to q = clip(rte(fl(x f)), -128, 127) is monotone, so Relu first leaves the q of 0 or
    more; a Clip from 0 on does so where its highest number is rounded to 127 or beyond.
    """
    if len(steps) < 2 or steps[-1][:2] != ("round_int8", operands + len(steps) - 2):
        return steps
    rectifier, factor = steps[-2], np.float32(steps[-1][2])  # type: ignore[arg-type]
    if rectifier[0] == "clip":
        low, high = (np.float32(limit) for limit in rectifier[2:])  # type: ignore[arg-type]
        rectifies = bool(low == 0 and np.rint(high * factor) >= _MOST)
    else:
        rectifies = rectifier[0] == "relu"
    if not rectifies:
        return steps
    return (*steps[:-2], ("relu_int8", rectifier[1], steps[-1][2]))


def _add(steps: ExprBuilder, op: Operation) -> int:
    for name in op.inputs:
        if name and steps.dtype(name) not in steps.known:
            raise NotCoveredError(
                f"node {op.name!r} ({op.kind}) reads {name!r} of type {steps.dtype(name)}; kernels "
                f"read {', '.join(steps.known)}"
            )
    return OPERATORS[op.kind](steps, op)
