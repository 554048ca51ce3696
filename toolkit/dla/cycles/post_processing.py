"""Units after the MAC array: output stage (SDP), pooling (PDP) and normalisation (CDP).

Each is a pipeline with a rate in elements per clock. Channels are padded to the array or the memory
atom, and padded channels take time too.
"""

import math

from toolkit.dla.cycles.configurations import BYTES_PER_ELEMENT, Config, Precision
from toolkit.dla.cycles.layers import ConvLayer, LayerError, Pool, Stage

# Bytes of the line buffer of partial sums, and the rows in it by the number of overlapping windows
# (nvdla/sw, umd/core/src/compiler/engine-ast/PDPNode.cpp, calculateMaxWidth).
POOL_BUFFER_BYTES = 7 * 1024
POOL_ROWS_KEPT = (1, 1, 2, 4, 4, 8, 8, 8, 8)
POOL_SUM_BITS: dict[Precision, int] = {"int8": 14, "fp16": 28}


def padded_channels(channels: int, config: Config, precision: Precision) -> int:
    """Return the channels in memory: whole atoms (32 bytes on nv_full)."""
    unit = config.memory_atom_bytes // BYTES_PER_ELEMENT[precision]
    return -(-channels // unit) * unit


def tensor_bytes(
    channels: int, height: int, width: int, config: Config, precision: Precision
) -> int:
    """Return the bytes of a feature tensor of one frame in memory."""
    size = padded_channels(channels, config, precision) * BYTES_PER_ELEMENT[precision]
    return size * height * width


def sdp_cycles(elements: float, stage: Stage, config: Config) -> float:
    """Return the clocks of `elements` in the first (`x`) or last (`y`) unit.

    Raises LayerError: this DLA has no last unit, so no tables and no element-wise work there.
    """
    rate = config.sdp_x if stage == "x" else config.sdp_y
    if not rate:
        raise LayerError(
            f"{config.name} has no last unit in its output stage, which tables and element-wise "
            "layers need; compute this layer elsewhere."
        )
    return elements / rate


def conv_output_cycles(layer: ConvLayer, rows: int, config: Config, *, flying: bool) -> float:
    """Return the clocks of `rows` output rows of a convolution in the units after the array.

    All units run concurrently, so the slowest counts. `flying`: pooling runs on the fly.
    """
    positions = rows * layer.out_width
    at_once = config.kernels_at_once(layer.precision)
    padded = -(-layer.kernels // at_once) * at_once
    slowest = sdp_cycles(positions * padded, "x", config)
    if layer.eltwise == "y" or layer.table:
        slowest = max(slowest, sdp_cycles(positions * layer.kernels, "y", config))
    if flying:
        slowest = max(slowest, positions * padded / pdp_rate(config, layer.precision))
    return slowest


def pdp_rate(config: Config, precision: Precision) -> float:
    """Return the input elements of pooling per clock: two INT8 share one FP16 lane."""
    return config.pdp / BYTES_PER_ELEMENT[precision]


def cdp_rate(config: Config, precision: Precision) -> float:
    """Return the elements of response normalisation per clock, as for pooling."""
    return config.cdp / BYTES_PER_ELEMENT[precision]


def pool_columns(pool: Pool, config: Config) -> int:
    """Return the widest output of one pooling pass; a wider one is split into columns."""
    overlaps = min(math.ceil(pool.kernel[0] / pool.stride[0]), len(POOL_ROWS_KEPT) - 1)
    bits = POOL_ROWS_KEPT[overlaps] * POOL_SUM_BITS[pool.precision]
    at_once = config.kernels_at_once(pool.precision)
    return max(1, POOL_BUFFER_BYTES * 8 // (bits * at_once))


def pool_parts(pool: Pool, config: Config) -> int:
    """Return the number of hardware layers of a pooling that is split along its width."""
    return -(-pool.out_width // pool_columns(pool, config))


def pool_in_width(pool: Pool, config: Config) -> int:
    """Return the input columns read, with those read twice at splits."""
    overlap = max(0, pool.kernel[1] - pool.stride[1])
    return pool.width + (pool_parts(pool, config) - 1) * overlap
