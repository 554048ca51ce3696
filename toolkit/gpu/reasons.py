"""Why a node has no GPU kernel: every sentence that is said of one, and what each reason means.

A sentence stands behind "node 'name' (Operator) " or "tensor 'name' ". Its key is the id of its
reason, with a suffix where a reason has several. `tandem explain` finds the reason of a sentence.
"""

from string import Formatter
from typing import NewType

Reason = NewType("Reason", str)
"""A sentence of SENTENCES with its values."""

SENTENCES = {
    "gpu.no-kernel": "has no kernel yet",
    "gpu.constant": "reads {!r}, which is computed; kernels are compiled for constant parameters",
    "gpu.constant-axes": "has axes that are not constant ({!r})",
    "gpu.constant-weights": "has weights that are not constant ({!r})",
    "gpu.constant-weights:recurrent": "has weights that are not constant",
    "gpu.attention-outputs": "keeps keys or returns weights; kernels return 1 tensor made from 4",
    "gpu.attention-window": "has a window; kernels look at all keys",
    "gpu.attention-heads": "has {} queries of {} for {} values of {}; kernels take up to {}, "
    "shared evenly",
    "gpu.normalization-outputs": "returns what it normalized by; kernels return 1 tensor",
    "gpu.normalization-outputs:batch": "returns statistics; kernels return 1 tensor",
    "gpu.indices": "takes {} indices for an element; kernels take {}",
    "gpu.grid-sample": "samples {} dimensions ({}); kernels take 2, and 3 by linear and nearest",
    "gpu.resize:sizes": "has neither scales nor sizes",
    "gpu.resize:scales": "has no scale for every dimension",
    "gpu.resize:mode": "has the unknown mode {}",
    "gpu.roi-align:mode": "takes the largest sample of a bin; kernels average",
    "gpu.roi-align:samples": "has as many samples as a region is large; kernels take a fixed "
    "sampling_ratio",
    "gpu.roi-align:corners": "leaves coordinate_transformation_mode to its opset, and opsets "
    "differ; kernels take one that the node states",
    "gpu.suppression": "has {} classes of {} boxes; kernels take {} of {}",
    "gpu.recurrent-gates": "clips its sums or couples its gates; kernels do not",
    "gpu.recurrent-gates:layout": "has layout {}; kernels take 0 and 1",
    "gpu.recurrent-steps": "has {} steps; kernels take {}",
    "gpu.recurrent-lengths": "has sequences of other lengths than {}",
    "gpu.recurrent-lengths:computed": "has lengths of sequences that are not constant ({!r})",
    "gpu.recurrent-activations": "has the activations {}; kernels take {}",
    "gpu.training": "is in training mode; kernels are for inference",
    "gpu.einsum:equation": "has the equation {!r} of {} tensors; kernels take 1 or 2, without "
    "diagonals and '...'",
    "gpu.einsum:sizes": "has sizes {} and {} of {}",
    "gpu.einsum:ones": "makes {}, and shape inference of ONNX says {}: expand the operand that has "
    "the size 1",
    "gpu.joins": "joins by {!r}; kernels join by {}",
    "gpu.top-k": "selects {} from {} elements; kernels take {}, and of fixed sizes more where they "
    "select at most {}",
    "gpu.unpooled-size": "writes {} by indices in {}; kernels take equal sizes",
    "gpu.scale-blocks": "has blocks with scales of their own, {!r}, that are not constant",
    "gpu.quantized-type": "makes {}; kernels make int8, uint8, int16, uint16 and {}",
    "gpu.float8:saturate": "has saturate=0; kernels make numbers beyond {} its largest",
    "gpu.float8:zero": "has a zero point of {}, {!r}; kernels take 0",
    "gpu.float8:computed": "has a scale of {} that is computed, {!r}; kernels take constants",
    "gpu.float8:scales": "has {} scales of {}; kernels take 1 for an activation",
    "gpu.float8:scale": "has the scale {}; kernels take positive ones with a finite reciprocal",
    "gpu.float8:sm": "makes {}, which GPUs from SM {} on compute; this one has SM {}",
    "gpu.cast": "makes {}; kernels make {}",
    "gpu.spatial": "has {} spatial dimensions; kernels take 1 to 3",
    "gpu.unknown-shape": "has the shape {}, which no formula gives; kernels are compiled for known "
    "sizes, give them with --shape",
    "gpu.unknown-type": "has no known type",
    "gpu.elements": "has {} elements; kernels take 1 to {}",
    "gpu.sized-by-numbers": "makes a tensor whose size depends on the numbers in another; kernels "
    "are started for sizes known before",
    "gpu.domain": "is of the domain {!r}; kernels compute operators of ONNX itself",
    "gpu.element-type": "reads {!r} of type {}; kernels read {}",
    "gpu.left-out-output": "leaves out output {}; kernels make all before the last",
    "gpu.left-out-output:part": "has a result without a name",
    "gpu.attribute": "has the attribute {!r} of type {}; kernels take numbers and texts",
}


def reason(key: str, *values: object) -> Reason:
    """Return a sentence with its values."""
    return Reason(SENTENCES[key].format(*values))


_PORTABLE = "Nothing: the node runs portable on the CPU, and the build says what crosses."
_FOLD = "Make it constant in the model; build with --shape, which often does."

