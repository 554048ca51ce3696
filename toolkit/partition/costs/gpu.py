"""The time of GPU kernels: a roofline over tiles, waves of SMs, bytes and launches.

A product of `rows` x `maps` outputs over `depth` is computed in tiles of outputs, one an SM at a
time; a tile reuses operands the better, the larger it is, and the last wave may leave SMs idle. The
largest tile reaches the fitted share of the peak; a smaller one as much less as its reuse is less.
Every kernel also needs the clocks of an empty one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from device.engine.manifest import Precision
from toolkit.graph.node_view import NodeView
from toolkit.partition.costs.bytes import WIDTH, moved_bytes
from toolkit.partition.costs.fusion import Kernel
from toolkit.partition.costs.hardware import Hardware
from toolkit.partition.costs.shapes import known, product

Array = npt.NDArray[np.float64]
Quantity = Array | float

# Tiles of outputs (rows, maps) that TensorRT's kernels of these chips take, as their names in
# engine profiles say ("tile128x64x64"), and one for few rows.
TILES = ((256, 128), (128, 128), (128, 64), (64, 64), (64, 32), (16, 128))
# Into how many parts the depth may be cut, so that few outputs keep many SMs busy ("split-K").
SPLITS = (1, 2, 4, 8)
WAYS = tuple((tile, split) for tile in TILES for split in SPLITS)
# Channels that tensor cores take at once: depth is padded to them.
DEPTH_UNIT: dict[Precision, int] = {"fp32": 4, "fp16": 8, "int8": 16}
PICTURE_CHANNELS = 4  # first layers read pictures of up to 4 channels without further padding
# FP16 products of an SM's tensor cores to FP32 products of its CUDA cores, on Volta and Ampere
# (configs/profiles).
TENSOR_TIMES = 8.0
NO_PRODUCT = (0.0,) * 8
# Activations with an exponential or a division.
CURVES = frozenset({"Sigmoid", "Tanh", "Softplus", "Mish", "Exp", "Erf", "Gelu", "Elu", "Log"})
SEPARABLE = 4  # groups of fewer input channels run on the CUDA cores


@dataclass(frozen=True)
class GpuWork:
    """Kernels as arrays, one element each.

    `matrix` and `separable` are 1 for products on tensor and on CUDA cores. A product makes
    `groups` times `rows` x `maps` outputs over `depth`; `curved` is 1 where they pass through a
    function that the special-function units compute.
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


@dataclass(frozen=True)
class GpuRates:
    """Where kernels run; each may be a number or an element for each kernel."""

    sms: Quantity
    mhz: Quantity
    matrix_rate: Quantity
    cuda_rate: Quantity
    bandwidth: Quantity  # bytes a microsecond
    reuse: Quantity  # products that each loaded operand must serve for the full rate
    fp32: Quantity  # 1 where products are FP32
    graph: Quantity  # 1 where a CUDA graph launches

    @staticmethod
    def of(board: Hardware, precision: Precision, *, cuda_graph: bool = False) -> "GpuRates":
        """Return the rates of a board at a precision."""
        return GpuRates(
            sms=board.sms,
            mhz=board.gpu_mhz,
            matrix_rate=board.matrix_rate(precision),
            cuda_rate=board.cuda_rate,
            bandwidth=board.bandwidth,
            reuse=_needed_reuse(board, precision),
            fp32=float(precision == "fp32"),
            graph=float(cuda_graph),
        )


@dataclass(frozen=True)
class GpuParameters:
    """The constants that the times rest on, as numbers."""

    array_efficiency: float
    fp32_share: float
    separable_efficiency: float
    output_cycles: float
    curve_cycles: float
    bandwidth_share: float
    kernel_cycles: float
    graph_share: float


@dataclass(frozen=True)
class Times:
    """Microseconds of each kernel: computing, moving bytes, and what an empty one takes."""

    compute: Array
    memory: Array
    overhead: Array

    @property
    def total(self) -> Array:
        """Computing and moving overlap; the overhead comes on top."""
        return np.maximum(self.compute, self.memory) + self.overhead


def gpu_work(kernels: Sequence[Kernel], precision: Precision) -> GpuWork:
    """Return the work of kernels at a precision; kernels that only rename do none."""
    rows = [_work_of(kernel, precision) for kernel in kernels]
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(fields(GpuWork))).T
    return GpuWork(*columns)


