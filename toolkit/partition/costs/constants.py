"""The constants of the cost model: `configs/costs.toml`, written by `scripts/fit_costs.py`."""

from functools import cache

import msgspec

import configs
from device.profile import Confidence
from toolkit.partition.costs.errors import ErrorRows, Errors


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A constant with its source and confidence.

    `spread`: the factor by which the value may be off (standard error of the fit), None if it was
    not fitted.
    """

    value: float
    source: str
    confidence: Confidence
    spread: float | None = None
    note: str = ""


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the groups of constants."""


class GpuCosts(_Group, frozen=True, kw_only=True):
    """Kernels of the GPU; formulas in `toolkit/partition/costs/gpu.py`."""

    array_efficiency: Constant  # of the matrix rate, with the largest tile of outputs
    fp32_share: Constant  # of that efficiency, in FP32
    separable_efficiency: Constant  # of the CUDA cores' rate, in depthwise convolutions
    output_cycles: Constant  # clocks of an SM for each output of a GEMM
    curve_cycles: Constant  # additional clocks if a sigmoid or similar follows
    bandwidth_share: Constant  # of the memory's peak
    kernel_cycles: Constant  # clocks of an empty kernel
    graph_share: Constant  # of those, in a CUDA graph
    launch_kilocycles: (
        Constant  # of the CPU, for a kernel that no graph starts, before Cortex-A78AE
    )
    call_kilocycles: Constant  # of the CPU, for a framework's call of an engine


class DlaGeneration(_Group, frozen=True, kw_only=True):
    """Constants of one generation of the DLA."""

    bandwidth_share: Constant  # of the memory's peak, for one core
    layer_us: Constant  # of an empty layer


class DlaCosts(_Group, frozen=True, kw_only=True):
    """Layers of the DLA; formulas in `toolkit/partition/costs/dla.py`."""

    array_efficiency: Constant  # of the cycles of the array
    fp16_share: Constant  # of the prior FP16 rate of v2
    arrays: Constant  # v2 as this number of v1 arrays in parallel
    submission_us: Constant  # of a loadable
    v1: DlaGeneration
    v2: DlaGeneration


class CpuCosts(_Group, frozen=True, kw_only=True):
    """The CPU: estimates, nothing is published."""

    gmacs: Constant
    bandwidth_share: Constant
    node_us: Constant


class CrossingCosts(_Group, frozen=True, kw_only=True):
    """Passing tensors between processors."""

    us: Constant  # of one crossing, without the copy


class Contention(_Group, frozen=True, kw_only=True):
    """Slowdown by memory contention; formula in `toolkit/partition/costs/model.py`."""

    free_share: Constant  # of the peak: own demand below which there is no slowdown
    full_share: Constant  # of the peak: others' demand at which the slowdown saturates
    slope: Constant  # slowdown per share of the peak of own and of others' demand


class EnergyCosts(_Group, frozen=True, kw_only=True):
    """Power and energy; formulas in `toolkit/partition/costs/energy.py`."""

    idle_w: Constant  # the whole board, of AGX Orin 64GB; others: configs/power.toml
    sm_w: Constant  # one busy SM at 1 GHz
    dla_w: Constant  # one busy DLA core at 1 GHz
    mac_pj: Constant  # one INT8 multiply-accumulate on the GPU at 1 GHz; wider ones cost by width
    dla_mac_pj: Constant  # the same on the DLA
    byte_pj: Constant  # one byte to or from memory
    clock_exponent: Constant  # of power in the clock: voltage rises with it


class Residuals(_Group, frozen=True, kw_only=True):
    """Errors of the fitted predictions against the rows of one engine."""

    rows: int
    median_error: float
    within_35: float  # share of rows


class Costs(_Group, frozen=True, kw_only=True):
    """All constants of the cost model, and the errors of the fit."""

    gpu: GpuCosts
    dla: DlaCosts
    cpu: CpuCosts
    crossing: CrossingCosts
    contention: Contention
    energy: EnergyCosts
    residuals: dict[str, Residuals]
    fitted_devices: tuple[str, ...]  # profiles with rows of the GPU in the fit
    fitted_sms: tuple[int, ...]  # their generations of the GPU


@cache
def load_costs() -> Costs:
    """Return the constants of `configs/costs.toml`."""
    return msgspec.toml.decode((configs.ROOT / "costs.toml").read_bytes(), type=Costs)


@cache
def load_errors() -> Errors:
    """Return how far off predictions are: `configs/errors.json`."""
    return msgspec.json.decode((configs.ROOT / "errors.json").read_bytes(), type=Errors)


@cache
def gpu_errors() -> ErrorRows:
    """Return the errors of the GPU."""
    return ErrorRows(load_errors().gpu)


class Power(_Group, frozen=True, kw_only=True):
    """The file `configs/power.toml`."""

    idle_w: dict[str, Constant]


MEASURED_BOARD = "agx-orin-64gb"  # of the powers in the fit


def idle_power(profile: str) -> Constant | None:
    """Return the power of an idle board in W, None for profiles of which it is not known."""
    if profile == MEASURED_BOARD:
        return load_costs().energy.idle_w
    return _load_power().idle_w.get(profile)


@cache
def _load_power() -> Power:
    return msgspec.toml.decode((configs.ROOT / "power.toml").read_bytes(), type=Power)
