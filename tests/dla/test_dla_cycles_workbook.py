"""The workbook's assumptions give its numbers: every row, the totals, the frame rates."""

import pytest
from dla_layers import workbook_rows
from dla_workbook import (
    RULES,
    Machine,
    SheetLayer,
    SheetRow,
    frames_per_second,
    mac_cycles,
    sheet_row,
    transfer_cycles,
    with_sram,
)

DEFAULT = Machine()
ROWS = workbook_rows()
COMPUTED = [row for row in ROWS if row["part_of"] == "no"]
WITH_SRAM = RULES["ResNet50 with SRAM"]


def sheet_layer(row: dict[str, str]) -> SheetLayer:
    return SheetLayer(
        channels=int(row["channels"]),
        size=(int(row["height"]), int(row["width"])),
        kernels=int(row["kernels"]),
        kernel=(int(row["kernel_h"]), int(row["kernel_w"])),
        stride=(int(row["stride_h"]), int(row["stride_w"])),
        out=(int(row["out_h"]), int(row["out_w"])),
        same_padding=row["same_padding"] == "yes",
        fully_connected=row["kind"] == "fc",
        eltwise=row["kind"] == "conv+eltwise",
        transformed_weights=row["transformed_weights"] == "yes",
    )


def computed(row: dict[str, str], machine: Machine = DEFAULT) -> SheetRow:
    return sheet_row(sheet_layer(row), RULES[row["net"]], machine)


def label(row: dict[str, str]) -> str:
    return f"{row['net']}-{row['row']}"


def test_the_workbook_has_131_layers_of_which_27_are_parts_of_combined_rows() -> None:
    assert len(ROWS) == 131
    parts = [row for row in ROWS if row["part_of"] == "yes"]
    assert len(parts) == 27
    # The sheet gives such a part memory traffic of its own, but no cycles of multiplication.
    assert {row["net"] for row in parts} == {"GoogLeNet"}
    assert {(row["mac_cycles"], row["cycles"], row["pole"]) for row in parts} == {("", "", "")}


@pytest.mark.parametrize("row", ROWS, ids=label)
def test_sizes_and_memory_of_every_row(row: dict[str, str]) -> None:
    ours = computed(row)
    assert ours.input_kb == pytest.approx(float(row["input_kb"]), abs=1e-9)
    assert ours.output_kb == pytest.approx(float(row["output_kb"]), abs=1e-9)
    assert ours.weight_kb == pytest.approx(float(row["weight_kb"]), abs=1e-9)
    assert ours.dram_kb == pytest.approx(float(row["dram_kb"]), abs=1e-9)
    assert ours.dram_cycles == int(row["dram_cycles"])


@pytest.mark.parametrize("row", COMPUTED, ids=label)
def test_cycles_and_pole_of_every_computed_row(row: dict[str, str]) -> None:
    ours = computed(row)
    assert ours.mac_cycles == pytest.approx(float(row["mac_cycles"]), abs=1e-9)
    assert ours.cycles == pytest.approx(float(row["cycles"]), abs=1e-9)
    assert ours.pole == row["pole"]


@pytest.mark.parametrize("row", COMPUTED, ids=label)
def test_cycles_and_pole_with_a_second_memory(row: dict[str, str]) -> None:
    mac = mac_cycles(sheet_layer(row), WITH_SRAM, DEFAULT)
    assert mac == pytest.approx(float(row["sram_mac_cycles"]), abs=1e-9)
    dram_kb = float(row["sram_dram_kb"])
    assert transfer_cycles(dram_kb, DEFAULT.dram_gb_s, DEFAULT) == int(row["sram_dram_cycles"])
    moved = (dram_kb, float(row["sram_read_kb"]), float(row["sram_written_kb"]))
    cycles, pole = with_sram(mac, *moved, DEFAULT)
    assert (cycles, pole) == (pytest.approx(float(row["sram_cycles"]), abs=1e-9), row["sram_pole"])


# A sheet's totals: DRAM KB, MAC cycles, cycles, frames a second; with SRAM: cycles, frames.
TOTALS = {
    "AlexNet": (8031.171875, 260599.5625, 895443.5625, 1116.76, 591475.5625, 1690.69),
    "GoogLeNet": (11521.640625, 527789.0, 1222071, 818.28, 579712.5, 1724.99),
    "ResNet50": (69870.984375, 1647400, 7113691, 140.574, 5161544, 193.74),
}


