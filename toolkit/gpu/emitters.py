"""The operators that start a group, and who adds their work. Element-wise operators are rows of
`toolkit.gpu.expressions`.
"""

from collections.abc import Callable, Mapping

from toolkit.gpu import convolutions, grids, places, poolings, products, resizes, rows
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
    "Softmax": rows.emit_softmax,
    "Identity": places.emit_same,
    "Reshape": places.emit_reshape,
    "Flatten": places.emit_reshape,
    "Squeeze": places.emit_reshape,
    "Unsqueeze": places.emit_reshape,
    "Transpose": places.emit_transpose,
    "Concat": places.emit_concat,
    "ToIntegers": grids.emit_to_integers,
    "FromIntegers": grids.emit_from_integers,
}
