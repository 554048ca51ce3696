"""Fuses scaling operators into the weights of the layer that they scale.

    alpha A B + beta C = A (alpha B) + (beta C)

    BN(W x + b) = g (W x + b - m) / sqrt(v + e) + B = (W s) x + (b - m) s + B,  s = g / sqrt(v + e)

with s per output channel; exact up to rounding. INT8 needs it: weight ranges are taken after it.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as ir_passes
from onnxscript.rewriter import RewriteRuleSet
from onnxscript.rewriter.rules.common import (
    fuse_batchnorm_into_conv_rule,
    fuse_batchnorm_into_conv_transpose_rule,
    fuse_batchnorm_into_gemm_rule,
)

from toolkit.graph.constant_weights import set_constant

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


def fuse_gemm_factors(model: ir.Model) -> str:
    """Put the factors alpha and beta of a Gemm into its constant operands.

    INT8 needs it: not every onnxruntime scales the bias of an integer Gemm rightly.
    """
    fused = 0
    for node in model.graph:
        if node.op_type != "Gemm" or node.domain != "":
            continue
        for name, index in (("alpha", 1), ("beta", 2)):
            fused += _fuse_factor(model.graph, node, name, index)
    return f"fused {fused} factors of Gemm" if fused else ""


def _fuse_factor(graph: ir.Graph, node: ir.Node, name: str, index: int) -> bool:
    factor = node.attributes.get_float(name, 1.0)
    operand = node.inputs[index] if index < len(node.inputs) else None
    constant = operand.const_value if operand is not None else None
    if factor == 1.0 or constant is None:
        return False
    array = constant.numpy()
    scaled = (array.astype(np.float64) * factor).astype(array.dtype)
    set_constant(graph, node, index, scaled, f"{node.name}_{name}")
    node.attributes.pop(name)
    return True
