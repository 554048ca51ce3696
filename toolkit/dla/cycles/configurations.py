"""Hardware parameters of each DLA, known or inferred: one row per DLA.

Vary a row with `dataclasses.replace(ORIN, atomic_k=32)`. `sources.py` gives the source and
certainty of every field of every row.
"""

from dataclasses import dataclass, replace
from typing import Literal

Precision = Literal["int8", "fp16"]

BYTES_PER_ELEMENT: dict[Precision, int] = {"int8": 1, "fp16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One DLA core. Rates are per clock of the core; sizes are in bytes.

    MAC array: `atomic_c` input channels times `atomic_k` INT8 kernels at once (`atomic_k_fp16` in
    FP16, 0 if it has none). Sequence: a direct convolution runs in stripes of `stripe` to
    `2 * stripe` output positions (`long_stripes`: of `2 * stripe` while at least four times
    `stripe` remain), an image convolution in stripes of `image_stripe`; a package lasts at least
    `package_minimum` clocks, and weights leave the buffer at `weight_bytes`; fully connected layers
    take up to `max_batch` frames together. Buffer: `banks` of `bank_bytes` in entries of
    `entry_bytes`; split layers give weights at most `split_weight_banks`. Output: `sdp_x` and
    `sdp_y` elements (0: no such unit), `pdp` and `cdp` INT8 elements. Memory: `port_bytes`,
    features in atoms of `memory_atom_bytes`. Units:
    `winograd`, `image_post_extension` (rows of an image joined).

    Free parameters, for fitting to a compiler and a board: `uses_winograd` (for 3x3 convolutions),
    `depthwise_channels` (channels per step of a depthwise unit, 0: no such unit), `mac_efficiency`
    and `memory_efficiency` (scale rates, (0, 1]), `overlap` (share of the input's fill that is
    hidden by other work, [0, 1]) and `layer_overhead` (clocks per hardware layer).
    """

    name: str
    generation: Literal["v1", "v2"]
    atomic_c: int
    atomic_k: int
    atomic_k_fp16: int
    memory_atom_bytes: int
    stripe: int
    long_stripes: bool
    image_stripe: int
    package_minimum: int
    weight_bytes: int
    max_batch: int
    banks: int
    bank_bytes: int
    entry_bytes: int
    split_weight_banks: int
    sdp_x: int
    sdp_y: int
    pdp: int
    cdp: int
    port_bytes: int
    winograd: bool
    image_post_extension: bool
    uses_winograd: bool = False
    depthwise_channels: int = 0
    mac_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    overlap: float = 1.0
    layer_overhead: int = 0

    def kernels_at_once(self, precision: Precision) -> int:
        """Return the kernels of one group (FP16: half of INT8 on nv_full, 0 if it has none)."""
        return self.atomic_k if precision == "int8" else self.atomic_k_fp16


KIB = 1024
NV_FULL = Config(
    name="nv_full",
    generation="v1",
    atomic_c=64,
    atomic_k=32,
    atomic_k_fp16=16,
    memory_atom_bytes=32,
    stripe=16,
    long_stripes=False,
    image_stripe=64,
    package_minimum=10,
    weight_bytes=128,
    max_batch=32,
    banks=16,
    bank_bytes=32 * KIB,
    entry_bytes=128,
    split_weight_banks=8,
    sdp_x=16,
    sdp_y=4,
    pdp=8,
    cdp=8,
    port_bytes=64,
    winograd=True,
    image_post_extension=True,
    layer_overhead=70,
)
NV_LARGE = replace(
    NV_FULL,
    name="nv_large",
    atomic_k_fp16=0,
    stripe=32,
    long_stripes=True,
    package_minimum=32,
    weight_bytes=64,
    max_batch=1,
    entry_bytes=64,
    port_bytes=32,
    winograd=False,
)
NV_MEDIUM_1024_FULL = replace(
    NV_LARGE,
    name="nv_medium_1024_full",
    atomic_c=32,
    weight_bytes=32,
    banks=32,
    bank_bytes=16 * KIB,
    entry_bytes=32,
    sdp_x=8,
    sdp_y=2,
    pdp=4,
    cdp=4,
)
NV_MEDIUM_512 = replace(
    NV_MEDIUM_1024_FULL,
    name="nv_medium_512",
    atomic_k=16,
    memory_atom_bytes=16,
    stripe=16,
    image_stripe=32,
    package_minimum=16,
    sdp_x=4,
    sdp_y=0,
    pdp=2,
    cdp=2,
    port_bytes=16,
)
NV_SMALL_256 = replace(
    NV_MEDIUM_512,
    name="nv_small_256",
    atomic_k=8,
    memory_atom_bytes=8,
    stripe=8,
    package_minimum=8,
    bank_bytes=4 * KIB,
    sdp_x=1,
    pdp=1,
    cdp=1,
    port_bytes=8,
)
NV_SMALL_256_FULL = replace(NV_SMALL_256, name="nv_small_256_full", sdp_x=2, sdp_y=1)
NV_SMALL = replace(
    NV_SMALL_256, name="nv_small", atomic_c=8, image_stripe=16, weight_bytes=8, entry_bytes=8
)
XAVIER = replace(NV_FULL, name="xavier")
ORIN = replace(
    NV_FULL,
    name="orin",
    generation="v2",
    atomic_c=128,
    atomic_k=64,
    atomic_k_fp16=4,
    stripe=32,
    weight_bytes=256,
    max_batch=1,
    bank_bytes=64 * KIB,
    sdp_x=64,
    sdp_y=16,
    pdp=32,
    cdp=32,
    port_bytes=128,
)
CONFIGURATIONS: dict[str, Config] = {
    row.name: row
    for row in (
        NV_FULL,
        NV_LARGE,
        NV_MEDIUM_1024_FULL,
        NV_MEDIUM_512,
        NV_SMALL_256,
        NV_SMALL_256_FULL,
        NV_SMALL,
        XAVIER,
        ORIN,
    )
}
