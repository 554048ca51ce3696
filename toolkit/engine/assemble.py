"""Plan + lowered segments -> the manifest and the entries of an engine file."""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from msgspec import UNSET, UnsetType

from device.engine.frame_manifest import FrameKernels
from device.engine.manifest import (
    FORMAT_VERSION,
    Crossing,
    Dim,
    DimRange,
    Manifest,
    MemoryPlan,
    NodePlacement,
    Portable,
    Provenance,
    Segment,
    TensorInfo,
    largest_bytes,
)
from device.engine.preprocessing import Preprocessing
from toolkit.engine.tensorrt import TensorRTSegment, tensorrt_segment
from toolkit.errors import BuildError
from toolkit.gpu.compile_segment import GpuSegment
from toolkit.gpu.ports import PortCompiler
from toolkit.graph.dtypes import IO_DTYPES
from toolkit.graph.extract import ExtractedSegment, serialize_segment
from toolkit.graph.segment import PlannedSegment
from toolkit.memory import Lifetime, plan_memory

FrameCompiler = Callable[
    [Sequence[TensorInfo]], tuple[tuple[FrameKernels, ...], Mapping[str, np.ndarray]]
]
"""Gets the engine's inputs; returns kernels that make one of frames, and their entries."""


def assemble(
    model: ir.Model,
    segments: Sequence[PlannedSegment],
    lowered: Sequence[ExtractedSegment],
    *,
    scales: Mapping[str, float],
    dims: Sequence[DimRange],
    placements: Sequence[NodePlacement],
    profile: str,
    provenance: Provenance,
    cuda: Mapping[str, GpuSegment] | None = None,
    compile_port: PortCompiler | None = None,
    tensorrt: Mapping[str, TensorRTSegment] | None = None,
    take_turns: bool = False,
    preprocessing: Preprocessing | UnsetType = UNSET,
    compile_frames: FrameCompiler | None = None,
) -> tuple[Manifest, dict[str, np.ndarray]]:
    """Return the manifest and the file's entries.

    `scales` are those of INT8 tensors; `cuda`: the segments that have GPU kernels, by name;
    `compile_port`: makes kernels for the ports of DLA segments; `tensorrt`: the GPU segments that
    TensorRT may run, by name; `take_turns`: frames go to all
    DLA cores in turn; `preprocessing`: image -> input, where it is known; `compile_frames`: makes
    the kernels that do it.
    """
    kernels = cuda or {}
    tensors = border_tensors(model, lowered, scales, {dim.name for dim in dims})
    ranges = {dim.name: dim for dim in dims}
    sizes = {t.name: largest_bytes(t, ranges) for t in tensors.values()}
    finalised = dict(tensorrt or {}) | {
        planned.name: tensorrt_segment(piece, tensors, compile_port, take_turns=take_turns)
        for planned, piece in zip(segments, lowered, strict=True)
        if planned.processor.startswith("dla")
    }
    inputs = tuple(str(value.name) for value in model.graph.inputs)
    outputs = tuple(str(value.name) for value in model.graph.outputs)
    frames: tuple[FrameKernels, ...] | UnsetType = UNSET
    frame_entries: Mapping[str, np.ndarray] = {}
    if compile_frames is not None:
        frames, frame_entries = compile_frames([tensors[name] for name in inputs])
    manifest = Manifest(
        format=FORMAT_VERSION,
        profile=profile,
        inputs=inputs,
        outputs=outputs,
        tensors=tuple(tensors.values()),
        dims=tuple(dims),
        segments=tuple(
            _segment(planned, piece, kernels.get(planned.name), finalised.get(planned.name))
            for planned, piece in zip(segments, lowered, strict=True)
        ),
        crossings=_crossings(segments, lowered, sizes),
        memory=_memory(lowered, outputs, sizes),
        plan=tuple(placements),
        provenance=provenance,
        preprocessing=preprocessing,
        frames=frames,
    )
    return manifest, _entries(lowered, kernels, finalised, frame_entries)


