"""The time of GPU kernels: a roofline over tiles, waves, memory traffic and launches.

A GEMM of `rows` x `maps` outputs over `depth` is computed in output tiles, one per SM at a time. A
larger tile has more operand reuse; the last wave may leave SMs idle. The largest tile reaches the
fitted efficiency; a smaller one proportionally less by its reuse. Every kernel adds the clocks of
an empty one. Where no CUDA graph starts them, kernels are no faster than the CPU launches them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from device.engine.manifest import Precision
from toolkit.graph.node_view import NodeView
from toolkit.partition.costs.bytes import WIDTH, known_shape, moved_bytes
from toolkit.partition.costs.fusion import FusedKernel
from toolkit.partition.costs.hardware import Hardware

Array = npt.NDArray[np.float64]
Quantity = Array | float

# How executors start the kernels of a GPU segment: a CUDA graph is one launch for all of them, and
# each takes a share of an empty one (`gpu.graph_share`).
Launch = Literal["graph", "each"]  # one launch for all kernels, or one for each
ExecutorName = Literal["cuda", "tensorrt", "portable"]

# By the names in `device.runtime.executors.table`.
LAUNCH_OF: Mapping[ExecutorName, Launch] = {
    "cuda": "graph",  # `device/runtime/executors/cuda.py` captures a segment into one graph
    "tensorrt": "each",  # enqueueV3, as TensorRT's runtime and trtexec without --useCudaGraph do
    "portable": "each",
}
PLANNED: ExecutorName = "cuda"  # what an engine's GPU segments run with

# Output tiles (rows, maps) of TensorRT's kernels on these chips, from names in engine profiles
# ("tile128x64x64"), and one for few rows.
TILES = ((256, 128), (128, 128), (128, 64), (64, 64), (64, 32), (16, 128))
# Split-K factors.
SPLITS = (1, 2, 4, 8)
TILINGS = tuple((tile, split) for tile in TILES for split in SPLITS)
# Channels per tensor core instruction: depth is padded to them.
DEPTH_UNIT: dict[Precision, int] = {"fp32": 4, "fp16": 8, "int8": 16}
IMAGE_CHANNELS = 4  # first layers read images of up to 4 channels without further padding
# FP16 rate of tensor cores relative to the FP32 rate of CUDA cores, on Volta and Ampere
# (configs/profiles).
TENSOR_CORE_RATIO = 8.0
NO_GEMM = (0.0,) * 8
NARROWEST = min(maps for _, maps in TILES)
# Activations with an exponential or a division (special-function units).
CURVES = frozenset({"Sigmoid", "Tanh", "Softplus", "Mish", "Exp", "Erf", "Gelu", "Elu", "Log"})
# A sigmoid is one special-function operation where the hardware has tanh, else an exponential and a
# reciprocal: "tanh.approx requires sm_75 or higher" (PTX ISA, section tanh).
TANH_SM = 75
CURVE_STEPS = 2.0
FIRST_SM_OF_A78AE = 87  # CPUs of modules with older GPUs: Carmel, Denver, Cortex-A57
SEPARABLE = 4  # groups of fewer input channels run on the CUDA cores


@dataclass(frozen=True)
class GpuWork:
    """Kernels as arrays, one element each.

    `matrix` and `separable` are 1 for GEMMs on tensor cores and on CUDA cores. A GEMM has `groups`
    times `rows` x `maps` outputs over `depth`; `curved` is 1 if the epilogue uses the
    special-function units. `launches`: 0 for views.
    """

    matrix: Array
    separable: Array
    rows: Array
    maps: Array
    depth: Array
    groups: Array
    macs: Array
    curved: Array
    bytes: Array
    launches: Array


@dataclass(frozen=True)
class GpuRates:
    """Rates of a GPU; scalars, or one element per kernel."""

    sms: Quantity
    mhz: Quantity
    matrix_rate: Quantity
    cuda_rate: Quantity
    bandwidth: Quantity  # bytes per microsecond
    reuse: Quantity  # multiply-accumulates per loaded operand needed for the full rate
    fp32: Quantity  # 1 for FP32
    graph: Quantity  # 1 in a CUDA graph
    curve_steps: Quantity  # special-function operations of a sigmoid, those of Ampere being 1

    @staticmethod
    def of(board: Hardware, precision: Precision, launch: Launch) -> "GpuRates":
        """Return the rates of a board at a precision."""
        return GpuRates(
            sms=board.sms,
            mhz=board.gpu_mhz,
            matrix_rate=board.matrix_rate(precision),
            cuda_rate=board.cuda_rate,
            bandwidth=board.bandwidth,
            reuse=_needed_reuse(board, precision),
            fp32=float(precision == "fp32"),
            graph=float(launch == "graph"),
            curve_steps=1.0 if board.sm >= TANH_SM else CURVE_STEPS,
        )


@dataclass(frozen=True)
class GpuParameters:
    """The constants of GPU times as numbers."""

    array_efficiency: float
    fp32_share: float
    separable_efficiency: float
    output_cycles: float
    curve_cycles: float
    bandwidth_share: float
    kernel_cycles: float
    graph_share: float
    launch_kilocycles: float
    call_kilocycles: float


@dataclass(frozen=True)
class Times:
    """Microseconds of each kernel: compute, memory, and overhead of an empty kernel."""

    compute: Array
    memory: Array
    overhead: Array

    @property
    def total(self) -> Array:
        """max(compute, memory) + overhead."""
        return np.maximum(self.compute, self.memory) + self.overhead


class TimeShares(NamedTuple):
    """What the time of a network consists of, as shares that overlap.

    `overhead`: empty kernels; `memory`: kernels bound by it; `cuda_cores`: depthwise convolutions;
    `plain`: kernels without an activation with an exponential.
    """

    overhead: float
    memory: float
    cuda_cores: float
    plain: float


def gpu_work(
    kernels: Sequence[FusedKernel], precision: Precision, *, int4: bool = False
) -> GpuWork:
    """Return the work of kernels at a precision; "free" kernels have none.

    `int4`: as for `moved_bytes`.
    """
    rows = [_work_of(kernel, precision, int4) for kernel in kernels]
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(fields(GpuWork))).T
    return GpuWork(*columns)


def _work_of(kernel: FusedKernel, precision: Precision, int4: bool) -> tuple[float, ...]:
    view = kernel.head
    moved = float(sum(moved_bytes(kernel, precision, int4=int4)))
    launched = (moved, float(kernel.launches if kernel.kind != "free" else 0))
    if kernel.kind != "matrix":
        return (*NO_GEMM, *launched)
    output_shape = known_shape(view.outputs[0].shape) if view.outputs else None
    data = view.input(0)
    input_shape = None if data is None else known_shape(data.shape)
    if output_shape is None or input_shape is None:
        return (*NO_GEMM, *launched)
    macs = float(view.macs or 0)
    curved = float(any(node.op in CURVES for node in kernel.nodes))
    if view.op in ("Gemm", "MatMul"):
        return (1, 0, *_matrix_sizes(view, output_shape, input_shape), macs, curved, *launched)
    if min(len(output_shape), len(input_shape)) < 2:  # a false note of an exporter
        return (*NO_GEMM, *launched)
    groups = view.integer("group", 1)
    per_group = input_shape[1] // groups
    maps = output_shape[1] // groups
    positions = math.prod(output_shape) / max(1, output_shape[1])
    taps = macs / max(1.0, positions * output_shape[1] * per_group)
    separable = groups > 1 and per_group < SEPARABLE
    unit = IMAGE_CHANNELS if per_group <= IMAGE_CHANNELS else DEPTH_UNIT[precision]
    packed = 1 if separable else _packed(groups, maps)
    depth = taps * -(-packed * per_group // unit) * unit
    sizes = (positions, packed * maps, depth, groups / packed)
    return (float(not separable), float(separable), *sizes, macs, curved, *launched)


def _packed(groups: int, maps: int) -> int:
    """Return the groups that a tile computes together, as a product with zeros between them.

    A tile is no narrower than `NARROWEST` maps; of one narrow group it would hold mostly padding
    (CUTLASS: `GroupMode::kMultipleGroup`, "one CTA calculates multiple groups").
    """
    packed = 1
    while 2 * packed * maps <= NARROWEST and groups % (2 * packed) == 0:
        packed *= 2
    return packed


def _matrix_sizes(
    view: NodeView, output_shape: tuple[int, ...], input_shape: tuple[int, ...]
) -> tuple[float, float, float, float]:
    """Return rows, maps, depth and groups of a GEMM."""
    weight = view.input(1)
    batched = view.op == "MatMul" and weight is not None and not weight.constant
    groups = math.prod(output_shape[:-2]) if batched else 1
    transposed = view.op == "Gemm" and view.integer("transA", 0) == 1
    return (
        math.prod(output_shape[:-1]) / groups,
        output_shape[-1],
        input_shape[0 if transposed else -1],
        groups,
    )


def gpu_times(
    work: GpuWork, rates: GpuRates, parameters: GpuParameters, costs: Array | None = None
) -> Times:
    """Return the times of kernels in isolation; `costs`: see `tile_costs`."""
    costs = tile_costs(work, rates) if costs is None else costs
    efficiency = parameters.array_efficiency * np.where(rates.fp32, parameters.fp32_share, 1.0)
    depth = work.depth / (rates.matrix_rate * efficiency)
    per_output = (
        parameters.output_cycles + work.curved * rates.curve_steps * parameters.curve_cycles
    )
    cycles = [
        outputs * (depth / split + per_output)
        for outputs, (_, split) in zip(costs, TILINGS, strict=True)
    ]
    matrix = work.matrix * np.min(cycles, axis=0)
    outputs = work.rows * work.maps * work.groups
    separable = work.macs / (rates.cuda_rate * parameters.separable_efficiency)
    separable = work.separable * (separable + outputs * per_output) / rates.sms
    share = np.where(rates.graph, parameters.graph_share, 1.0)
    return Times(
        compute=(matrix + separable) / rates.mhz,
        memory=work.bytes / (rates.bandwidth * parameters.bandwidth_share),
        overhead=work.launches * parameters.kernel_cycles * share / rates.mhz,
    )


def time_parts(work: GpuWork, times: Times) -> Array:
    """Return (5 x kernels): microseconds in each of `TimeShares`, and in all."""
    total = times.total
    return np.array(
        [
            times.overhead,
            np.where(times.memory > times.compute, times.memory, 0.0),
            work.separable * total,
            (1 - work.curved) * total,
            total,
        ]
    )


def time_shares(parts: Array) -> TimeShares:
    """Return the shares of a network; `parts`: sums of `time_parts`."""
    return TimeShares(*(float(share) for share in parts[:-1] / max(parts[-1], 1e-9)))


def launch_us(parameters: GpuParameters, board: Hardware) -> float:
    """Return the time in which the CPU of a board launches a kernel.

    From Cortex-A78AE on, launches were the bound of no published row. 0: not a bound, not known.
    """
    if board.sm >= FIRST_SM_OF_A78AE:
        return 0.0
    return parameters.launch_kilocycles * 1e3 * board.cpu_us


def call_us(parameters: GpuParameters, board: Hardware) -> float:
    """Return what a framework adds to a call of an engine, 0 where the clock is not known."""
    return parameters.call_kilocycles * 1e3 * board.cpu_us


def tile_costs(work: GpuWork, rates: GpuRates) -> Array:
    """Return (tilings x kernels): outputs of the busiest SM, weighted by the missing operand reuse
    of the tile.
    """
    waves = [
        np.ceil(
            np.ceil(work.rows / rows) * np.ceil(work.maps / maps) * work.groups * split / rates.sms
        )
        * (rows * maps)
        * np.maximum(1.0, rates.reuse / _reuse((rows, maps)))
        for (rows, maps), split in TILINGS
    ]
    return np.array(waves)


def _needed_reuse(board: Hardware, precision: Precision) -> float:
    """Return the operand reuse at which an SM is compute-bound.

    With tensor cores only the largest tile reaches it. CUDA cores are slower while operands load as
    fast, so smaller tiles suffice.
    """
    ratio = board.matrix_rate(precision) / board.cuda_rate * WIDTH[precision] / WIDTH["fp16"]
    return _reuse(TILES[0]) * min(1.0, ratio / TENSOR_CORE_RATIO)


def _reuse(tile: tuple[int, int]) -> float:
    """Return the multiply-accumulates of a tile per loaded operand."""
    return tile[0] * tile[1] / (tile[0] + tile[1])
