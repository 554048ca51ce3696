"""Power and energy: what is switched on, what is computed and what is moved.

The board draws its idle power whatever it does. A busy processor adds power with its clock (and the
voltage that rises with it), a product adds energy with its width, a byte moved adds its own.
Constants come from boards of the T234; others are taken as like it.
"""

from dataclasses import dataclass

from device.engine.manifest import Precision, Processor
from toolkit.partition.costs.bytes import WIDTH
from toolkit.partition.costs.hardware import Hardware


@dataclass(frozen=True)
class EnergyParameters:
    """The constants that energies rest on, as numbers."""

    idle_w: float
    sm_w: float
    dla_w: float
    mac_pj: float
    dla_mac_pj: float
    byte_pj: float
    clock_exponent: float


def active_w(board: Hardware, processor: Processor, given: EnergyParameters) -> float:
    """Return the power that a busy processor adds to the idle board, without work and bytes."""
    if processor == "gpu":
        return given.sm_w * board.sms * float((board.gpu_mhz / 1e3) ** given.clock_exponent)
    if processor.startswith("dla"):
        return given.dla_w * float((board.dla_mhz / 1e3) ** given.clock_exponent)
    return 0.0


def work_mj(
    board: Hardware,
    processor: Processor,
    given: EnergyParameters,
    *,
    macs: float,
    moved: float,
    precision: Precision,
) -> float:
    """Return the energy in mJ of products and bytes."""
    picojoules = moved * given.byte_pj
    gpu, dla = processor == "gpu", processor.startswith("dla")
    if gpu or dla:
        mhz, mac_pj = (board.gpu_mhz, given.mac_pj) if gpu else (board.dla_mhz, given.dla_mac_pj)
        voltage = float((mhz / 1e3) ** (given.clock_exponent - 1))
        picojoules += macs * mac_pj * WIDTH[precision] * voltage
    return picojoules * 1e-9
