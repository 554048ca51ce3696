"""What an engine computes in, by name; engines of FP8 and of INT4 weights are of FP16 otherwise."""

from device.engine.cuda_manifest import Cuda
from device.engine.manifest import Manifest

FLOAT8_STEP = "float8"
"""Among the passes of an engine: some of its products are of FP8."""
INT4_KERNELS = frozenset({"int4_gemm", "int4_matrix_vector"})  # of weights of 4 bits


def arithmetic_of(manifest: Manifest) -> str:
    """Return "fp8", the precision of an engine, or that with INT4 weights."""
    source = manifest.provenance
    name: str = "fp8" if FLOAT8_STEP in source.passes else source.precision
    functions = {
        kernel.function
        for segment in manifest.segments
        for implementation in segment.implementations
        if isinstance(implementation, Cuda)
        for kernel in implementation.kernels
    }
    return name if INT4_KERNELS.isdisjoint(functions) else f"{name} with INT4 weights"
