"""Rates and clocks of a profile in one of its power modes."""

import re
from dataclasses import dataclass
from typing import Literal

from device.engine.manifest import Precision
from device.profile import Gpu, PowerMode, Profile

Generation = Literal["v1", "v2"]
TENSOR_FLOAT32 = 80  # the first SM with TF32, which TensorRT uses for FP32 unless told not to
INT4_SM = 80  # the first SM whose kernels read weights of 4 bits
TENSOR_FLOAT32_SHARE = 0.5  # of the FP16 rate: NVIDIA A100 whitepaper, 156 against 312 TFLOPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Clocks in MHz and SMs in use; None: the maximum of the profile."""

    gpu_mhz: float | None = None
    dla_mhz: float | None = None
    emc_mhz: float | None = None
    cpu_mhz: float | None = None
    gpu_sms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A board at given clocks. Rates are multiply-accumulates per SM and clock.

    `cuda_rate`: FP32 on the CUDA cores; `matrix_rates`: GEMM at each precision. `bandwidth`: peak
    memory bandwidth in bytes per microsecond. `cpu_mhz` 0: not known.
    """

    name: str
    sms: int
    gpu_mhz: float
    cuda_rate: float
    matrix_rates: tuple[tuple[Precision, float], ...]
    bandwidth: float
    has_gpu: bool
    dla_cores: int
    dla_mhz: float
    dla: Generation | None
    sm: int
    cpu_mhz: float

    def matrix_rate(self, precision: Precision) -> float:
        """Return the multiply-accumulates per SM and clock of a GEMM."""
        return dict(self.matrix_rates)[precision]

    @property
    def cpu_us(self) -> float:
        """Microseconds of a clock of the CPU, 0 where it is not known."""
        return 1 / self.cpu_mhz if self.cpu_mhz else 0.0


def clocks_of(mode: PowerMode) -> Clocks:
    """Return the clocks of a power mode; two SMs make a TPC."""
    return Clocks(
        gpu_mhz=mode.gpu_max_mhz,
        dla_mhz=mode.dla_max_mhz,
        emc_mhz=mode.emc_max_mhz,
        cpu_mhz=mode.cpu_max_mhz,
        gpu_sms=None if mode.gpu_tpc is None else 2 * mode.gpu_tpc,
    )


def hardware(profile: Profile, power_mode: str | None = None) -> Hardware:
    """Return the board in a power mode, None: maximum clocks.

    Raises ProfileError: the profile has no such mode.
    """
    mode = None if power_mode is None else profile.power_mode(power_mode)
    return at_clocks(profile, Clocks() if mode is None else clocks_of(mode))


def at_clocks(profile: Profile, clocks: Clocks) -> Hardware:
    """Return the board at given clocks."""
    memory, dla = profile.memory, profile.dla
    highest = None if memory.max_mhz is None else memory.max_mhz.value
    share = 1.0
    if clocks.emc_mhz is not None and highest is not None:
        share = min(1.0, clocks.emc_mhz / highest)
    gpu_mhz, sms, sm = 1.0, 1, 0
    rates: tuple[float, dict[Precision, float]] = (1.0, {"fp32": 1.0, "fp16": 1.0, "int8": 1.0})
    if profile.gpu is not None:
        gpu_mhz = clocks.gpu_mhz or profile.gpu.max_mhz.value
        sms = min(clocks.gpu_sms or profile.gpu.sm_count.value, profile.gpu.sm_count.value)
        sm, rates = profile.gpu.sm, _rates(profile.gpu)
    return Hardware(
        name=profile.name,
        sms=sms,
        gpu_mhz=gpu_mhz,
        cuda_rate=rates[0],
        matrix_rates=tuple(sorted(rates[1].items())),
        bandwidth=memory.bandwidth_gbps.value * share * 1e3,
        has_gpu=profile.gpu is not None,
        dla_cores=profile.dla_cores,
        dla_mhz=0.0 if dla is None else clocks.dla_mhz or dla.max_mhz.value,
        dla=None if dla is None else dla.generation,
        sm=sm,
        cpu_mhz=clocks.cpu_mhz or _highest_cpu_mhz(profile),
    )


def _highest_cpu_mhz(profile: Profile) -> float:
    """Return the highest clock of the CPU, 0 where the profile does not state one."""
    stated = re.search(r"([\d.]+) GHz", profile.cpu)
    of_modes = [mode.cpu_max_mhz for mode in profile.power_modes if mode.cpu_max_mhz is not None]
    return float(stated.group(1)) * 1e3 if stated else max(of_modes, default=0.0)


def _rates(gpu: Gpu) -> tuple[float, dict[Precision, float]]:
    """Return rates per SM and clock: on the CUDA cores, and of a GEMM at each precision."""
    per = 1e12 / 2 / (gpu.sm_count.value * gpu.max_mhz.value * 1e6)
    fp32, fp16 = gpu.fp32_tflops.value * per, gpu.fp16_tflops.value * per
    fp16 = max(fp32, fp16)
    int8 = fp16 if gpu.int8_tops is None else max(fp16, gpu.int8_tops.value * per)
    matrix32 = fp16 * TENSOR_FLOAT32_SHARE if gpu.sm >= TENSOR_FLOAT32 else fp32
    return fp32, {"fp32": max(fp32, matrix32), "fp16": fp16, "int8": int8}
