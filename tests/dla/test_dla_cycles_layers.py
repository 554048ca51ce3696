"""Around the array: buffer splits, bytes, output stage, pooling, and how they make a time."""

import random
from dataclasses import replace

import pytest
from dla_layers import as_convolution, workbook_rows
from hypothesis import assume, given
from hypothesis import strategies as st

from toolkit.dla.cycles.buffer import BufferSplit, data_entries, split
from toolkit.dla.cycles.configurations import CONFIGURATIONS
from toolkit.dla.cycles.estimate import all_modes, estimate
from toolkit.dla.cycles.layers import (
    ConvLayer,
    Deconvolution,
    Layer,
    LayerError,
    Lrn,
    Pointwise,
    Pool,
)
from toolkit.dla.cycles.result import Cycles

FULL = CONFIGURATIONS["nv_full"]
SMALL = CONFIGURATIONS["nv_small"]
UNBOUND = replace(FULL, port_bytes=10**9)


def direct(layer: ConvLayer, bytes_per_clock: float = 64.0) -> Cycles:
    return next(
        c for c in all_modes(layer, FULL, bytes_per_clock=bytes_per_clock) if c.mode == "direct"
    )


def laid(layer: ConvLayer) -> BufferSplit:
    taps = layer.kernel[0] * layer.kernel[1]
    return split(layer, FULL, data_entries(layer, FULL), taps)


# Splits that the open compiler was seen to make.

WIDE = ConvLayer(channels=64, height=112, width=112, kernels=128, kernel=(3, 3), pads=(1,) * 4)
HEAVY = ConvLayer(
    channels=128, height=112, width=112, kernels=256, kernel=(3, 3), stride=(2, 2), pads=(1,) * 4
)
FLAT = ConvLayer(channels=256, height=56, width=56, kernels=256)


def test_a_wide_input_is_cut_in_two_with_all_weights() -> None:
    layout = laid(WIDE)
    assert (layout.weight_mode, layout.data_banks, layout.weight_banks) == ("all weights", 13, 3)
    assert [chunk.in_rows for chunk in layout.chunks] == [59, 55]


def test_heavy_weights_alternate_and_are_read_for_every_chunk() -> None:
    layout = laid(HEAVY)
    assert (layout.weight_mode, layout.data_banks, layout.weight_banks) == (
        "two kernel groups",
        12,
        4,
    )
    assert len(layout.chunks) == 5
    cycles = direct(HEAVY)
    rows = 4 * 27 + 9  # a row of each cut is read twice
    assert rows == 112 + 5
    weights = 256 * 128 * 9
    parameters = 5 * 4 * 256
    assert cycles.bytes_read == rows * 112 * 128 + 5 * weights + parameters
    assert cycles.bytes_refetched == 5 * 112 * 128 + 4 * weights
    assert cycles.bytes_written == 56 * 56 * 256


def test_a_flat_kernel_has_no_overlap() -> None:
    layout = laid(FLAT)
    assert (layout.data_banks, layout.weight_banks) == (14, 2)
    assert [chunk.in_rows for chunk in layout.chunks] == [32, 24]
    assert direct(FLAT).bytes_refetched == 0


def test_what_fits_whole_is_one_hardware_layer() -> None:
    layout = laid(replace(WIDE, height=56, width=56))
    assert len(layout.chunks) == 1
    assert layout.data_banks + layout.weight_banks <= FULL.banks
    # 28 rows of 112 take 7 banks and 256 x 128 x 9 weights 9: together all 16.
    brim = ConvLayer(channels=128, height=16, width=112, kernels=256, kernel=(3, 3))
    assert (laid(brim).weight_mode, laid(brim).data_banks) == ("all weights", 7)
    assert laid(replace(brim, height=19)).weight_mode == "two kernel groups"


def test_padding_far_beyond_the_kernel_still_counts() -> None:
    # 4 rows of a kernel's steps lie wholly in the padding below a split input.
    layer = ConvLayer(
        channels=512, height=60, width=60, kernels=64, stride=(7, 1), pads=(0, 0, 30, 0)
    )
    chunks = laid(layer).chunks
    assert len(chunks) > 1
    assert sum(chunk.out_rows for chunk in chunks) == layer.out_height == 13
    assert all(1 <= chunk.in_rows <= 60 for chunk in chunks)


