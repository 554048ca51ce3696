"""A first roofline cost model: what a node takes on a processor, and what a crossing costs.

Uncalibrated: constants with their sources are in `configs/costs.toml`. A model fitted to
measurements can take the place of `predicted_us` and `crossing_us`; nothing else reads constants.
"""

from functools import cache

import msgspec

import configs
from device.manifest import Precision, Processor
from device.profile import Confidence, Dla, Gpu, Profile
from toolkit.planning.dla_checks import channels
from toolkit.planning.node_view import NodeView, TensorView

WIDTH: dict[Precision, int] = {"fp32": 4, "fp16": 2, "int8": 1}
DTYPE_BYTES = {"int64": 8, "float64": 8, "uint64": 8, "int32": 4, "uint32": 4, "int16": 2}
WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
# Layers that TensorRT computes in the kernel of the layer before them.
FUSED = frozenset(
    {"Relu", "Clip", "LeakyRelu", "Sigmoid", "Tanh", "BatchNormalization", "Add", "Mul", "Sub"}
    | {"Sum", "HardSwish", "HardSigmoid", "Elu", "PRelu"}
)
# Layers that only rename their data on the GPU.
FREE = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"})


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One constant of the model, in words where it comes from and how far to trust it."""

    value: float
    source: str
    confidence: Confidence
    note: str = ""


class GpuCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shares of the GPU's peaks, and the time of a kernel with nothing to do."""

    compute_efficiency: Constant
    bandwidth_efficiency: Constant
    node_us: Constant


class DlaCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shares of one DLA core's peaks, and the time of a layer with nothing to do."""

    compute_efficiency: Constant
    bandwidth_efficiency: Constant
    node_us: Constant
    fp16_share: Constant
    full_channels: Constant


class CpuCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The rate of the CPU, which no profile gives."""

    gmacs: Constant
    bandwidth_efficiency: Constant
    node_us: Constant


class CrossingCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The time of passing from one processor to another, without the copying."""

    us: Constant


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All constants of the cost model."""

    gpu: GpuCosts
    dla: DlaCosts
    cpu: CpuCosts
    crossing: CrossingCosts


@cache
def load_costs() -> Costs:
    """Return the constants of `configs/costs.toml`."""
    return msgspec.toml.decode((configs.ROOT / "costs.toml").read_bytes(), type=Costs)


def predicted_us(
    view: NodeView, processor: Processor, profile: Profile, precision: Precision
) -> float:
    """Return the predicted time of a node in microseconds.

    A dynamic leading dimension counts as 1; tensors of unknown shape cost nothing, so a node of
    unknown shapes costs its launch.
    """
    if view.op in FREE and processor != "cpu":
        return 0.0
    fused = _is_fused(view)
    rate, bandwidth, overhead = _speed(view, processor, profile, precision)
    compute = 0.0 if fused else (view.macs or 0) / rate
    copying = _moved_bytes(view, precision, after_fusion=fused) / bandwidth
    return (0.0 if fused else overhead) + 1e6 * max(compute, copying)


def _speed(
    view: NodeView, processor: Processor, profile: Profile, precision: Precision
) -> tuple[float, float, float]:
    """Return multiply-accumulates and bytes a second, and the microseconds of an empty node."""
    costs = load_costs()
    bandwidth = profile.memory.bandwidth_gbps.value * 1e9
    if processor == "cpu":
        rate, share = costs.cpu.gmacs.value * 1e9, costs.cpu.bandwidth_efficiency.value
        return rate, bandwidth * share, costs.cpu.node_us.value
    if processor == "gpu" and profile.gpu is not None:
        rate = _gpu_rate(view, profile.gpu, precision) * costs.gpu.compute_efficiency.value
        return rate, bandwidth * costs.gpu.bandwidth_efficiency.value, costs.gpu.node_us.value
    if processor != "gpu" and profile.dla is not None:
        rate = _dla_rate(view, profile.dla, precision, costs.dla)
        return rate, bandwidth * costs.dla.bandwidth_efficiency.value, costs.dla.node_us.value
    raise ValueError(f"profile {profile.name} has no {processor}")


def crossing_us(size: int, profile: Profile) -> float:
    """Return the predicted time of passing `size` bytes to another processor and its format."""
    reformat = 2e6 * size / (profile.memory.bandwidth_gbps.value * 1e9)  # read and written once
    return load_costs().crossing.us.value + reformat


def tensor_bytes(tensor: TensorView, precision: Precision) -> int | None:
    """Return the size of a tensor at the precision of the engine, None where it is unknown."""
    if tensor.elements is None:
        return None
    width = WIDTH[precision] if tensor.is_float else DTYPE_BYTES.get(tensor.dtype, 1)
    return tensor.elements * width


def _is_fused(view: NodeView) -> bool:
    made_by = frozenset(view.before)
    return view.op in FUSED and bool(made_by & (WEIGHTED | FUSED))


def _moved_bytes(view: NodeView, precision: Precision, *, after_fusion: bool) -> int:
    """Sum the bytes read and written; a fused layer reads only its other operands."""
    if after_fusion:
        tensors = view.activations[1:] + view.constants
    else:
        tensors = view.activations + view.constants + view.outputs
    return sum(tensor_bytes(tensor, precision) or 0 for tensor in tensors)


def _group_channels(view: NodeView) -> int:
    """Return the input channels that one output of a convolution or product sums over."""
    return (channels(view.input(0), view.op) or 1) // max(1, view.integer("group", 1))


def _gpu_rate(view: NodeView, gpu: Gpu, precision: Precision) -> float:
    """Return the peak multiply-accumulates a second for the node."""
    fp32 = gpu.fp32_tflops.value
    fp16 = max(fp32, gpu.fp16_tflops.value)
    int8 = max(fp16, gpu.int8_tops.value) if gpu.int8_tops is not None else fp16
    tera = {"fp32": fp32, "fp16": fp16, "int8": int8}[precision]
    if view.op not in WEIGHTED or _group_channels(view) < 4:
        tera = fp32  # no tensor cores for pointwise and depthwise work
    return tera * 1e12 / 2


def _dla_rate(view: NodeView, dla: Dla, precision: Precision, costs: DlaCosts) -> float:
    """Return the multiply-accumulates a second of one core for the node."""
    tera = dla.int8_tops.value
    if precision != "int8" and view.op in WEIGHTED:
        published = dla.fp16_tflops
        tera = published.value if published is not None else tera * costs.fp16_share.value
    if view.op in WEIGHTED:
        tera *= min(1.0, _group_channels(view) / costs.full_channels.value)
    return tera * 1e12 / 2 * costs.compute_efficiency.value
