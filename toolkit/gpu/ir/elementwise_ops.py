"""The table of ONNX element-wise operators: the expression ops of each.

A new operator is a row here, and a branch in `toolkit.gpu.kernels.expression` where the ops there
do not suffice. Formulas and defaults: ONNX's operators, opset 23 and before.
"""

from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.dtypes import ELEMENT_TYPES, is_float
from toolkit.gpu.ir.network import Operation
from toolkit.plugins import Constant

Array = npt.NDArray[Any]
ExprOp = tuple[Constant, ...]
Constants = Mapping[str, Array]


class ExprBuilder:
    """Collects the ops of an expression.

    `index`: the number of each tensor's value, operands first; `ops`: those added so far.
    """

    def __init__(
        self, index: Mapping[str, int], constants: Constants, dtypes: Mapping[str, str]
    ) -> None:
        self.ops: list[ExprOp] = []
        self._index = index
        self._operands = len(index)
        self._constants = constants
        self._dtypes = dtypes

    @property
    def last(self) -> int:
        """The index of the newest value."""
        return self._operands + len(self.ops) - 1

    def add(self, op: str, *arguments: Constant) -> int:
        """Add an op: indices of values, then numbers; return the index of its value."""
        self.ops.append((op, *arguments))
        return self.last

    def constant(self, number: float, dtype: str = "float32") -> int:
        """Add a number; return the index of its value."""
        if is_float(dtype):
            return self.add("constant", float(number))
        return self.add("constant", bool(number) if dtype == "bool" else int(number), dtype)

    def value(self, name: str) -> int:
        """Return the index of a tensor's value; single constant numbers are added."""
        if name in self._index:
            return self._index[name]
        number = self._constants[name].reshape(()).item()
        return self.constant(number, self.dtype(name))

    def number(self, name: str) -> float | None:
        """Return the value of a single constant number, None for all other tensors."""
        if not is_number(name, self._constants):
            return None
        return float(self._constants[name].reshape(()))

    def dtype(self, name: str) -> str:
        """Return the element type of a tensor or a constant."""
        if name in self._constants:
            return str(self._constants[name].dtype.name)
        return self._dtypes.get(name, "float32")


Rule = Callable[[ExprBuilder, Operation], int]
"""Adds the ops of an operation; returns the index of its result."""


def is_number(name: str, constants: Constants) -> bool:
    """Whether a tensor is a single constant number."""
    return name in constants and constants[name].size == 1 and constants[name].dtype.kind in "fiub"


def _plain(name: str, s: ExprBuilder, op: Operation) -> int:
    """One op of all operands."""
    return s.add(name, *(s.value(operand) for operand in op.inputs))


def _typed(name: str, integer: str, s: ExprBuilder, op: Operation) -> int:
    """One op for floats, another for integers."""
    return _plain(name if is_float(s.dtype(op.inputs[0])) else integer, s, op)


def _floats(name: str, s: ExprBuilder, op: Operation) -> int:
    """An op that changes floats only: integers are whole and finite."""
    x = s.value(op.inputs[0])
    return s.add(name, x) if is_float(s.dtype(op.inputs[0])) else x


def _variadic(name: str, s: ExprBuilder, op: Operation) -> int:
    """A binary op, over any number of operands."""
    return reduce(partial(s.add, name), map(s.value, op.inputs))


def _mean(s: ExprBuilder, op: Operation) -> int:
    return s.add("mul", _variadic("add", s, op), s.constant(1 / len(op.inputs)))


def _parameters(name: str, defaults: Mapping[str, float], s: ExprBuilder, op: Operation) -> int:
    """One op of a tensor, with attributes as its numbers."""
    numbers = [op.number(attribute, default) for attribute, default in defaults.items()]
    return s.add(name, s.value(op.inputs[0]), *numbers)


def _clip(s: ExprBuilder, op: Operation) -> int:
    """Limits are inputs from opset 11 on; before, attributes. Either may be left out."""
    x, dtype = s.value(op.inputs[0]), s.dtype(op.inputs[0])
    names = {at: op.input(at) for at in (1, 2)}
    fixed = all(not name or s.number(name) is not None for name in names.values())
    if is_float(dtype) and fixed:
        low, high = (
            op.number(what, default if not names[at] else s.number(names[at]) or 0.0)
            for at, what, default in ((1, "min", -np.inf), (2, "max", np.inf))
        )
        return s.add("clip", x, low, high)
    for at, bound in ((1, "max"), (2, "min")):
        if names[at]:
            x = s.add(bound, x, s.value(names[at]))
    return x


def _cast(s: ExprBuilder, op: Operation) -> int:
    x = s.value(op.inputs[0])
    target = onnx.helper.tensor_dtype_to_np_dtype(op.integer("to", 1)).name
    if target not in ELEMENT_TYPES:
        raise NotCoveredError(
            f"node {op.name!r} (Cast) makes {target}; kernels make {', '.join(ELEMENT_TYPES)}"
        )
    same = s.dtype(op.inputs[0]) == target
    wider = is_float(s.dtype(op.inputs[0])) and target in ("float32", "float64")
    return x if same or wider else s.add("cast", x, target)


