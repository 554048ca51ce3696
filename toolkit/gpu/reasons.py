"""Why a node has no GPU kernel: a row for each reason that `toolkit.gpu.support` gives.

`pattern` is found in the text of the reason; `tandem explain` looks both up.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuReason:
    """One reason: what it means, and what to do."""

    id: str
    pattern: str
    what: str
    do: str


_PORTABLE = "Nothing: the node runs portable on the CPU, and the build says what crosses."
_FOLD = "Make it constant in the model; build with --shape, which often does."

# fmt: off
GPU_REASONS: tuple[GpuReason, ...] = (
    GpuReason("gpu.no-kernel", r"has no kernel yet",
        "No kernel computes this operator, and its ONNX definition does not help.",
        _PORTABLE + " A plugin adds a kernel (docs/plugins.md)."),
    GpuReason("gpu.constant", r"kernels are compiled for constant parameters",
        "The parameter shapes the kernel, which is compiled ahead of time.", _FOLD),
    GpuReason("gpu.constant-axes", r"has axes that are not constant",
        "The reduced axes shape the kernel.", _FOLD),
    GpuReason("gpu.constant-weights", r"has weights that are not constant",
        "The weights of a recurrent layer or a ConvTranspose are packed when the engine is built.",
        _FOLD),
    GpuReason("gpu.attention-outputs", r"keeps keys or returns weights",
        "The kernel returns the result alone, without a cache of keys and values.",
        "Export the model without a key-value cache and without attention weights."),
    GpuReason("gpu.attention-window", r"has a window; kernels look at all keys",
        "The kernel has no sliding window.", "Write the window as a mask."),
    GpuReason("gpu.attention-heads", r"queries of .* for .* values of",
        "The heads are too deep, or queries do not share values evenly.",
        "Choose heads within the limit that the reason names."),
    GpuReason("gpu.normalization-outputs", r"returns what it normalized by|returns statistics",
        "The kernel returns the result, not mean and deviation.",
        "Remove the outputs that only training uses."),
    GpuReason("gpu.indices", r"indices for an element",
        "The kernel reads so many indices for one element.", _PORTABLE),
    GpuReason("gpu.grid-sample", r"samples .* dimensions",
        "The kernel samples images, and volumes by linear and nearest.", _PORTABLE),
    GpuReason("gpu.roi-align",
        r"takes the largest sample of a bin|has as many samples as a region is large"
        r"|leaves coordinate_transformation_mode to its opset",
        "The kernel averages a number of samples that the node states, at corners that it states.",
        "Export RoiAlign with mode avg, a sampling_ratio above 0 and its"
        " coordinate_transformation_mode; others run portable on the CPU."),
    GpuReason("gpu.suppression", r"classes of .* boxes; kernels take",
        "One block finds the place of each class in the result, and boxes are compared with each"
        " other.", _PORTABLE),
    GpuReason("gpu.recurrent-gates",
        r"clips its sums or couples its gates|has layout \d+; kernels take",
        "The kernel has the plain gates, and the layouts of ONNX.",
        "Export the layer without clip and input_forget, with layout 0 or 1."),
    GpuReason("gpu.recurrent-steps", r"has \d+ steps; kernels take",
        "Each step starts kernels of its own, and their number is limited.",
        "Feed the sequence in parts, with the state as an input and an output."),
    GpuReason("gpu.recurrent-lengths",
        r"has lengths of sequences that are not constant|has sequences of other lengths",
        "All sequences of a batch take the same steps, as many as the input has.",
        "Export the layer without sequence_lens."),
    GpuReason("gpu.recurrent-activations", r"has the activations",
        "The kernel has the activations that the reason names.", "Use those."),
    GpuReason("gpu.training", r"is in training mode",
        "The kernel computes inference: it drops nothing and updates no statistics.",
        "Export the model in evaluation mode."),
    GpuReason("gpu.einsum", r"has the equation|has sizes .* of|shape inference of ONNX says",
        "The equation is written as one product of matrices.",
        "Write it in steps of 1 or 2 tensors, without '...' and without an index twice in a "
        "tensor."),
    GpuReason("gpu.joins", r"joins by .*; kernels join by",
        "Kernels join elements at the same index by atomic instructions, which have no other "
        "reduction.", _PORTABLE),
    GpuReason("gpu.top-k", r"selects .* from .* elements",
        "Long rows are selected from in chunks of fixed sizes, which hold what is selected twice.",
        "Build with --shape, which fixes the sizes; select fewer elements, or in parts."),
    GpuReason("gpu.unpooled-size", r"writes .* by indices in",
        "The indices count elements of the size that the attributes give, and the result has "
        "another.", "Export MaxUnpool without output_shape, or with the size of the attributes."),
    GpuReason("gpu.scale-blocks", r"has blocks with scales of their own",
        "Scales of blocks are laid out when the engine is built.", _FOLD),
    GpuReason("gpu.quantized-type", r"makes .*; kernels make int8, uint8, int16, uint16 and",
        "Quantization to this type has no kernel.", "Quantize to INT8."),
    GpuReason("gpu.float8",
        r"; kernels take (constants|1 for an activation|positive ones)|has saturate=0"
        r"|has a zero point of|from SM \d+ on compute",
        "The kernel that rounds an activation to FP8 multiplies by one number, known when the"
        " engine is built, and saturates; SM 89 is the first that has FP8.",
        "Quantize activations per tensor, with a positive scale, the zero point 0 and saturation."),
    GpuReason("gpu.cast", r"makes .*; kernels make ",
        "No kernel writes this type.", "Cast to one of the types that the reason names."),
    GpuReason("gpu.spatial", r"spatial dimensions; kernels take 1 to 3",
        "Kernels convolve and pool over 1 to 3 dimensions.", _PORTABLE),
    GpuReason("gpu.unknown-shape", r"which no formula gives; kernels are compiled for known sizes",
        "Kernels are compiled for sizes, or formulas of them, that are known.",
        "Build with --shape NAME=DIMS, or with --dim NAME=MIN:OPT:MAX."),
    GpuReason("gpu.unknown-type", r"has no known type",
        "Kernels are compiled for types that are known.",
        "Export the model again; ONNX infers the types of its own operators."),
    GpuReason("gpu.elements", r"elements; kernels take 1 to",
        "Kernels count elements with 31 bits, and empty tensors are not computed.",
        "Use a smaller size or batch."),
    GpuReason("gpu.sized-by-numbers", r"size depends on the numbers",
        "The size of the result is known only when it is computed.", _PORTABLE),
    GpuReason("gpu.domain", r"is of the domain",
        "Kernels compute operators of ONNX itself, and those of plugins.",
        _PORTABLE + " A plugin adds an operator (docs/plugins.md)."),
    GpuReason("gpu.element-type", r"of type .*; kernels read",
        "No kernel reads this type.", "Cast to one of the types that the reason names."),
    GpuReason("gpu.left-out-output", r"leaves out output|has a result without a name",
        "Kernels make all outputs before the last one that is read.",
        "Name the output in the model, also if nothing reads it."),
    GpuReason("gpu.attribute", r"has the attribute .* of type",
        "Kernels take numbers and texts; graphs (If, Loop, Scan) run portable.", _PORTABLE),
)
# fmt: on


def gpu_reason(text: str) -> GpuReason | None:
    """Return the row of a reason in words, None where it is none of these."""
    return next((row for row in GPU_REASONS if re.search(row.pattern, text)), None)
