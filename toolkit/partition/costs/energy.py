"""Power and energy: idle power, busy processors, multiply-accumulates and memory traffic.

The idle power of the board is constant. A busy processor adds power that rises with its clock (and
voltage), a multiply-accumulate adds energy by its width, a byte moved adds its own. Constants come
from a board of the T234; runs of AGX Xavier at the wall agree with them. The idle power of each
board has its own source: `configs/power.toml`.
"""

from dataclasses import dataclass

from device.engine.manifest import Precision, Processor
from toolkit.partition.costs.bytes import WIDTH
from toolkit.partition.costs.hardware import Hardware


@dataclass(frozen=True)
class EnergyParameters:
    """The constants of energy as numbers."""

    idle_w: float
    sm_w: float
    dla_w: float
    mac_pj: float
    dla_mac_pj: float
    byte_pj: float
    clock_exponent: float


def active_w(board: Hardware, processor: Processor, parameters: EnergyParameters) -> float:
    """Return the power in W that a busy processor adds, without computation and traffic."""
    if processor == "gpu":
        return (
            parameters.sm_w * board.sms * float((board.gpu_mhz / 1e3) ** parameters.clock_exponent)
        )
    if processor.startswith("dla"):
        return parameters.dla_w * float((board.dla_mhz / 1e3) ** parameters.clock_exponent)
    return 0.0


def work_mj(
    board: Hardware,
    processor: Processor,
    parameters: EnergyParameters,
    *,
    macs: float,
    moved: float,
    precision: Precision,
) -> float:
    """Return the energy in mJ of multiply-accumulates and traffic."""
    picojoules = moved * parameters.byte_pj
    gpu, dla = processor == "gpu", processor.startswith("dla")
    if gpu or dla:
        mhz, mac_pj = (
            (board.gpu_mhz, parameters.mac_pj) if gpu else (board.dla_mhz, parameters.dla_mac_pj)
        )
        voltage = float((mhz / 1e3) ** (parameters.clock_exponent - 1))
        picojoules += macs * mac_pj * WIDTH[precision] * voltage
    return picojoules * 1e-9
