"""The operators that start a group, and who adds their work. Element-wise operators are rows of
`toolkit.gpu.expressions`.
"""

from collections.abc import Callable, Mapping

from toolkit.gpu import (
    attentions,
    convolutions,
    gathers,
    grids,
    moves,
    pads,
    places,
    poolings,
    products,
    resizes,
    rows,
)
from toolkit.gpu.draft import Draft
from toolkit.gpu.fusion import Group

Emitter = Callable[[Draft, Group], None]

EMITTERS: Mapping[str, Emitter] = {
    "Conv": convolutions.emit_convolution,
    "Gemm": products.emit_gemm,
    "MatMul": products.emit_matmul,
    "MaxPool": poolings.emit_pool,
    "AveragePool": poolings.emit_pool,
    "GlobalAveragePool": poolings.emit_global_average,
    "Resize": resizes.emit_resize,
    "Upsample": resizes.emit_resize,
    "Pad": pads.emit_pad,
    "Gather": gathers.emit_gather,
    "GatherElements": gathers.emit_gather_elements,
    "GatherND": gathers.emit_gather_nd,
    "ScatterElements": gathers.emit_scatter_elements,
    "Scatter": gathers.emit_scatter_elements,
    "ScatterND": gathers.emit_scatter_nd,
    "Attention": attentions.emit_attention,
    "Softmax": rows.emit_softmax,
    "LogSoftmax": rows.emit_softmax,
    "Hardmax": rows.emit_softmax,
    "LayerNormalization": rows.emit_layer_normalization,
    "RMSNormalization": rows.emit_layer_normalization,
    "InstanceNormalization": rows.emit_group_normalization,
    "GroupNormalization": rows.emit_group_normalization,
    "MeanVarianceNormalization": rows.emit_mean_variance,
    "LpNormalization": rows.emit_lp_normalization,
    "Identity": moves.emit_same,
    "Reshape": moves.emit_reshape,
    "Flatten": moves.emit_reshape,
    "Squeeze": moves.emit_reshape,
    "Unsqueeze": moves.emit_reshape,
    "Transpose": moves.emit_transpose,
    "Slice": moves.emit_slice,
    "Split": moves.emit_split,
    "Expand": moves.emit_expand,
    "Tile": moves.emit_tile,
    "DepthToSpace": moves.emit_depth_to_space,
    "SpaceToDepth": moves.emit_space_to_depth,
    "Concat": places.emit_concat,
    "ToIntegers": grids.emit_to_integers,
    "FromIntegers": grids.emit_from_integers,
}
