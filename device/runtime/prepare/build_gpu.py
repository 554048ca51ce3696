"""A segment -> a plan for the GPU, through TensorRT's Python API."""

from typing import Any

from device.runtime.prepare.builder_calls import (
    RefusedError,
    Tools,
    parse,
    ports_of,
    set_ranges,
    use_timing_cache,
)
from device.runtime.tensorrt import request as limits
from device.runtime.tensorrt.releases import GpuRelease, find_gpu_release
from device.runtime.tensorrt.request import GpuPort, OnGpu, Request

_TYPES = {
    "bool": "BOOL",
    "float16": "HALF",
    "float32": "FLOAT",
    "int32": "INT32",
    "int64": "INT64",
    "int8": "INT8",
    "uint8": "UINT8",
}
"""The manifest's types in TensorRT's names; not every release has all of them."""


def build_for_gpu(tools: Tools, version: str, request: Request) -> tuple[Any, Any]:
    """Return the plan (None: there is none) and the config. Raises RefusedError."""
    target = request.target
    assert isinstance(target, OnGpu)
    release = find_gpu_release(version)
    if release.form is None:
        raise RefusedError(f"TensorRT {version} takes no segment of an engine: {release.why}")
    network = parse(tools, release.network_flags, request.model)
    config = _configure(tools, release, request, target)
    _set_ports(tools.trt, network, target, typed=release.form == "typed")
    if release.form == "ranged":
        set_ranges(tools.trt, network, request)
    _set_sizes(tools.builder, config, target)
    return tools.builder.build_serialized_network(network, config), config


def _configure(tools: Tools, release: GpuRelease, request: Request, target: OnGpu) -> Any:  # noqa: ANN401
    trt = tools.trt
    config = tools.builder.create_builder_config()
    tools.alive.append(config)
    for name in release.builder_flags.get(target.precision, ()):
        config.set_flag(getattr(trt.BuilderFlag, name))
    config.clear_flag(trt.BuilderFlag.TF32)
    config.default_device_type = trt.DeviceType.GPU
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, limits.GPU_WORKSPACE_BYTES)
    use_timing_cache(config, request)
    return config


def _set_ports(trt: Any, network: Any, target: OnGpu, *, typed: bool) -> None:  # noqa: ANN401
    """Let inputs and outputs be in C order, in the manifest's types.

    Raises RefusedError: this TensorRT has another type there.
    """
    ports = (*target.inputs, *target.outputs)
    tensors = ports_of(network, tuple(port.tensor for port in ports))
    for port in ports:
        tensor, dtype = tensors[port.tensor], _dtype(trt, port)
        if port.scale is not None and not typed:  # the ONNX has it in floating point
            tensor.dtype = dtype
        if tensor.dtype != dtype:
            raise RefusedError(
                f"tensor {port.tensor!r} is {port.dtype} in the engine, and {tensor.dtype.name} in "
                "this TensorRT; the segment's kernels run in its place"
            )
        tensor.allowed_formats = 1 << int(trt.TensorFormat.LINEAR)


def _set_sizes(builder: Any, config: Any, target: OnGpu) -> None:  # noqa: ANN401
    """Give dynamic inputs their smallest, usual and largest shapes."""
    dynamic = [port for port in target.inputs if port.least != port.largest]
    if not dynamic:
        return
    profile = builder.create_optimization_profile()
    for port in dynamic:
        profile.set_shape(port.tensor, port.least, port.usual, port.largest)
    if config.add_optimization_profile(profile) < 0:
        raise RefusedError(f"TensorRT does not take the sizes of input {dynamic[0].tensor!r}")


def _dtype(trt: Any, port: GpuPort) -> Any:  # noqa: ANN401
    dtype = getattr(trt.DataType, _TYPES.get(port.dtype, ""), None)
    if dtype is None:
        raise RefusedError(
            f"tensor {port.tensor!r} is {port.dtype}, a type that TensorRT {trt.__version__} does "
            "not have; the segment's kernels run in its place"
        )
    return dtype
