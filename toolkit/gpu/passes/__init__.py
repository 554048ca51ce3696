"""Rewrites of a segment until kernels compute it, and its fusion into groups of one kernel each.

quantized, quantized_general, integer_operators    Q/DQ and integer operators
composites, group_normalization, recurrent, einsum attention, normalizations, RNNs and Einsum
functions                                          operators -> their ONNX definitions
constants, gemm                                    folds around constants and GEMMs
layout, layout_chains, concat_split                views, padding, Concat and its slices
patch_embedding, space_to_depth, upsampling        first convolutions, patches, upsampling
chosen_regions                                     RoiAlign of chosen regions alone
fusion                                             operations -> a root and its epilogue
"""
