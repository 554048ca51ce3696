"""Raises and lowers models to opsets that onnx and onnxruntime handle, with onnx's converter.

Where the converter leaves something as newer opsets do not mean it, it is put right here.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.shape_inference
import onnx.version_converter

from toolkit.errors import ImportModelError, first_line
from toolkit.graph import native
from toolkit.importers.weights import replaced_but_weights, without_weights

# Models are raised to TARGET_OPSET, the first whose Q/DQ TensorRT takes on the DLA and for which
# onnx has a reference of Q/DQ. Some operators have no converter: a model of at least MIN_OPSET,
# where Q/DQ are per channel and axes are inputs, is then kept as it is.
OLDEST_OPSET = 1
MIN_OPSET = 13
TARGET_OPSET = 19
# Models above are lowered to it where the operators allow: onnxruntime 1.31 refuses newer ones.
NEWEST_RUN_OPSET = 26
RESIZE_MODES_OPSET = 11  # the first in which Resize says how it samples
BROADCASTING_OPSET = 7  # the first in which shapes are aligned at their ends, as NumPy does
LARGE_ELEMENTS = 1 << 12  # no converter reads a constant of this size
# What the version converter raises on a model that it cannot convert.
_REFUSALS = (
    RuntimeError,
    ValueError,
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    onnx.version_converter.ConvertError,
)

Inline = Callable[[onnx.ModelProto], onnx.ModelProto]
"""Returns a model without the functions that are no plugins'."""


def at_known_opset(
    proto: onnx.ModelProto, path: Path, inline: Inline
) -> tuple[onnx.ModelProto, list[str]]:
    """Convert the model to TARGET_OPSET..NEWEST_RUN_OPSET where possible; return it and notes.

    `inline` is called for a model with functions that is converted. Raises ImportModelError: the
    opset is missing, unknown, or below MIN_OPSET and cannot be raised.
    """
    opset = _opset(proto)
    if opset is None:
        raise ImportModelError(f"{path.name} imports no standard ONNX opset; export it again.")
    newest = onnx.defs.onnx_opset_version()
    if not OLDEST_OPSET <= opset <= newest:
        raise ImportModelError(
            f"{path.name} has opset {opset}; Tandem reads {OLDEST_OPSET} to {newest}: "
            f"export it with an opset in that range."
        )
    target_opset = min(max(opset, TARGET_OPSET), NEWEST_RUN_OPSET)
    if opset == target_opset:
        return proto, []
    # The converter drops functions. Those of plugins come in the place of the model's own later.
    plain = inline(proto) if proto.functions else proto
    try:
        if opset < BROADCASTING_OPSET:
            _lay_slopes(plain, path, opset)
        converted = _converted(plain, target_opset)
    except _REFUSALS as err:
        if opset >= MIN_OPSET:
            return proto, [f"opset {opset} kept: {first_line(err)}"]
        raise ImportModelError(
            f"{path.name} has opset {opset} and cannot be raised to {target_opset} "
            f"({first_line(err)}); export it with opset {MIN_OPSET} or newer."
        ) from err
    return converted, [
        f"opset {opset} {'raised' if opset < target_opset else 'lowered'} to {target_opset}"
    ]


def _opset(proto: onnx.ModelProto) -> int | None:
    return next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), None)


def _converted(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Convert in place, without the large weights: the converter would copy them four times."""
    light = without_weights(proto, more_than=LARGE_ELEMENTS, keep_dims=True)
    # The converter adds constants that are no inputs, which IR version 3 does not know.
    light.ir_version = max(light.ir_version, 4)
    converted = native.convert_version(light, opset)
    if (_opset(proto) or RESIZE_MODES_OPSET) < RESIZE_MODES_OPSET:
        _set_resize_modes(converted.graph)
    return replaced_but_weights(proto, converted, more_than=LARGE_ELEMENTS)


def _lay_slopes(proto: onnx.ModelProto, path: Path, opset: int) -> None:
    """Give PRelu's slopes of C channels the shape (C, 1, ...): the converter leaves them (C,).

    Raises ImportModelError: slopes that are computed or read elsewhere, and inputs of unknown rank.
    """
    slopes = {tensor.name: tensor for tensor in proto.graph.initializer}
    nodes = [
        node
        for node in proto.graph.node
        if node.op_type == "PRelu"
        and not any(name in slopes and math.prod(slopes[name].dims) == 1 for name in node.input[1:])
    ]
    if not nodes:
        return
    ranks = _ranks(proto)
    read_elsewhere = {
        name for node in proto.graph.node if node.op_type != "PRelu" for name in node.input
    }
    slope_ranks: dict[str, int] = {}
    for node in nodes:
        source, name, *more = (*node.input, "", "")
        rank = ranks.get(source)
        is_slope = name in slopes and name not in read_elsewhere and not any(more)
        if rank is None or rank < 2 or not is_slope or slope_ranks.setdefault(name, rank) != rank:
            raise ImportModelError(
                f"{path.name} has opset {opset}, and the slopes of its PRelu {source!r} "
                f"cannot be raised to {TARGET_OPSET}; export it with opset {MIN_OPSET} or newer."
            )
    for name, rank in slope_ranks.items():
        tensor = slopes[name]
        tensor.dims[:] = [math.prod(tensor.dims), *(rank - 2) * [1]]
        for value in proto.graph.input:  # IR version 3 lists constants among the inputs
            if value.name == name:
                value.CopyFrom(
                    onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims)
                )


def _ranks(proto: onnx.ModelProto) -> dict[str, int]:
    graph = native.infer_shapes(proto, strict=False, data_prop=False).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    return {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in values
        if value.type.tensor_type.HasField("shape")
    }


def _set_resize_modes(graph: onnx.GraphProto) -> None:
    """Give Resize nodes the one sampling that Upsample and Resize had before it was an attribute.

    The converter leaves the newer default, "half_pixel". Nearest pixels are those that
    onnxruntime takes for the old operators: the last one before a point, and the next one where
    the picture becomes smaller. Raises ValueError: it becomes smaller and larger, by axis.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    constants |= {
        name: attribute.t
        for node in graph.node
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.name == "value"
        for name in node.output
    }
    for node in graph.node:
        if node.op_type != "Resize":
            continue
        scales = constants.get(node.input[2]) if len(node.input) > 2 else None
        factors = onnx.numpy_helper.to_array(scales) if scales is not None else np.ones(1)
        shrinks = bool((factors < 1).any())
        if shrinks and (factors > 1).any():
            raise ValueError(f"{node.output[0]!r} is resized by {factors.tolist()}, both ways")
        values = {
            "coordinate_transformation_mode": "asymmetric",
            "nearest_mode": "ceil" if shrinks else "floor",
        }
        other_attributes = [
            attribute for attribute in node.attribute if attribute.name not in values
        ]
        del node.attribute[:]
        node.attribute.extend(other_attributes)
        node.attribute.extend(onnx.helper.make_attribute(*item) for item in values.items())