def _segment(
    planned: PlannedSegment,
    piece: ExtractedSegment,
    gpu: GpuSegment | None,
    finalised: TensorRTSegment | None,
) -> Segment:
    """Return a segment of the manifest, with its implementations, best first."""
    portable = Portable(model=_model_entry(piece.name), weights=tuple(piece.weights))
    better = (one.implementation for one in (finalised, gpu) if one is not None)
    return Segment(
        name=planned.name,
        processor=planned.processor,
        inputs=piece.inputs,
        outputs=piece.outputs,
        nodes=planned.nodes,
        implementations=(*better, portable),
    )


def border_tensors(
    model: ir.Model,
    lowered: Sequence[ExtractedSegment],
    scales: Mapping[str, float],
    dims: Collection[str],
) -> dict[str, TensorInfo]:
    """Return what the manifest says of the tensors at the borders of segments, by name.

    `dims`: the names of the dynamic dimensions. Raises BuildError: a rank is not known.
    """
    values = {str(value.name): value for value in model.graph.inputs}
    values.update({str(v.name): v for node in model.graph for v in node.outputs})
    names = [str(value.name) for value in model.graph.inputs]
    names += [name for piece in lowered for name in piece.outputs]
    return {
        name: TensorInfo(
            name=name,
            dtype=IO_DTYPES[values[name].dtype or ir.DataType.UNDEFINED],
            shape=_shape(values[name], dims),
            scale=scales.get(name),
        )
        for name in dict.fromkeys(names)
    }


def _shape(value: ir.Value, dims: Collection[str]) -> tuple[Dim, ...]:
    if value.shape is None:
        raise BuildError(
            f"The rank of tensor {value.name!r} is not known before running, so it cannot enter, "
            "leave or cross segments; fix the input shapes with --shape."
        )
    return tuple(
        dim if isinstance(dim, int) else (str(dim.value) if str(dim.value) in dims else None)
        for dim in value.shape
    )


def _crossings(
    segments: Sequence[PlannedSegment],
    lowered: Sequence[ExtractedSegment],
    sizes: Mapping[str, int | None],
) -> tuple[Crossing, ...]:
    processor = {segment.name: segment.processor for segment in segments}
    crossings = []
    for piece in lowered:
        for tensor in piece.outputs:
            targets = tuple(
                reader.name
                for reader in lowered
                if tensor in reader.inputs and processor[reader.name] != processor[piece.name]
            )
            if targets:
                crossings.append(
                    Crossing(tensor=tensor, source=piece.name, targets=targets, bytes=sizes[tensor])
                )
    return tuple(crossings)


def _memory(
    lowered: Sequence[ExtractedSegment],
    outputs: Sequence[str],
    sizes: Mapping[str, int | None],
) -> MemoryPlan:
    end = len(lowered) - 1
    lives = []
    for first, piece in enumerate(lowered):
        for tensor in piece.outputs:
            size = sizes[tensor]
            if not size:  # unknown before running, or empty
                continue
            readers = [index for index, reader in enumerate(lowered) if tensor in reader.inputs]
            last = end if tensor in outputs else max(readers, default=first)
            lives.append(Lifetime(tensor, size, first, last))
    return plan_memory(lives)


def _model_entry(segment: str) -> str:
    return f"portable/{segment}.onnx"


def _entries(
    lowered: Sequence[ExtractedSegment],
    cuda: Mapping[str, GpuSegment],
    finalised: Mapping[str, TensorRTSegment],
    frames: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    entries: dict[str, np.ndarray] = {}
    for piece in lowered:
        for name, array in piece.weights.items():
            entries[name] = array  # a weight that two segments read is stored once
    for piece in lowered:
        _add(
            entries,
            _model_entry(piece.name),
            np.frombuffer(serialize_segment(piece), dtype=np.uint8),
        )
    parts = [gpu.entries for gpu in cuda.values()] + [form.entries for form in finalised.values()]
    parts.append(frames)
    added = {name: array for part in parts for name, array in part.items()}
    for name, array in added.items():  # a cubin that two segments start is stored once
        _add(entries, name, array)
    return entries


def _add(entries: dict[str, np.ndarray], name: str, array: np.ndarray) -> None:
    """Add an entry of ours beside the model's weights, which keep their own names."""
    if name in entries:
        raise BuildError(
            f"A weight of the model is called {name!r}, a name that engine files reserve; "
            "rename it."
        )
    entries[name] = array
