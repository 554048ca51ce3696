"""Every rewrite that lets a node onto the DLA: one row each, tried from top to bottom."""

from toolkit.legalize import (
    activation,
    arithmetic,
    pool_windows,
    pooling,
    rearrange,
    resize,
    selection,
    transposed,
)
from toolkit.legalize.lift import lift
from toolkit.legalize.lift_forms import FORMS
from toolkit.legalize.logic import LOGIC, conditions
from toolkit.legalize.rewrite import Rewrite, ops

MATRIX = "DLA operator matrix, June 2024"
HEADER = "limits of NvInfer.h 10.3"
RESNET = "MLPerf Inference 3.0, ResNet-50 graph surgery"
ISSUE_3365 = "TensorRT issue 3365"
ONNX = "ONNX operator definition"

MEANS = ops("GlobalAveragePool ReduceMean")
SUMS = ops("ReduceSum ReduceL1 ReduceSumSquare")
BINARY = ops("Add Sub Mul Div Max Min Sum")

ONE_RANGE = "averages shrink ranges: each step is rounded to INT8 in a range of its own"
UNIT = "weights of 0 and 1 are exact in INT8, and the output takes the range of the input"
SAME = "the tensors keep the ranges of what they replace"
APART = "each new tensor has a range of its own, to be calibrated"

