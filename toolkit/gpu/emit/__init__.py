"""Operations -> kernel launches: an emitter for each family, and what they share.

table            operator -> emitter
context          the state of a lowering: views, packed weights, ops
agreement        compares lowerings at several points of dynamic dimensions
attention        Attention
concat           Concat in place
conv1x1_nchw     1x1 convolutions with an NCHW output
conv3d           convolutions over one or three dimensions, ConvTranspose
convolution      convolutions over two dimensions
depthwise_int8   depthwise INT8 convolutions by dp4a
elementwise      groups of element-wise operations
epilogue         weights and epilogues of GEMMs and convolutions
gather           Gather, Scatter and variants
gemm             Gemm and MatMul
grid_sample      GridSample
int8_gemm        operands of INT8 GEMMs
layout           views: Reshape, Transpose, Slice, ...
normalization    Softmax and normalizations
pad              Pad
plugins          nodes of plugins
pooling          pooling over one to three dimensions, MaxUnpool, global average
quantization     INT8 <-> ONNX integers
reduction        Reduce operators, ArgMax, ArgMin
resample_tables  indices and weights of resized dimensions
resize           Resize and Upsample
roi_align        RoiAlign
scan             CumSum and CumProd
space_to_depth   first convolutions as space-to-depth
split_k          split-K
strided_rows     tensors as rows of any strides
top_k            TopK
windows          windows of convolutions and poolings
"""
