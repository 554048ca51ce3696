"""Writes weights of 4 bits, and the factors of their channels, into a graph.

1 / s goes into the normalization that makes x where only products with these factors read it, else
into a product of its own, which kernels compute with what makes x.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from toolkit.graph.block_weights import BlockTensor, BlockWeight
from toolkit.graph.constant_weights import set_constant
from toolkit.graph.rewriter import UniqueNames
from toolkit.quantize.int4.products import Product

_NORMALIZATIONS = ("LayerNormalization", "RMSNormalization")


def write_weights(model: ir.Model, products: Sequence[Product]) -> ir.Model:
    """Return a copy of the model in which products have their weights of 4 bits."""
    copy = model.clone()
    nodes = list(copy.graph)
    names = UniqueNames(str(name) for name in ir.convenience.create_value_mapping(copy.graph))
    by_operand: dict[str, list[Product]] = {}
    for product in sorted(products, key=lambda product: product.place):
        by_operand.setdefault(product.operand, []).append(product)
    for group in by_operand.values():
        factors, readers = group[0].factors, [nodes[product.place] for product in group]
        value = readers[0].inputs[0]
        assert value is not None
        if factors is not None:
            _divide(copy.graph, value, readers, factors, names)
        for product, node in zip(group, readers, strict=True):
            _set_weight(copy.graph, node, product.weight, names)
    return copy


def _divide(
    graph: ir.Graph,
    value: ir.Value,
    products: Sequence[ir.Node],
    factors: NDArray[np.float32],
    names: UniqueNames,
) -> None:
    """Let products read `value` divided by the factors of its channels."""
    inverse = (1 / factors).astype(np.float32)
    maker = value.producer()
    uses = list(value.uses())
    constants = [] if maker is None else [v.const_value if v else None for v in maker.inputs[1:]]
    if (
        maker is not None
        and maker.op_type in _NORMALIZATIONS
        and {use.node for use in uses} == set(products)
        and all(use.idx == 0 for use in uses)
        and not value.is_graph_output()
        and all(c is not None and c.shape.numpy() == inverse.shape for c in constants)
    ):
        for index, constant in enumerate(constants, 1):
            assert constant is not None
            set_constant(graph, maker, index, constant.numpy() * inverse, f"{maker.name}_int4")
        return
    name = names.take(f"{value.name}_by_channel")
    constant_value = ir.Value(name=name, const_value=ir.tensor(inverse, name=name))
    constant_value.shape = ir.Shape(inverse.shape)
    constant_value.type = ir.TensorType(ir.DataType.FLOAT)
    graph.register_initializer(constant_value)
    divided = ir.Node("", "Mul", [value, constant_value], name=names.take(f"{value.name}_divide"))
    result = divided.outputs[0]
    result.name = names.take(f"{value.name}_divided")
    result.type, result.shape = value.type, value.shape
    graph.insert_before(products[0], divided)
    for product in products:
        product.replace_input_with(0, result)


def _set_weight(graph: ir.Graph, product: ir.Node, weight: BlockWeight, names: UniqueNames) -> None:
    transposed = bool(product.attributes.get_int("transB", 0))
    old = product.inputs[1]
    assert old is not None
    name = names.take(f"{product.name}_int4")
    tensor = BlockTensor(weight, ir.DataType.FLOAT, name, transposed=transposed)
    value = ir.Value(name=name, shape=ir.Shape(tensor.shape.numpy()), const_value=tensor)
    value.type = ir.TensorType(tensor.dtype)
    graph.register_initializer(value)
    product.replace_input_with(1, value)
    if old.is_initializer() and not list(old.uses()):
        graph.initializers.pop(str(old.name))
