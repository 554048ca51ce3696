"""The manifest of an engine file: what the engine holds and how its parts fit together.

The manifest is JSON, kept under one key in the metadata of a safetensors file
(`device.engine.file`). Every name in it refers to something else in it: segments and crossings to
`tensors`, implementations to entries of the file. `device.engine.manifest_check.check_manifest`
proves all of that before anything is used.
"""

from collections.abc import Mapping
from typing import Literal, Union

import msgspec
from msgspec import UNSET, UnsetType

from device.engine.cuda_manifest import Cuda
from device.engine.frame_manifest import FrameKernels
from device.engine.preprocessing import Preprocessing
from device.engine.tensorrt_manifest import TensorRT, TensorRTGpu

FORMAT_VERSION = 1

# Every place in the arena starts at a multiple of this: wide loads of any processor are aligned.
ARENA_ALIGNMENT = 64

# What a tensor may hold, in numpy's names, with the bytes of one element.
ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
}

Processor = Literal["cpu", "gpu", "dla0", "dla1"]
Precision = Literal["fp32", "fp16", "int8"]
Dim = Union[int, str, None]  # noqa: UP007  (msgspec reads it at run time on Python 3.10)


class _Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every part of the manifest: frozen, and unknown keys are refused."""


class TensorInfo(_Value, frozen=True, kw_only=True):
    """A tensor that enters, leaves or passes between segments.

    A dimension is a number, the name of a dynamic dimension (see `DimRange`), or None where the
    size is known only after running. `scale` is set for int8 tensors: real = scale * stored.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    scale: float | None = None


class DimRange(_Value, frozen=True, kw_only=True):
    """The sizes that a dynamic dimension may take: min <= opt <= max, all multiples of `step`."""

    name: str
    min: int
    opt: int
    max: int
    step: int = 1


class Portable(_Value, frozen=True, kw_only=True, tag="portable", tag_field="kind"):
    """A segment as ONNX for onnxruntime on any CPU.

    `model` names the file entry (uint8) with the ONNX bytes; `weights` name the entries that are
    handed to the runtime as the model's external initializers, under the same names. Constants
    that shapes depend on stay inside the model, as shape inference reads no external ones.
    """

    model: str
    weights: tuple[str, ...] = ()


Implementation = Union[Portable, Cuda, TensorRT, TensorRTGpu]  # noqa: UP007  (as above)


class Segment(_Value, frozen=True, kw_only=True):
    """A maximal piece of the graph on one processor; segments are stored in running order."""

    name: str
    processor: Processor
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[str, ...]
    implementations: tuple[Implementation, ...]


class Crossing(_Value, frozen=True, kw_only=True):
    """A tensor that passes from the segment that makes it to segments on another processor.

    `bytes` is its size at the largest shape, None where that is known only after running.
    """

    tensor: str
    source: str
    targets: tuple[str, ...]
    bytes: int | None


class Buffer(_Value, frozen=True, kw_only=True):
    """The place of one tensor inside the arena, in bytes at the largest shape."""

    tensor: str
    offset: int
    bytes: int


class MemoryPlan(_Value, frozen=True, kw_only=True):
    """One allocation per session; tensors whose lives do not overlap share bytes."""

    arena_bytes: int
    buffers: tuple[Buffer, ...]


class NodePlacement(_Value, frozen=True, kw_only=True):
    """Where one node runs, the rule that decided it (or "") and the reason in words.

    `predicted_us` is the predicted time of the node on its processor, in microseconds.
    """

    node: str
    op: str
    processor: Processor
    segment: str
    rule: str
    reason: str
    predicted_us: float


DUMMY = "dummy"
IMPORTED = "imported"  # ranges of another tool; how they were measured is not known
UNCALIBRATED = (
    "UNCALIBRATED: the INT8 ranges of this engine were never measured; its results are wrong, and "
    "it is good for timing only"
)


class CalibrationInfo(_Value, frozen=True, kw_only=True):
    """Where the INT8 scales came from; method "dummy": from nowhere (see `UNCALIBRATED`).

    `table_sha256`: of the calibration table as a file; unset where there is none.
    """

    method: str
    samples: int
    data_sha256: str
    table_sha256: str | UnsetType = UNSET


class Measurement(_Value, frozen=True, kw_only=True):
    """A figure that was measured of the engine, and how: on what, against what."""

    name: str
    value: float
    how: str


class Provenance(_Value, frozen=True, kw_only=True):
    """What the engine was made from and with; no times and no paths, so builds can be compared.

    `licence`: what the model's metadata say. `metadata`: those that name its classes, as they are
    written there. `measured`: what the build has measured of the engine. Unset where there is none,
    and then not in the file.
    """

    model: str
    model_sha256: str
    precision: Precision
    passes: tuple[str, ...]
    versions: dict[str, str]
    calibration: CalibrationInfo | None = None
    licence: str | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET
    measured: tuple[Measurement, ...] | UnsetType = UNSET


class Manifest(_Value, frozen=True, kw_only=True):
    """Everything about an engine but its bytes.

    `preprocessing`: how the images of the calibration became inputs, which the pipeline must do,
    too; unset where that is not known, and then not in the file. `frames`: kernels that do it on
    the GPU, where the build was asked for them.
    """

    format: int
    profile: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: tuple[TensorInfo, ...]
    dims: tuple[DimRange, ...]
    segments: tuple[Segment, ...]
    crossings: tuple[Crossing, ...]
    memory: MemoryPlan
    plan: tuple[NodePlacement, ...]
    provenance: Provenance
    preprocessing: Preprocessing | UnsetType = UNSET
    frames: tuple[FrameKernels, ...] | UnsetType = UNSET

    @property
    def uncalibrated(self) -> bool:
        """Whether the INT8 ranges were made up, for timing."""
        calibration = self.provenance.calibration
        return calibration is not None and calibration.method == DUMMY


def largest_elements(shape: tuple[Dim, ...], ranges: Mapping[str, DimRange]) -> int | None:
    """Return the number of elements at the largest shape, None where a dimension is unknown.

    Raises KeyError for a dynamic dimension that `ranges` lacks.
    """
    elements = 1
    for dim in shape:
        if dim is None:
            return None
        elements *= ranges[dim].max if isinstance(dim, str) else dim
    return elements


def largest_bytes(tensor: TensorInfo, ranges: Mapping[str, DimRange]) -> int | None:
    """Return the bytes of a tensor at its largest shape, None where a dimension is unknown.

    Raises KeyError for a dtype or a dynamic dimension that is not declared.
    """
    elements = largest_elements(tensor.shape, ranges)
    return None if elements is None else elements * ITEM_BYTES[tensor.dtype]