# fmt: off
REWRITES: tuple[Rewrite, ...] = (
    # Rank 2 and 3, heads, views.
    Rewrite(id="view.identity", ops=rearrange.VIEWS, exact=True, build=rearrange.view_identity,
            equation="view'(view(x)) = x", needs="the shape of x comes back, elements in order",
            source=ONNX, precision=SAME),
    Rewrite(id="view.moves", ops=rearrange.VIEWS, exact=True, build=rearrange.view_moves,
            equation="views that shuffle channels, or channels and b x b blocks = Conv or "
                     "ConvTranspose with weights of 0 and 1",
            needs="a 4-D map of known size above and below the views", source=MATRIX,
            precision=UNIT),
    Rewrite(id="lift", ops=frozenset(FORMS), exact=False, build=lift, reads=rearrange.PLAIN_VIEWS,
            equation="f(view(x)) = view(f(x)); Gemm(Flatten(x)) = Flatten(Conv(x)) with a window "
                     "of the whole map; [N, C, L] = [N, C, 1, L]",
            needs="constant weights, known sizes, rank 2 or 3", source=MATRIX, precision=SAME),
    Rewrite(id="view.unary", ops=ops("Abs Clip LeakyRelu Relu Sigmoid Tanh"), exact=True,
            build=rearrange.view_unary, equation="f(view(x)) = view(f(x)), f of one element",
            needs="views of a 4-D map with no other reader", source=ONNX, precision=SAME),

    # Means, sums and maxima over maps and channels.
    Rewrite(id="mean.window", ops=MEANS, build=pooling.mean_window,
            equation="mean over HxW = AveragePool of window HxW",
            needs="H and W of at most 8", source=RESNET, precision=SAME),
    Rewrite(id="mean.cascade", ops=MEANS, build=pooling.mean_cascade,
            equation="mean over HxW = mean of the means of equal blocks",
            needs="H and W are products of factors of at most 8", source=RESNET,
            precision=ONE_RANGE),
    Rewrite(id="mean.conv", ops=MEANS, build=pooling.mean_conv,
            equation="mean over HxW = depthwise Conv of window HxW with weights 1/(HW)",
            needs="H and W of at most 32", source=MATRIX,
            precision="equal weights are exact in INT8 up to one factor"),
    Rewrite(id="mean.padded", ops=MEANS, build=pooling.mean_padded,
            equation="mean(x) = (padded size / size) mean(x padded with zeros), in a cascade",
            needs="a 4-D map of known size", source=HEADER, precision=ONE_RANGE),
    Rewrite(id="mean.channels", ops=ops("ReduceMean"), build=pooling.over_channels,
            equation="mean over C = 1x1 Conv of one output with weights 1/C (HxW first by pooling)",
            needs="a 4-D map of known size", source=MATRIX, precision=ONE_RANGE),
    Rewrite(id="sum.cascade", ops=SUMS, build=pooling.mean_cascade,
            equation="sum over HxW of g(x) = HW mean of g(x); g(x) = x, |x|, x x",
            needs="H and W are products of factors of at most 8", source=MATRIX,
            precision="the sum has HW times the range of the mean"),
    Rewrite(id="sum.conv", ops=SUMS, build=pooling.mean_conv,
            equation="sum over HxW of g(x) = depthwise Conv with weights 1",
            needs="H and W of at most 32", source=MATRIX, precision="weights of 1 are exact"),
    Rewrite(id="sum.padded", ops=SUMS, build=pooling.mean_padded,
            equation="sum over HxW of g(x) = (padded size) mean(g(x) padded with zeros)",
            needs="a 4-D map of known size", source=MATRIX, precision=ONE_RANGE),
    Rewrite(id="sum.channels", ops=SUMS, build=pooling.over_channels,
            equation="sum over C of g(x) = 1x1 Conv of one output with weights 1",
            needs="a 4-D map of known size", source=MATRIX, precision="weights of 1 are exact"),
    Rewrite(id="max.keep-dims", ops=ops("ReduceMax"), exact=True, build=pooling.keep_dims,
            equation="max without its axes = view of max with them",
            needs="a 4-D map of known size", source=MATRIX, precision=SAME),
    Rewrite(id="max.cascade", ops=ops("GlobalMaxPool ReduceMax ReduceMin"), exact=True,
            build=pooling.global_max,
            equation="max over HxW = max of the maxima of blocks; min(x) = -max(-x)",
            needs="a 4-D map of known size, reduced over H or W", source=HEADER, precision=SAME),
    Rewrite(id="max-pool.cascade", ops=ops("MaxPool"), exact=True, build=pool_windows.max_cascade,
            equation="max over k = max over k1 of max over k2, k - 1 = (k1 - 1) + (k2 - 1)",
            needs="no dilation, no rounding up", source=HEADER, precision=SAME),
    Rewrite(id="average-pool.cascade", ops=ops("AveragePool"), build=pool_windows.average_cascade,
            equation="mean over k = mean of means over k1, k = k1 k2",
            needs="stride = window, no padding, factors of at most 8", source=HEADER,
            precision=ONE_RANGE),
    Rewrite(id="average-pool.conv", ops=ops("AveragePool"), build=pool_windows.average_conv,
            equation="mean over k x k = depthwise Conv with weights 1/(k k)",
            needs="window of at most 32, padding counted or none", source=HEADER,
            precision="equal weights are exact in INT8 up to one factor"),
    Rewrite(id="average-pool.inclusive", ops=ops("AveragePool"),
            build=pool_windows.average_inclusive,
            equation="mean of what a window holds = (window / held) mean with padding",
            needs="known size; the factor is a whole constant map", source="NvInfer.h 8.5",
            precision=APART),

    # Activations.
    Rewrite(id="hard-sigmoid", ops=ops("HardSigmoid"), build=activation.hard_sigmoid,
            equation="hard sigmoid(x) = clip(a x + b, 0, 1)", needs="nothing",
            source="ONNX operator definition, clipped ReLU of the DLA", precision=APART),
    Rewrite(id="hard-swish", ops=ops("HardSwish"), build=activation.hard_swish,
            equation="hard swish(x) = x clip(x / 6 + 1/2, 0, 1)", needs="nothing",
            source="ONNX operator definition, clipped ReLU of the DLA", precision=APART),
    Rewrite(id="clip", ops=ops("Clip"), build=activation.clip,
            equation="clip(x, l, u) = l + clip(s (x - l), 0, s (u - l)) / s; clip(x, l, inf) = "
                     "l + relu(x - l); clip(x, -inf, u) = u - relu(u - x)",
            needs="constant bounds, l < u", source="TensorRT 8.5 developer guide",
            precision="x - l needs a range that reaches u - l: beyond it only clipped values lie"),
    Rewrite(id="swish", ops=ops("Swish"), build=activation.swish,
            equation="swish(x) = x sigmoid(a x)", needs="nothing", source=MATRIX, precision=APART),
    Rewrite(id="gelu.tanh", ops=ops("Gelu"), build=activation.gelu,
            equation="gelu(x) = x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2",
            needs="approximate = tanh", source=ONNX,
            precision="x^3 spreads its range widely: check its error in the report"),
    Rewrite(id="softsign", ops=ops("Softsign"), build=activation.softsign,
            equation="softsign(x) = x / (1 + |x|)", needs="the DLA divides", source=MATRIX,
            precision=APART, certainty="recalled"),
    Rewrite(id="abs.max", ops=ops("Abs"), exact=True, build=activation.absolute,
            equation="|x| = max(x, -x)", needs="nothing", source=MATRIX, precision=SAME),
    Rewrite(id="prelu.rank", ops=ops("PRelu"), exact=True, build=activation.slope_rank,
            equation="slope of C values = slope of 1xCx1x1", needs="a constant slope",
            source=HEADER, precision=SAME),

    # Arithmetic.
    Rewrite(id="div.constant", ops=ops("Div"), build=arithmetic.divide_by_constant,
            equation="x / c = x (1 / c)", needs="a constant divisor, no zeros in it",
            source=MATRIX, precision=SAME),
    Rewrite(id="sub.add", ops=ops("Sub"), exact=True, build=arithmetic.subtract,
            equation="a - b = a + (-1) b", needs="nothing",
            source="DLA operator matrix: Sub on Xavier is Scale and Sum", precision=SAME),
    Rewrite(id="neg.mul", ops=ops("Neg"), exact=True, build=arithmetic.negate,
            equation="-x = (-1) x", needs="nothing", source=MATRIX, precision=SAME),
    Rewrite(id="pow.mul", ops=ops("Pow"), build=arithmetic.power,
            equation="x^n = x x .. x", needs="a constant n of 2, 3 or 4", source=MATRIX,
            precision=APART),
    Rewrite(id="mean-of-inputs", ops=ops("Mean"), build=arithmetic.mean_of_inputs,
            equation="mean(a, b, ..) = (a + b + ..) / n", needs="nothing", source=MATRIX,
            precision=APART),
    Rewrite(id="identity.scale", ops=ops("Identity"), exact=True, build=arithmetic.identity,
            equation="x = batch norm of mean 0, variance 1, epsilon 0, scale 1 and shift 0",
            needs="a 4-D tensor of known size", source=MATRIX, precision=SAME),
    Rewrite(id="broadcast.constant", ops=BINARY, exact=True, build=arithmetic.broadcast_constant,
            equation="f(x, c) = f(x, c written out)", needs="at most 2^20 elements written out",
            source="TensorRT DLA layer restrictions", precision=SAME, certainty="recalled"),
    Rewrite(id="broadcast.computed", ops=BINARY, exact=True, build=arithmetic.broadcast_computed,
            equation="f(x, y) = f(x, y widened): over C by a 1x1 Conv of ones, over H and W by "
                     "nearest Resize",
            needs="axes of size 1, scales of at most 32", source=HEADER, precision=UNIT),
    Rewrite(id="expand", ops=ops("Expand Tile"), exact=True, build=arithmetic.expand,
            equation="repeat over C = 1x1 Conv of ones, over H and W = nearest Resize",
            needs="repeated axes of size 1, scales of at most 32", source=HEADER, precision=UNIT),
    Rewrite(id="where.constant", ops=ops("Where"), exact=True, build=arithmetic.where_constant,
            equation="where(c, x, y) = c x + (1 - c) y", needs="a constant c; finite x and y",
            source=MATRIX, precision=SAME),

    Rewrite(id="logic", ops=LOGIC, exact=True, build=conditions, dtypes=frozenset({"bool"}),
            equation="and(a, b) = a b; or(a, b) = max(a, b); not(a) = 1 - a; xor(a, b) = "
                     "(a - b)^2; where(c, x, y) = c x + (1 - c) y",
            needs="4-D booleans that end in Cast or Where more than they begin elsewhere; "
                  "finite x and y",
            source=MATRIX, precision="0 and 1 are exact in INT8"),

    # Cutting, choosing, moving.
    Rewrite(id="focus.conv", ops=ops("Concat"), exact=True, build=rearrange.focus,
            reads=ops("Slice"), first=True,
            equation="Concat of x[i::b, j::b] = Conv of window and stride b, weights of 0 and 1",
            needs="all strided slices of one map", source=MATRIX, precision=UNIT),
    Rewrite(id="slice.conv", ops=ops("Slice"), exact=True, build=selection.slice_conv,
            equation="x[C'] = 1x1 Conv with rows of the unit matrix; x[a:b:s] = depthwise Conv "
                     "of stride s with its 1 at a",
            needs="constant bounds, windows of at most 32, strides of at most 8", source=MATRIX,
            precision=UNIT),
    Rewrite(id="split.conv", ops=ops("Split"), exact=True, build=selection.split_conv,
            equation="each part of a Split as slice.conv", needs="as slice.conv", source=MATRIX,
            precision=UNIT),
    Rewrite(id="gather.slice", ops=ops("Gather"), exact=True, build=selection.gather_slice,
            equation="x[a, a+1, .., b-1] = x[a:b]", needs="constant neighbouring indices",
            source=MATRIX, precision=SAME),
    Rewrite(id="gather.conv", ops=ops("Gather"), exact=True, build=selection.gather_conv,
            equation="x[:, i] = 1x1 Conv with rows i of the unit matrix",
            needs="constant indices of channels", source=MATRIX, precision=UNIT),
    Rewrite(id="pad.into-conv", ops=ops("Pad"), exact=True, build=selection.pad_into_conv,
            equation="Conv(Pad(x)) = Conv(x) with both paddings",
            needs="constant zeros, padding smaller than the kernel", source=HEADER,
            precision=SAME),
    Rewrite(id="pad.conv", ops=ops("Pad"), exact=True, build=selection.pad_conv,
            equation="Pad(x) = padded depthwise Conv with one weight of 1",
            needs="constant zeros around the map, at most 31 a direction", source=HEADER,
            precision=UNIT),
    Rewrite(id="cumsum.conv", ops=ops("CumSum"), build=selection.cumulative_sum,
            equation="cumulative sum over C = 1x1 Conv with a triangle of ones",
            needs="the axis of the channels", source=MATRIX, precision="weights of 1 are exact"),
    Rewrite(id="concat.transpose", ops=ops("Concat"), exact=True, build=selection.concat_transpose,
            equation="Concat over H or W = T(Concat over C of T(x)), T swaps the axes",
            needs="4-D tensors, a DLA that transposes", source=MATRIX, precision=SAME),
    Rewrite(id="space-to-depth.conv", ops=ops("SpaceToDepth"), exact=True,
            build=rearrange.space_to_depth,
            equation="y[(i, j, c), h, w] = x[c, b h + i, b w + j] = Conv of window and stride b",
            needs="blocks of at most 8", source=MATRIX, precision=UNIT),
    Rewrite(id="depth-to-space.deconv", ops=ops("DepthToSpace"), exact=True,
            build=rearrange.depth_to_space,
            equation="y[c, b h + i, b w + j] = x[(i, j, c), h, w] = ConvTranspose of window b",
            needs="blocks of at most 22", source=MATRIX, precision=UNIT),

    # Convolutions.
    Rewrite(id="deconv.dense", ops=ops("ConvTranspose"), build=transposed.dense,
            equation="groups = blocks on the diagonal; dilation = zeros between the taps",
            needs="constant weights, no padding", source=HEADER, precision=SAME),
    Rewrite(id="deconv.slice", ops=ops("ConvTranspose"),
            build=transposed.cropped_by_slice,
            equation="deconv with padding p = deconv without, cut from p on by Slice",
            needs="constant weights, a DLA that slices", source=ISSUE_3365, precision=SAME),
    Rewrite(id="deconv.conv", ops=ops("ConvTranspose"),
            build=transposed.cropped_by_conv,
            equation="deconv with padding p = deconv without, cut by a depthwise Conv",
            needs="constant weights, padding of at most 31 in all", source=HEADER,
            precision=UNIT),
    Rewrite(id="conv.dense", ops=ops("Conv"), build=transposed.conv_dense,
            equation="groups = blocks on the diagonal of one dense kernel",
            needs="constant weights", source=HEADER, precision=SAME),

    # Resize.
    Rewrite(id="resize.nearest", ops=ops("Resize Upsample"), exact=True, build=resize.nearest,
            equation="nearest modes that copy the same rows and columns are one; sizes = scales",
            needs="whole scales of at most 32", source=HEADER, precision=SAME),
    Rewrite(id="resize.linear", ops=ops("Resize Upsample"), build=resize.linear,
            equation="linear modes with the same coordinates are one; sizes = scales",
            needs="whole scales of at most 4, coordinates of half_pixel", source=HEADER,
            precision=SAME),
    Rewrite(id="resize.max-pool", ops=ops("Resize Upsample"), exact=True,
            build=resize.nearest_pool,
            equation="every k-th row and column = MaxPool of window 1 and stride k",
            needs="shrinking by 2, 4, 8 or 16", source=HEADER, precision=SAME),
    Rewrite(id="resize.average-pool", ops=ops("Resize Upsample"), build=resize.linear_pool,
            equation="linear halving = AveragePool of window and stride 2",
            needs="coordinates in the middle of two", source=HEADER, precision=SAME),
)
# fmt: on
