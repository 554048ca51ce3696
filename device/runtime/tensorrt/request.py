"""One segment to be finished on the board: what passes to the child process, and back."""

from collections.abc import Mapping
from typing import Literal, Union

import msgspec

from device.engine.manifest import DimRange, Segment, TensorInfo
from device.engine.tensorrt_manifest import Port, TensorRT, TensorRTGpu
from device.runtime.tensorrt.releases import FormName

SRAM_BYTES = 1 << 20
LOCAL_DRAM_BYTES = 1 << 30
GLOBAL_DRAM_BYTES = 1 << 29
WORKSPACE_BYTES = 1 << 28
"""Limits of the memory pools, the defaults of TensorRT's header but for the workspace. They are
always set: TensorRT 8.5 took half the SRAM that its header promises."""

GPU_WORKSPACE_BYTES = 1 << 30
"""Of a segment on the GPU, where tactics compete for it; the default is all of the memory."""


class _Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the messages: frozen, and unknown keys are refused."""


class GpuPort(_Value, frozen=True, kw_only=True):
    """An input or output on the GPU, in C order: its shapes at the smallest, usual, largest sizes.

    With `scale`, an int8 tensor holds real / scale.
    """

    tensor: str
    dtype: str
    least: tuple[int, ...]
    usual: tuple[int, ...]
    largest: tuple[int, ...]
    scale: float | None = None


class OnDla(_Value, frozen=True, kw_only=True, tag="dla", tag_field="kind"):
    """A build for one DLA core."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


class OnGpu(_Value, frozen=True, kw_only=True, tag="gpu", tag_field="kind"):
    """A build for the GPU. `precision`: the lowest of its layers."""

    precision: Literal["fp32", "fp16", "int8"]
    inputs: tuple[GpuPort, ...]
    outputs: tuple[GpuPort, ...]


class Request(_Value, frozen=True, kw_only=True):
    """A segment for one release of TensorRT.

    `model`: its ONNX, with the weights beside it. `plan`, `log`, `timing_cache`: files to write;
    the last is read, too, where it is there. `ranges` is empty but for a release that takes ranges.
    """

    model: str
    plan: str
    log: str
    timing_cache: str
    target: Union[OnDla, OnGpu]  # noqa: UP007  (msgspec reads it on 3.10)
    ranges: dict[str, float]
    half_nodes: tuple[str, ...]


class Answer(_Value, frozen=True, kw_only=True):
    """What came of it. `problem`: why there is no plan.

    `refused_layers`: those that TensorRT says the DLA does not run, before it builds. Each differs
    from a rule of Tandem's table. `fallback`: it was built with GPU fallback, and every layer is on
    the DLA. `passing`: something else than TensorRT is to blame, such as a full disk.
    `plan_sha256`: of the whole plan.
    """

    tensorrt: str
    refused_layers: tuple[str, ...] = ()
    problem: str | None = None
    fallback: bool = False
    passing: bool = False
    plan_sha256: str = ""


class TimesRequest(_Value, frozen=True, kw_only=True):
    """A segment on the GPU whose plan and kernels are timed. `plans`: the folder of the plan."""

    engine: str
    segment: str
    plans: str


class Times(_Value, frozen=True, kw_only=True):
    """Medians on the same inputs, by the GPU's clock. `problem`: why there are none."""

    tensorrt_us: float = 0.0
    cuda_us: float = 0.0
    problem: str = ""


def make_request(
    implementation: TensorRT | TensorRTGpu,
    form: FormName | None,
    target: OnDla | OnGpu,
    *,
    model: str,
    plan: str,
    log: str,
    cache: str,
) -> Request:
    """Return the request for a segment in the form that a release takes."""
    ranged = form == "ranged"
    return Request(
        model=model,
        plan=plan,
        log=log,
        timing_cache=cache,
        target=target,
        ranges=implementation.ranges if ranged else {},
        half_nodes=implementation.half_nodes if ranged else (),
    )


def target_of(
    implementation: TensorRT | TensorRTGpu,
    segment: Segment,
    tensors: Mapping[str, TensorInfo],
    dims: Mapping[str, DimRange],
) -> OnDla | OnGpu:
    """Return what a segment is built for. `tensors`, `dims`: those of the engine, by name."""
    if isinstance(implementation, TensorRT):
        return OnDla(inputs=implementation.inputs, outputs=implementation.outputs)
    inputs, outputs = (
        tuple(_gpu_port(tensors[name], dims) for name in names)
        for names in (segment.inputs, segment.outputs)
    )
    return OnGpu(precision=implementation.precision, inputs=inputs, outputs=outputs)


def _gpu_port(tensor: TensorInfo, dims: Mapping[str, DimRange]) -> GpuPort:
    ranges = [
        (dims[dim].min, dims[dim].opt, dims[dim].max) if isinstance(dim, str) else (dim or 0,) * 3
        for dim in tensor.shape
    ]
    least, usual, largest = (tuple(sizes[index] for sizes in ranges) for index in range(3))
    return GpuPort(
        tensor=tensor.name,
        dtype=tensor.dtype,
        least=least,
        usual=usual,
        largest=largest,
        scale=tensor.scale,
    )
