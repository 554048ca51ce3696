"""Kernels in Triton; `toolkit.gpu.ir.launch.KERNELS` is the table of them.

A file begins with the formula that its kernels compute. Names in capitals are known at compile
time. Activations are FP32, FP16 or INT8; accumulators are FP32, or INT32 for INT8. Importing these
modules needs Triton, so only compiler workers do so; the same source runs on the CPU in Triton's
interpreter (TRITON_INTERPRET=1).

    expression      element-wise expressions, loads and stores of epilogues
    primitives      the table of what a step of an expression computes
    functions       elementary functions of FP32
    int8            INT8 values in registers
    mma_layout      the MMA layout of sm_90 accumulators
    strided_rows    offsets, loads and stores of strided tensors
    attention       fused attention
    depthwise       depthwise convolutions
    depthwise_int8  depthwise INT8 convolutions by dp4a
    elementwise     element-wise expressions, copies, transposes
    gather          gather and scatter
    gemm            GEMM and implicit GEMM of all loaders, split-K reduction
    grid_sample     GridSample
    roi_align       RoiAlign
    max_pooling     max pooling over small windows
    normalization   normalization along rows, LRN
    pad             padding, space-to-depth
    pooling         pooling over one to three dimensions, max unpooling, global average
    reduction       reductions along rows, ArgMax and ArgMin
    resample        resampling by tables
    scan            running sums and products
    select_top      candidates of TopK in long rows
    softmax         softmax, log-softmax, hardmax
    top_k           TopK
"""
