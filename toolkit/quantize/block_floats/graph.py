"""Writes operands in MXFP8 or NVFP4 into a graph.

For TensorRT a weight is stored with DequantizeLinear nodes: of NVFP4 one for the scales of blocks
and one for the numbers, as TensorRT Model Optimizer writes them; activations have TensorRT's
operators.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.version_converter
import onnx_ir as ir

from toolkit.errors import BuildError, first_line
from toolkit.graph import native
from toolkit.quantize.block_floats.formats import (
    MXFP8,
    BlockFloats,
    BlockFormat,
    block_products,
    depth_axis,
    round_weight,
    tensor_scale,
    why_float,
)
from toolkit.quantize.block_floats.functions import (
    QUANTIZERS,
    RESTORER,
    SIMULATED,
    TENSORRT,
    quantizer,
    restorer,
    round_trip,
)
from toolkit.quantize.float8.graph import check_opset
from toolkit.quantize.qdq.nodes import DEQUANTIZE
from toolkit.quantize.qdq.writer import QdqWriter
from toolkit.quantize.weights import constant_of

EXPORT_OPSET = 23  # the first with FP4
_IR_VERSION = 11  # that of the opset
_FLOAT = ir.DataType.FLOAT


@dataclass(frozen=True, slots=True)
class BlockModel:
    """A model with `products` of `candidates` in a format; `floats`: the others, and why.

    `exact`: what holds numbers of the format, in float32. `weight_bytes`: of weights, with scales.
    """

    model: ir.Model
    products: tuple[str, ...]
    candidates: int
    floats: Mapping[str, str]
    exact: frozenset[str]
    weight_bytes: int


def simulated(model: ir.Model, form: BlockFormat, amax: Mapping[str, float]) -> BlockModel:
    """Return a copy that computes in float32 what products in a format compute.

    `amax`: ranges of activations. Raises BuildError: no product can be, or the opset has no FP8.
    """
    check_opset(model)
    opset = model.graph.opset_imports[""]
    return _with_format(model, form, amax, (), _Simulation(form, opset))


def exported(
    model: ir.Model, form: BlockFormat, amax: Mapping[str, float], keep_float: Collection[str] = ()
) -> ir.Model:
    """Return a copy in opset 23 or newer for TensorRT, but for the nodes `keep_float`.

    Raises BuildError: no product can be in the format, or the opset cannot be raised.
    """
    raised = _raised(model, form)
    writer = _Export(form, raised.graph.opset_imports[""])
    return _with_format(raised, form, amax, keep_float, writer).model


def _raised(model: ir.Model, form: BlockFormat) -> ir.Model:
    opset = model.graph.opset_imports.get("", 0)
    if opset >= EXPORT_OPSET:
        raised = model.clone()
    else:
        try:
            proto = native.convert_version(ir.to_proto(model), EXPORT_OPSET)
        except (
            RuntimeError, ValueError, onnx.version_converter.ConvertError
        ) as err:  # fmt: skip
            raise BuildError(
                f"The model has opset {opset}, but {form.name} needs {EXPORT_OPSET} and it cannot "
                f"be raised ({first_line(err)}); export it again with a newer opset."
            ) from err
        raised = ir.from_proto(proto)
    raised.ir_version = max(raised.ir_version or 0, _IR_VERSION)
    return raised


class _Simulation:
    """Rounds an activation in one node, and a weight in place."""

    def __init__(self, form: BlockFormat, opset: int) -> None:
        self.functions = (round_trip(form, opset),)
        self.domain = SIMULATED
        self._form = form

    def activation(self, writer: QdqWriter, x: ir.Value, scale: ir.Value | None) -> ir.Value:
        inputs = (x,) if scale is None else (x, scale)
        outputs = {f"{x.name}_rounded": _FLOAT}
        return writer.call((SIMULATED, self._form.name), inputs, outputs, {})[0]

    def weight(self, writer: QdqWriter, name: str, floats: BlockFloats) -> ir.Value:
        return writer.constant(f"{name}_rounded", floats.restored())


class _Export:
    """Writes the operators that TensorRT reads."""

    def __init__(self, form: BlockFormat, opset: int) -> None:
        more = (restorer(opset),) if form == MXFP8 else ()
        self.functions = (quantizer(form, opset), *more)
        self.domain = TENSORRT
        self._form = form

    def activation(self, writer: QdqWriter, x: ir.Value, scale: ir.Value | None) -> ir.Value:
        inputs = (x,) if scale is None else (x, scale)
        float8, float4 = ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT4E2M1
        if scale is None:
            types, typed = (float8, ir.DataType.UINT8), {"output_dtype": float8}
        else:
            types, typed = (float4, float8), {"scale_type": float8}
        base = f"{x.name}_{self._form.name}"
        outputs = dict(zip((base, f"{base}_scales"), types, strict=True))
        attributes = {"axis": -1, "block_size": self._form.block, **typed}
        quantize = (TENSORRT, QUANTIZERS[self._form.name])
        stored, scales = writer.call(quantize, inputs, outputs, attributes)
        return self._restored(writer, str(x.name), stored, (scales, scale), -1)

    def weight(self, writer: QdqWriter, name: str, floats: BlockFloats) -> ir.Value:
        stored = writer.constant(f"{name}_{self._form.name}", floats.stored)
        scales = writer.constant(f"{name}_{self._form.name}_scales", floats.scales)
        whole = floats.tensor_scale
        scale = None if whole is None else writer.constant(f"{name}_tensor_scale", whole)
        return self._restored(writer, name, stored, (scales, scale), floats.axis)

    def _restored(
        self,
        writer: QdqWriter,
        name: str,
        stored: ir.Value,
        scales: tuple[ir.Value, ir.Value | None],
        axis: int,
    ) -> ir.Value:
        blocks, whole = scales
        result = {f"{name}_restored": _FLOAT}
        attributes = {"axis": axis, "block_size": self._form.block}
        if whole is None:
            attributes["output_dtype"] = _FLOAT
            inputs = (stored, blocks)
            return writer.call((TENSORRT, RESTORER), inputs, result, attributes)[0]
        steps = writer.dequantize(blocks, (whole,), f"{name}_steps")
        return writer.call(("", DEQUANTIZE), (stored, steps), result, attributes)[0]


def _with_format(
    model: ir.Model,
    form: BlockFormat,
    amax: Mapping[str, float],
    keep_float: Collection[str],
    writing: _Simulation | _Export,
) -> BlockModel:
    copy = model.clone()
    nodes = block_products(copy)
    floats = {str(node.name): why for node in nodes if (why := why_float(node, form, amax))}
    floats |= {name: "as asked" for node in nodes if (name := str(node.name)) in keep_float}
    chosen = [node for node in nodes if str(node.name) not in floats]
    if not chosen:
        first = next((f": {name}: {why}" for name, why in floats.items()), "")
        raise BuildError(
            f"{form.name} needs a MatMul or Gemm with a constant float32 matrix whose depth is a "
            f"multiple of {form.block}, and the model has none{first}; build with --precision fp16."
        )
    writer, exact, weight_bytes = QdqWriter(copy.graph), set[str](), 0
    activations: dict[ir.Value, ir.Value] = {}
    for node in chosen:
        x, old, weight = node.inputs[0], node.inputs[1], constant_of(node, 1)
        assert x is not None
        assert old is not None
        assert weight is not None
        if x not in activations:
            scale = None
            if form.ranged:
                scale = writer.constant(f"{x.name}_scale", tensor_scale(amax[str(x.name)]))
                exact.add(str(scale.name))
            activations[x] = writing.activation(writer, x, scale)
        rounded = round_weight(np.asarray(weight, np.float32), depth_axis(node), form)
        weight_bytes += round(weight.size * form.bits) // 8
        operands = (activations[x], writing.weight(writer, str(old.name), rounded))
        for index, operand in enumerate(operands):
            exact.add(str(operand.name))
            node.replace_input_with(index, operand)
        if old.is_initializer() and not list(old.uses()):
            copy.graph.initializers.pop(str(old.name))
    copy.graph.opset_imports[writing.domain] = 1
    for function in writing.functions:
        copy.functions[function.identifier()] = function
    copy.graph.sort()
    names = tuple(str(node.name) for node in chosen)
    return BlockModel(copy, names, len(nodes), floats, frozenset(exact), weight_bytes)
