"""What the DLA takes: one row per limit, read from top to bottom, and the judge that applies them.

Rules that need the whole graph are elsewhere: batches, sizes and loadables (G6 to G9) in
`placement`. The equal INT8 ranges that the DLA wants around poolings, sums and concatenations
are no rule here, for a table can always be made to have them; nothing makes them equal yet.
"""

from device.manifest import Precision
from device.profile import Dla
from toolkit.planning import dla_checks as c
from toolkit.planning import dla_layer_checks as layer
from toolkit.planning import dla_ops as o
from toolkit.planning.node_view import NodeView
from toolkit.planning.rule import FLOOR, Generation, Rule, Verdict, Version, parse_version

# The TensorRT of the last JetPack of each generation (5.1 and 6.2), taken where none is named.
USUAL_TENSORRT: dict[Generation, str] = {"v1": "8.5.2", "v2": "10.3.0"}

GUIDE = "TensorRT DLA layer restrictions"
GUIDE_85 = "TensorRT 8.5 developer guide"
HEADER = "NvInfer.h 10.3"
MATRIX = "DLA operator matrix, June 2024"
ALL = None
INT8: tuple[Precision, ...] = ("int8",)
FP16: tuple[Precision, ...] = ("fp16",)
V1: tuple[Generation, ...] = ("v1",)
V2: tuple[Generation, ...] = ("v2",)
HEAD_HINT = "keep tensors 4-D, with a 1x1 Conv in place of Flatten and Gemm"
FREEZE_HINT = "freeze the dynamic dimensions at import"
CONCAT_HINT = "concatenate along the channels"

