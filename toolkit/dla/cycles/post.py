"""What follows the MAC array: the output stage (SDP), pooling (PDP) and normalisation (CDP).

Each is a pipeline of its own that takes so many elements a clock. Channels are padded to what the
array or the memory atom holds, and padded ones take their time like real ones.
"""

import math

from toolkit.dla.cycles.configurations import BYTES_PER_ELEMENT, Config, Precision
from toolkit.dla.cycles.layers import ConvLayer, LayerError, Pool, Stage

# Bytes that a row of partly summed windows may take, and the rows kept for windows that overlap so
# often (nvdla/sw, umd/core/src/compiler/engine-ast/PDPNode.cpp, calculateMaxWidth).
POOL_BUFFER_BYTES = 7 * 1024
POOL_ROWS_KEPT = (1, 1, 2, 4, 4, 8, 8, 8, 8)
POOL_SUM_BITS: dict[Precision, int] = {"int8": 14, "fp16": 28}


def padded_channels(channels: int, config: Config, precision: Precision) -> int:
    """Return the channels as they lie in memory: whole atoms (32 bytes on nv_full)."""
    unit = config.memory_atom_bytes // BYTES_PER_ELEMENT[precision]
    return -(-channels // unit) * unit


def tensor_bytes(
    channels: int, height: int, width: int, config: Config, precision: Precision
) -> int:
    """Return the bytes of a feature tensor of one frame in memory."""
    size = padded_channels(channels, config, precision) * BYTES_PER_ELEMENT[precision]
    return size * height * width


def sdp_cycles(elements: float, stage: Stage, config: Config) -> float:
    """Return the clocks of so many elements in the first (`x`) or last (`y`) unit.

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
    """Return the clocks that `rows` output rows of a convolution take behind the array.

    All units work at once, so the slowest counts. `flying`: the pooling follows without memory.
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
    """Return the input elements that pooling takes a clock: two INT8 share one FP16 lane."""
    return config.pdp / BYTES_PER_ELEMENT[precision]


def cdp_rate(config: Config, precision: Precision) -> float:
    """Return the elements that response normalisation takes a clock, as for pooling."""
    return config.cdp / BYTES_PER_ELEMENT[precision]


def pool_columns(pool: Pool, config: Config) -> int:
    """Return the widest output that pooling computes in one go; wider is cut into columns."""
    overlaps = min(math.ceil(pool.kernel[0] / pool.stride[0]), len(POOL_ROWS_KEPT) - 1)
    bits = POOL_ROWS_KEPT[overlaps] * POOL_SUM_BITS[pool.precision]
    at_once = config.kernels_at_once(pool.precision)
    return max(1, POOL_BUFFER_BYTES * 8 // (bits * at_once))


def pool_parts(pool: Pool, config: Config) -> int:
    """Return into how many hardware layers a pooling is cut along its width."""
    return -(-pool.out_width // pool_columns(pool, config))


def pool_in_width(pool: Pool, config: Config) -> int:
    """Return the input columns read in all, those read twice at cuts included."""
    overlap = max(0, pool.kernel[1] - pool.stride[1])
    return pool.width + (pool_parts(pool, config) - 1) * overlap