def _power(s: ExprBuilder, op: Operation) -> int:
    base, exponent = op.inputs
    constant = s.number(exponent)
    x, whole = s.value(base), not is_float(s.dtype(base))
    if constant == 2:
        return s.add("mul", x, x)
    if constant == 3:
        return s.add("mul", s.add("mul", x, x), x)
    if constant == 0.5 and not whole:
        return s.add("sqrt", x)
    if not whole:
        return s.add("power", x, s.add("cast", s.value(exponent), "float32"))
    if not is_float(s.dtype(exponent)):
        return s.add("whole_power", x, s.value(exponent))
    return s.add("cast", s.add("mixed_power", x, s.value(exponent)), s.dtype(base))


def _mod(s: ExprBuilder, op: Operation) -> int:
    """With `fmod` the remainder has the sign of the first operand, else that of the second."""
    if not op.integer("fmod", 0):
        return _plain("modulo", s, op)
    return _typed("remainder", "whole_remainder", s, op)


def _shift(s: ExprBuilder, op: Operation) -> int:
    return _plain(f"shift_{op.text('direction', '').lower()}", s, op)


def _infinite(s: ExprBuilder, op: Operation) -> int:
    above, below = op.integer("detect_positive", 1), op.integer("detect_negative", 1)
    return s.add("is_infinite", s.value(op.inputs[0]), bool(above), bool(below))


def _gelu(s: ExprBuilder, op: Operation) -> int:
    tanh = op.text("approximate", "none") == "tanh"
    return s.add("gelu_tanh" if tanh else "gelu", s.value(op.inputs[0]))


def _hard_swish(s: ExprBuilder, op: Operation) -> int:
    x = s.value(op.inputs[0])
    return s.add("mul", x, s.add("hard_sigmoid", x, 1 / 6, 0.5))


def _swish(s: ExprBuilder, op: Operation) -> int:
    x, alpha = s.value(op.inputs[0]), op.number("alpha", 1.0)
    if alpha == 1.0:
        return s.add("silu", x)
    return s.add("mul", x, s.add("sigmoid", s.add("mul", x, s.constant(alpha))))


def _round_int8(s: ExprBuilder, op: Operation) -> int:
    factor = np.float32(1) / np.float32(op.number("scale", 1.0))
    return s.add("round_int8", s.value(op.inputs[0]), float(factor))


_SELU = {"alpha": 1.6732632423543772, "gamma": 1.0507009873554805}  # ONNX, operator Selu
_PLAIN: Mapping[str, str] = {  # one op of all operands, the same for all types
    "Abs": "abs",
    "Acos": "acos",
    "Acosh": "acosh",
    "Add": "add",
    "And": "and",
    "Asin": "asin",
    "Asinh": "asinh",
    "Atan": "atan",
    "Atanh": "atanh",
    "BitwiseAnd": "and",
    "BitwiseNot": "bit_not",
    "BitwiseOr": "or",
    "BitwiseXor": "xor",
    "Cos": "cos",
    "Cosh": "cosh",
    "Equal": "equal",
    "Erf": "erf",
    "Exp": "exp",
    "Greater": "greater",
    "GreaterOrEqual": "not_less",
    "IsNaN": "is_nan",
    "Less": "less",
    "LessOrEqual": "not_greater",
    "Log": "log",
    "Mish": "mish",
    "Mul": "mul",
    "Neg": "neg",
    "Not": "not",
    "Or": "or",
    "PRelu": "prelu",
    "Reciprocal": "reciprocal",
    "Relu": "relu",
    "Sigmoid": "sigmoid",
    "Sign": "sign",
    "Sin": "sin",
    "Sinh": "sinh",
    "Softplus": "softplus",
    "Softsign": "softsign",
    "Sqrt": "sqrt",
    "Sub": "sub",
    "Tan": "tan",
    "Tanh": "tanh",
    "Where": "where",
    "Xor": "xor",
}
_PARAMETERS: Mapping[str, tuple[str, Mapping[str, float]]] = {  # an op with attributes
    "Celu": ("celu", {"alpha": 1.0}),
    "Elu": ("elu", {"alpha": 1.0}),
    "HardSigmoid": ("hard_sigmoid", {"alpha": 0.2, "beta": 0.5}),
    "LeakyRelu": ("leaky_relu", {"alpha": 0.01}),
    "Selu": ("selu", _SELU),
    "Shrink": ("shrink", {"lambd": 0.5, "bias": 0.0}),
    "ThresholdedRelu": ("thresholded", {"alpha": 1.0}),
}
OPERATORS: Mapping[str, Rule] = {
    **{kind: partial(_plain, name) for kind, name in _PLAIN.items()},
    **{kind: partial(_parameters, *row) for kind, row in _PARAMETERS.items()},
    "BitShift": _shift,
    "Cast": _cast,
    "Ceil": partial(_floats, "ceil"),
    "Clip": _clip,
    "Div": partial(_typed, "div", "whole_div"),
    "Floor": partial(_floats, "floor"),
    "Gelu": _gelu,
    "HardSwish": _hard_swish,
    "IsInf": _infinite,
    "Max": partial(_variadic, "max"),
    "Mean": _mean,
    "Min": partial(_variadic, "min"),
    "Mod": _mod,
    "Pow": _power,
    "Round": partial(_floats, "round"),
    "RoundInt8": _round_int8,
    "Sum": partial(_variadic, "add"),
    "Swish": _swish,
}
