"""A segment -> a plan for one DLA core, through TensorRT's Python API.

GPU fallback is off: a layer that the DLA refuses must fail the build, not run on the GPU in
silence. Some releases fold constants with fallback alone (NVIDIA/Deep-Learning-Accelerator-SW,
operators; NVIDIA-AI-IOT/cuDLA-samples#19). So a build that is refused is tried with fallback, and
its plan is taken only if TensorRT's inspector shows no layer that runs elsewhere.
"""

import json
from dataclasses import dataclass
from typing import Any

from device.engine.tensorrt_manifest import Port
from device.runtime.prepare.builder_calls import (
    PLACES,
    RefusedError,
    Tools,
    computing_layers,
    has_bytes,
    parse,
    ports_of,
    set_ranges,
    use_timing_cache,
)
from device.runtime.tensorrt import request as limits
from device.runtime.tensorrt.messages import WITH_FALLBACK, text_of
from device.runtime.tensorrt.releases import Release, find_release
from device.runtime.tensorrt.request import OnDla, Request


@dataclass(frozen=True, slots=True)
class Built:
    """What a build has given. `plan` None: there is none.

    `refused`: layers that TensorRT keeps off the DLA, by its own table. `fallback`: GPU fallback
    was on, and every layer of the plan is on the DLA; `elsewhere`: those for whose sake a plan with
    fallback was not taken.
    """

    plan: Any
    config: Any
    refused: tuple[str, ...] = ()
    fallback: bool = False
    elsewhere: tuple[str, ...] = ()


def build_for_dla(tools: Tools, version: str, request: Request) -> Built:
    """Build a segment. Raises RefusedError."""
    assert isinstance(request.target, OnDla)
    release = find_release(version)
    if release.form is None:
        raise RefusedError(f"TensorRT {version} has no DLA here: {release.why}")
    if tools.builder.num_DLA_cores < 1:
        raise RefusedError("TensorRT finds no DLA core on this board")
    config = configure(tools, release, int8=bool(request.ranges))
    use_timing_cache(config, request)
    network = parse(
        tools,
        release.network_flags,
        request.model,
        parser_flags=release.parser_flags,
        config=config,
    )
    _set_ports(tools.trt, network, request.target, typed=release.form == "typed")
    if release.form == "ranged":
        set_ranges(tools.trt, network, request)
    layers = computing_layers(tools.trt, network)
    refused = tuple(str(layer.name) for layer in layers if not config.can_run_on_DLA(layer))
    plan, fallback, elsewhere = serialize(tools, network, config)
    return Built(plan, config, refused, fallback, elsewhere)


def configure(tools: Tools, release: Release, *, int8: bool) -> Any:  # noqa: ANN401
    """Return the settings of a build for DLA core 0, which loads on every core."""
    trt = tools.trt
    config = tools.builder.create_builder_config()
    tools.alive.append(config)
    for name in (*release.builder_flags, *(release.int8_flags if int8 else ())):
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
    return config


def serialize(tools: Tools, network: Any, config: Any) -> tuple[Any, bool, tuple[str, ...]]:  # noqa: ANN401
    """Return a plan that runs on the DLA alone (None: there is none), whether GPU fallback was on,
    and the layers for whose sake a plan with fallback was not taken.

    Raises RefusedError: nothing says where the layers of a plan with fallback run.
    """
    plan = tools.builder.build_serialized_network(network, config)
    if has_bytes(plan):
        return plan, False, ()
    tools.logger.log(tools.trt.ILogger.INFO, WITH_FALLBACK)
    config.set_flag(tools.trt.BuilderFlag.GPU_FALLBACK)
    config.profiling_verbosity = tools.trt.ProfilingVerbosity.DETAILED
    plan = tools.builder.build_serialized_network(network, config)
    if not has_bytes(plan):
        return None, False, ()
    elsewhere = _layers_elsewhere(tools, plan)
    return (None, False, elsewhere) if elsewhere else (plan, True, ())


def _layers_elsewhere(tools: Tools, plan: Any) -> tuple[str, ...]:  # noqa: ANN401
    """Return the layers of a plan that do not run on the DLA.

    The inspector names the layers. That one is on the DLA stands in its type, or in the log: the
    name alone does not tell, since TensorRT calls regions of the GPU {ForeignNode[...]}, too.
    """
    trt = tools.trt
    runtime = trt.Runtime(tools.logger)
    runtime.DLA_core = 0
    engine = runtime.deserialize_cuda_engine(plan)
    tools.alive.extend((runtime, engine))
    inspector = None if engine is None else engine.create_engine_inspector()
    tools.alive.append(inspector)
    text = "" if inspector is None else inspector.get_engine_information(
        trt.LayerInformationFormat.JSON
    )  # fmt: skip
    try:
        rows = [_row(layer) for layer in json.loads(text)["Layers"]]
    except (ValueError, KeyError, TypeError) as error:
        raise _nothing_said() from error
    if not rows:
        raise _nothing_said()
    lines = [text_of(line) for line in tools.lines]
    on_dla = {
        line.removeprefix(PLACES[0]).strip(" ,") for line in lines if line.startswith(PLACES[0])
    }
    return tuple(
        name for name, kind in rows if not kind.upper().startswith("DLA") and name not in on_dla
    )


def _row(layer: object) -> tuple[str, str]:
    """Return name and type of a layer; a plan that was built without details has names alone."""
    if isinstance(layer, dict):
        return str(layer["Name"]), str(layer.get("LayerType", ""))
    return str(layer), ""


def _nothing_said() -> RefusedError:
    return RefusedError(
        "TensorRT builds it with GPU fallback alone, and does not say whether a layer runs on the "
        "GPU then; keep it off the DLA with `tandem build --force-gpu`, and report it"
    )


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
