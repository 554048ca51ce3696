"""What the DLA takes of a whole network: its flags, ports, INT8 ranges and memory.

Each check yields one sentence for what it refuses; sources are written as in `dla_rules`.
`Network` is what the double's objects hold at the time of a build.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tensorrt_double.dla_rules import Build, Layer, Tensor, Version, problems
from tensorrt_double.onnx_layers import CONSTANT_READERS, TRANSPARENT

LOADABLES_PER_CORE = 16  # page 10
ADDRESS_BYTES = 256  # NvInferRuntime.h 10.3.0:4003, setTensorAddress
READ_ONLY_DTYPE: Version = (11, 1)  # ITensor.dtype, from this release on
GIB = 1 << 30


@dataclass(frozen=True)
class Port:
    """An input or output: its type and format by TensorRT's names."""

    name: str
    side: str  # input, output
    shape: tuple[int, ...]
    dtype: str
    formats: tuple[str, ...]


@dataclass(frozen=True)
class Network:
    """A network with the settings of its build.

    `typed`: strongly typed. `flags`: of the builder. `ranges`: amax by tensor. `half`: layers whose
    precision was set to HALF. `pools`: bytes by memory pool.
    """

    layers: Sequence[Layer]
    ports: Sequence[Port]
    build: Build
    typed: bool
    flags: frozenset[str]
    ranges: Mapping[str, float]
    half: frozenset[str]
    pools: Mapping[str, int]


def version_of(text: str) -> Version:
    """Return the first three numbers of a version such as 11.4.0.106."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def dla_of(version: Version) -> str:
    """Return the DLA of a board with this TensorRT: 8.5.2 is taken as Xavier's, newer as Orin's."""
    return "xavier" if version < (8, 6) else "orin"


def precision_of(layer: Layer, network: Network) -> str:
    """Return what a layer computes in: by its Q/DQ where types are strong, else by the flags."""
    if network.typed:
        reads = {tensor.dtype for tensor in layer.flowing if tensor.dtype.startswith("float")}
        return "fp32" if "float32" in reads else "int8" if _dequantized(layer, network) else "fp16"
    if "INT8" in network.flags and layer.name not in network.half:
        return "int8"
    return "fp16" if network.flags & {"FP16", "INT8"} else "fp32"


def _dequantized(layer: Layer, network: Network) -> bool:
    made = {t.name for other in network.layers if other.op == "DequantizeLinear"
            for t in other.outputs}  # fmt: skip
    return any(t is not None and not t.constant and t.name in made for t in layer.inputs)


def constants_of(layers: Sequence[Layer]) -> list[Tensor]:
    """Return the constants that are layers of their own in TensorRT."""
    found: dict[str, Tensor] = {}
    for layer in layers:
        if layer.op in CONSTANT_READERS:
            found |= {t.name: t for t in layer.inputs if t is not None and t.constant}
    return list(found.values())


def layer_refusals(network: Network) -> Iterator[tuple[str, str]]:
    """Yield the layers that the DLA does not take, each with the first reason."""
    for layer in computing(network.layers):
        found = problems(layer, of_layer(layer, network))
        if found:
            yield layer.name, f"Layer '{layer.name}' ({layer.op.upper()}): {found[0]}"


def refusals(network: Network) -> Iterator[str]:
    """Yield why the DLA does not take a network whose layers it takes."""
    yield from _flags(network)
    for port in network.ports:
        yield from _port(port, network)
    if not network.typed and "INT8" in network.flags:
        yield from _ranges(network)
    yield from _memory(network)


def of_layer(layer: Layer, network: Network) -> Build:
    """Return what a layer of a network is built for."""
    return replace(network.build, precision=precision_of(layer, network))


def computing(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers that run: neither Q/DQ nor constants."""
    return [layer for layer in layers if layer.op not in TRANSPARENT | {"Constant"}]


def loadables(layers: Sequence[Layer]) -> int:
    """Return how many loadables a network becomes: one for each batch (page 11 and 12)."""
    return max(1, len({math.prod(known(layer.outputs[0])[:-3]) for layer in computing(layers)}))


def known(tensor: Tensor) -> list[int]:
    return [size or 0 for size in tensor.shape or ()]


def _flags(network: Network) -> Iterator[str]:
    if network.typed:
        return
    if not network.flags & {"FP16", "INT8"}:
        yield "DLA layers run in FP16 or INT8, and neither flag is set (page, column Precision)"
    for port in network.ports:
        need = {"HALF": "FP16", "INT8": "INT8"}.get(port.dtype)
        if need is not None and need not in network.flags:
            yield f"{port.name} is {port.dtype} without the flag {need}"


_TYPE_OF = {"CHW16": ("HALF",), "CHW32": ("INT8",), "DLA_LINEAR": ("HALF", "INT8"),
            "DLA_HWC4": ("HALF", "INT8")}  # fmt: skip


