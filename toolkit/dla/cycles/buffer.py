"""The layout of a convolution in the convolution buffer, and what is read again.

The whole input of a hardware layer is in the buffer before its first package; weights arrive by
kernel group. A layer that does not fit is split along the height into several hardware layers.
Rules as in the open compiler (nvdla/sw,
umd/core/src/compiler/engine-ast/ConvCoreNode.cpp, lines 1490-1760, 2190-2362 and 2558-2740); the
compilers for Xavier and Orin are closed and may split differently.
"""

from dataclasses import dataclass
from typing import Literal

from toolkit.dla.cycles.configurations import BYTES_PER_ELEMENT, Config
from toolkit.dla.cycles.layers import ConvLayer

WeightMode = Literal["all weights", "two kernel groups", "one kernel group", "weights in parts"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One hardware layer: its input rows and output rows."""

    in_rows: int
    out_rows: int


@dataclass(frozen=True, slots=True)
class BufferSplit:
    """The division of the buffer. `fits` False: the open compiler would refuse this layer."""

    weight_mode: WeightMode
    data_banks: int
    weight_banks: int
    chunks: tuple[Chunk, ...]
    fits: bool = True

    def weight_reads(self, frames: int) -> int:
        """Return how often all weights are read: once if they stay, else for every chunk."""
        return 1 if self.weight_mode == "all weights" else len(self.chunks) * frames


def data_entries(layer: ConvLayer, config: Config, image_channels: int = 0) -> int:
    """Return the buffer entries of one input row; `image_channels`: of a pixel, 0 for features.

    Features are stored in memory atoms, several per entry; three of four take a whole one.
    """
    size = BYTES_PER_ELEMENT[layer.precision]
    if image_channels:
        pixels = layer.width + layer.pads[1] + layer.pads[3]
        return _up(pixels * image_channels * size, config.entry_bytes)
    atoms = _up(layer.channels * size, config.memory_atom_bytes)
    per_entry = config.entry_bytes // config.memory_atom_bytes
    whole, last = divmod(atoms, per_entry)
    part = layer.width if last == 3 else _up(last * layer.width, per_entry)
    return whole * layer.width + part


def split(layer: ConvLayer, config: Config, entries: int, taps: int) -> BufferSplit:
    """Return the division of the buffer for a layer.

    entries: buffer entries of one input row; taps: weights per kernel and channel (9 for 3x3).

    Order of preference, as in the compiler: all rows with all weights, with two kernel groups in
    turn, or with one; else fewer rows with all weights if they take at most `split_weight_banks`,
    with two groups, with one.
    """
    per_bank = config.bank_bytes // config.entry_bytes
    data = _up(entries * layer.height, per_bank)
    all_weights = _weight_banks(layer, config, layer.kernels, taps)
    group = _weight_banks(layer, config, config.kernels_at_once(layer.precision), taps)
    choices: tuple[tuple[WeightMode, int], ...] = (
        ("all weights", all_weights),
        ("two kernel groups", 2 * group),
        ("one kernel group", group),
    )
    single_chunk = (Chunk(layer.height, layer.out_height),)
    for mode, banks in choices:
        if data + banks <= config.banks:
            return BufferSplit(mode, data, banks, single_chunk)
    refused = False
    for mode, banks in choices:
        if banks <= config.split_weight_banks:
            rows = (config.banks - banks) * per_bank // entries
            if rows >= layer.extent[0]:
                data_banks = config.banks - banks
                return BufferSplit(mode, data_banks, banks, _chunks(layer, rows), fits=not refused)
            refused = True
    return _forced(layer, config, entries, per_bank)


def _forced(layer: ConvLayer, config: Config, entries: int, per_bank: int) -> BufferSplit:
    """Split the buffer in halves for a layer that the open compiler refuses, to give it a cost."""
    banks = config.banks // 2
    rows = max(banks * per_bank // entries, layer.extent[0])
    chunks = _chunks(layer, rows)
    return BufferSplit("weights in parts", banks, config.banks - banks, chunks, fits=False)


def _chunks(layer: ConvLayer, rows: int) -> tuple[Chunk, ...]:
    """Return the hardware layers of at most `rows` input rows; neighbours overlap by the kernel."""
    chunks = []
    computed = 0
    while computed < layer.out_height:
        top = min(max(0, computed * layer.stride[0] - layer.pads[0]), layer.height - 1)
        padding_rows = max(0, layer.pads[0] - computed * layer.stride[0])
        remaining = layer.out_height - computed
        covered = (rows + padding_rows - layer.extent[0]) // layer.stride[0] + 1
        out_rows = remaining if top + rows >= layer.height else min(remaining, covered)
        chunks.append(Chunk(min(rows, layer.height - top), out_rows))
        computed += out_rows
    return tuple(chunks)


def _weight_banks(layer: ConvLayer, config: Config, kernels: int, taps: int) -> int:
    size = kernels * (layer.channels // layer.groups) * taps * BYTES_PER_ELEMENT[layer.precision]
    entries = _up(size, config.entry_bytes)
    return _up(entries, config.bank_bytes // config.entry_bytes)


def _up(value: int, unit: int) -> int:
    return -(-value // unit)
