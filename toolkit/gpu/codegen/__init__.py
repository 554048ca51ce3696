"""Kernels -> cubins, in worker processes, without a GPU.

compile         all kernels of a segment, with a cache on disk
triton_version  whether Triton is there and new enough
worker          the process that runs Triton
messages        requests to workers and their answers
kernel_files    the source of a kernel: Tandem's or a plugin's
cuda_source     CUDA C++ of plugins -> cubins
early_start     PTX that waits for the previous kernel (sm_90)
"""