def test_weights_beyond_the_buffer_are_costed_and_marked() -> None:
    # The first fully connected layer of VGG-16: one group of kernels is larger than the buffer.
    layer = ConvLayer(channels=512, height=7, width=7, kernels=4096, kernel=(7, 7))
    layout = laid(layer)
    assert (layout.weight_mode, layout.fits) == ("weights in parts", False)
    assert direct(layer).bytes_read >= 512 * 49 * 4096


def test_entries_fill_up_at_three_atoms_of_four() -> None:
    row = ConvLayer(channels=32, height=1, width=10, kernels=1)
    entries = [data_entries(replace(row, channels=32 * atoms), FULL) for atoms in range(1, 6)]
    assert entries == [3, 5, 10, 10, 13]
    assert data_entries(replace(row, pads=(0, 3, 0, 3)), FULL, 4) == 1
    assert data_entries(replace(row, width=27, pads=(0, 3, 0, 3)), FULL, 4) == 2


sides = st.integers(1, 130)
layers = st.builds(
    lambda c, h, w, k, r, s, stride, pad, dilation: ConvLayer(
        channels=c,
        height=h + (r - 1) * dilation,
        width=w + (s - 1) * dilation,
        kernels=k,
        kernel=(r, s),
        stride=(stride, stride),
        pads=(min(pad, r - 1), min(pad, s - 1), min(pad, r - 1), min(pad, s - 1)),
        dilation=(dilation, dilation),
    ),
    st.integers(1, 1024),
    sides,
    sides,
    st.integers(1, 600),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 2),
)


@given(layers)
def test_chunks_make_every_output_from_rows_that_they_hold(layer: ConvLayer) -> None:
    layout = laid(layer)
    per_bank = FULL.bank_bytes // FULL.entry_bytes
    room = layout.data_banks * per_bank // data_entries(layer, FULL)
    assume(layout.fits)
    assert layout.data_banks + layout.weight_banks <= FULL.banks
    done = reached = 0
    for chunk in layout.chunks:
        assert reached < layer.height  # the chunk with the last row makes all that is left
        assert 1 <= chunk.in_rows <= room
        assert chunk.out_rows >= 1
        first = max(0, done * layer.stride[0] - layer.pads[0])
        done += chunk.out_rows
        last = (done - 1) * layer.stride[0] - layer.pads[0] + layer.extent[0] - 1
        reached = first + chunk.in_rows
        assert min(last, layer.height - 1) < reached <= layer.height
    assert done == layer.out_height


@given(layers, st.floats(0.5, 64), st.floats(0, 1))
def test_total_lies_between_its_ends_and_above_every_part(
    layer: ConvLayer, rate: float, overlap: float
) -> None:
    cycles = estimate(layer, replace(FULL, overlap=overlap), bytes_per_clock=rate)
    rounding = 1 + 1e-12
    assert cycles.optimistic <= cycles.total * rounding <= cycles.pessimistic * rounding**2
    most = max(cycles.mac, cycles.output_stage, cycles.memory)
    assert cycles.optimistic == pytest.approx(most + cycles.overhead)
    assert cycles.pessimistic <= (cycles.fill + most + cycles.overhead) * rounding
    assert cycles.bytes_refetched < cycles.bytes_read
    assert cycles.mac * 2048 >= cycles.macs
    slower = estimate(layer, replace(FULL, overlap=overlap), bytes_per_clock=rate / 2)
    assert slower.total * rounding >= cycles.total


# What binds.


def test_a_buffer_binds_where_reading_once_would_not() -> None:
    at_port = direct(HEAVY)
    assert at_port.bound_by == "MACs"
    # 451,584 clocks of the array; 3.96 MB in all, 2.71 MB if everything were read once.
    assert direct(HEAVY, bytes_per_clock=8.0).bound_by == "buffer"
    assert direct(HEAVY, bytes_per_clock=5.9).bound_by == "memory"
    assert direct(FLAT, bytes_per_clock=4.0).bound_by == "memory"


def test_free_parameters_scale_their_part() -> None:
    plain = direct(FLAT, 10.0)
    half = replace(FULL, mac_efficiency=0.5, memory_efficiency=0.25, layer_overhead=1000)
    slowed = all_modes(FLAT, half, bytes_per_clock=10.0)[0]
    assert slowed.mac == 2 * plain.mac
    assert slowed.memory == pytest.approx(4 * plain.memory)
    assert (plain.overhead, slowed.overhead) == (2 * 70, 2 * 1000)


