"""Weights of 4 bits in blocks, as other tools write them -> `BlockTensor` constants.

    MatMulNBits(x, packed, scales, zeros)        (onnxruntime)  ->  MatMul(x, w) [+ bias]
    MatMul(x, DequantizeLinear(q, s, z))         (ONNX)         ->  MatMul(x, w)

Constants in FP4, and those whose scales are E8M0 or are stored in FP8 themselves (NVFP4, MXFP8),
become floating point: there are no kernels of them, and onnxruntime reads none.

onnxruntime packs two elements of a column in a byte, the first in the low bits, block after block,
and its zero points alike (onnxruntime, docs/ContribOperators.md).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from toolkit.errors import ImportModelError
from toolkit.graph.block_weights import SYMMETRIC_ZERO, BlockTensor, BlockWeight, is_storable
from toolkit.graph.rewriter import UniqueNames
from toolkit.quantize.qdq.nodes import constant_of, is_dequantize, quant_params_of

MATMUL_N_BITS = "MatMulNBits"
_BITS = 4
_FIRST_SIGNED = {ir.DataType.INT4: -8, ir.DataType.UINT4: 0}  # what the integer 0 is stored as
_READERS = ("MatMul", "Gemm")


@dataclass(frozen=True, slots=True)
class BlockImport:
    """A model with its weights of 4 bits as `BlockTensor` constants, and what to say of it.

    `floats`: constants in NVFP4 or MXFP8 that became floating point.
    """

    model: ir.Model
    weights: int
    notes: tuple[str, ...]
    floats: int = 0


def import_blocks(model: ir.Model, *, keep_qdq: bool) -> BlockImport:
    """Return a copy of a model whose weights of 4 bits in blocks are constants.

    `keep_qdq`: DequantizeLinear nodes stay as they are. A MatMulNBits of another form stays, too,
    with a note. Raises ImportModelError: the operands of a node do not fit its attributes.
    """
    narrow = any(_is_narrow(node) for node in model.graph)
    if not narrow and not any(_has_blocks(node, keep_qdq=keep_qdq) for node in model.graph):
        return BlockImport(model, 0, ())
    copy = model.clone()
    graph = copy.graph
    names = UniqueNames(str(name) for name in ir.convenience.create_value_mapping(graph))
    floats = sum(_replace_narrow(graph, node) for node in list(graph) if _is_narrow(node))
    count, notes = 0, []
    for node in list(graph):
        if not _has_blocks(node, keep_qdq=keep_qdq):
            continue
        if node.op_type != MATMUL_N_BITS:
            count += _replace_dequantize(graph, node, names)
            continue
        refusal = _replace_product(graph, node, names)
        count += refusal is None
        if refusal is not None:
            notes.append(f"node {node.name!r} ({MATMUL_N_BITS}) {refusal}, and stays as it is")
    return BlockImport(copy, count, tuple(notes), floats)


def _is_narrow(node: ir.Node) -> bool:
    """Whether a node restores a constant in FP4, or by scales that are no plain floats."""
    if not is_dequantize(node) or node.inputs[0] is None or node.inputs[1] is None:
        return False
    stored, scale = node.inputs[0], node.inputs[1]
    if stored.const_value is None:
        return False
    narrow = stored.const_value.dtype == ir.DataType.FLOAT4E2M1
    e8m0 = scale.const_value is not None and scale.const_value.dtype == ir.DataType.FLOAT8E8M0
    return narrow or e8m0 or (is_dequantize(scale.producer()) and _numbers(scale) is not None)


def _replace_narrow(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace a DequantizeLinear by its numbers; return False where its scales are computed.

    Raises ImportModelError: its scales do not fit.
    """
    result, numbers = node.outputs[0], _numbers(node.outputs[0])
    dtype = _result_dtype(node) or ir.DataType.FLOAT
    if numbers is None or result.is_graph_output():
        return False
    name = str(result.name)
    result.name = f"{name}_removed"
    tensor = ir.tensor(numbers.astype(dtype.numpy()), name=name)
    value = ir.Value(name=name, shape=ir.Shape(numbers.shape), const_value=tensor)
    value.type = ir.TensorType(dtype)
    graph.register_initializer(value)
    result.replace_all_uses_with(value)
    scale = node.inputs[1]
    graph.remove(node, safe=True)
    inner = scale.producer() if scale is not None else None
    if inner is not None and not list(inner.outputs[0].uses()):
        graph.remove(inner, safe=True)
    return True


