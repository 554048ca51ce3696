"""Values that no exporter writes, put where a model has values."""

SIZES = (0, 1, 2, 3, 5, 7, 8, 13, 64, 255, 4096, -1, -2, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)
INTEGERS = (*SIZES, -(2**31), -(2**63), -3, -4, -100, 100, 10_000)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-38, 1e38, float("inf"), float("-inf"), float("nan"), 1e9)
TEXTS = ("", "x", "NOTSET", "SAME_UPPER", "VALID", "linear", "cubic", "nearest", "constant", "edge",
         "reflect", "bidirectional", "reverse", "round_prefer_ceil", "DCR", "é\u2028", "a" * 300,
         "ij,jk->ik", "...i->i", "ii->")  # fmt: skip
OPSETS = (*range(1, 30), 0, -1, 2**31, 2**62)
DTYPES = tuple(range(30))
PLAIN_DTYPES = (1, 2, 3, 6, 7, 9, 10, 11)
OPS = (
    "Abs", "Add", "And", "ArgMax", "AveragePool", "BatchNormalization", "Cast", "CastLike", "Ceil",
    "Clip", "Compress", "Concat", "ConcatFromSequence", "Constant", "ConstantOfShape", "Conv",
    "ConvInteger", "ConvTranspose", "CumSum", "DepthToSpace", "DequantizeLinear", "Det", "Div",
    "Dropout", "DynamicQuantizeLinear", "Einsum", "Elu", "Equal", "Erf", "Exp", "Expand", "EyeLike",
    "Flatten", "GRU", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm", "GlobalAveragePool",
    "GlobalMaxPool", "GridSample", "GroupNormalization", "HardSigmoid", "HardSwish", "Identity",
    "If", "InstanceNormalization", "IsNaN", "LRN", "LSTM", "LayerNormalization", "LeakyRelu",
    "Less", "Log", "LogSoftmax", "Loop", "LpNormalization", "MatMul", "MatMulInteger", "Max",
    "MaxPool", "MaxUnpool", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "NonMaxSuppression",
    "NonZero", "Not", "OneHot", "Optional", "PRelu", "Pad", "Pow", "QLinearConv", "QLinearMatMul",
    "QuantizeLinear", "RNN", "RandomNormalLike", "Range", "Reciprocal", "ReduceL2", "ReduceLogSum",
    "ReduceMax", "ReduceMean", "ReduceProd", "ReduceSum", "Relu", "Reshape", "Resize",
    "ReverseSequence", "RoiAlign", "Round", "STFT", "Scan", "ScatterElements", "ScatterND", "Selu",
    "SequenceAt", "SequenceConstruct", "Shape", "Shrink", "Sigmoid", "Sign", "Size", "Slice",
    "Softmax", "Softplus", "Softsign", "SpaceToDepth", "Split", "SplitToSequence", "Sqrt",
    "Squeeze", "StringNormalizer", "Sub", "Sum", "Tan", "Tanh", "TfIdfVectorizer",
    "ThresholdedRelu", "Tile", "TopK", "Transpose", "Trilu", "Unique", "Unsqueeze", "Upsample",
    "Where", "Xor",
)  # fmt: skip
GROWING = ("Concat", "Expand", "Tile", "ConstantOfShape", "Range", "Pad", "Resize", "OneHot")