def test_memory_is_never_faster_than_the_port() -> None:
    assert estimate(FLAT, FULL, bytes_per_clock=1e6) == estimate(FLAT, FULL, bytes_per_clock=64.0)
    assert estimate(FLAT, FULL) == estimate(FLAT, FULL, bytes_per_clock=64.0)


def test_the_ends_of_a_layer_are_all_overlapped_and_filled_first() -> None:
    layer = ConvLayer(channels=64, height=28, width=28, kernels=64, kernel=(3, 3), pads=(1,) * 4)
    cycles = direct(layer, 16.0)
    fill = 64 * 28 * 28 / 16
    mac = 28 * 28 * 9 * 2
    assert (cycles.fill, cycles.mac) == (fill, mac)
    assert cycles.optimistic == mac + 70
    assert cycles.pessimistic == fill + mac + 70
    assert cycles.total == cycles.optimistic


# Output stage, pooling, normalisation.


def test_a_sum_in_the_first_unit_costs_bytes_and_in_the_last_clocks() -> None:
    branch = as_convolution(
        next(r for r in workbook_rows("ResNet50") if r["layer"].startswith("Res2a_branch2c"))
    )
    alone = estimate(replace(branch, eltwise=None), UNBOUND)
    first, last = (estimate(replace(branch, eltwise=stage), UNBOUND) for stage in ("x", "y"))
    assert first.output_stage == alone.output_stage == 56 * 56 * 256 / 16
    assert last.output_stage == 56 * 56 * 256 / 4
    for cycles in (first, last):
        assert cycles.bytes_read - alone.bytes_read == 56 * 56 * 256
    table = estimate(replace(branch, eltwise=None, table=True), UNBOUND)
    assert (table.output_stage, table.bytes_read) == (last.output_stage, alone.bytes_read)


def test_the_output_stage_takes_whole_groups_of_kernels() -> None:
    layer = ConvLayer(channels=64, height=10, width=10, kernels=97)
    assert estimate(layer, UNBOUND).output_stage == 100 * 128 / 16
    assert estimate(replace(layer, table=True), UNBOUND).output_stage == 100 * 97 / 4


def test_pointwise_layers_read_every_operand() -> None:
    add = Pointwise(channels=256, height=56, width=56, operands=2)
    size = 256 * 56 * 56
    cycles = estimate(add, FULL)
    assert (cycles.output_stage, cycles.bytes_read, cycles.bytes_written) == (
        size / 16,
        2 * size,
        size,
    )
    assert cycles.bound_by == "output stage"
    assert estimate(add, FULL, bytes_per_clock=40.0).bound_by == "memory"
    table = estimate(replace(add, operands=1, stage="y"), FULL)
    assert (table.output_stage, table.bound_by) == (size / 4, "output stage")
    thin = estimate(replace(add, channels=3, operands=1), FULL)
    assert thin.bytes_written == 32 * 56 * 56
    with pytest.raises(LayerError, match="nv_small has no last unit"):
        estimate(replace(add, stage="y"), SMALL)


def test_pooling_takes_input_elements() -> None:
    pool = Pool(channels=64, height=56, width=56, kernel=(3, 3), stride=(2, 2), pads=(0, 0, 1, 1))
    cycles = estimate(pool, FULL)
    assert (pool.out_height, pool.out_width) == (28, 28)
    assert cycles.output_stage == 64 * 56 * 56 / 8
    assert estimate(replace(pool, precision="fp16"), FULL).output_stage == 64 * 56 * 56 / 4
    assert (cycles.bytes_read, cycles.bytes_written) == (64 * 56 * 56, 64 * 28 * 28)


@pytest.mark.parametrize(("overlap", "columns"), [(1, 128), (2, 64), (3, 32), (4, 32)])
def test_pooling_is_cut_beyond_its_row_buffer(overlap: int, columns: int) -> None:
    for width, parts in ((columns, 1), (columns + 1, 2)):
        pool = Pool(channels=32, height=8, width=width + overlap - 1, kernel=(overlap, overlap))
        assert pool.out_width == width
        cycles = estimate(pool, FULL)
        assert cycles.hardware_layers == parts
        assert cycles.bytes_refetched == (parts - 1) * (overlap - 1) * 8 * 32


