"""Let a model take pixels as bytes, or FP16, and make of them what it took before.

    x = (pixel * scale - mean) / std

On a GPU this is part of the first kernel; a quarter of the bytes of FP32 go to it, or half of them.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from toolkit.errors import SurgeonError
from toolkit.graph.rewriter import UniqueNames

PixelType = Literal["uint8", "float16"]
_TYPES = {"uint8": ir.DataType.UINT8, "float16": ir.DataType.FLOAT16}
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def take_pixels(
    model: ir.Model,
    name: str | None,
    dtype: PixelType = "uint8",
    *,
    scale: float = 1.0,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
) -> str:
    """Give the input `name` (None: the only one) another type; return its name.

    `mean` and `std` have one number, or one for each channel of [N, C, H, W] or [N, H, W, C].
    Raises SurgeonError: there is no such input, it holds no real numbers, or numbers do not fit.
    """
    graph = model.graph
    old = _input(graph, name)
    assert old.dtype is not None
    if not (min(std) > 0 and scale > 0):
        raise SurgeonError(f"scale is {scale}, std {list(std)}; give numbers above 0")
    if 1 not in (len(mean), len(std)) and len(mean) != len(std):
        raise SurgeonError(
            f"mean has {len(mean)} numbers, std {len(std)}; give one, or one for each channel"
        )
    factor = np.asarray(scale / np.asarray(std, np.float64))
    shift = np.asarray(mean, np.float64) / np.asarray(std, np.float64)
    names = UniqueNames(
        str(value.name)
        for values in (graph.inputs, graph.initializers.values(), *(n.outputs for n in graph))
        for value in values
    )
    pixels = ir.Value(
        name=old.name, type=ir.TensorType(_TYPES[dtype]), shape=old.shape, doc_string=old.doc_string
    )
    nodes = [ir.node("Cast", [pixels], attributes={"to": old.dtype}, name=f"{old.name}/cast")]
    for op, numbers in (("Mul", factor), ("Sub", shift)):
        if np.all(numbers == (1 if op == "Mul" else 0)):
            continue
        values = numbers.reshape(_aligned(old, numbers.size)).astype(old.dtype.numpy())
        constant = ir.Value(
            name=names.take(f"{old.name}/{op.lower()}_by"), const_value=ir.tensor(values)
        )
        graph.register_initializer(constant)
        operands = [nodes[-1].outputs[0], constant]
        nodes.append(ir.node(op, operands, name=f"{old.name}/{op.lower()}"))
    for node in nodes:
        result = node.outputs[0]
        result.name = names.take(f"{node.name}_output")
        result.type, result.shape = old.type, old.shape
    ir.convenience.replace_all_uses_with(old, nodes[-1].outputs[0])
    graph.inputs[graph.inputs.index(old)] = pixels
    first = next(iter(graph), None)
    if first is None:
        raise SurgeonError("the model has no node")
    graph.insert_before(first, nodes)
    return str(pixels.name)


def _input(graph: ir.Graph, name: str | None) -> ir.Value:
    inputs = {str(value.name): value for value in graph.inputs}
    if name is None and len(inputs) != 1:
        raise SurgeonError(f"the model has the inputs {', '.join(inputs)}; name one with --input")
    if name is not None and name not in inputs:
        raise SurgeonError(f"the model has no input {name!r}; it has {', '.join(inputs)}")
    value = next(iter(inputs.values())) if name is None else inputs[name]
    if value.dtype is None or value.dtype not in _FLOATS:
        raise SurgeonError(
            f"input {str(value.name)!r} has the type {value.dtype}; pixels can stand for float32 "
            "and float16"
        )
    return value


def _aligned(value: ir.Value, count: int) -> tuple[int, ...]:
    """Return the shape of one number, or of one for each channel, beside a tensor."""
    sizes = () if value.shape is None else tuple(value.shape)
    if count == 1:
        return ()
    if len(sizes) == 4 and sizes[1] == count:
        return (count, 1, 1)
    if sizes and sizes[-1] == count:
        return (count,)
    raise SurgeonError(
        f"mean and std have {count} numbers, input {str(value.name)!r} has the shape "
        f"{[str(n) for n in sizes]}; give one number, or one for each channel"
    )
