"""How many warps of a kernel an SM holds at once: theoretical occupancy, from the cubin's figures.

    warps of a block    = ceil(threads / 32)
    blocks by warps     = threads of the SM / 32 // warps of a block
    blocks by registers = floor(registers of a partition / registers of a warp) * partitions
                          // warps of a block
    blocks by shared    = shared memory of the SM // portions of (that of a block + reserved)
    occupancy           = min(all of these, blocks of the SM) * warps of a block / warps of the SM

Registers go to a warp in portions of 256, shared memory to a block in portions of 128 bytes (256
before sm_80). The same arithmetic as NVIDIA's cuda_occupancy.h.
"""

from dataclasses import dataclass
from typing import Literal

from toolkit.gpu.target import WARP, sm_limits

Limit = Literal["warps", "registers", "shared memory", "blocks"]

_REGISTER_PORTION = 256  # registers of a warp are taken in portions of this size
_PARTITIONS = 4  # of an SM, each with a quarter of the registers, from sm_50 on


@dataclass(frozen=True, slots=True)
class Occupancy:
    """`warps` of `most_warps` at once on an SM, in `blocks`, and what bounds them."""

    blocks: int
    warps: int
    most_warps: int
    limit: Limit

    @property
    def share(self) -> float:
        """The part of the warps that an SM can hold, 0 to 1."""
        return self.warps / self.most_warps


def occupancy(sm: int, *, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Return the occupancy of a kernel whose blocks take these resources.

    `registers` of one thread; `shared_bytes` of a block. Raises CompileError: an unknown SM.
    """
    limits = sm_limits(sm)
    warps = -(-threads // WARP)
    of_a_warp = -(-max(registers, 1) * WARP // _REGISTER_PORTION) * _REGISTER_PORTION
    by_registers = limits.registers // _PARTITIONS // of_a_warp * _PARTITIONS // warps
    portion = 128 if sm >= 80 else 256
    shared = -(-(shared_bytes + limits.reserved_bytes) // portion) * portion
    bounds: dict[Limit, int] = {
        "warps": limits.threads // WARP // warps,
        "registers": by_registers,
        "shared memory": limits.shared_bytes // shared if shared else limits.blocks,
        "blocks": limits.blocks,
    }
    limit = min(bounds, key=lambda name: bounds[name])
    blocks = bounds[limit]
    return Occupancy(blocks, blocks * warps, limits.threads // WARP, limit)