@pytest.mark.parametrize("net", TOTALS)
def test_totals_of_a_sheet_leave_the_parts_out(net: str) -> None:
    kb, mac, total, fps, sram_total, sram_fps = TOTALS[net]
    rows = [row for row in COMPUTED if row["net"] == net]
    ours = [computed(row) for row in rows]
    assert sum(row.dram_kb for row in ours) == pytest.approx(kb, abs=1e-6)
    assert sum(row.mac_cycles for row in ours) == pytest.approx(mac, abs=1e-6)
    cycles = [row.cycles for row in ours]
    assert sum(cycles) == pytest.approx(total, abs=1e-6)
    assert frames_per_second(cycles, DEFAULT) == pytest.approx(fps, abs=0.005)
    behind_sram = [
        with_sram(
            mac_cycles(sheet_layer(row), WITH_SRAM, DEFAULT),
            float(row["sram_dram_kb"]),
            float(row["sram_read_kb"]),
            float(row["sram_written_kb"]),
            DEFAULT,
        )[0]
        for row in rows
    ]
    assert sum(behind_sram) == pytest.approx(sram_total, abs=1e-6)
    assert frames_per_second(behind_sram, DEFAULT) == pytest.approx(sram_fps, abs=0.005)


# MACs, buffer KB, DRAM GB/s, published ResNet-50 frames a second (nvdla/doc, hw/v1/primer), digits.
PUBLISHED = (
    (2048, 512, 20, 269, 0),
    (1024, 256, 15, 153, 0),
    (512, 256, 10, 93, 0),
    (256, 256, 5, 46, 0),
    (128, 256, 2, 20, 0),
    (64, 128, 1, 7.3, 1),
    (32, 128, 0.5, 3.6, 1),
)


@pytest.mark.parametrize(("macs", "buffer_kb", "gb_s", "fps", "digits"), PUBLISHED)
def test_the_published_frame_rates_of_seven_configurations(
    macs: int, buffer_kb: int, gb_s: float, fps: float, digits: int
) -> None:
    machine = Machine(macs=macs, buffer_kb=buffer_kb, dram_gb_s=gb_s)
    cycles = [computed(row, machine).cycles for row in workbook_rows("ResNet50")]
    assert round(frames_per_second(cycles, machine), digits) == fps


def test_a_small_buffer_reads_what_does_not_fit_again() -> None:
    layer = SheetLayer(
        channels=64, size=(32, 32), kernels=64, kernel=(1, 1), stride=(1, 1), out=(32, 32)
    )
    # 64 KB in, 64 KB out, 4 KB of weights, which stay: the input is read once however small it is.
    wide = sheet_row(layer, RULES["ResNet50"], Machine(buffer_kb=8))
    assert wide.dram_kb == 64 + 4 + 64
    # 4 KB in, 4 KB out, 256 KB of weights; 8 KB keep half for a group: 4 KB of input fit just so.
    deep = SheetLayer(
        channels=512, size=(2, 4), kernels=512, kernel=(1, 1), stride=(1, 1), out=(2, 4)
    )
    assert sheet_row(deep, RULES["ResNet50"], Machine(buffer_kb=8)).dram_kb == 4 + 256 + 4
    assert sheet_row(deep, RULES["ResNet50"], Machine(buffer_kb=7)).dram_kb == 4 + 2 * 256 + 4


def test_a_tie_keeps_the_weights_and_reading_needs_the_lines_of_a_kernel() -> None:
    # 64 KB in, 64 KB of weights; one line of input takes 4 KB, one group of kernels 8 KB.
    tie = SheetLayer(
        channels=256, size=(16, 16), kernels=256, kernel=(1, 1), stride=(1, 1), out=(16, 16)
    )
    assert sheet_row(tie, RULES["ResNet50"], Machine(buffer_kb=68)).dram_kb == 64 + 64 + 64
    # Two lines take 8 KB: of 71 KB the 64 of weights do not find room beside them.
    tall = SheetLayer(
        channels=256, size=(16, 16), kernels=64, kernel=(2, 2), stride=(1, 1), out=(16, 16)
    )
    assert sheet_row(tall, RULES["ResNet50"], Machine(buffer_kb=72)).dram_kb == 64 + 64 + 16
    assert sheet_row(tall, RULES["ResNet50"], Machine(buffer_kb=71)).dram_kb == 2 * 64 + 64 + 16
