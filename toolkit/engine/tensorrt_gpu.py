"""A GPU segment -> its `tensorrt_gpu` implementation, for a board's TensorRT beside our kernels.

Both forms are those of a DLA segment but for the borders: inputs and outputs keep the types of the
manifest, in C order. Where a form cannot be, it has the reason.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from device.engine.manifest import Precision, TensorInfo
from device.engine.tensorrt_manifest import Form, TensorRTGpu
from toolkit.engine.tensorrt import (
    PlainSegment,
    TensorRTSegment,
    plain_segment,
    quantized,
    scale_problem,
    store_borders,
    write_form,
)
from toolkit.errors import BuildError
from toolkit.export.half import to_half
from toolkit.graph.extract import ExtractedSegment


def tensorrt_gpu_segment(
    piece: ExtractedSegment,
    tensors: Mapping[str, TensorInfo],
    precision: Precision,
    beyond_half: Collection[str] = frozenset(),
) -> TensorRTSegment | str:
    """Return the `tensorrt_gpu` implementation of a segment, or why it can have none.

    `tensors`: those at its borders. `precision`: of the engine. `beyond_half`: tensors that FP16
    does not hold. Strongly typed TensorRT has FP32 for them; before, any layer may be FP16.
    """
    for name in (*piece.inputs, *piece.outputs):
        if None in tensors[name].shape:
            return f"the size of tensor {name!r} is known only when run"
    try:
        plain = plain_segment(piece)
    except BuildError as error:
        return str(error)
    lowest: Precision = "fp16" if precision == "int8" and not plain.amax else precision
    scales = {name: tensors[name].scale for name in (*piece.inputs, *piece.outputs)}
    entries: dict[str, np.ndarray] = {}
    wide = _wide_in(plain, beyond_half) if lowest != "fp32" else frozenset[str]()
    if wide:
        ranged, ranged_problem = None, f"FP16 does not hold tensor {min(wide)!r}"
    else:
        ranged, ranged_problem = _form(
            lambda: write_form(
                f"{piece.name}.ranged", plain.model, plain.stored, "float32", entries
            )
        )
    if lowest == "fp32":
        typed, typed_problem = ranged, ranged_problem
    elif problem := scale_problem(scales):
        typed, typed_problem = None, problem
    else:
        typed, typed_problem = _form(
            lambda: write_form(
                f"{piece.name}.typed", _typed(plain, scales, wide), plain.stored, "float16", entries
            )
        )
    if ranged is None and typed is None:
        return ranged_problem
    implementation = TensorRTGpu(
        precision=lowest,
        ranged=ranged,
        typed=typed,
        ranges={**plain.amax, **plain.results},
        half_nodes=plain.half if plain.amax else (),
        ranged_problem=ranged_problem,
        typed_problem=typed_problem,
    )
    return TensorRTSegment(implementation, entries)


def _form(write: Callable[[], Form]) -> tuple[Form | None, str]:
    try:
        return write(), ""
    except BuildError as error:
        return None, str(error)


def _wide_in(plain: PlainSegment, beyond_half: Collection[str]) -> frozenset[str]:
    """Return the tensors of a segment that FP16 does not hold."""
    graph = plain.model.graph
    names = {str(value.name) for node in graph for value in (*node.inputs, *node.outputs) if value}
    return frozenset(names.intersection(beyond_half))


def _typed(
    plain: PlainSegment, scales: Mapping[str, float | None], wide: frozenset[str]
) -> ir.Model:
    """Return the segment as strongly typed TensorRT reads it.

    What FP16 does not hold is not INT8 either, as a dequantized tensor has the type of its scale.
    """
    if not plain.amax:
        return to_half(plain.model, half_io=False, wide=wide)
    amax = {name: limit for name, limit in plain.amax.items() if name not in wide}
    model = quantized(replace(plain, amax=amax), "tensorrt-gpu")
    store_borders(model.graph, scales, half=False)
    return to_half(model, half_io=False, wide=wide)
