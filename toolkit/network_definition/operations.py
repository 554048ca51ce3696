"""The operations of layers, with TensorRT's names, and the ONNX operators that compute them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto


class ActivationType(Enum):
    """Activations of `add_activation`; alpha and beta as in TensorRT."""

    RELU = auto()
    SIGMOID = auto()
    TANH = auto()
    LEAKY_RELU = auto()
    ELU = auto()
    SELU = auto()
    SOFTSIGN = auto()
    SOFTPLUS = auto()
    CLIP = auto()
    HARD_SIGMOID = auto()
    THRESHOLDED_RELU = auto()
    GELU_ERF = auto()
    GELU_TANH = auto()


class ElementWiseOperation(Enum):
    """Operations of `add_elementwise`."""

    SUM = auto()
    SUB = auto()
    PROD = auto()
    DIV = auto()
    POW = auto()
    MAX = auto()
    MIN = auto()
    AND = auto()
    OR = auto()
    XOR = auto()
    EQUAL = auto()
    GREATER = auto()
    LESS = auto()


class UnaryOperation(Enum):
    """Operations of `add_unary`."""

    ABS = auto()
    ACOS = auto()
    ACOSH = auto()
    ASIN = auto()
    ASINH = auto()
    ATAN = auto()
    ATANH = auto()
    CEIL = auto()
    COS = auto()
    COSH = auto()
    ERF = auto()
    EXP = auto()
    FLOOR = auto()
    ISINF = auto()
    ISNAN = auto()
    LOG = auto()
    NEG = auto()
    NOT = auto()
    RECIP = auto()
    ROUND = auto()
    SIGN = auto()
    SIN = auto()
    SINH = auto()
    SQRT = auto()
    TAN = auto()


class ReduceOperation(Enum):
    """Operations of `add_reduce`."""

    SUM = auto()
    PROD = auto()
    MAX = auto()
    MIN = auto()
    AVG = auto()


class PoolingType(Enum):
    """Operations of `add_pooling_nd`."""

    MAX = auto()
    AVERAGE = auto()


class MatrixOperation(Enum):
    """What `add_matrix_multiply` does with an operand first; VECTOR: it is a vector per batch."""

    NONE = auto()
    TRANSPOSE = auto()
    VECTOR = auto()


class InterpolationMode(Enum):
    """Interpolation of `add_resize`."""

    NEAREST = auto()
    LINEAR = auto()
    CUBIC = auto()


class TopKOperation(Enum):
    """Which elements `add_topk` takes."""

    MAX = auto()
    MIN = auto()


class GatherMode(Enum):
    """DEFAULT takes slices along an axis, ELEMENT elements along it, ND slices by index tuples."""

    DEFAULT = auto()
    ELEMENT = auto()
    ND = auto()


@dataclass(frozen=True, slots=True)
class Operator:
    """An ONNX operator. `alpha`, `beta`: attributes that take these parameters of a layer."""

    op_type: str
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)
    alpha: str | None = None
    beta: str | None = None


# CLIP has its limits as inputs: `Network.add_activation`.
ACTIVATIONS: Mapping[ActivationType, Operator] = {
    ActivationType.RELU: Operator("Relu"),
    ActivationType.SIGMOID: Operator("Sigmoid"),
    ActivationType.TANH: Operator("Tanh"),
    ActivationType.LEAKY_RELU: Operator("LeakyRelu", alpha="alpha"),
    ActivationType.ELU: Operator("Elu", alpha="alpha"),
    ActivationType.SELU: Operator("Selu", alpha="alpha", beta="gamma"),
    ActivationType.SOFTSIGN: Operator("Softsign"),
    ActivationType.SOFTPLUS: Operator("Softplus"),
    ActivationType.CLIP: Operator("Clip"),
    ActivationType.HARD_SIGMOID: Operator("HardSigmoid", alpha="alpha", beta="beta"),
    ActivationType.THRESHOLDED_RELU: Operator("ThresholdedRelu", alpha="alpha"),
    ActivationType.GELU_ERF: Operator("Gelu"),
    ActivationType.GELU_TANH: Operator("Gelu", {"approximate": "tanh"}),
}

ELEMENTWISE: Mapping[ElementWiseOperation, str] = {
    ElementWiseOperation.SUM: "Add",
    ElementWiseOperation.SUB: "Sub",
    ElementWiseOperation.PROD: "Mul",
    ElementWiseOperation.DIV: "Div",
    ElementWiseOperation.POW: "Pow",
    ElementWiseOperation.MAX: "Max",
    ElementWiseOperation.MIN: "Min",
    ElementWiseOperation.AND: "And",
    ElementWiseOperation.OR: "Or",
    ElementWiseOperation.XOR: "Xor",
    ElementWiseOperation.EQUAL: "Equal",
    ElementWiseOperation.GREATER: "Greater",
    ElementWiseOperation.LESS: "Less",
}

UNARY: Mapping[UnaryOperation, str] = {
    UnaryOperation.ABS: "Abs",
    UnaryOperation.ACOS: "Acos",
    UnaryOperation.ACOSH: "Acosh",
    UnaryOperation.ASIN: "Asin",
    UnaryOperation.ASINH: "Asinh",
    UnaryOperation.ATAN: "Atan",
    UnaryOperation.ATANH: "Atanh",
    UnaryOperation.CEIL: "Ceil",
    UnaryOperation.COS: "Cos",
    UnaryOperation.COSH: "Cosh",
    UnaryOperation.ERF: "Erf",
    UnaryOperation.EXP: "Exp",
    UnaryOperation.FLOOR: "Floor",
    UnaryOperation.ISINF: "IsInf",
    UnaryOperation.ISNAN: "IsNaN",
    UnaryOperation.LOG: "Log",
    UnaryOperation.NEG: "Neg",
    UnaryOperation.NOT: "Not",
    UnaryOperation.RECIP: "Reciprocal",
    UnaryOperation.ROUND: "Round",
    UnaryOperation.SIGN: "Sign",
    UnaryOperation.SIN: "Sin",
    UnaryOperation.SINH: "Sinh",
    UnaryOperation.SQRT: "Sqrt",
    UnaryOperation.TAN: "Tan",
}

REDUCTIONS: Mapping[ReduceOperation, str] = {
    ReduceOperation.SUM: "ReduceSum",
    ReduceOperation.PROD: "ReduceProd",
    ReduceOperation.MAX: "ReduceMax",
    ReduceOperation.MIN: "ReduceMin",
    ReduceOperation.AVG: "ReduceMean",
}

POOLINGS: Mapping[PoolingType, str] = {
    PoolingType.MAX: "MaxPool",
    PoolingType.AVERAGE: "AveragePool",
}

INTERPOLATIONS: Mapping[InterpolationMode, str] = {
    InterpolationMode.NEAREST: "nearest",
    InterpolationMode.LINEAR: "linear",
    InterpolationMode.CUBIC: "cubic",
}

# Resize has them by name, in TensorRT's and in ONNX's words.
COORDINATE_TRANSFORMATIONS = ("asymmetric", "half_pixel", "align_corners", "pytorch_half_pixel")
NEAREST_ROUNDINGS = ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")

GATHERS: Mapping[GatherMode, str] = {
    GatherMode.DEFAULT: "Gather",
    GatherMode.ELEMENT: "GatherElements",
    GatherMode.ND: "GatherND",
}