def _numbers(value: ir.Value | None) -> NDArray[np.float32] | None:
    """Return a constant, or what a DequantizeLinear of constants computes; None: it is neither."""
    stored = constant_of(value)
    if stored is not None:
        return stored.astype(np.float32)
    node = None if value is None else value.producer()
    if node is None or not is_dequantize(node):
        return None
    parts = [_numbers(operand) for operand in node.inputs if operand is not None]
    numbers, scales, *zeros = parts
    if numbers is None or scales is None or any(zero is None for zero in zeros):
        return None
    axis, block = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
    spread = [_spread(part, numbers.shape, axis, block, node) for part in (scales, *zeros)]
    shifted = numbers - spread[1] if zeros else numbers
    restored: NDArray[np.float32] = (shifted * spread[0]).astype(np.float32)
    return restored


def _spread(
    part: NDArray[Any] | None, shape: tuple[int, ...], axis: int, block: int, node: ir.Node
) -> NDArray[Any]:
    """Return scales or zero points as far as they broadcast with the numbers."""
    assert part is not None
    if part.size == 1:
        return part.reshape(())
    along = axis % len(shape) if shape else 0
    if block and part.ndim == len(shape):
        within = (*(slice(None),) * along, slice(shape[along]))
        part = np.repeat(part, block, along)[within]
    elif part.ndim == 1 and shape:
        part = part.reshape([-1 if at == along else 1 for at in range(len(shape))])
    fits = part.ndim == len(shape) and all(
        size in (full, 1 if not block else full)
        for size, full in zip(part.shape, shape, strict=True)
    )
    if not fits:
        raise ImportModelError(
            f"Node {node.name!r} ({node.op_type}) has scales that do not fit its constant of the "
            f"sizes {list(shape)} with axis {axis} and block_size {block}; quantize the model "
            "again."
        )
    return part


def _has_blocks(node: ir.Node, *, keep_qdq: bool) -> bool:
    if node.op_type == MATMUL_N_BITS:
        return node.domain == "com.microsoft"
    return not keep_qdq and is_dequantize(node) and node.attributes.get_int("block_size", 0) > 0


def _replace_product(graph: ir.Graph, node: ir.Node, names: UniqueNames) -> str | None:
    """Replace a MatMulNBits; return why it has another form.

    Raises ImportModelError: its weights are packed for a kernel of onnxruntime, or do not fit.
    """
    prepacked = node.attributes.get_int("weight_prepacked", 0)
    if prepacked:
        raise ImportModelError(
            f"Node {node.name!r} ({MATMUL_N_BITS}) has weight_prepacked={prepacked}: its weights "
            "are in the order of a kernel of onnxruntime, not in that of the operator; export the "
            "model without it."
        )
    packed, scales, zeros, order, bias = (*node.inputs[1:], *(None,) * 5)[:5]
    bits = node.attributes.get_int("bits", _BITS)
    operands = [value for value in (packed, scales, zeros) if value is not None]
    computed = next((value for value in operands if constant_of(value) is None), None)
    if bits != _BITS:
        return f"has weights of {bits} bits, not of {_BITS}"
    if order is not None:
        return "has an order of its own of the depth (g_idx)"
    if computed is not None:
        return f"computes its operand {computed.name!r}"
    if packed is None or scales is None or not is_storable(scales.dtype):
        return f"has scales of type {scales.dtype.name if scales and scales.dtype else 'unknown'}"
    if zeros is not None and zeros.dtype != ir.DataType.UINT8:
        return f"has zero points of type {zeros.dtype.name if zeros.dtype else 'unknown'}"
    assert scales.dtype is not None
    weight = _unpacked(node, constant_of(packed), constant_of(scales), constant_of(zeros))
    right = _constant(graph, BlockTensor(weight, scales.dtype, names.take(f"{node.name}_weight")))
    result = node.outputs[0]
    product = ir.Node("", "MatMul", [node.inputs[0], right], name=node.name)
    last = product
    nodes = [product]
    if bias is not None:
        product.outputs[0].name = names.take(f"{result.name}_product")
        last = ir.Node("", "Add", [product.outputs[0], bias], name=names.take(f"{node.name}_bias"))
        nodes.append(last)
    last.outputs[0].type, last.outputs[0].shape = result.type, result.shape
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [result], [last.outputs[0]])
    return None


