"""Parameters of operations that are inputs in ONNX; kernels need them constant."""

from dataclasses import dataclass

from toolkit.gpu.ir.network import Array, Network, Operation, SegmentTensors

Tensors = Network | SegmentTensors


def constant_of(network: Tensors, op: Operation, at: int) -> Array | None:
    """Return the constant input `at` of an operation, None where it is absent."""
    name = op.input(at)
    return network.constants[name] if name else None


def integers_of(network: Tensors, op: Operation, at: int, name: str) -> tuple[int, ...] | None:
    """Return integers that are an attribute in older versions of an operator, and now an input.

    None where they are absent.
    """
    if name in op.attributes:
        return op.integers(name, ())
    values = constant_of(network, op, at)
    return None if values is None else tuple(values.reshape(-1).tolist())


def floats_of(network: Tensors, op: Operation, at: int, name: str) -> tuple[float, ...] | None:
    """Return floats that are an attribute in older versions of an operator, and now an input.

    None where they are absent or empty.
    """
    if name in op.attributes:
        value = op.attributes[name]
        assert isinstance(value, tuple)
        return tuple(float(item) for item in value)
    values = constant_of(network, op, at)
    if values is None or values.size == 0:
        return None
    return tuple(float(value) for value in values.reshape(-1))


@dataclass(frozen=True, slots=True)
class UnitSlice:
    """The slice [start, start + size) of one dimension of a tensor, with step 1."""

    source: str
    axis: int
    start: int
    size: int


def slice_of(network: Network, op: Operation | None) -> UnitSlice | None:
    """Return the slice of a Slice of one dimension with step 1; None for other operations."""
    if op is None or op.kind != "Slice" or any(n not in network.constants for n in op.inputs[1:]):
        return None
    starts = integers_of(network, op, 1, "starts") or ()
    axes = integers_of(network, op, 3, "axes") or (0,)
    source = op.inputs[0]
    shape = network.shapes.get(source, ())
    steps = integers_of(network, op, 4, "steps") or (1,)
    if len(starts) != 1 or len(axes) != 1 or steps != (1,) or not shape:
        return None
    axis = axes[0] % len(shape)
    start = max(starts[0] + shape[axis], 0) if starts[0] < 0 else starts[0]
    return UnitSlice(source, axis, start, network.shapes[op.outputs[0]][axis])


def scales_input(op: Operation) -> int:
    """Return the index of the scales among the inputs of a Resize or Upsample.

    Older versions have no region of interest before them.
    """
    old = "scales" in op.attributes or op.kind == "Upsample" or len(op.inputs) == 2
    return 1 if old else 2
