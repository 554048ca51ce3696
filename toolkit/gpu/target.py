"""What the compiler must know of a GPU, by its SM version."""

from dataclasses import dataclass

from device.profile import Gpu, Memory
from toolkit.gpu.errors import CompileError

WARP = 32  # threads


@dataclass(frozen=True, slots=True)
class SmLimits:
    """What an SM holds: threads, blocks, registers, shared memory; of a block, the most it takes.

    `reserved_bytes` of shared memory go to the system for each block.
    """

    sm: int
    threads: int
    blocks: int
    shared_bytes: int
    block_shared_bytes: int
    reserved_bytes: int = 0
    registers: int = 65536


def _row(sm: int, threads: int, blocks: int, shared: int, block_shared: int) -> SmLimits:
    reserved = 1024 if sm >= 80 else 0
    return SmLimits(sm, threads, blocks, shared * 1024, block_shared * 1024, reserved)


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": resident threads
# and blocks of an SM, its shared memory and the most of it for one block, both in KiB.
_LIMITS = {
    row.sm: row
    for row in (
        #    sm   threads blocks shared block
        _row(53, 2048, 32, 64, 48),
        _row(62, 2048, 32, 64, 48),
        _row(72, 2048, 32, 96, 96),
        _row(75, 1024, 16, 64, 64),
        _row(80, 2048, 32, 164, 163),
        _row(86, 1536, 16, 100, 99),
        _row(87, 1536, 16, 164, 163),
        _row(89, 1536, 24, 100, 99),
        _row(90, 2048, 32, 228, 227),
        _row(100, 2048, 32, 228, 227),
        _row(110, 1536, 24, 228, 227),
        _row(120, 1536, 24, 100, 99),
    )
}


def sm_limits(sm: int) -> SmLimits:
    """Return what an SM of this version holds; raises CompileError for an unknown one."""
    if sm not in _LIMITS:
        known = ", ".join(map(str, _LIMITS))
        raise CompileError(f"sm_{sm} is not known; kernels are compiled for {known}")
    return _LIMITS[sm]


_FIRST_SM_WITH_ASYNC_COPY = 80  # from global to shared memory (PTX ISA, cp.async)
# From here on products are compiled for tensor cores. For sm_72 and sm_75 Triton's tiles of 64 x 64
# spilled 256 to 11896 bytes a thread (ResNet-18 in FP16, Triton 3.9).
_FIRST_SM_WITH_TRITON_MMA = 80
# Products of FP16 that the tensor cores of one SM make in a cycle, dense; INT8 makes twice as many,
# TF32 half. NVIDIA's architecture whitepapers (A100, GA102, AGX Orin, AD102, H100, Blackwell).
_PRODUCTS_PER_CYCLE: dict[int, int] = {
    80: 1024,
    86: 512,
    87: 1024,
    89: 512,
    90: 2048,
    100: 4096,
    110: 4096,
    120: 512,
}
_FIRST_SM_WITH_TANH = 75  # PTX ISA, tanh.approx
_FIRST_SM_WITH_TF32 = 80  # tensor cores round FP32 operands to TF32


# Bytes a cycle between memory and one SM of an H200 at 1980 MHz: 4800 GB/s for 132 SMs.
_H200_BYTES_PER_CYCLE = 4800e3 / (132 * 1980)


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """`sm` 87 is compute capability 8.7; `sm_count` the processors that a launch should fill.

    `exhaustive`: carry every tactic, not the best few by estimate. `memory_bytes`: peak bytes a
    cycle between memory and one SM. `shares_memory`: with the CPU, as on a Jetson.
    """

    sm: int
    sm_count: int
    exhaustive: bool = False
    memory_bytes: float = _H200_BYTES_PER_CYCLE
    shares_memory: bool = False

    @classmethod
    def of(cls, gpu: Gpu, memory: Memory, *, exhaustive: bool = False) -> "GpuTarget":
        """Return the GPU of a profile, at its highest clock."""
        count = gpu.sm_count.value
        memory_bytes = memory.bandwidth_gbps.value * 1e3 / (count * gpu.max_mhz.value)
        return cls(gpu.sm, count, exhaustive, memory_bytes, memory.kind.startswith("LPDDR"))

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one block may take."""
        return sm_limits(self.sm).block_shared_bytes

    @property
    def copies_while_computing(self) -> bool:
        """Whether loops over blocks gain from more than two stages."""
        return self.sm >= _FIRST_SM_WITH_ASYNC_COPY

    @property
    def has_matrix_units(self) -> bool:
        """Whether products of FP16 run on tensor cores; else each thread multiplies numbers."""
        return self.sm >= _FIRST_SM_WITH_TRITON_MMA

    @property
    def has_tanh(self) -> bool:
        """Whether a hyperbolic tangent of FP16's digits is one instruction."""
        return self.sm >= _FIRST_SM_WITH_TANH

    @property
    def has_wgmma(self) -> bool:
        """Whether tensor cores read operands from shared memory (wgmma, of sm_90 alone)."""
        return self.sm == 90

    @property
    def has_mma_sync(self) -> bool:
        """Whether each warp reads operands into registers and multiplies alone (mma.sync)."""
        return 80 <= self.sm < 90 or self.sm == 120

    def products_per_cycle(self, item_bytes: int) -> float:
        """Products that one SM makes in a cycle at most, of operands of 1, 2 or 4 bytes.

        FP32 takes three products of TF32. Without matrix units a thread makes one at a time.
        """
        if not self.has_matrix_units:
            return 64
        return {1: 2.0, 2: 1.0, 4: 1 / 6}[item_bytes] * _PRODUCTS_PER_CYCLE[self.sm]

    @property
    def fp32_precision(self) -> str:
        """The `input_precision` of `tl.dot` for FP32 operands.

        "tf32x3" splits each operand in two TF32 numbers and sums three products: tensor cores with
        an error near that of FP32. Older GPUs multiply in FP32.
        """
        return "tf32x3" if self.sm >= _FIRST_SM_WITH_TF32 else "ieee"
