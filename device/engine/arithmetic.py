"""What an engine computes in; engines of BF16, FP8 and INT4 weights are of FP16 otherwise."""

from device.engine.cuda_manifest import Cuda
from device.engine.manifest import Manifest

FLOAT8_STEP = "float8"
"""Among the passes of an engine: some of its products are of FP8."""
BFLOAT16_STEP = "store-bfloat16"
"""Among the passes of an engine: its GPU kernels store BF16 where others store FP16."""
# Of weights of 4 bits; `int4_matrix_vector` is in engines of earlier versions.
INT4_KERNELS = frozenset({"int4_gemm", "int4_matrix_vector"})


def arithmetic_of(manifest: Manifest) -> str:
    """Return "fp8", "bf16", both as "bf16+fp8", else the precision, or that with INT4 weights."""
    steps = {BFLOAT16_STEP: "bf16", FLOAT8_STEP: "fp8"}
    names = [name for step, name in steps.items() if step in manifest.provenance.passes]
    name = "+".join(names) or manifest.provenance.precision
    functions = {
        kernel.function
        for segment in manifest.segments
        for implementation in segment.implementations
        if isinstance(implementation, Cuda)
        for kernel in implementation.kernels
    }
    return name if INT4_KERNELS.isdisjoint(functions) else f"{name} with INT4 weights"


def arithmetic_title(manifest: Manifest) -> str:
    """Return what an engine computes in as a title: its types in capitals."""
    name, *more = arithmetic_of(manifest).split(" ", 1)
    return " ".join((name.upper(), *more))
