"""Kernels in Triton; `toolkit.gpu.ir.launch.KERNELS` is the table of them.

A file begins with the formula that its kernels compute. Names in capitals are known at compile
time. Activations are FP32, FP16 or INT8; accumulators are FP32, or INT32 for INT8. Importing these
modules needs Triton, so only compiler workers do so; the same source runs on the CPU in Triton's
interpreter (TRITON_INTERPRET=1).
"""
