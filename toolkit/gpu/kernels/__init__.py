"""Kernels in Triton, one family a file; `toolkit.gpu.ir.launch.KERNELS` is the table of them.

A file begins with the formula that its kernel computes. Names in capitals are known at compile
time. Activations are FP16 or FP32; sums are FP32 in both cases. Importing these modules needs
Triton, so nothing but the compiling processes does so; the same source runs on the CPU in Triton's
interpreter (TRITON_INTERPRET=1).
"""
