"""What a build for the DLA and one for the GPU both ask of TensorRT's Python API."""

from pathlib import Path
from typing import Any, TextIO

from device.runtime.tensorrt.request import Request

_NO_REALS = ("BOOL", "INT32", "INT64")  # shapes and indices, which have no precision


class RefusedError(Exception):
    """TensorRT does not build the segment; the text says why."""


def make_logger(trt: Any, log: TextIO) -> Any:  # noqa: ANN401
    """Return a logger that writes every line to a file: the last one before a crash counts."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        """See `make_logger`."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:  # noqa: ANN401
            if severity != trt.ILogger.VERBOSE:
                log.write(f"{msg}\n")
                log.flush()

    return Logger()


def parse(
    trt: Any,  # noqa: ANN401
    network_flags: tuple[str, ...],
    request: Request,
    builder: Any,  # noqa: ANN401
    logger: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Return the network of the request's ONNX. Raises RefusedError: TensorRT cannot read it."""
    flags = 0
    for name in network_flags:
        flags |= 1 << int(getattr(trt.NetworkDefinitionCreationFlag, name))
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(request.model):
        errors = [parser.get_error(index).desc() for index in range(parser.num_errors)]
        raise RefusedError(
            f"TensorRT cannot read the segment: {'; '.join(errors) or 'no reason given'}"
        )
    return network


def use_timing_cache(config: Any, request: Request) -> None:  # noqa: ANN401
    """Give the build the timings of earlier ones.

    A damaged cache is none, and one of another TensorRT is refused: an empty one takes its place.
    """
    path = Path(request.timing_cache)
    stored = path.read_bytes() if path.exists() else b""
    cache = config.create_timing_cache(stored)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)


def ports_of(network: Any, names: tuple[str, ...]) -> dict[str, Any]:  # noqa: ANN401
    """Return the inputs and outputs of a network by name. Raises RefusedError: one is missing."""
    tensors = {}
    for index in range(network.num_inputs):
        tensors[str(network.get_input(index).name)] = network.get_input(index)
    for index in range(network.num_outputs):
        tensors[str(network.get_output(index).name)] = network.get_output(index)
    for name in names:
        if name not in tensors:
            raise RefusedError(f"TensorRT's network has no input or output {name!r}")
    return tensors


def set_ranges(trt: Any, network: Any, request: Request) -> None:  # noqa: ANN401
    """Give every tensor its range, and the nodes that stay in floating point their precision."""
    half = frozenset(request.half_nodes)
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    for tensor in inputs:
        _set_range(tensor, request)
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        outputs = [layer.get_output(output) for output in range(layer.num_outputs)]
        computes = all(tensor.dtype.name not in _NO_REALS for tensor in outputs)
        if str(layer.name) in half and computes:
            layer.precision = trt.DataType.HALF
        for tensor in outputs:
            _set_range(tensor, request)


def _set_range(tensor: Any, request: Request) -> None:  # noqa: ANN401
    amax = request.ranges.get(str(tensor.name))
    if amax is not None and not tensor.set_dynamic_range(-amax, amax):
        raise RefusedError(f"TensorRT does not take the range {amax} of tensor {tensor.name!r}")
