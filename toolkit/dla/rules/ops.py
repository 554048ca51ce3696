"""ONNX operators that the DLA of Orin supports through TensorRT, and hints for the others.

From NVIDIA's operator matrix (Deep-Learning-Accelerator-SW, operators/README, June 2024),
extended by the DLA layer restrictions of TensorRT's documentation.
"""

from typing import Literal

Status = Literal["native", "native from 8.6.12", "rewrite", "folded", "not exposed", "unsupported"]


def ops(names: str) -> frozenset[str]:
    """Return the operators of a blank-separated list."""
    return frozenset(names.split())


_TABLE: tuple[tuple[Status, str], ...] = (
    # Cast: not in the matrix; the guide has it behind a comparison (rule cast.compare).
    # Min: headers and guide list ElementWise MIN, the matrix says "not exposed": rule min.conflict.
    (
        "native",
        "Abs Add AveragePool BatchNormalization Clip Concat Conv ConvTranspose Equal LeakyRelu LRN "
        "Max MaxPool Min Mul PRelu Relu Reshape Resize Sigmoid Slice Softmax Split Sub Sum Tanh "
        "Transpose Upsample Gemm MatMul Cast",
    ),
    # Pow and ReduceMax: their rows were renamed by mistake in the last revision of the matrix.
    (
        "native from 8.6.12",
        "Atanh Cos Div GlobalMaxPool Greater Less Pow ReduceMax Sin",
    ),
    (
        "rewrite",
        "And CumSum DepthToSpace DequantizeLinear Gather GatherElements GatherND GRU Identity LSTM "
        "Neg Not Or QuantizeLinear ReduceSum RNN Scatter ScatterElements SpaceToDepth Where Xor",
    ),
    ("folded", "Constant ConstantOfShape Shape"),
    (
        "not exposed",
        "Acos Acosh Asin Asinh Atan Ceil Celu Cosh Elu Erf Exp Expand Flatten Floor "
        "GlobalAveragePool GlobalLpPool GreaterOrEqual GroupNormalization HardSigmoid HardSwish "
        "InstanceNormalization LayerNormalization LessOrEqual Log LogSoftmax LpNormalization "
        "LpPool Mean MeanVarianceNormalization Mish Mod Pad Reciprocal ReduceL1 ReduceL2 "
        "ReduceLogSum ReduceLogSumExp ReduceMean ReduceMin ReduceSumSquare Round Selu Shrink Sign "
        "Sinh Softplus Softsign Sqrt Squeeze Tan ThresholdedRelu Tile Unsqueeze",
    ),
)

STATUS: dict[str, Status] = {op: status for status, names in _TABLE for op in names.split()}


def with_status(requested: Status) -> frozenset[str]:
    """Return the operators of one status."""
    return frozenset(op for op, status in STATUS.items() if status == requested)


FROM_8_6_12 = with_status("native from 8.6.12")
NATIVE = with_status("native") | FROM_8_6_12

# The operators of one TensorRT layer, which share their limits.
CONV = ops("Conv")
DECONV = ops("ConvTranspose")
PRODUCT = ops("Gemm MatMul")
WEIGHTED = CONV | DECONV | PRODUCT
POOL = ops("MaxPool AveragePool")
ACTIVATION = ops("Relu Sigmoid Tanh Clip LeakyRelu")
SHUFFLE = ops("Reshape Transpose")
REDUCE = ops("ReduceMax GlobalMaxPool")
RESIZE = ops("Resize Upsample")
CUT = ops("Slice Split")
UNARY = ops("Abs Atanh Cos Sin")
COMPARE = ops("Equal Greater Less")
CAST = ops("Cast")
BINARY = ops("Add Sum Sub Mul Max Min Div Pow Equal Greater Less")
RANKED = CONV | DECONV | POOL | ACTIVATION | SHUFFLE | REDUCE | CUT | PRODUCT

_HINTS: tuple[tuple[str, str], ...] = (
    (
        "GlobalAveragePool ReduceMean",
        "use AveragePool with windows of at most 8x8, in a cascade for larger maps",
    ),
    ("Flatten Squeeze Unsqueeze", "keep tensors 4-D, with a 1x1 Conv in place of Flatten and Gemm"),
    ("HardSwish HardSigmoid", "write it as Add, Clip and Mul"),
    ("Div", "multiply by the reciprocal constant"),
    ("Sub", "write it as Mul by -1 and Add"),
    ("Neg", "multiply by -1"),
    ("Min", "write it as Max between two Mul by -1"),
    ("Split", "use one Slice per output"),
    (
        "GroupNormalization InstanceNormalization LayerNormalization",
        "train with BatchNormalization instead",
    ),
    ("SpaceToDepth", "use a strided Conv with constant weights"),
    ("DepthToSpace", "use a ConvTranspose with constant weights"),
    ("CumSum", "use a 1x1 Conv with a triangular weight"),
    ("ReduceSum", "use AveragePool and a constant scale"),
    ("Gather GatherElements GatherND", "use Slice where the indices are constant and contiguous"),
    ("Identity Dropout", "remove it"),
    (
        "QuantizeLinear DequantizeLinear",
        "move the scales to the calibration table (TensorRT 10 and older)",
    ),
    (
        "TopK NonMaxSuppression ArgMax",
        "cut the graph before it and post-process on the GPU or the CPU",
    ),
)

HINTS: dict[str, str] = {op: hint for names, hint in _HINTS for op in names.split()}