def _work_of(kernel: Kernel, precision: Precision) -> tuple[float, ...]:
    view = kernel.head
    moved = float(sum(moved_bytes(kernel, precision)))
    if kernel.kind != "matrix":
        return (*NO_PRODUCT, moved)
    made = known(view.outputs[0].shape) if view.outputs else None
    data = view.input(0)
    taken = None if data is None else known(data.shape)
    if made is None or taken is None:
        return (*NO_PRODUCT, moved)
    macs = float(view.macs or 0)
    curved = float(any(node.op in CURVES for node in kernel.nodes))
    if view.op in ("Gemm", "MatMul"):
        return (1, 0, *_matrix_sizes(view, made, taken), macs, curved, moved)
    groups = view.integer("group", 1)
    per_group = taken[1] // groups
    maps = made[1] // groups
    positions = product(made) / max(1, made[1])
    taps = macs / max(1.0, positions * made[1] * per_group)
    separable = groups > 1 and per_group < SEPARABLE
    unit = PICTURE_CHANNELS if per_group <= PICTURE_CHANNELS else DEPTH_UNIT[precision]
    depth = taps * -(-per_group // unit) * unit
    sizes = (positions, maps, depth, groups)
    return (float(not separable), float(separable), *sizes, macs, curved, moved)


def _matrix_sizes(
    view: NodeView, made: tuple[int, ...], taken: tuple[int, ...]
) -> tuple[float, float, float, float]:
    """Return rows, maps, depth and groups of a product of matrices."""
    weight = view.input(1)
    stacked = view.op == "MatMul" and weight is not None and not weight.constant
    groups = product(made[:-2]) if stacked else 1
    across = view.op == "Gemm" and view.integer("transA", 0) == 1
    return product(made[:-1]) / groups, made[-1], taken[0 if across else -1], groups


def gpu_times(
    work: GpuWork, rates: GpuRates, given: GpuParameters, ways: Array | None = None
) -> Times:
    """Return the times of kernels, none of which waits for another; `ways`: see `tilings`."""
    ways = tilings(work, rates) if ways is None else ways
    efficiency = given.array_efficiency * np.where(rates.fp32, given.fp32_share, 1.0)
    depth = work.depth / (rates.matrix_rate * efficiency)
    per_output = given.output_cycles + work.curved * given.curve_cycles
    each = [
        outputs * (depth / split + per_output)
        for outputs, (_, split) in zip(ways, WAYS, strict=True)
    ]
    matrix = work.matrix * np.min(each, axis=0)
    outputs = work.rows * work.maps * work.groups
    separable = work.macs / (rates.cuda_rate * given.separable_efficiency)
    separable = work.separable * (separable + outputs * per_output) / rates.sms
    share = np.where(rates.graph, given.graph_share, 1.0)
    return Times(
        compute=(matrix + separable) / rates.mhz,
        memory=work.bytes / (rates.bandwidth * given.bandwidth_share),
        overhead=np.ones_like(work.bytes) * given.kernel_cycles * share / rates.mhz,
    )


def tilings(work: GpuWork, rates: GpuRates) -> Array:
    """Return what the busiest SM makes in each of `WAYS` (ways x kernels): outputs times waves,
    weighted by how much less than needed its tile reuses operands.
    """
    waves = [
        np.ceil(
            np.ceil(work.rows / rows) * np.ceil(work.maps / maps) * work.groups * split / rates.sms
        )
        * (rows * maps)
        * np.maximum(1.0, rates.reuse / _reuse((rows, maps)))
        for (rows, maps), split in WAYS
    ]
    return np.array(waves)


def _needed_reuse(board: Hardware, precision: Precision) -> float:
    """Return the reuse at which an SM's products no longer wait for operands.

    With tensor cores only the largest tile has enough of it. Without them, products are slower by
    their rate while operands come as fast, so that smaller tiles do.
    """
    times = board.matrix_rate(precision) / board.cuda_rate * WIDTH[precision] / WIDTH["fp16"]
    return _reuse(TILES[0]) * min(1.0, times / TENSOR_TIMES)


def _reuse(tile: tuple[int, int]) -> float:
    """Return the products that a tile makes of each operand that it loads."""
    return tile[0] * tile[1] / (tile[0] + tile[1])
