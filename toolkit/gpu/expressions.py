"""ONNX element-wise operators as steps of an expression (`toolkit.gpu.kernels.expression`).

Adding an operator is adding a row here and a branch there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.gpu.call import Constant
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.network import Operation

Array = npt.NDArray[Any]
Step = tuple[Constant, ...]
Constants = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Expression:
    """Values computed from `operands` by `steps`; the last step is the result.

    Without steps it is the first operand itself.
    """

    operands: tuple[str, ...]
    steps: tuple[Step, ...]


# Operators of one or two tensors that take no attributes: ONNX name, step name, operands.
_PLAIN: dict[str, tuple[str, int]] = {
    "Relu": ("relu", 1),
    "Sigmoid": ("sigmoid", 1),
    "Exp": ("exp", 1),
    "Sqrt": ("sqrt", 1),
    "Erf": ("erf", 1),
    "Neg": ("neg", 1),
    "Abs": ("abs", 1),
    "Add": ("add", 2),
    "Sub": ("sub", 2),
    "Mul": ("mul", 2),
    "Div": ("div", 2),
}


def _clip(op: Operation, constants: Constants) -> tuple[Step, ...]:
    limits = [
        _scalar(op, op.input(at), constants) if op.input(at) else default
        for at, default in ((1, -np.inf), (2, np.inf))
    ]
    # From opset 11 on the limits are inputs; before, attributes.
    low = op.number("min", limits[0])
    return (("clip", 0, float(low), float(op.number("max", limits[1]))),)


def _leaky_relu(op: Operation, _: Constants) -> tuple[Step, ...]:
    return (("leaky_relu", 0, op.number("alpha", 0.01)),)


def _hard_sigmoid(op: Operation, _: Constants) -> tuple[Step, ...]:
    return (("hard_sigmoid", 0, op.number("alpha", 0.2), op.number("beta", 0.5)),)


def _round_int8(op: Operation, _: Constants) -> tuple[Step, ...]:
    return (("round_int8", 0, inverse(op.number("scale", 1.0))),)


def _hard_swish(_: Operation, __: Constants) -> tuple[Step, ...]:
    return (("hard_sigmoid", 0, 1 / 6, 0.5), ("mul", 0, 1))


# Operators of one tensor with parameters: their steps, where value 0 is the operand.
_WITH_PARAMETERS: dict[str, Callable[[Operation, Constants], tuple[Step, ...]]] = {
    "Clip": _clip,
    "LeakyRelu": _leaky_relu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "RoundInt8": _round_int8,
}
_VALUES = {"add": 2, "sub": 2, "mul": 2, "div": 2}  # steps that read two values; others read one


def is_elementwise(op: Operation) -> bool:
    """Whether the operation is a row of these tables."""
    return op.kind in _PLAIN or op.kind in _WITH_PARAMETERS


def tensors_read(op: Operation, constants: Constants) -> tuple[str, ...]:
    """Return the operands of an element-wise operation that are not single constant numbers."""
    count = _PLAIN[op.kind][1] if op.kind in _PLAIN else 1
    names = op.inputs[:count]
    return tuple(name for name in names if not _is_number(name, constants))


def inverse(scale: float) -> float:
    """Return 1 / scale in float32: rounding to a grid multiplies by it."""
    return float(np.float32(1) / np.float32(scale))


def converting(source: float | None, target: float | None) -> tuple[Step, ...]:
    """Return the steps from numbers stored with one scale (None: real ones) to another."""
    if source == target:
        return ()
    real: tuple[Step, ...] = () if source is None else (("real", 0, source),)
    if target is None:
        return real
    return (*real, ("round_int8", len(real), inverse(target)))


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
) -> Expression:
    """Join element-wise operations in running order into one expression.

    `root`: the tensor that a kernel hands to it as its first operand, if any. The result is the
    output of the last operation, on a grid as integers if that is a RoundInt8. `scales` of the
    operands that are read as integers on a grid.
    """
    operands = operands_of(root, operations, constants)
    index = {name: at for at, name in enumerate(operands)}
    steps: list[Step] = []

    def add_real(name: str, scale: float) -> None:
        steps.append(("real", index[name], scale))
        index[name] = len(operands) + len(steps) - 1

    for name in operands:
        scale = scales.get(name)
        if scale is not None:
            add_real(name, scale)
    for op in operations:
        own = _steps(op, index, len(operands), steps, constants)
        steps += own
        index[op.outputs[0]] = len(operands) + len(steps) - 1
        if op.kind == "RoundInt8" and op is not operations[-1]:
            add_real(op.outputs[0], op.number("scale", 1.0))
    return Expression(operands, tuple(steps))


def _steps(
    op: Operation,
    index: dict[str, int],
    operands: int,
    before: list[Step],
    constants: Constants,
) -> list[Step]:
    """Return the steps of one operation, its values numbered as in the whole expression."""
    found: list[Step] = []

    def value(name: str) -> int:
        if name in index:
            return index[name]
        found.append(("constant", _scalar(op, name, constants)))
        return operands + len(before) + len(found) - 1

    if op.kind in _PLAIN:
        name, count = _PLAIN[op.kind]
        places = [value(one) for one in op.inputs[:count]]
        return [*found, (name, *places)]
    operand = value(op.inputs[0])
    first = operands + len(before) + len(found)
    for step in _WITH_PARAMETERS[op.kind](op, constants):
        count = _VALUES.get(str(step[0]), 1)
        places = [_placed(at, operand, first) for at in step[1 : 1 + count]]
        found.append((step[0], *places, *step[1 + count :]))
    return found


def _placed(at: Constant, operand: int, first: int) -> int:
    assert isinstance(at, int)
    return operand if at == 0 else first + at - 1


def _is_number(name: str, constants: Constants) -> bool:
    return name in constants and constants[name].size == 1 and constants[name].dtype.kind == "f"


def _scalar(op: Operation, name: str, constants: Constants) -> float:
    if not _is_number(name, constants):
        raise NotCoveredError(
            f"node {op.name!r} ({op.kind}) reads {name!r}, which must be one constant number here"
        )
    return float(constants[name].reshape(()))
