"""The table of ONNX element-wise operators: the expression ops of each.

A new operator is a row of `OPERATORS`; where its formula needs an op that is not there, that is a
row of `toolkit.gpu.kernels.primitives`. Formulas and defaults: ONNX's operators, opset 23 and
before.
"""

from collections.abc import Callable, Mapping
from functools import partial, reduce
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx

from toolkit.gpu.ir.dtypes import is_float
from toolkit.plugins import Constant

if TYPE_CHECKING:  # a calibration reads the names of operators, and infers no shapes
    from toolkit.gpu.ir.network import Operation

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


Rule = Callable[[ExprBuilder, "Operation"], int]
"""Adds the ops of an operation; returns the index of its result."""


def is_number(name: str, constants: Constants) -> bool:
    """Whether a tensor is a single constant number."""
    return name in constants and constants[name].size == 1 and constants[name].dtype.kind in "fiub"


def reciprocal(scale: float) -> float:
    """Return 1 / scale in float32: quantization multiplies by it."""
    return float(np.float32(1) / np.float32(scale))


def _plain(
    name: str,
    s: ExprBuilder,
    op: "Operation",
    attributes: Mapping[str, float] = MappingProxyType({}),
) -> int:
    """One op of all operands, with attributes, given with their defaults, as its numbers."""
    numbers = [op.number(attribute, default) for attribute, default in attributes.items()]
    return s.add(name, *map(s.value, op.inputs), *numbers)


def _typed(name: str, integer: str, s: ExprBuilder, op: "Operation") -> int:
    """One op for floats, another for integers."""
    return _plain(name if is_float(s.dtype(op.inputs[0])) else integer, s, op)


def _floats(name: str, s: ExprBuilder, op: "Operation") -> int:
    """An op that changes floats only: integers are whole and finite."""
    x = s.value(op.inputs[0])
    return s.add(name, x) if is_float(s.dtype(op.inputs[0])) else x


def _variadic(name: str, s: ExprBuilder, op: "Operation") -> int:
    """A binary op, over any number of operands."""
    return reduce(partial(s.add, name), map(s.value, op.inputs))


def _mean(s: ExprBuilder, op: "Operation") -> int:
    return s.add("mul", _variadic("add", s, op), s.constant(1 / len(op.inputs)))


def _clip(s: ExprBuilder, op: "Operation") -> int:
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


def _cast(s: ExprBuilder, op: "Operation") -> int:
    x = s.value(op.inputs[0])
    target = onnx.helper.tensor_dtype_to_np_dtype(op.integer("to", 1)).name
    same = s.dtype(op.inputs[0]) == target
    wider = is_float(s.dtype(op.inputs[0])) and target in ("float32", "float64")
    return x if same or wider else s.add("cast", x, target)


def _power(s: ExprBuilder, op: "Operation") -> int:
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
        return s.add("int_power", x, s.value(exponent))
    return s.add("cast", s.add("mixed_power", x, s.value(exponent)), s.dtype(base))


def _mod(s: ExprBuilder, op: "Operation") -> int:
    """With `fmod` the remainder has the sign of the first operand, else that of the second."""
    if not op.integer("fmod", 0):
        return _plain("modulo", s, op)
    return _typed("remainder", "int_remainder", s, op)


def _infinite(s: ExprBuilder, op: "Operation") -> int:
    above, below = op.integer("detect_positive", 1), op.integer("detect_negative", 1)
    return s.add("is_infinite", s.value(op.inputs[0]), bool(above), bool(below))


def _gelu(s: ExprBuilder, op: "Operation") -> int:
    tanh = op.text("approximate", "none") == "tanh"
    return s.add("gelu_tanh" if tanh else "gelu", s.value(op.inputs[0]))


def _hard_swish(s: ExprBuilder, op: "Operation") -> int:
    return s.add("hard_swish", s.value(op.inputs[0]))


def _swish(s: ExprBuilder, op: "Operation") -> int:
    x, alpha = s.value(op.inputs[0]), op.number("alpha", 1.0)
    if alpha == 1.0:
        return s.add("silu", x)
    return s.add("mul", x, s.add("sigmoid", s.add("mul", x, s.constant(alpha))))


def _round_int8(s: ExprBuilder, op: "Operation") -> int:
    return s.add("round_int8", s.value(op.inputs[0]), reciprocal(op.number("scale", 1.0)))


def _to_float8(s: ExprBuilder, op: "Operation") -> int:
    return s.add("to_float8", s.value(op.inputs[0]), reciprocal(op.number("scale", 1.0)))


def _from_float8(s: ExprBuilder, op: "Operation") -> int:
    return s.add("from_float8", s.value(op.inputs[0]), op.number("scale", 1.0))


# Operators that are one op of all operands, of the same name.
_OF_SAME_NAME = (
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh Cos Cosh Equal Erf Exp Greater Less Log Mish Mul "
    "Neg Not Or PRelu Reciprocal Relu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Tan Tanh "
    "Where Xor"
)
_SELU = {"alpha": 1.6732632423543772, "gamma": 1.0507009873554805}  # ONNX, operator Selu
# Operands of which these operators arrange the numbers; the others are indices and sizes.
ARRANGED: Mapping[str, int] = {
    **dict.fromkeys(("Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"), 1),
    **dict.fromkeys(("Expand", "Gather", "GatherElements", "GatherND", "Pad", "Slice", "Split"), 1),
    "Concat": 1 << 30,
    "Tile": 1,
}
OPERATORS: Mapping[str, Rule] = {
    **{kind: partial(_plain, kind.lower()) for kind in _OF_SAME_NAME.split()},
    "BitShift": lambda s, op: _plain(f"shift_{op.text('direction', '').lower()}", s, op),
    "BitwiseAnd": partial(_plain, "and"),
    "BitwiseNot": partial(_plain, "bit_not"),
    "BitwiseOr": partial(_plain, "or"),
    "BitwiseXor": partial(_plain, "xor"),
    "Cast": _cast,
    "Ceil": partial(_floats, "ceil"),
    "Celu": partial(_plain, "celu", attributes={"alpha": 1.0}),
    "Clip": _clip,
    "Div": partial(_typed, "div", "int_div"),
    "Elu": partial(_plain, "elu", attributes={"alpha": 1.0}),
    "Floor": partial(_floats, "floor"),
    "Gelu": _gelu,
    "FromFloat8": _from_float8,
    "GreaterOrEqual": partial(_plain, "greater_equal"),
    "HardSigmoid": partial(_plain, "hard_sigmoid", attributes={"alpha": 0.2, "beta": 0.5}),
    "HardSwish": _hard_swish,
    "IsInf": _infinite,
    "IsNaN": partial(_plain, "is_nan"),
    "LeakyRelu": partial(_plain, "leaky_relu", attributes={"alpha": 0.01}),
    "LessOrEqual": partial(_plain, "less_equal"),
    "Max": partial(_variadic, "max"),
    "Mean": _mean,
    "Min": partial(_variadic, "min"),
    "Mod": _mod,
    "Pow": _power,
    "Round": partial(_floats, "round"),
    "RoundInt8": _round_int8,
    "Selu": partial(_plain, "selu", attributes=_SELU),
    "Shrink": partial(_plain, "shrink", attributes={"lambd": 0.5, "bias": 0.0}),
    "Sum": partial(_variadic, "add"),
    "Swish": _swish,
    "ThresholdedRelu": partial(_plain, "thresholded_relu", attributes={"alpha": 1.0}),
    "ToFloat8": _to_float8,
}
