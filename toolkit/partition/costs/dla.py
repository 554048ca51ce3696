"""The time of DLA layers: the cycles of `toolkit.dla.cycles`, with fitted efficiencies.

Each kernel becomes a layer of the cycle model, which gives the cycles of array, output stage and
memory. Its time is the maximum of the three plus the overhead of an empty layer. Batch multiplies
the time: the DLA does not gain from it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from device.engine.manifest import Precision
from toolkit.dla.cycles.configurations import CONFIGURATIONS, Config
from toolkit.dla.cycles.configurations import Precision as DlaPrecision
from toolkit.dla.cycles.estimate import estimate
from toolkit.dla.cycles.layers import (
    ConvLayer,
    Deconvolution,
    Layer,
    LayerError,
    Lrn,
    Pointwise,
    Pool,
)
from toolkit.dla.cycles.result import Cycles
from toolkit.graph.node_view import NodeView
from toolkit.partition.costs.bytes import known_shape, moved_bytes
from toolkit.partition.costs.fusion import FusedKernel
from toolkit.partition.costs.gpu import Array, Quantity, Times
from toolkit.partition.costs.hardware import Generation, Hardware

TABLES = frozenset({"Sigmoid", "Tanh", "Softplus", "Mish", "HardSigmoid", "HardSwish"})
SUMS = frozenset({"Add", "Sum", "Sub", "Mul", "Max", "Min"})
IMAGE_CHANNELS = 4  # of the image unit (NVDLA hardware specification, image mode)
# Modes of a layer are compared at this memory bandwidth in bytes per clock; the fitted shares give
# 30
# to 70 (AGX Xavier and AGX Orin at their highest clocks).
COMPARED_AT = 40.0


@dataclass(frozen=True)
class DlaWork:
    """Layers as arrays, one element each: clocks of array and output stage, bytes, 1 for FP16, and
    the number of layers (one per frame, 0 if nothing runs).
    """

    mac: Array
    output: Array
    bytes: Array
    half: Array
    layers: Array


@dataclass(frozen=True)
class DlaRates:
    """Rates of a DLA core; scalars, or one element per layer."""

    mhz: Quantity
    bandwidth: Quantity  # bytes per microsecond
    v2: Quantity  # 1 on the second generation

    @staticmethod
    def of(board: Hardware) -> "DlaRates":
        """Return the rates of one core of a board."""
        return DlaRates(board.dla_mhz, board.bandwidth, float(board.dla == "v2"))


@dataclass(frozen=True)
class DlaParameters:
    """The constants of DLA times as numbers; pairs are (v1, v2)."""

    array_efficiency: float
    fp16_share: float
    bandwidth_share: tuple[float, float]
    layer_us: tuple[float, float]


def configuration(generation: Generation, arrays: int) -> tuple[Config, int]:
    """Return the cycle model of a generation, and its number of parallel arrays.

    Per-layer overheads are fitted here, so those of the model are 0. v2 is modelled as `arrays`
    arrays of v1 on separate positions: layers of 64 channels reach more of its peak than one array
    of 128 channels could.
    """
    if generation == "v1":
        return replace(CONFIGURATIONS["xavier"], layer_overhead=0), 1
    v1 = CONFIGURATIONS["xavier"]
    smaller = replace(
        CONFIGURATIONS["orin"],
        atomic_c=v1.atomic_c,
        atomic_k=v1.atomic_k,
        stripe=v1.stripe,
        layer_overhead=0,
    )
    return smaller, arrays


def dla_work(
    kernels: Sequence[FusedKernel],
    precision: Precision,
    generation: Generation,
    arrays: int,
    half: frozenset[str] = frozenset(),
) -> DlaWork:
    """Return the work of kernels; those of the nodes in `half` compute in FP16."""
    config, count = configuration(generation, arrays)
    rows: list[tuple[float, ...]] = []
    for index, kernel in enumerate(kernels):
        kernel_precision: DlaPrecision = "int8" if precision == "int8" else "fp16"
        if kernel.head.name in half:
            kernel_precision = "fp16"
        cycles = _cycles(kernel, kernel_precision, config, first=index == 0)
        frames = _frames(kernel)
        if cycles is None:
            moved = float(sum(moved_bytes(kernel, precision)))
            rows.append((0.0, 0.0, moved, 0.0, frames * float(kernel.kind != "free")))
            continue
        mac = cycles.mac / (count if kernel.kind == "matrix" else 1)
        moved = float(cycles.bytes_read + cycles.bytes_written)
        frame_work = (mac, cycles.output_stage, moved)
        rows.append(
            (*[frames * value for value in frame_work], float(kernel_precision == "fp16"), frames)
        )
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(fields(DlaWork))).T
    return DlaWork(*columns)


def dla_times(work: DlaWork, rates: DlaRates, parameters: DlaParameters) -> Times:
    """Return the times of layers in sequence on one core."""
    share = np.where(work.half * rates.v2, parameters.fp16_share, 1.0)
    array = work.mac / (parameters.array_efficiency * share)
    bandwidth_share = np.where(
        rates.v2, parameters.bandwidth_share[1], parameters.bandwidth_share[0]
    )
    overhead = np.where(rates.v2, parameters.layer_us[1], parameters.layer_us[0])
    return Times(
        compute=np.maximum(array, work.output) / rates.mhz,
        memory=work.bytes / (rates.bandwidth * bandwidth_share),
        overhead=work.layers * overhead,
    )


def _frames(kernel: FusedKernel) -> float:
    """Return the batch: the leading dimension."""
    output_shape = known_shape(kernel.head.outputs[0].shape) if kernel.head.outputs else None
    return float(output_shape[0]) if output_shape is not None and len(output_shape) > 1 else 1.0


def _cycles(
    kernel: FusedKernel, precision: DlaPrecision, config: Config, *, first: bool
) -> Cycles | None:
    """Return the cycles of a kernel, None if the cycle model has no such layer."""
    if kernel.kind == "free":
        return None
    try:
        layer = layer_of(kernel, precision, first=first)
        return None if layer is None else estimate(layer, config, bytes_per_clock=COMPARED_AT)
    except LayerError:  # unsupported shapes: the rules refuse the node
        return None


def layer_of(kernel: FusedKernel, precision: DlaPrecision, *, first: bool) -> Layer | None:
    """Return one frame of a kernel as a layer of the cycle model, None if it has none.

    Raises LayerError: the model has no such layer.
    """
    view = kernel.head
    data = view.input(0)
    input_shape = None if data is None else known_shape(data.shape)
    output_shape = known_shape(view.outputs[0].shape) if view.outputs else None
    if input_shape is None or output_shape is None:
        return None
    if view.op in ("Conv", "ConvTranspose") and len(input_shape) == 4:
        return _convolution(kernel, input_shape, output_shape, precision, first=first)
    if view.op in ("Gemm", "MatMul"):
        batch = math.prod(input_shape[1:-1])  # rows of one frame
        return ConvLayer(
            channels=input_shape[-1],
            height=1,
            width=1,
            kernels=output_shape[-1],
            batch=batch,
            precision=precision,
        )
    if len(input_shape) != 4:
        return None
    if kernel.kind == "pool":
        return _pool(view, input_shape, precision)
    return _output_stage(kernel, input_shape, output_shape, precision)


def _output_stage(
    kernel: FusedKernel,
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    precision: DlaPrecision,
) -> Layer:
    """Return a layer without the MAC array."""
    _, channels, height, width = input_shape
    if kernel.head.op == "LRN":
        return Lrn(channels=channels, height=height, width=width, precision=precision)
    return Pointwise(
        channels=output_shape[1] if len(output_shape) == 4 else channels,
        height=output_shape[2] if len(output_shape) == 4 else height,
        width=output_shape[3] if len(output_shape) == 4 else width,
        operands=max(1, len(kernel.reads)),
        stage="y" if any(node.op in TABLES for node in kernel.nodes) else "x",
        precision=precision,
    )


def _convolution(
    kernel: FusedKernel,
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    precision: DlaPrecision,
    *,
    first: bool,
) -> Layer | None:
    view, window = kernel.head, kernel.head.window
    if window is None or window.pads is None:
        return None
    _, channels, height, width = input_shape
    size = (window.kernel[0], window.kernel[1])
    stride = (window.strides[0], window.strides[1])
    groups = view.integer("group", 1)
    if view.op == "ConvTranspose":
        return Deconvolution(
            channels=channels,
            height=height,
            width=width,
            kernels=output_shape[1],
            kernel=size,
            stride=stride,
            groups=groups,
            precision=precision,
        )
    top, left, bottom, right = window.pads
    return ConvLayer(
        channels=channels,
        height=height,
        width=width,
        kernels=output_shape[1],
        kernel=size,
        stride=stride,
        pads=(top, left, bottom, right),
        dilation=(window.dilations[0], window.dilations[1]),
        groups=groups,
        precision=precision,
        image=first and channels <= IMAGE_CHANNELS,
        eltwise="x" if _adds(kernel) else None,
        table=any(node.op in TABLES for node in kernel.nodes),
    )


def _adds(kernel: FusedKernel) -> bool:
    """Return True if the epilogue of the convolution reads a second tensor."""
    activations = {tensor.name for tensor in kernel.head.activations}
    return any(
        node.op in SUMS and any(tensor in kernel.reads for tensor in node.activations)
        for node in kernel.nodes[1:]
    ) or any(tensor.name not in activations for tensor in kernel.reads)


def _pool(view: NodeView, input_shape: tuple[int, ...], precision: DlaPrecision) -> Pool | None:
    _, channels, height, width = input_shape
    if view.op.startswith("Global"):
        size, stride, pads = (height, width), (1, 1), (0, 0, 0, 0)
    elif view.window is None or view.window.pads is None or len(view.window.kernel) != 2:
        return None
    else:
        window, window_pads = view.window, view.window.pads
        size = (window.kernel[0], window.kernel[1])
        stride = (window.strides[0], window.strides[1])
        pads = (window_pads[0], window_pads[1], window_pads[2], window_pads[3])
    return Pool(
        channels=channels,
        height=height,
        width=width,
        kernel=size,
        stride=stride,
        pads=pads,
        precision=precision,
    )
