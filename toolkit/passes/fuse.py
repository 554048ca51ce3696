"""Fuse batch normalisation into the layer that feeds it.

    BN(W x + b) = g (W x + b - m) / sqrt(v + e) + B = (W s) x + (b - m) s + B,  s = g / sqrt(v + e)

with s per output channel; exact up to rounding. INT8 needs it: weight ranges are taken after it.
"""

import onnx_ir as ir
from onnx_ir.passes import common as ir_passes
from onnxscript.rewriter import RewriteRuleSet
from onnxscript.rewriter.rules.common import (
    fuse_batchnorm_into_conv_rule,
    fuse_batchnorm_into_conv_transpose_rule,
    fuse_batchnorm_into_gemm_rule,
)

BATCH_NORM_RULES = RewriteRuleSet(
    [
        fuse_batchnorm_into_conv_rule,
        fuse_batchnorm_into_conv_transpose_rule,
        fuse_batchnorm_into_gemm_rule,
    ]
)


def fuse_batch_norms(model: ir.Model) -> str:
    """Fold BatchNormalization into Conv, ConvTranspose and Gemm."""
    fused = BATCH_NORM_RULES.apply_to_model(model)
    if fused:
        ir_passes.RemoveUnusedNodesPass()(model)  # the statistics, now in the weights
    return f"fused {fused} batch normalisations" if fused else ""
