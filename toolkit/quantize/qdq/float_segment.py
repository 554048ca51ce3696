"""A segment as `FloatWriter` left it -> the plain model that its form with Q/DQ stands for."""

import numpy as np
import onnx_ir as ir

from calibration.table import QMAX
from toolkit.graph.extract import ExtractedSegment
from toolkit.quantize.qdq.importer import (
    PlainModel,
    plain_model,
    refuse_integer_operators,
    refuse_unscaled,
)
from toolkit.quantize.qdq.infer_ranges import nodes_in_float
from toolkit.quantize.qdq.writer import STORED
from toolkit.quantize.quantize import INT8_READS


def float_segment(piece: ExtractedSegment) -> PlainModel:
    """Return a segment in floating point, its borders as with Q/DQ, and its quantization.

    Raises ImportModelError: a node computes in integers by itself, or a border is INT8 unscaled.
    """
    assert piece.floating is not None
    model = piece.floating.clone()
    graph = model.graph
    refuse_integer_operators(model)
    refuse_unscaled((*graph.inputs, *graph.outputs))
    float_nodes = nodes_in_float(graph)
    amax: dict[ir.Value, float] = {}
    for node in graph:
        for index, scale in node.meta.get(INT8_READS, {}).items():
            value = node.inputs[index]
            assert value is not None
            amax[value] = max(QMAX * float(np.float32(scale)), amax.get(value, 0.0))
    for names, values in ((piece.inputs, graph.inputs), (piece.outputs, graph.outputs)):
        by_name = {str(value.name): value for value in values}
        values[:] = [by_name[name] for name in names]
    for index, stored in enumerate(piece.model.graph.outputs):
        if stored.dtype == ir.DataType.INT8:
            _restore(graph, index)
    constants = [value for value in graph.initializers.values() if STORED in value.meta]
    for value in constants:  # the last, as an importer adds them
        graph.register_initializer(graph.initializers.pop(str(value.name)))
    integers = {str(value.name): value.meta[STORED] for value in constants}
    return plain_model(model, amax, float_nodes, integers)


def _restore(graph: ir.Graph, index: int) -> None:
    """Let an output that crosses in INT8 be the value that its Identity reads."""
    value = graph.outputs[index]
    crossing, name = value.producer(), str(value.name)
    assert crossing is not None
    real = crossing.inputs[0]
    assert real is not None
    if real.is_graph_output():  # under both names
        crossing.name = f"Identity_{name}"
        graph.remove(crossing)
        graph.append(crossing)
    else:
        graph.outputs[index] = real
        graph.remove(crossing, safe=True)
        real.name = name
