"""Networks made layer by layer, with the names of TensorRT's network definition API.

network      `Network`; its layers are in `base`, `weighted`, `mathematical` and `shaping`
layers       `Tensor` and `Layer`: what `add_...` takes and returns
operations   the operations of layers that have one, and their ONNX operators
windows      strides, padding and weights of convolutions and poolings
draft        the graph under construction: shapes are inferred as layers come
"""

from toolkit.network_definition.layers import Layer, Tensor
from toolkit.network_definition.network import Network
from toolkit.network_definition.operations import (
    ActivationType,
    ElementWiseOperation,
    GatherMode,
    InterpolationMode,
    MatrixOperation,
    PoolingType,
    ReduceOperation,
    TopKOperation,
    UnaryOperation,
)
from toolkit.network_definition.windows import PaddingMode

__all__ = [
    "ActivationType",
    "ElementWiseOperation",
    "GatherMode",
    "InterpolationMode",
    "Layer",
    "MatrixOperation",
    "Network",
    "PaddingMode",
    "PoolingType",
    "ReduceOperation",
    "Tensor",
    "TopKOperation",
    "UnaryOperation",
]