# fmt: off
RULES: tuple[Rule, ...] = (
    # Precision and operator: what cannot be mended by another parameter.
    Rule(id="G1", ops=ALL, limit="the DLA computes in FP16 and INT8 only",
         check=lambda view: "precision FP32", precisions=("fp32",), source=GUIDE,
         hint="build with --precision int8"),
    Rule(id="G11", ops=ALL, limit="TensorRT 10.8 to 11.4.0 has no DLA on Jetson",
         check=lambda view: "this TensorRT", precisions=("fp32", "fp16", "int8"),
         tensorrt=((10, 8), (11, 4, 1)), source="TensorRT support matrices and release notes",
         hint="use JetPack 6 (TensorRT 10.3), or TensorRT 11.4.1 and newer"),
    Rule(id="G13", ops=ALL, limit="plugins, loops and conditionals never run on the DLA",
         check=c.custom, source=HEADER),
    Rule(id="op.rewrite", ops=o.with_status("rewrite"),
         limit="it needs a rewrite into operators that the DLA takes",
         check=c.operator, source=MATRIX, hint=o.HINTS),
    Rule(id="op.folded", ops=o.with_status("folded"),
         limit="it is computed while building and never runs on the DLA",
         check=c.operator, source=MATRIX),
    Rule(id="op.not-exposed", ops=o.with_status("not exposed"),
         limit="TensorRT does not offer it on the DLA",
         check=c.operator, source=MATRIX, hint=o.HINTS),
    Rule(id="op.unsupported", ops=ALL, limit="the DLA does not support it",
         check=lambda view: None if view.op in o.STATUS else c.operator(view), source=MATRIX,
         hint=o.HINTS),
    Rule(id="op.version", ops=o.FROM_8_6_12, limit="the DLA takes it from TensorRT 8.6.12 on",
         check=c.operator, tensorrt=(FLOOR, (8, 6, 12)), source=MATRIX, hint=o.HINTS),
    Rule(id="softmax.v1", ops=o.ops("Softmax"), limit="the DLA of Xavier has no softmax",
         check=c.operator, generations=V1, source="NvInfer.h 8.5"),
    Rule(id="sub.v1", ops=o.ops("Sub"), limit="the DLA of Xavier has no subtraction",
         check=c.operator, generations=V1, source=MATRIX, hint=o.HINTS),
    Rule(id="slice.v1", ops=o.CUT, limit="only the DLA of Orin slices",
         check=c.operator, generations=V1, source=GUIDE_85, certainty="observed"),
    Rule(id="slice.version", ops=o.CUT, limit="the DLA takes it from TensorRT 8.5 on",
         check=c.operator, tensorrt=(FLOOR, (8, 5)), source=GUIDE_85),
    Rule(id="unary.v1", ops=o.UNARY, limit="only the DLA of Orin has it",
         check=c.operator, generations=V1, source=MATRIX),
    Rule(id="shuffle.v1", ops=o.SHUFFLE, limit="only the DLA of Orin reshapes and transposes",
         check=c.operator, generations=V1, source=MATRIX),
    Rule(id="shuffle.version", ops=o.SHUFFLE, limit="the DLA takes it from TensorRT 8.5 on",
         check=c.operator, tensorrt=(FLOOR, (8, 5)), source=MATRIX),
    Rule(id="reduce.v1", ops=o.REDUCE, limit="only the DLA of Orin reduces",
         check=c.operator, generations=V1, source=MATRIX),

    # Tensors: general limits.
    Rule(id="G5", ops=ALL, limit="every dimension must be one fixed number",
         check=c.static_shape, source=HEADER, hint=FREEZE_HINT),
    Rule(id="G1.type", ops=o.NATIVE, limit="tensors must be FP32 or FP16 in the model",
         check=c.plain_float, source=GUIDE),
    Rule(id="G2", ops=o.NATIVE, limit="the batch (all dimensions but C, H, W) must be at most 4096",
         check=c.batch_within(4096), source=GUIDE),
    Rule(id="G2.v1", ops=o.NATIVE, limit="the batch must be at most 32 on Xavier",
         check=c.batch_within(32), generations=V1, source="TensorRT issue 2318",
         certainty="observed"),
    Rule(id="G4", ops=o.NATIVE, limit="dimensions other than the batch must be in [1, 8192]",
         check=c.dimensions, source=GUIDE,
         hint="cut the graph before the reshape and post-process on the GPU or the CPU"),
    Rule(id="G10", ops=o.NATIVE, limit="a tensor must have fewer than 2^31 elements",
         check=c.volume, source=HEADER),
    Rule(id="G16", ops=o.WEIGHTED | o.ops("BatchNormalization"), limit="weights must be constant",
         check=c.static_weights, source=MATRIX),

    # Convolution and products (which become 1x1 convolutions).
    Rule(id="conv.rank", ops=o.CONV | o.DECONV, limit="convolutions must be 2-D (rank 4)",
         check=c.four_dims, source=GUIDE),
    Rule(id="product.form", ops=o.PRODUCT,
         limit="both inputs must be of rank 2 and not transposed, to become a 1x1 convolution",
         check=c.matrix_form, source=MATRIX, certainty="recalled"),
    Rule(id="conv.kernel", ops=o.CONV, limit="kernel height and width must be in [1, 32]",
         check=c.window("kernel", 1, 32), source=HEADER),
    Rule(id="conv.padding", ops=o.CONV, limit="padding must be in [0, 31]",
         check=c.window("pads", 0, 31), source=HEADER),
    Rule(id="conv.padding-kernel", ops=o.CONV, limit="padding must be smaller than the kernel",
         check=c.padding_below_kernel, source=HEADER),
    Rule(id="conv.stride", ops=o.CONV, limit="strides must be in [1, 8]",
         check=c.window("strides", 1, 8), source=HEADER),
    Rule(id="conv.dilation", ops=o.CONV, limit="dilations must be in [1, 32]",
         check=c.window("dilations", 1, 32), source=HEADER),
    Rule(id="conv.channels", ops=o.WEIGHTED, limit="input channels must be in [1, 8192]",
         check=c.input_channels, source=GUIDE_85),
    Rule(id="conv.maps", ops=o.WEIGHTED, limit="output maps must be in [1, 8192]",
         check=c.output_maps, source=HEADER),
    Rule(id="conv.groups", ops=o.CONV, limit="there must be at most 8192 groups",
         check=c.groups_within(8192), source=HEADER),
    Rule(id="conv.group-int8", ops=o.CONV,
         limit="INT8 groups must have a multiple of 4 input and output channels (or be depthwise)",
         check=c.group_of_four, precisions=INT8, source=HEADER),
    Rule(id="conv.cbuf-int8", ops=o.CONV | o.PRODUCT,
         limit="one kernel and one data slice must fit in the 16 banks of the convolution buffer",
         check=c.convolution_buffer(1), precisions=INT8, source=GUIDE_85),
    Rule(id="conv.cbuf-fp16", ops=o.CONV | o.PRODUCT,
         limit="one kernel and one data slice must fit in the 16 banks of the convolution buffer",
         check=c.convolution_buffer(2), precisions=FP16, source=GUIDE_85),
    Rule(id="deconv.kernel", ops=o.DECONV,
         limit="kernels must be within 32x32, or 1 by 64, 96 or 128",
         check=c.long_window("kernel"), source=HEADER),
    Rule(id="deconv.stride", ops=o.DECONV,
         limit="strides must be within 32x32, or 1 by 64, 96 or 128",
         check=c.long_window("strides"), source=HEADER),
    Rule(id="deconv.padding", ops=o.DECONV, limit="transposed convolutions must not be padded",
         check=c.output_padding, source=HEADER, hint="set the padding to 0 and Slice the result"),
    Rule(id="deconv.groups", ops=o.DECONV, limit="transposed convolutions must have one group",
         check=c.groups_within(1), source=HEADER),
    Rule(id="deconv.dilation", ops=o.DECONV, limit="transposed convolutions must not be dilated",
         check=c.window("dilations", 1, 1), source=GUIDE_85),
    Rule(id="deconv.square", ops=o.DECONV,
         limit="TensorRT switches square kernels and strides in [23, 32] off",
         check=c.square_window, source=GUIDE_85),

    # Pooling.
    Rule(id="pool.rank", ops=o.POOL, limit="pooling must be 2-D (rank 4)",
         check=c.four_dims, source=HEADER),
    Rule(id="pool.window", ops=o.POOL, limit="window height and width must be in [1, 8]",
         check=c.window("kernel", 1, 8), source=HEADER,
         hint="use a cascade of windows of at most 8x8"),
    Rule(id="pool.padding", ops=o.POOL, limit="padding must be in [0, 7]",
         check=c.window("pads", 0, 7), source=HEADER),
    Rule(id="pool.stride", ops=o.POOL, limit="strides must be in [1, 16]",
         check=c.window("strides", 1, 16), source=HEADER),
    Rule(id="pool.dilation", ops=o.POOL, limit="pooling must not be dilated",
         check=c.window("dilations", 1, 1), source="TensorRT ONNX operator table"),
    Rule(id="pool.indices", ops=o.ops("MaxPool"), limit="MaxPool must not return indices",
         check=layer.indices_output, source="TensorRT ONNX operator table"),
    Rule(id="pool.inclusive", ops=o.ops("AveragePool"),
         limit="the DLA of Xavier counts the padding in averages",
         check=layer.exclusive_average, generations=V1, source="NvInfer.h 8.5"),
    Rule(id="window.unknown", ops=o.CONV | o.DECONV | o.POOL, limit="padding must be known",
         check=c.unresolved_pads, source=HEADER, hint=FREEZE_HINT),

    # Activation.
    Rule(id="activation.rank", ops=o.ACTIVATION, limit="activations must be 2-D (rank 4)",
         check=c.four_dims, source=GUIDE, hint=HEAD_HINT),
    Rule(id="clip.upper", ops=o.ops("Clip"), limit="the upper bound must be a constant in [1, 127]",
         check=layer.clip_upper, source=GUIDE_85),
    Rule(id="clip.lower", ops=o.ops("Clip"), limit="the lower bound must be 0 (clipped ReLU)",
         check=layer.clip_lower, source=GUIDE_85, certainty="recalled"),
    Rule(id="prelu.slope", ops=o.ops("PRelu"), limit="the slope must be constant",
         check=layer.slope_constant, source=HEADER),
    Rule(id="prelu.rank", ops=o.ops("PRelu"), limit="the slope must have the rank of the input",
         check=layer.slope_rank, source=HEADER, hint="reshape the slope to 1xCx1x1"),
    Rule(id="unary.precision", ops=o.ops("Atanh Cos Sin"), limit="it runs in INT8 only",
         check=c.operator, precisions=FP16, source=GUIDE, certainty="recalled"),

    # Element-wise, scale and comparison.
    Rule(id="eltwise.broadcast", ops=o.BINARY,
         limit="operands must be whole, per channel (NC11) or one number (N111)",
         check=layer.broadcast, source=GUIDE, certainty="recalled"),
    Rule(id="div.divisor", ops=o.ops("Div"), limit="in FP16 the divisor must be constant",
         check=layer.divisor_constant, precisions=FP16, source=GUIDE, certainty="recalled",
         hint=o.HINTS),
    Rule(id="pow.constant", ops=o.ops("Pow"), limit="one side must be one repeated constant",
         check=layer.power_constant, source=GUIDE, certainty="recalled"),
    Rule(id="pow.precision", ops=o.ops("Pow"), limit="powers run in INT8 only",
         check=c.operator, precisions=FP16, source=GUIDE, certainty="recalled"),
    Rule(id="compare.cast", ops=o.ops("Equal Greater Less"),
         limit="the Cast that must follow it in the same loadable stays on the GPU",
         check=c.operator, source=GUIDE),

    # Normalisation, concatenation, slicing.
    Rule(id="lrn.window", ops=o.ops("LRN"), limit="the window must be 3, 5, 7 or 9",
         check=layer.lrn_window, source=HEADER),
    Rule(id="concat.axis", ops=o.ops("Concat"), limit="the axis must be that of the channels",
         check=layer.channel_axis, source=HEADER, hint=CONCAT_HINT),
    Rule(id="concat.inputs", ops=o.ops("Concat"), limit="there must be two inputs or more",
         check=layer.two_inputs, source=GUIDE),
    Rule(id="slice.rank", ops=o.CUT, limit="sliced tensors must be 4-D",
         check=c.four_dims, source=HEADER),
    Rule(id="slice.static", ops=o.CUT, limit="starts, sizes and axes must be constant",
         check=layer.slice_static, source=HEADER),
    Rule(id="slice.steps", ops=o.CUT, limit="steps must be 1",
         check=layer.slice_steps, source=GUIDE_85),
    Rule(id="slice.batch", ops=o.CUT, limit="the batch must not be sliced",
         check=layer.slice_batch, source=HEADER),
    Rule(id="slice.int8", ops=o.CUT, limit="INT8 slices need TensorRT 8.6 or newer",
         check=c.operator, precisions=INT8, tensorrt=(FLOOR, (8, 6)), source=GUIDE_85,
         certainty="recalled"),

    # Resize.
    Rule(id="resize.scales", ops=o.RESIZE, limit="the scales must be constant",
         check=layer.scales_constant, source=HEADER, hint="give Resize scales, not sizes"),
    Rule(id="resize.axes", ops=o.RESIZE, limit="there must be 4 scales, 1 for batch and channels",
         check=layer.scales_spatial, source=HEADER),
    Rule(id="resize.integer", ops=o.RESIZE, limit="the scales must be whole numbers from 1 on",
         check=layer.scales_integer, source=HEADER),
    Rule(id="resize.nearest", ops=o.RESIZE, limit="nearest scales must be in [1, 32]",
         check=layer.scales_within("nearest", 32), source=HEADER),
    Rule(id="resize.linear", ops=o.RESIZE, limit="bilinear scales must be in [1, 4]",
         check=layer.scales_within("linear", 4), source=HEADER),
    Rule(id="resize.mode", ops=o.RESIZE,
         limit="mode, coordinates and rounding must be a combination that the DLA has",
         check=layer.resize_mode, source=HEADER,
         hint="use nearest asymmetric floor, or linear half_pixel"),
    Rule(id="resize.linear-version", ops=o.RESIZE, limit="before TensorRT 8.4 only nearest works",
         check=layer.linear_mode, tensorrt=(FLOOR, (8, 4)), source="TensorRT 8.2 developer guide"),

    # Softmax, shuffle, reduction.
    Rule(id="softmax.axis", ops=o.ops("Softmax"), limit="the axis must be C, H or W",
         check=layer.softmax_axis, source=HEADER),
    Rule(id="softmax.size", ops=o.ops("Softmax"),
         limit="the axis must be at most 1024, or 8192 where all other dimensions are 1",
         check=layer.softmax_size, source=HEADER),
    Rule(id="softmax.rows", ops=o.ops("Softmax"),
         limit="up to TensorRT 8.4 batch and other dimensions must be 1",
         check=layer.softmax_alone, tensorrt=(FLOOR, (8, 5)), source="TensorRT 8.4 guide"),
    Rule(id="shuffle.rank", ops=o.SHUFFLE, limit="input and output must be 4-D",
         check=c.four_dims, source=MATRIX, hint=HEAD_HINT),
    Rule(id="shuffle.batch", ops=o.SHUFFLE, limit="the batch must stay in place",
         check=layer.batch_kept, source=MATRIX),
    Rule(id="shuffle.neighbour", ops=o.ops("Reshape"),
         limit="the DLA refuses a Reshape directly connected to Slice or Concat",
         check=layer.beside_slice, source="TensorRT logs", certainty="observed"),
    Rule(id="reduce.rank", ops=o.REDUCE, limit="input and output must be 4-D",
         check=c.four_dims, source=GUIDE, certainty="recalled", hint="keep the reduced axes"),
    Rule(id="reduce.axes", ops=o.REDUCE, limit="the axes must be constant and among C, H, W",
         check=layer.reduced_axes, source=GUIDE, certainty="recalled"),
    Rule(id="layer.rank", ops=o.NATIVE - o.RANKED, limit="tensors must be 4-D (N, C, H, W)",
         check=c.four_dims, source=GUIDE, certainty="recalled", hint=HEAD_HINT),

    # Policy of this planner, not a limit of the hardware.
    Rule(id="P1", ops=o.WEIGHTED, generations=V2, precisions=FP16,
         limit="FP16 convolutions measured 13.9 times slower than INT8 on the DLA of Orin",
         check=lambda view: f"{view.op} in FP16", source="planner policy, ResNet-50 measurement",
         certainty="observed", hint="build with --precision int8"),
)
# fmt: on


def judge(
    view: NodeView, dla: Dla, tensorrt: str | None, precision: Precision
) -> tuple[Verdict, ...]:
    """Return every rule that keeps the node off the DLA; none: it may run there.

    `tensorrt` None takes the version of the generation's last JetPack.
    """
    version = parse_version(tensorrt or USUAL_TENSORRT[dla.generation])
    verdicts = []
    for rule in RULES:
        bound = rule.ops is None or view.op in rule.ops
        if bound and _applies(rule, dla.generation, version, precision):
            actual = rule.check(view)
            if actual is not None:
                verdicts.append(_verdict(rule, view, actual))
    return tuple(verdicts)


def _applies(rule: Rule, generation: Generation, version: Version, precision: Precision) -> bool:
    first, free = rule.tensorrt
    in_time = first <= version < free
    return in_time and generation in rule.generations and precision in rule.precisions


def _verdict(rule: Rule, view: NodeView, actual: str) -> Verdict:
    return Verdict(
        rule=rule.id,
        node=view.name,
        limit=rule.limit,
        actual=actual,
        reason=f"{actual}, but {rule.limit}",
        hint=rule.hint if isinstance(rule.hint, str) else rule.hint.get(view.op, ""),
        certainty=rule.certainty,
    )
