"""What each rule of the DLA means and what to do about it: the texts of `tandem explain RULE`.

The rows of rules say limit, source and certainty; these say why it matters, and the remedy. A rule
without a row here fails a test.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Meaning(NamedTuple):
    """Why there is such a limit, or what follows from it; and what to do."""

    what: str
    do: str


_EARLIER = "Build with --jetpack for a JetPack that has it, or let the node run on the GPU."
_XAVIER = "Nothing on Xavier: the node runs on the GPU, or the model avoids the operator."
_RANK = "Keep the tensor 4-D (N, C, H, W): a 1x1 Conv in place of Flatten and Gemm, keepdims=1."
_KEEP = "Change the layer in the model; the node runs on the GPU until then."
_REWRITE = "Nothing where a rewrite exists: `tandem plan` applies it where it pays."
_FREEZE = "Build with --shape NAME=DIMS, which gives the input a fixed size."

# fmt: off
MEANINGS: Mapping[str, Meaning] = {
    # Precision, version and operator.
    "G1": Meaning("The DLA has no FP32 arithmetic, so an FP32 plan leaves it idle.",
        "Plan or build with --precision int8 or fp16."),
    "G11": Meaning("NVIDIA left the DLA out of these TensorRT versions on Jetson.",
        "Build with --jetpack for a JetPack before or after them."),
    "version.v1": Meaning("Xavier stays on JetPack 5: later TensorRT does not know its DLA.",
        "Build with --jetpack for JetPack 5."),
    "version.v2": Meaning("TensorRT before 8.4 does not know the DLA of Orin.",
        "Build with --jetpack for JetPack 5 or newer."),
    "G13": Meaning("The DLA runs a fixed sequence of layers; it calls no code of others and does "
        "not branch.", "Take the plugin or the control flow out of the part meant for the DLA."),
    "op.rewrite": Meaning("The DLA does not have this operator but has others that compute the "
        "same.", _REWRITE),
    "op.folded": Meaning("The operator computes shapes or constants, which the build evaluates; "
        "it is left only where its input is computed.", "Make its input constant, or "
        "build with --shape, which fixes the input shapes."),
    "op.not-exposed": Meaning("The hardware may do it, but TensorRT does not offer it on the DLA.",
        _REWRITE + " `tandem plan --explain NODE` names the one that helps."),
    "op.unsupported": Meaning("The operator is not in NVIDIA's matrix of the DLA's operators.",
        "Replace it by operators that are (`tandem explain OPERATOR`), or leave it to the GPU."),
    "op.version": Meaning("The operator came to the DLA with a later TensorRT.", _EARLIER),
    "min.conflict": Meaning("Two of NVIDIA's documents disagree about Min on the DLA; the plan "
        "takes the cautious one.", "Write min(a, b) as -max(-a, -b); `tandem plan` does so where "
        "it pays."),
    "unary.kind": Meaning("Documents disagree about most unary operators on the DLA; only Abs is "
        "in all of them.", "Leave it to the GPU, or test it on the board."),
    "softmax.v1": Meaning("Xavier's DLA has no softmax layer.", _XAVIER),
    "sub.version": Meaning("Subtraction on the DLA came with TensorRT 8.2, which makes it of a "
        "scale and a sum on Xavier.",
        "a - b = a + (-1) b; `tandem plan` rewrites it so where it pays."),
    "slice.v1": Meaning("Slicing on the DLA came with Orin.", _XAVIER),
    "unary.v1": Meaning("Unary layers on the DLA came with Orin.", _XAVIER),
    "shuffle.v1": Meaning("Reshape and Transpose on the DLA came with Orin.", _XAVIER),
    "shuffle.version": Meaning("Reshape and Transpose on the DLA came with TensorRT 8.5.",
        _EARLIER),
    "reduce.v1": Meaning("Reductions on the DLA came with Orin.", _XAVIER),
    "compare.precision": Meaning("Comparisons are offered in INT8 only.",
        "Build with --precision int8."),

    # Tensors.
    "G5": Meaning("A loadable is compiled for one size; the DLA has no dynamic shapes.", _FREEZE),
    "G1.type": Meaning("Only tensors that start as FP32 or FP16 can become the DLA's INT8 or FP16; "
        "integers and booleans cannot.", "Keep index and mask arithmetic out of the part meant "
        "for the DLA."),
    "G2": Meaning("All dimensions before C, H, W count as the batch, which a loadable bounds.",
        "Run a smaller batch: the DLA does not gain from a larger one."),
    "G2.v1": Meaning("Xavier's compiler was seen to refuse batches above this.",
        "Run a smaller batch."),
    "G4": Meaning("A surface of the DLA is no larger in C, H or W.",
        "Cut the graph before the reshape that joins them, and post-process on GPU or CPU."),
    "G4.cut": Meaning("Above this node a tensor grows beyond the DLA's limit (G4). What follows "
        "is post-processing, and stays on the GPU with it.",
        "Nothing; or end the model before this node."),
    "G10": Meaning("TensorRT counts elements with 31 bits.", "Use a smaller size or batch."),
    "G16": Meaning("Weights are laid out when the loadable is compiled.",
        "Make the weights initializers of the model."),
    "G17": Meaning("The DLA keeps constants in FP16, in which a larger one is infinite.",
        "Scale the constant, and what it meets, down in the model."),
    "layer.rank": Meaning("The DLA's layers work on N, C, H, W.", _RANK),

    # Convolution and GEMM.
    "conv.rank": Meaning("The DLA convolves over height and width only.",
        "Write a 1-D convolution as 1xK with a height of 1; `tandem plan` does so where it pays."),
    "product.form": Meaning("A matrix product becomes a 1x1 convolution, which needs plain rows "
        "and columns.", "Transpose the weights in the model and reshape to rank 2."),
    "conv.kernel": Meaning("Larger kernels are not offered.", _KEEP),
    "conv.padding": Meaning("More padding is not offered.", _KEEP),
    "conv.padding-kernel": Meaning("A window must touch at least one number of the input.", _KEEP),
    "conv.stride": Meaning("Larger strides are not offered.",
        "Split the stride over two layers; `tandem plan` does so where it pays."),
    "conv.dilation": Meaning("Wider gaps are not offered.", _KEEP),
    "conv.channels": Meaning("More input channels are not offered.", _KEEP),
    "conv.maps": Meaning("More output channels are not offered.", _KEEP),
    "conv.groups": Meaning("More groups are not offered.", _KEEP),
    "conv.group-int8": Meaning("Grouped INT8 convolutions are offered for such groups only.",
        "Choose channels per group as a multiple of 4, or a depthwise convolution."),
    "conv.cbuf-int8": Meaning("The convolution buffer has 16 banks for one kernel and the lines of "
        "input under it; a wider one cannot be started.",
        "Make the input narrower or of fewer channels, the kernel lower or less dilated."),
    "conv.cbuf-fp16": Meaning("The convolution buffer has 16 banks for one kernel and the lines of "
        "input under it, in 2 bytes a number.",
        "Use INT8, a narrower input or fewer channels, a lower or less dilated kernel."),
    "deconv.kernel": Meaning("Other kernels of transposed convolutions are not offered.", _KEEP),
    "deconv.stride": Meaning("Other strides of transposed convolutions are not offered.", _KEEP),
    "deconv.padding": Meaning("The DLA does not crop the result of a transposed convolution.",
        "Set the padding to 0 and Slice the result; `tandem plan` does so where it pays."),
    "deconv.groups": Meaning("TensorRT offers transposed convolutions of one group only.",
        "Write each group as a layer of its own; `tandem plan` does so where it pays."),
    "deconv.dilation": Meaning("Transposed convolutions cannot be dilated.", _KEEP),
    "deconv.square": Meaning("TensorRT leaves these sizes out.", "Use a side of 22 or less."),

    # Pooling.
    "pool.rank": Meaning("The DLA pools over height and width only.", _RANK),
    "pool.window": Meaning("Larger windows are not offered.",
        "Use a cascade of windows of at most 8x8; `tandem plan` does so where it pays."),
    "pool.padding": Meaning("More padding of poolings is not offered.", _KEEP),
    "pool.stride": Meaning("Larger strides of poolings are not offered.", _KEEP),
    "pool.dilation": Meaning("A pooling window has no gaps.", _KEEP),
    "pool.indices": Meaning("The DLA returns maxima, not where they are.",
        "Remove the second output of MaxPool."),
    "pool.inclusive": Meaning("Xavier divides by the whole window, also where it lies on padding.",
        "Set count_include_pad=1 in training, or remove the padding."),
    "window.unknown": Meaning("Automatic padding depends on the input's size, which is not known.",
        _FREEZE),

    # Activation.
    "activation.rank": Meaning("Activations run behind 4-D layers.", _RANK),
    "clip.upper": Meaning("The clipped ReLU takes one bound from 1 to 127.",
        "Scale the input so that the bound fits; `tandem plan` does so where it pays."),
    "clip.lower": Meaning("The DLA's clip starts at 0.",
        "Shift the input by the lower bound; `tandem plan` does so where it pays."),
    "prelu.slope": Meaning("The slope is stored with the loadable.", "Make the slope constant."),
    "prelu.rank": Meaning("The slope is applied per channel.", "Reshape the slope to 1xCx1x1."),

    # Element-wise, scale and comparison.
    "eltwise.broadcast": Meaning("The DLA repeats an operand along H and W, or everywhere, and in "
        "no other way.", "Expand the operand, or give it the shape NxCx1x1."),
    "div.divisor": Meaning("In FP16 a layer divides by constants only.",
        "Make the divisor constant, or use INT8."),
    "pow.constant": Meaning("One exponent serves the whole layer.",
        "Use one exponent for all elements."),
    "pow.precision": Meaning("Powers are offered in INT8 only.", "Build with --precision int8."),
    "compare.reader": Meaning("A comparison is offered only together with the Cast that reads "
        "it.", "Let one Cast read the comparison and nothing else."),
    "compare.v1": Meaning("What is published of comparisons is of Orin.", _KEEP),
    "cast.compare": Meaning("The DLA changes types only where a comparison becomes a number.",
        _KEEP),
    "lrn.window": Meaning("Other windows are not offered.", _KEEP),

    # Concatenation, slicing, resizing.
    "concat.axis": Meaning("Surfaces are joined along the channels only.",
        "Concatenate along the channels."),
    "concat.inputs": Meaning("A concatenation of one tensor is a copy.", "Remove the node."),
    "slice.rank": Meaning("The DLA cuts 4-D surfaces.", _RANK),
    "slice.static": Meaning("A slice is an address, fixed when the loadable is compiled.",
        "Make starts, ends, axes and steps constant."),
    "slice.steps": Meaning("A slice is contiguous.",
        "A strided slice is a convolution with weights of 0 and 1; `tandem plan` does so."),
    "slice.batch": Meaning("The batch cannot be cut.", "Split the batch outside of the model."),
    "slice.int8": Meaning("INT8 slices came with TensorRT 8.6.", _EARLIER),
    "resize.scales": Meaning("The scales are compiled in.", "Give Resize scales, not sizes."),
    "resize.axes": Meaning("Only height and width are resized.",
        "Give 4 scales: 1, 1 and those of H and W."),
    "resize.integer": Meaning("The DLA repeats or interpolates by whole factors, and enlarges "
        "only.", "Use whole scales; a smaller size by a strided pooling or convolution."),
    "resize.nearest": Meaning("Larger factors are not offered.", "Resize in two steps."),
    "resize.linear": Meaning("Larger factors are not offered.", "Resize in two steps."),
    "resize.mode": Meaning("Other conventions place the samples elsewhere.",
        "Export with mode nearest, asymmetric, floor; or linear, half_pixel."),
    "resize.linear-version": Meaning("Bilinear resizing came with TensorRT 8.4.", _EARLIER),

    # Softmax, views, reductions.
    "softmax.axis": Meaning("Softmax runs over one of C, H, W.", "Choose another axis."),
    "softmax.size": Meaning("Longer rows are not offered.",
        "Leave it to the GPU; it is small there."),
    "softmax.rows": Meaning("Older TensorRT takes one row only.", _EARLIER),
    "shuffle.rank": Meaning("The DLA moves 4-D surfaces.", _RANK),
    "shuffle.batch": Meaning("The batch is outermost and stays there.",
        "Transpose C, H and W only."),
    "shuffle.neighbour": Meaning("TensorRT was seen to refuse such pairs.",
        "Put another layer between them, or cut the model there."),
    "reduce.rank": Meaning("A reduction leaves a 4-D surface.", "Set keepdims=1."),
    "reduce.axes": Meaning("The batch is not reduced, and the axes are compiled in.",
        "Make the axes constant, and of C, H, W."),

    # Loadables, memory and the formats at their borders.
    "G6": Meaning("Each segment on the DLA is a loadable, and a core keeps so many in all models "
        "together. The plan merges segments until they fit.",
        "Nothing; `tandem plan` keeps the limit. Fewer nodes in between give fewer segments."),
    "G6.8-4": Meaning("As G6, for TensorRT 8.0 to 8.4.", "A newer JetPack raises it to 16."),
    "G6.7": Meaning("As G6, for TensorRT 7 and older.", "Use a newer JetPack."),
    "G7": Meaning("A loadable has one batch size.", "Nothing; the plan cuts where it changes."),
    "G8": Meaning("Tensors inside a loadable lie in a pool of this size.",
        "Nothing; the plan cuts the segment. A smaller input needs less."),
    "G9": Meaning("Weights of a loadable lie in a pool of this size.",
        "Nothing; the plan cuts the segment."),
    "format.rank": Meaning("The DLA's formats lay out 4-D tensors.", _RANK),
    "format.precision": Meaning("The format holds FP16 or INT8.",
        "Let the border tensor be FP16 or INT8."),
    "chw16.precision": Meaning("CHW16 packs 16 FP16 channels.", "Use CHW32 for INT8."),
    "chw32.precision": Meaning("CHW32 packs 32 INT8 channels.", "Use CHW16 for FP16."),
    "hwc4.side": Meaning("HWC4 is a format of images that come in.",
        "Use another format for outputs."),
    "hwc4.channels": Meaning("HWC4 holds an image of 1, 3 or 4 channels.", "Use CHW16 or CHW32."),
    "hwc4.reader": Meaning("Only a convolution reads images in this format.",
        "Begin the segment with a Conv."),
    "hwc4.precision": Meaning("The convolution reads the image as it is stored.",
        "Give input and first convolution one precision."),
    "hwc4.groups": Meaning("A convolution that reads an image has few groups.",
        "Use a plain convolution first."),

    # The planner's own.
    "P1": Meaning("FP16 convolutions on Orin's DLA are so slow that the plan does not place them.",
        "Build with --precision int8, or --precision fp16 for the GPU alone."),
}
# fmt: on
