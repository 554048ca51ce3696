"""What an engine computes in; engines of BF16, FP8 and INT4 weights are of FP16 otherwise."""

from device.engine.cuda_manifest import Cuda
from device.engine.manifest import Manifest

FLOAT8_STEP = "float8"
"""Among the passes of an engine: some of its products are of FP8."""
BFLOAT16_STEP = "store-bfloat16"
"""Among the passes of an engine: its GPU kernels store BF16 where others store FP16."""
INT4_KERNELS = frozenset({"int4_gemm", "int4_matrix_vector"})  # of weights of 4 bits


def arithmetic_of(manifest: Manifest) -> str:
    """Return "fp8", "bf16", the precision of an engine, or that with INT4 weights."""
    steps = {FLOAT8_STEP: "fp8", BFLOAT16_STEP: "bf16"}
    passes = manifest.provenance.passes
    name = next((steps[step] for step in passes if step in steps), manifest.provenance.precision)
    functions = {
        kernel.function
        for segment in manifest.segments
        for implementation in segment.implementations
        if isinstance(implementation, Cuda)
        for kernel in implementation.kernels
    }
    return name if INT4_KERNELS.isdisjoint(functions) else f"{name} with INT4 weights"