def _unpacked(
    node: ir.Node,
    packed: NDArray[Any] | None,
    scales: NDArray[Any] | None,
    zeros: NDArray[Any] | None,
) -> BlockWeight:
    """Read the operands of a MatMulNBits; raises ImportModelError: sizes that do not fit."""
    depth, columns, block = (node.attributes.get_int(name, 0) for name in ("K", "N", "block_size"))
    if min(depth, columns) < 1 or block < 16 or block & (block - 1):
        raise ImportModelError(
            f"Node {node.name!r} ({MATMUL_N_BITS}) has K={depth}, N={columns} and "
            f"block_size={block}, but sizes are positive and blocks a power of two from 16 on; "
            "quantize the model again."
        )
    blocks = -(-depth // block)
    zero_bytes = -(-blocks // 2)
    sizes = (
        ("weights", packed, columns * blocks * block // 2),
        ("scales", scales, columns * blocks),
        ("zero points", zeros, columns * zero_bytes),
    )
    for what, array, expected in sizes:
        if array is not None and array.size != expected:
            raise ImportModelError(
                f"Node {node.name!r} ({MATMUL_N_BITS}) has {what} of {array.size} elements, but "
                f"K={depth}, N={columns} and block_size={block} take {expected}; quantize the "
                "model again."
            )
    assert packed is not None
    assert scales is not None
    integers = _nibbles(packed.reshape(columns, -1))[:, :depth]
    offsets = np.full((columns, blocks), SYMMETRIC_ZERO, np.uint8)
    if zeros is not None:
        offsets = _nibbles(zeros.reshape(columns, zero_bytes))[:, :blocks]
    return BlockWeight(
        np.ascontiguousarray(integers.T),
        np.ascontiguousarray(scales.reshape(columns, blocks).T, np.float32),
        np.ascontiguousarray(offsets.T),
        block,
    )


def _nibbles(packed: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the halves of each byte of a row, the low ones first."""
    data = packed.astype(np.uint8, copy=False)
    return np.stack((data & 15, data >> 4), -1).reshape(len(data), -1)


def _replace_dequantize(graph: ir.Graph, node: ir.Node, names: UniqueNames) -> bool:
    """Replace a DequantizeLinear of a weight of 4 bits; return False where it is none."""
    weight, dtype = _dequantized(node), _result_dtype(node)
    axis, result = node.attributes.get_int("axis", 1) % 2, node.outputs[0]
    uses = list(result.uses())
    transposes = [use.node for use in uses if use.node.op_type == "Transpose"]
    if weight is None or dtype is None or result.is_graph_output() or not uses:
        return False
    if transposes:
        (result, *more) = (transpose.outputs[0] for transpose in transposes)
        if more or len(uses) > 1 or result.is_graph_output() or not _turns(transposes[0]):
            return False
        axis = 1 - axis
    if not all(_depth_axis(use.node, use.idx) == axis for use in result.uses()):
        return False
    tensor = BlockTensor(weight, dtype, names.take(f"{node.name}_weight"), transposed=axis == 1)
    result.replace_all_uses_with(_constant(graph, tensor))
    for old in (*transposes, node):
        graph.remove(old, safe=True)
    return True


def _result_dtype(node: ir.Node) -> ir.DataType | None:
    """Return the type of what a DequantizeLinear computes; None where no weight may have it."""
    scale = node.inputs[1]
    stated = node.attributes.get_int("output_dtype", 0)  # since opset 23
    dtype = ir.DataType(stated) if stated else scale.dtype if scale is not None else None
    return dtype if is_storable(dtype) else None


def _turns(transpose: ir.Node) -> bool:
    """Whether a Transpose of a matrix exchanges its axes."""
    permutation = transpose.attributes.get_ints("perm", (1, 0))
    return transpose.domain == "" and tuple(permutation) == (1, 0)


def _dequantized(node: ir.Node) -> BlockWeight | None:
    """Return the weight of a DequantizeLinear; None where it is not a matrix of 4 bits."""
    stored, params = constant_of(node.inputs[0]), quant_params_of(node)
    scale_dtype = node.inputs[1].dtype if node.inputs[1] is not None else None
    if stored is None or params is None or stored.ndim != 2 or not is_storable(scale_dtype):
        return None
    first = _FIRST_SIGNED.get(params.dtype)
    blocks = list(stored.shape)
    blocks[params.axis % 2] = -(-blocks[params.axis % 2] // params.block)
    if (
        first is None
        or list(params.scale.shape) != blocks
        or params.zero.shape != params.scale.shape
    ):
        return None
    arrays: list[NDArray[Any]] = [
        (stored.astype(np.int8) - first).astype(np.uint8),
        params.scale.astype(np.float32),
        (params.zero.astype(np.int8) - first).astype(np.uint8),
    ]
    integers, scales, zeros = (array if params.axis % 2 == 0 else array.T for array in arrays)
    return BlockWeight(integers, scales, zeros, params.block)


def _depth_axis(reader: ir.Node, index: int) -> int | None:
    """Return the axis of a weight that a product sums over; None for other readers."""
    if index != 1 or reader.op_type not in _READERS or reader.domain != "":
        return None
    transposed: int = reader.attributes.get_int("transB", 0)
    return transposed


def _constant(graph: ir.Graph, tensor: BlockTensor) -> ir.Value:
    value = ir.Value(name=tensor.name, shape=ir.Shape(tensor.shape.numpy()), const_value=tensor)
    value.type = ir.TensorType(tensor.dtype)
    graph.register_initializer(value)
    return value