def _port(port: Port, network: Network) -> Iterator[str]:
    if port.dtype not in ("INT8", "HALF"):
        yield f"DLA only supports FP16 and Int8 I/O: {port.name} is {port.dtype} (runtime 12, 13)"
        return
    if len(port.shape) < 3:
        yield f"{port.name} has {len(port.shape)} dimensions (NvInferRuntimeBase.h 10.3.0:287)"
    for name in port.formats:
        if port.dtype not in _TYPE_OF.get(name, ()):
            yield f"{port.name} is {port.dtype} in format {name} (runtime 12 and 13)"
        if name != "DLA_HWC4":
            continue
        if port.side == "output":
            yield f"{port.name} is an output in DLA_HWC4 (runtime 13)"
            continue
        if len(port.shape) == 4 and port.shape[1] not in (1, 3, 4):
            yield f"{port.name} has {port.shape[1]} channels in DLA_HWC4"
        yield from _first_convolution(port, network)


def _first_convolution(port: Port, network: Network) -> Iterator[str]:
    for layer in computing(network.layers):
        if port.name not in [t.name for t in layer.inputs if t is not None]:
            continue
        if layer.op != "Conv":
            yield f"{port.name} is in DLA_HWC4, and {layer.name} that reads it is no convolution"
        elif layer.attributes.get("group", 1) > 4:
            yield f"{port.name} is in DLA_HWC4, and {layer.name} has more than 4 groups"
        elif (precision_of(layer, network) == "int8") != (port.dtype == "INT8"):
            yield f"{port.name} is {port.dtype} in DLA_HWC4, and {layer.name} computes otherwise"


_EQUAL = {
    "MaxPool": "input and output of pooling (NvInfer.h 10.3.0:1450)",
    "AveragePool": "input and output of pooling (NvInfer.h 10.3.0:1450)",
    "Concat": "inputs and output of a concatenation (page, row Concatenation)",
    **dict.fromkeys(
        ("Add", "Sub", "Mul", "Max", "Min"), "inputs of an element-wise layer (10.3.0:2459)"
    ),
}


_MISSING = (
    "Missing scale and zero-point for tensor {}, expect fall back to non-int8 implementation for "
    "any layer consuming or producing given tensor"
)


def warnings(network: Network) -> Iterator[str]:
    """Yield the tensors whose layers run in FP16 for want of a range (DLA software FAQ)."""
    if network.typed or "INT8" not in network.flags:
        return
    for layer in computing(network.layers):
        if precision_of(layer, network) == "int8":
            for tensor in layer.outputs:
                if tensor.dtype.startswith("float") and tensor.name not in network.ranges:
                    yield _MISSING.format(tensor.name)


def _ranges(network: Network) -> Iterator[str]:
    for port in network.ports:
        if port.dtype == "INT8" and port.name not in network.ranges:
            yield f"{_MISSING.format(port.name)}, which is an INT8 {port.side}"
    for layer in computing(network.layers):
        if precision_of(layer, network) != "int8":
            continue
        tensors = [t for t in layer.flowing if t.dtype.startswith("float")]
        missing = [t.name for t in tensors if t.name not in network.ranges]
        if missing and ("FP16" not in network.flags or not network.ranges):
            yield f"{_MISSING.format(missing[0])}, and layer '{layer.name}' has no other"
        if layer.op in _EQUAL and not missing:
            outs = {t.name for t in layer.outputs}
            pairwise = "inputs of" in _EQUAL[layer.op]
            sizes = {network.ranges[t.name] for t in tensors if not (pairwise and t.name in outs)}
            if max(sizes) > min(sizes) * (1 + 1e-5):
                yield f"Layer '{layer.name}': dynamic ranges differ, of {_EQUAL[layer.op]}"


def _memory(network: Network) -> Iterator[str]:
    """Sizes of a subgraph (NvInfer.h 10.3.0:171; NvInferRuntime.h 10.3.0, class Weights)."""
    ports = {port.name for port in network.ports}
    inner, weights = 0, 0
    for layer in computing(network.layers):
        each = 1 if precision_of(layer, network) == "int8" else 2
        inner += sum(each * math.prod(known(t)) for t in layer.outputs if t.name not in ports)
        weights += sum(each * math.prod(known(t)) for t in layer.inputs
                       if t is not None and t.constant)  # fmt: skip
    for size, pool, default in (
        (inner, "DLA_LOCAL_DRAM", GIB), (weights, "DLA_GLOBAL_DRAM", GIB // 2)
    ):  # fmt: skip
        limit = min(default, network.pools.get(pool, default))
        if size >= limit:
            yield f"{size} bytes do not fit into {pool}, whose limit is {limit}"
