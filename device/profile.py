"""Device profiles: what a module has, in figures that each carry a source and a confidence."""

from typing import Generic, Literal, TypeVar

import msgspec

Confidence = Literal["high", "medium", "low", "unverified"]
T = TypeVar("T")


class _Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every part of a profile: frozen, and unknown keys are refused."""


class Figure(_Value, Generic[T], frozen=True, kw_only=True):
    """One published or derived number with where it comes from (ids of `configs/sources.toml`)."""

    value: T
    source: str
    confidence: Confidence
    note: str = ""


class Gpu(_Value, frozen=True, kw_only=True):
    """The GPU at its highest clock; dense rates, no sparsity."""

    arch: str
    sm: int  # 87 for compute capability 8.7
    sm_count: Figure[int]
    cuda_cores: Figure[int]
    tensor_cores: Figure[int]
    max_mhz: Figure[float]
    fp32_tflops: Figure[float]
    fp16_tflops: Figure[float]
    int8_tops: Figure[float] | None = None  # None: no INT8 path faster than FP32


class Dla(_Value, frozen=True, kw_only=True):
    """The DLA cores; dense rates per core at the highest clock."""

    generation: Literal["v1", "v2"]
    cores: Figure[int]
    max_mhz: Figure[float]
    int8_tops: Figure[float]
    fp16_tflops: Figure[float] | None  # None: not published
    sram_kib: Figure[int]  # per core; shared figures say so in their note


class Memory(_Value, frozen=True, kw_only=True):
    """The memory that all processors share (on the host profiles: the GPU's own)."""

    gb: Figure[float]
    kind: str
    bus_bits: Figure[int] | None = None
    max_mhz: Figure[float] | None = None
    bandwidth_gbps: Figure[float]


class PowerMode(_Value, frozen=True, kw_only=True):
    """One nvpmodel mode: clocks in MHz, None where no source gives the figure."""

    name: str
    id: int
    cpu_online: int | None = None
    cpu_max_mhz: float | None = None
    gpu_tpc: int | None = None
    gpu_max_mhz: float | None = None
    dla_cores: int | None = None
    dla_max_mhz: float | None = None
    emc_max_mhz: float | None = None
    source: str
    confidence: Confidence


class Profile(_Value, frozen=True, kw_only=True):
    """A module, its power modes and the JetPacks that it takes."""

    name: str
    title: str
    part: str
    soc: str
    cpu: str
    gpu: Gpu | None = None
    dla: Dla | None = None
    memory: Memory
    power_modes: tuple[PowerMode, ...] = ()
    jetpacks: tuple[str, ...] = ()  # versions in configs/jetpack.toml that support the module
    note: str = ""