# fmt: off
MEANINGS = {
    "gpu.no-kernel": ("No kernel computes this operator, and its ONNX definition does not help.",
        _PORTABLE + " A plugin adds a kernel (docs/plugins.md)."),
    "gpu.constant": ("The parameter shapes the kernel, which is compiled ahead of time.", _FOLD),
    "gpu.constant-axes": ("The reduced axes shape the kernel.", _FOLD),
    "gpu.constant-weights": (
        "The weights of a recurrent layer or a ConvTranspose are packed when the engine is built.",
        _FOLD),
    "gpu.attention-outputs": (
        "The kernel returns the result alone, without a cache of keys and values.",
        "Export the model without a key-value cache and without attention weights."),
    "gpu.attention-window": ("The kernel has no sliding window.", "Write the window as a mask."),
    "gpu.attention-heads": ("The heads are too deep, or queries do not share values evenly.",
        "Choose heads within the limit that the reason names."),
    "gpu.normalization-outputs": ("The kernel returns the result, not mean and deviation.",
        "Remove the outputs that only training uses."),
    "gpu.indices": ("The kernel reads so many indices for one element.", _PORTABLE),
    "gpu.grid-sample": ("The kernel samples images, and volumes by linear and nearest.", _PORTABLE),
    "gpu.resize": ("The attributes and inputs do not say how to resize.",
        "Export the model again, with attributes that ONNX has and a scale for each dimension."),
    "gpu.roi-align": (
        "The kernel averages a number of samples that the node states, at corners that it states.",
        "Export RoiAlign with mode avg, a sampling_ratio above 0 and its"
        " coordinate_transformation_mode; others run portable on the CPU."),
    "gpu.suppression": (
        "One block finds the place of each class in the result, and boxes are compared with each"
        " other.", _PORTABLE),
    "gpu.recurrent-gates": ("The kernel has the plain gates, and the layouts of ONNX.",
        "Export the layer without clip and input_forget, with layout 0 or 1."),
    "gpu.recurrent-steps": ("Each step starts kernels of its own, and their number is limited.",
        "Feed the sequence in parts, with the state as an input and an output."),
    "gpu.recurrent-lengths": (
        "All sequences of a batch take the same steps, as many as the input has.",
        "Export the layer without sequence_lens."),
    "gpu.recurrent-activations": (
        "The kernel has the activations that the reason names.", "Use those."),
    "gpu.training": ("The kernel computes inference: it drops nothing and updates no statistics.",
        "Export the model in evaluation mode."),
    "gpu.einsum": ("The equation is written as one product of matrices.",
        "Write it in steps of 1 or 2 tensors, without '...' and without an index twice in a "
        "tensor."),
    "gpu.joins": (
        "Kernels join elements at the same index by atomic instructions, which have no other "
        "reduction.", _PORTABLE),
    "gpu.top-k": (
        "Long rows are selected from in chunks of fixed sizes, which hold what is selected twice.",
        "Build with --shape, which fixes the sizes; select fewer elements, or in parts."),
    "gpu.unpooled-size": (
        "The indices count elements of the size that the attributes give, and the result has "
        "another.", "Export MaxUnpool without output_shape, or with the size of the attributes."),
    "gpu.scale-blocks": ("Scales of blocks are laid out when the engine is built.", _FOLD),
    "gpu.quantized-type": ("Quantization to this type has no kernel.", "Quantize to INT8."),
    "gpu.float8": (
        "The kernel that rounds an activation to FP8 multiplies by one number, known when the"
        " engine is built, and saturates; SM 89 is the first that has FP8.",
        "Quantize activations per tensor, with a positive scale, the zero point 0 and saturation."),
    "gpu.cast": ("No kernel writes this type.", "Cast to one of the types that the reason names."),
    "gpu.spatial": ("Kernels convolve and pool over 1 to 3 dimensions.", _PORTABLE),
    "gpu.unknown-shape": ("Kernels are compiled for sizes, or formulas of them, that are known.",
        "Build with --shape NAME=DIMS, or with --dim NAME=MIN:OPT:MAX."),
    "gpu.unknown-type": ("Kernels are compiled for types that are known.",
        "Export the model again; ONNX infers the types of its own operators."),
    "gpu.elements": ("Kernels count elements with 31 bits, and empty tensors are not computed.",
        "Use a smaller size or batch."),
    "gpu.sized-by-numbers": (
        "The size of the result is known only when it is computed.", _PORTABLE),
    "gpu.domain": ("Kernels compute operators of ONNX itself, and those of plugins.",
        _PORTABLE + " A plugin adds an operator (docs/plugins.md)."),
    "gpu.element-type": (
        "No kernel reads this type.", "Cast to one of the types that the reason names."),
    "gpu.left-out-output": ("Kernels make all outputs before the last one that is read.",
        "Name the output in the model, also if nothing reads it."),
    "gpu.attribute": (
        "Kernels take numbers and texts; graphs (If, Loop, Scan) run portable.", _PORTABLE),
}
"""By id: what a reason means, and what to do."""
# fmt: on


def reason_id(text: str) -> str:
    """Return the id of the reason whose sentence a text holds, "" where it holds none."""
    keys = (key for key, sentence in SENTENCES.items() if _holds(text, sentence))
    return next(keys, "").partition(":")[0]


def _holds(text: str, sentence: str) -> bool:
    """Whether a text has what stands around the values of a sentence, in its order."""
    at = 0
    for literal, *_ in Formatter().parse(sentence):
        at = text.find(literal, at)
        if at < 0:
            return False
        at += len(literal)
    return True
