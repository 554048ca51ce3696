"""A segment -> a plan for one DLA core, through TensorRT's Python API."""

from typing import Any

from device.engine.tensorrt_manifest import Port
from device.runtime.tensorrt import request as limits
from device.runtime.tensorrt.network import (
    RefusedError,
    parse,
    ports_of,
    set_ranges,
    use_timing_cache,
)
from device.runtime.tensorrt.releases import Release, find_release
from device.runtime.tensorrt.request import OnDla, Request


def build_for_dla(
    trt: Any,  # noqa: ANN401
    version: str,
    request: Request,
    builder: Any,  # noqa: ANN401
    logger: Any,  # noqa: ANN401
) -> tuple[Any, Any, tuple[str, ...]]:
    """Return the plan (None: there is none), the config, and the layers kept off the DLA.

    Raises RefusedError.
    """
    assert isinstance(request.target, OnDla)
    release = find_release(version)
    if release.form is None:
        raise RefusedError(f"TensorRT {version} has no DLA here: {release.why}")
    if builder.num_DLA_cores < 1:
        raise RefusedError("TensorRT finds no DLA core on this board")
    network = parse(trt, release.network_flags, request, builder, logger)
    config = _configure(trt, release, request, builder)
    _set_ports(trt, network, request.target, typed=release.form == "typed")
    if release.form == "ranged":
        set_ranges(trt, network, request)
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    refused = tuple(str(layer.name) for layer in layers if not config.can_run_on_DLA(layer))
    return builder.build_serialized_network(network, config), config, refused


def why_not_on_dla(refused: tuple[str, ...]) -> str:
    """Return why there is no plan, of the layers that TensorRT keeps off the DLA."""
    return (
        f"TensorRT does not run {len(refused)} of its layers on the DLA, first {refused[0]!r}; "
        "keep it off with `tandem build --force-gpu`, and report it: the rule table is wrong"
    )


def _configure(trt: Any, release: Release, request: Request, builder: Any) -> Any:  # noqa: ANN401
    config = builder.create_builder_config()
    int8 = release.int8_flags if request.ranges else ()
    for name in (*release.builder_flags, *int8):
        config.set_flag(getattr(trt.BuilderFlag, name))
    config.default_device_type = trt.DeviceType.DLA
    config.DLA_core = 0
    pools = trt.MemoryPoolType
    for pool, size in (
        (pools.DLA_MANAGED_SRAM, limits.SRAM_BYTES),
        (pools.DLA_LOCAL_DRAM, limits.LOCAL_DRAM_BYTES),
        (pools.DLA_GLOBAL_DRAM, limits.GLOBAL_DRAM_BYTES),
        (pools.WORKSPACE, limits.WORKSPACE_BYTES),
    ):
        config.set_memory_pool_limit(pool, size)
    use_timing_cache(config, request)
    return config


def _set_ports(trt: Any, network: Any, target: OnDla, *, typed: bool) -> None:  # noqa: ANN401
    """Give inputs and outputs the types and formats of the DLA, so that nothing is reformatted.

    A strongly typed network has its types from the ONNX.
    """
    ports = (*target.inputs, *target.outputs)
    tensors = ports_of(network, tuple(port.tensor for port in ports))
    for port in ports:
        tensor = tensors[port.tensor]
        if not typed:
            tensor.dtype = _dtype(trt, port)
        tensor.allowed_formats = 1 << int(getattr(trt.TensorFormat, port.format.upper()))


def _dtype(trt: Any, port: Port) -> Any:  # noqa: ANN401
    return trt.DataType.INT8 if port.dtype == "int8" else trt.DataType.HALF
