"""The model of NVIDIA's published performance workbook, to compare with ours.

The workbook (nvdla/hw, perf/NVDLA_OpenSource_Performance.xlsx) is a roofline, not a measurement:
every layer takes the longer of its memory traffic and its multiply-accumulates, layers follow
each other without overlap, every 3x3 convolution runs as Winograd, pooling and element-wise sums
are free. Sizes are in KB of 1024 bytes, one byte an element. The published frame
rates of the seven configurations (nvdla/doc, hw/v1/primer) are this formula for ResNet-50.

Three things differ from sheet to sheet: the fields of `Rules`, one row of `RULES` a sheet.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Pole = Literal["MAC", "DRAM", "CVSRAM-R", "CVSRAM-W"]
Traffic = Literal["once", "weights against input", "kernel group against input"]

CHANNEL_UNIT = 16
WINOGRAD_GAIN = 2.25  # multiplications of a 3x3 kernel saved
WINOGRAD_WEIGHTS = 16 / 9  # a 3x3 kernel becomes 4x4
KERNEL_GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SheetLayer:
    """One row's layer. Pairs are (rows, columns); `out` is the output after a fused pooling.

    transformed_weights: a 3x3 kernel is read as 4x4. GoogLeNet's sheet leaves that out from its
    inception 3b on, while it counts the multiplications saved.
    """

    channels: int
    size: tuple[int, int]
    kernels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    out: tuple[int, int]
    same_padding: bool = False
    fully_connected: bool = False
    eltwise: bool = False
    transformed_weights: bool = True

    @property
    def winograd(self) -> bool:
        """Whether the workbook counts it as Winograd: every 3x3 kernel."""
        return self.kernel == (3, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The workbook's free cells: its first column holds the defaults."""

    macs: int = 2048
    buffer_kb: float = 512
    dram_gb_s: float = 10
    sram_gb_s: float = 25  # each way
    clock_mhz: float = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Differences between sheets: padding of kernels, refetch rule, fully connected batch."""

    kernel_unit: int = 16
    traffic: Traffic = "weights against input"
    fc_batch: int = 1


RULES: dict[str, Rules] = {
    "AlexNet": Rules(traffic="once", fc_batch=16),
    "GoogLeNet": Rules(traffic="kernel group against input"),
    "ResNet50": Rules(kernel_unit=128),
    "ResNet50 with SRAM": Rules(),
}


@dataclass(frozen=True, slots=True)
class SheetRow:
    """A row's results. Cycles are of the DLA's clock; `pole`: the bottleneck."""

    input_kb: float
    output_kb: float
    weight_kb: float
    dram_kb: float
    dram_cycles: int
    mac_cycles: float
    cycles: float
    pole: Pole


def sheet_row(layer: SheetLayer, rules: Rules, machine: Machine) -> SheetRow:
    """Return the row of a layer without a second memory."""
    inputs = _input_kb(layer, layer.size[0])
    outputs = _output_kb(layer)
    weights = _weight_kb(layer, layer.kernels)
    traffic = dram_kb(layer, rules, machine)
    memory = transfer_cycles(traffic, machine.dram_gb_s, machine)
    macs = mac_cycles(layer, rules, machine)
    pole: Pole = "DRAM" if memory > macs else "MAC"
    return SheetRow(inputs, outputs, weights, traffic, memory, macs, max(memory, macs), pole)


def mac_cycles(layer: SheetLayer, rules: Rules, machine: Machine) -> float:
    """Return the clocks of the multiply-accumulates; a stride is folded into channels."""
    rows, columns = layer.stride
    taps = math.prod(layer.kernel)
    if layer.fully_connected:
        return layer.channels * taps * layer.kernels / machine.macs
    height, width = (
        side if layer.same_padding else side - kernel + 1
        for side, kernel in zip(layer.size, layer.kernel, strict=True)
    )
    positions = math.ceil(height / rows) * math.ceil(width / columns)
    folded = _up(layer.channels * rows * columns, CHANNEL_UNIT)
    products = folded * positions * _up(layer.kernels, rules.kernel_unit) * taps
    gain = WINOGRAD_GAIN if layer.winograd else 1
    return products / (rows * columns) / machine.macs / gain


def dram_kb(layer: SheetLayer, rules: Rules, machine: Machine) -> float:
    """Return the KB read and written; input or weights are refetched if the buffer is too small."""
    inputs = _input_kb(layer, layer.size[0])
    weights = _weight_kb(layer, layer.kernels)
    written = _output_kb(layer) * (2 if layer.eltwise else 1)
    if rules.traffic == "once":
        return inputs + weights / (rules.fc_batch if layer.fully_connected else 1) + written
    group = _weight_kb(layer, KERNEL_GROUP)
    if group >= machine.buffer_kb:
        group = machine.buffer_kb / 2
    against = weights if rules.traffic == "weights against input" else group
    if inputs < against:
        return _reads(inputs, machine.buffer_kb - group) * weights + inputs + written
    lines = _input_kb(layer, layer.kernel[0])
    return _reads(weights, machine.buffer_kb - lines) * inputs + weights + written


def transfer_cycles(kb: float, gb_s: float, machine: Machine) -> int:
    """Return the clocks of a transfer; as in the workbook, a KB is 1000 bytes of the rate."""
    return math.ceil(kb * machine.clock_mhz / gb_s)


def with_sram(
    mac: float, dram_kb: float, read_kb: float, written_kb: float, machine: Machine
) -> tuple[float, Pole]:
    """Return cycles and pole of a row with a second memory; its tensors there were set by hand."""
    terms: tuple[tuple[Pole, float], ...] = (
        ("MAC", mac),
        ("DRAM", transfer_cycles(dram_kb, machine.dram_gb_s, machine)),
        ("CVSRAM-R", transfer_cycles(read_kb, machine.sram_gb_s, machine)),
        ("CVSRAM-W", transfer_cycles(written_kb, machine.sram_gb_s, machine)),
    )
    pole, cycles = max(terms, key=lambda term: term[1])
    return cycles, pole


def frames_per_second(cycles: Iterable[float], machine: Machine) -> float:
    """Return the frame rate of layers that follow each other."""
    return machine.clock_mhz * 1e6 / sum(cycles)


def _input_kb(layer: SheetLayer, lines: int) -> float:
    rows, columns = layer.stride
    folded = _up(layer.channels * rows * columns, CHANNEL_UNIT)
    return folded * math.ceil(lines / rows) * math.ceil(layer.size[1] / columns) / 1024


def _output_kb(layer: SheetLayer) -> float:
    return math.prod(layer.out) * _up(layer.kernels, CHANNEL_UNIT) / 1024


def _weight_kb(layer: SheetLayer, kernels: int) -> float:
    rows, columns = layer.stride
    folded = _up(layer.channels * rows * columns, CHANNEL_UNIT)
    taps = math.ceil(layer.kernel[0] / rows) * math.ceil(layer.kernel[1] / columns)
    growth = WINOGRAD_WEIGHTS if layer.winograd and layer.transformed_weights else 1
    return folded * taps * kernels * growth / 1024


def _reads(size_kb: float, room_kb: float) -> int:
    return math.ceil(size_kb / room_kb) if size_kb > room_kb else 1


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
