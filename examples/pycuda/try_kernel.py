"""Try the CUDA C++ of a plugin on a GPU, before a network has it.

    python try_kernel.py

pycuda compiles examples/stereo/soft_disparity.cu with nvcc and runs it on random costs; NumPy
computes the same. Once they agree, plugin.py beside the kernel gives it to networks.
"""

from pathlib import Path

import numpy as np
import pycuda.autoprimaryctx  # noqa: F401
from pycuda import gpuarray
from pycuda.compiler import SourceModule

SOURCE = Path(__file__).parents[1] / "stereo" / "soft_disparity.cu"
DISPARITIES, HEIGHT, WIDTH = 24, 96, 160
THREADS = 128  # of a block, as plugin.py launches it


def main() -> None:
    # Constants of a plugin are macros; the source says extern "C" itself.
    module = SourceModule(
        SOURCE.read_text(), options=[f"-DDISPARITIES={DISPARITIES}"], no_extern_c=True
    )
    kernel = module.get_function("soft_disparity")
    random = np.random.default_rng()
    cost = random.normal(size=(1, DISPARITIES, HEIGHT, WIDTH)).astype(np.float32)
    disparity = gpuarray.empty((1, HEIGHT, WIDTH), np.float32)
    pixels = HEIGHT * WIDTH
    kernel(
        gpuarray.to_gpu(cost), disparity, np.int32(1), np.int32(pixels),
        grid=(-(-pixels // THREADS), 1), block=(THREADS, 1, 1),
    )  # fmt: skip

    shares = np.exp(cost - cost.max(axis=1, keepdims=True))
    expected = np.tensordot(
        shares / shares.sum(axis=1, keepdims=True), np.arange(DISPARITIES), (1, 0)
    )
    error = np.abs(disparity.get() - expected).max()
    print(f"largest error {error:.2e} of disparities up to {expected.max():.1f}")
    assert error < 1e-3


if __name__ == "__main__":
    main()
