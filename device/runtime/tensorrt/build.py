"""The child process that builds one segment: `python -m device.runtime.tensorrt.build REQUEST`.

DLA builds are known to end with a segmentation fault, so nothing else happens in this process. It
writes the plan and the log, and one JSON line to standard output.
"""

import os
import sys
from pathlib import Path
from typing import Any, TextIO

import msgspec

from device.engine.tensorrt_manifest import Port
from device.files import replacing
from device.runtime.tensorrt import request as limits
from device.runtime.tensorrt.messages import explain
from device.runtime.tensorrt.releases import Release, find_release
from device.runtime.tensorrt.request import Answer, Request


class RefusedError(Exception):
    """TensorRT does not build the segment; the text says why."""


def main(argv: list[str]) -> int:
    """Build the request in the file `argv[1]`."""
    request = msgspec.json.decode(Path(argv[1]).read_bytes(), type=Request)
    import tensorrt

    version = str(tensorrt.__version__)
    release = find_release(version)
    refused: tuple[str, ...] = ()
    problem = None
    # TensorRT's objects log until they are gone, which is when `build` has returned.
    with Path(request.log).open("w", encoding="utf-8") as log:
        try:
            refused = build(tensorrt, release, request, log)
        except RefusedError as error:
            problem = str(error)
    answer = Answer(tensorrt=version, refused_layers=refused, problem=problem)
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    return 0


def build(
    trt: Any,  # noqa: ANN401
    release: Release,
    request: Request,
    log: TextIO,
) -> tuple[str, ...]:
    """Build the plan and write it; return the layers that TensorRT keeps off the DLA.

    `trt`: the module tensorrt. `log`: the file `request.log`. Raises RefusedError.
    """
    if release.form is None:
        raise RefusedError(f"TensorRT {trt.__version__} has no DLA here: {release.why}")
    logger = _logger(trt, log)
    builder = trt.Builder(logger)
    if builder.num_DLA_cores < 1:
        raise RefusedError("TensorRT finds no DLA core on this board")
    network = _parse(trt, release, request, builder, logger)
    config = _configure(trt, release, request, builder)
    _set_ports(trt, network, request, typed=release.form == "typed")
    if release.form == "ranged":
        _set_ranges(trt, network, request)
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    refused = tuple(str(layer.name) for layer in layers if not config.can_run_on_DLA(layer))
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RefusedError(_why(request, refused))
    _write(Path(request.plan), memoryview(plan))
    with replacing(Path(request.timing_cache)) as file:  # another build may read it now
        file.write(memoryview(config.get_timing_cache().serialize()))
    return refused


def _logger(trt: Any, log: TextIO) -> Any:  # noqa: ANN401
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Writes every line to a file: the last one before a crash counts."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:  # noqa: ANN401
            if severity != trt.ILogger.VERBOSE:
                log.write(f"{msg}\n")
                log.flush()

    return Logger()


def _parse(trt: Any, release: Release, request: Request, builder: Any, logger: Any) -> Any:  # noqa: ANN401
    flags = 0
    for name in release.network_flags:
        flags |= 1 << int(getattr(trt.NetworkDefinitionCreationFlag, name))
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(request.model):
        errors = [parser.get_error(index).desc() for index in range(parser.num_errors)]
        raise RefusedError(
            f"TensorRT cannot read the segment: {'; '.join(errors) or 'no reason given'}"
        )
    return network


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
    path = Path(request.timing_cache)
    stored = path.read_bytes() if path.exists() else b""
    # A damaged cache is none, and one of another TensorRT is refused: an empty one takes its place.
    cache = config.create_timing_cache(stored)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)
    return config


def _set_ports(trt: Any, network: Any, request: Request, *, typed: bool) -> None:  # noqa: ANN401
    """Give inputs and outputs the types and formats of the DLA, so that nothing is reformatted.

    A strongly typed network has its types from the ONNX.
    """
    tensors = {}
    for index in range(network.num_inputs):
        tensors[str(network.get_input(index).name)] = network.get_input(index)
    for index in range(network.num_outputs):
        tensors[str(network.get_output(index).name)] = network.get_output(index)
    for port in (*request.inputs, *request.outputs):
        if port.tensor not in tensors:
            raise RefusedError(f"TensorRT's network has no input or output {port.tensor!r}")
        tensor = tensors[port.tensor]
        if not typed:
            tensor.dtype = _dtype(trt, port)
        tensor.allowed_formats = 1 << int(getattr(trt.TensorFormat, port.format.upper()))


def _dtype(trt: Any, port: Port) -> Any:  # noqa: ANN401
    return trt.DataType.INT8 if port.dtype == "int8" else trt.DataType.HALF


def _set_ranges(trt: Any, network: Any, request: Request) -> None:  # noqa: ANN401
    """Give every tensor its range, and the nodes that stay in FP16 their precision."""
    half = frozenset(request.half_nodes)
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    for tensor in inputs:
        _set_range(tensor, request)
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if str(layer.name) in half:
            layer.precision = trt.DataType.HALF
        for output in range(layer.num_outputs):
            _set_range(layer.get_output(output), request)


def _set_range(tensor: Any, request: Request) -> None:  # noqa: ANN401
    amax = request.ranges.get(str(tensor.name))
    if amax is not None and not tensor.set_dynamic_range(-amax, amax):
        raise RefusedError(f"TensorRT does not take the range {amax} of tensor {tensor.name!r}")


def _why(request: Request, refused: tuple[str, ...]) -> str:
    lines = Path(request.log).read_text(encoding="utf-8", errors="replace").splitlines()
    known = explain(lines)
    if known is not None:
        return known
    if refused:
        return (
            f"TensorRT does not run {len(refused)} of its layers on the DLA, first {refused[0]!r}; "
            "keep it off with `tandem build --force-gpu`, and report it: the rule table is wrong"
        )
    last = lines[-1] if lines else "it says nothing"
    return f"TensorRT builds no plan; its last line: {last}"


def _write(path: Path, data: memoryview) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    sys.exit(main(sys.argv))