def test_pooling_behind_a_convolution_saves_the_round_trip() -> None:
    first = as_convolution(workbook_rows("ResNet50")[0], image=True)
    pool = Pool(channels=64, height=112, width=112, kernel=(3, 3), stride=(2, 2), pads=(1,) * 4)
    cycles = estimate(replace(first, pool=pool), UNBOUND)
    assert cycles.bytes_written == 56 * 56 * 64
    assert cycles.output_stage == 112 * 112 * 64 / 8
    # A split convolution writes its rows first, and pooling follows from memory.
    halved = Pool(channels=128, height=112, width=112, kernel=(2, 2), stride=(2, 2))
    pooled, alone = direct(replace(WIDE, pool=halved)), direct(WIDE)
    behind = estimate(halved, FULL)
    assert pooled.total == pytest.approx(alone.total + behind.total)
    assert pooled.bytes_written == alone.bytes_written + behind.bytes_written


def test_normalisation_takes_eight_elements_a_clock() -> None:
    cycles = estimate(Lrn(channels=64, height=55, width=55), UNBOUND)
    assert cycles.output_stage == 64 * 55 * 55 / 8
    assert cycles.bound_by == "output stage"


def test_a_deconvolution_is_a_convolution_for_each_phase() -> None:
    layer = Deconvolution(
        channels=64, height=14, width=14, kernels=32, kernel=(4, 4), stride=(2, 2)
    )
    cycles = estimate(layer, FULL)
    phase = ConvLayer(
        channels=64, height=14, width=14, kernels=32, kernel=(2, 2), pads=(1, 1, 0, 0)
    )
    assert cycles.mac == 4 * estimate(phase, FULL).mac
    assert cycles.macs == 14 * 14 * 16 * 64 * 32
    outputs = 32 * 28 * 28
    assert cycles.bytes_written == 2 * outputs  # the phases, then their interleaving
    alone = estimate(replace(layer, stride=(1, 1), kernel=(3, 3)), FULL)
    assert alone.bytes_written == 32 * 14 * 14


def test_work_of_several_frames_is_a_multiple() -> None:
    conv = ConvLayer(channels=64, height=28, width=28, kernels=64, kernel=(3, 3))
    several: list[Layer] = [
        conv,
        Pool(channels=64, height=28, width=28, kernel=(2, 2)),
        Lrn(channels=64, height=28, width=28),
        Pointwise(channels=64, height=28, width=28),
        Deconvolution(channels=64, height=7, width=7, kernels=64, kernel=(2, 2), stride=(2, 2)),
    ]
    for layer in several:
        one, four = estimate(layer, FULL), estimate(replace(layer, batch=4), FULL)
        assert four.mac == 4 * one.mac
        assert four.output_stage == 4 * one.output_stage
        assert four.bytes_written == 4 * one.bytes_written
        assert four.macs == 4 * one.macs


# Refusals.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 0}, "channels 0"),
        ({"kernels": -1}, "kernels -1"),
        ({"groups": 3}, "3 groups"),
        ({"stride": (0, 1)}, "stride"),
        ({"pads": (0, 0, -1, 0)}, "pads"),
        ({"kernel": (57, 1)}, "does not fit"),
    ],
)
def test_sizes_that_no_layer_has_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(LayerError, match=message):
        replace(FLAT, **change)
    assert replace(FLAT, kernel=(56, 1)).out_height == 1


def test_other_layers_refuse_too() -> None:
    with pytest.raises(LayerError, match="does not fit"):
        Pool(channels=1, height=2, width=2, kernel=(3, 1))
    with pytest.raises(LayerError, match="at least 1"):
        Deconvolution(channels=1, height=2, width=2, kernels=1, kernel=(0, 1), stride=(1, 1))
    with pytest.raises(LayerError, match="operands 0"):
        Pointwise(channels=1, height=1, width=1, operands=0)
    with pytest.raises(LayerError, match="above 0"):
        estimate(FLAT, FULL, bytes_per_clock=0.0)


def test_a_layer_is_estimated_alike_whatever_came_before() -> None:
    chance = random.Random()
    rows = [as_convolution(row) for row in workbook_rows("ResNet50")]
    first = {layer: estimate(layer, FULL) for layer in rows}
    chance.shuffle(rows)
    assert all(estimate(layer, FULL) == first[layer] for layer in rows)
