"""What a build for the DLA and one for the GPU both ask of TensorRT's Python API."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from device.runtime.tensorrt.request import Request

PLACES = ("[DlaLayer]", "[GpuLayer]")  # how lines begin that say where a layer runs
_NO_REALS = ("BOOL", "INT32", "INT64")  # shapes and indices, which have no precision


class RefusedError(Exception):
    """TensorRT does not build the segment; the text says why."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The module tensorrt with a logger and a builder. `lines`: what TensorRT has said so far.

    `alive` keeps TensorRT's objects until the process ends without destroying them: destructors
    were seen to crash after a build for the DLA was complete.
    """

    trt: Any
    logger: Any
    builder: Any
    lines: Sequence[str]
    alive: list[Any] = field(default_factory=list)


def make_logger(trt: Any, write: Callable[[str], None]) -> Any:  # noqa: ANN401
    """Return a logger that gives `write` every line behind a mark of its severity, such as "[W] ".

    Of verbose lines it keeps those that say on which processor a layer runs.
    """
    marks = {
        trt.ILogger.INTERNAL_ERROR: "[E] ",
        trt.ILogger.ERROR: "[E] ",
        trt.ILogger.WARNING: "[W] ",
        trt.ILogger.INFO: "[I] ",
    }

    class Logger(trt.ILogger):  # type: ignore[misc]
        """See `make_logger`."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:  # noqa: ANN401
            if severity in marks or msg.startswith(PLACES):
                write(f"{marks.get(severity, '[V] ')}{msg}")

    return Logger()


def parse(
    tools: Tools,
    network_flags: tuple[str, ...],
    model: str,
    *,
    parser_flags: tuple[str, ...] = (),
    config: Any = None,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Return the network of an ONNX file. Raises RefusedError: TensorRT cannot read it.

    `parser_flags` are members of OnnxParserFlag; the parser may ask `config` what the DLA takes.
    """
    trt = tools.trt
    flags = 0
    for name in network_flags:
        flags |= 1 << int(getattr(trt.NetworkDefinitionCreationFlag, name))
    network = tools.builder.create_network(flags)
    parser = trt.OnnxParser(network, tools.logger)
    tools.alive.extend((network, parser))
    for name in parser_flags:
        parser.set_flag(getattr(trt.OnnxParserFlag, name))
    if parser_flags:
        parser.set_builder_config(config)
    if not parser.parse_from_file(model):
        errors = [parser.get_error(index).desc() for index in range(parser.num_errors)]
        raise RefusedError(
            f"TensorRT cannot read the segment: {'; '.join(errors) or 'no reason given'}"
        )
    return network


def use_timing_cache(config: Any, request: Request) -> None:  # noqa: ANN401
    """Give the build the timings of earlier ones.

    A damaged cache is none, and one of another TensorRT is refused: an empty one takes its place.
    """
    try:
        stored = Path(request.timing_cache).read_bytes()
    except OSError:  # there is none yet
        stored = b""
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


def computing_layers(trt: Any, network: Any) -> tuple[Any, ...]:  # noqa: ANN401
    """Return the layers but constants and what depends on constants alone.

    TensorRT's parser makes layers of the initializers of Add, Mul and the like, with a Shuffle that
    broadcasts them. TensorRT folds them into the layers that read them, and runs them nowhere.
    """
    folded: set[str] = set()
    computing = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        inputs = [layer.get_input(number) for number in range(layer.num_inputs)]
        names = [str(tensor.name) for tensor in inputs if tensor is not None]
        if layer.type == trt.LayerType.CONSTANT or (names and folded.issuperset(names)):
            folded |= {str(layer.get_output(n).name) for n in range(layer.num_outputs)}
        else:
            computing.append(layer)
    return tuple(computing)


def has_bytes(plan: Any) -> bool:  # noqa: ANN401
    """Return whether there is a plan: TensorRT was seen to return none, and one without bytes."""
    return plan is not None and memoryview(plan).nbytes > 0


def _set_range(tensor: Any, request: Request) -> None:  # noqa: ANN401
    amax = request.ranges.get(str(tensor.name))
    if amax is not None and not tensor.set_dynamic_range(-amax, amax):
        raise RefusedError(f"TensorRT does not take the range {amax} of tensor {tensor.name!r}")
