"""The known answers of the DLA's stages, and what the emulation makes of them."""

import gzip
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np

from device.dla_emulator.arithmetic import (
    accumulator,
    convert,
    lookup,
    output_stages,
    pooling,
    rounding,
)
from device.dla_emulator.arithmetic.convert import Converter
from device.dla_emulator.arithmetic.lookup import Addressing, Priority
from device.dla_emulator.arithmetic.output_stages import StageX, StageY

FILE = Path(__file__).parent / "data" / "nvdla_vectors.json.gz"
OPERATIONS = ("max", "min", "sum", "eql")
TABLES = ("le", "lo")
Columns = Mapping[str, np.ndarray]


@cache
def vectors() -> Mapping[str, Columns]:
    """Return each group's columns."""
    groups = json.loads(gzip.decompress(FILE.read_bytes()))
    del groups["about"]
    return {
        name: {column: np.array(values, np.int64) for column, values in columns.items()}
        for name, columns in groups.items()
    }


def output_converter(rows: Columns) -> np.ndarray:
    registers = Converter(rows["offset"], rows["scale"], rows["shift"])
    int8 = convert.convert_output(rows["x"], registers)
    out = np.where(rows["int16_out"], convert.convert_output_int16(rows["x"], registers), int8)
    return out != rows["out"]  # the flag is no result, and HLS and RTL disagree about it


def input_converter(rows: Columns) -> np.ndarray:
    registers = Converter(rows["offset"], rows["scale"], rows["shift"])
    return convert.convert_input(rows["x"], registers) != rows["out"]


def operand_converter(rows: Columns) -> np.ndarray:
    registers = Converter(rows["offset"], rows["scale"], rows["shift"])
    return convert.convert_operand(rows["x"], registers) != rows["out"]


def accumulate(rows: Columns) -> np.ndarray:
    total = accumulator.add(rows["accumulator"], rows["partial_sum"])
    out = np.where(rows["delivered"], accumulator.deliver(total, rows["clip"]), total)
    return out != rows["out"]


def stage_x(rows: Columns) -> np.ndarray:
    return np.array([_x(rows, i) != rows["out"][i] for i in range(len(rows["x"]))])


def _x(rows: Columns, i: int) -> int:
    stage = StageX(
        operation=None if rows["adder_bypassed"][i] else OPERATIONS[rows["operation"][i]],
        operand=int(rows["operand"][i]),
        operand_shift=int(rows["operand_shift"][i]),
        multiplier=None if rows["multiplier_bypassed"][i] else int(rows["multiplier"][i]),
        shift=int(rows["shift"][i]),
        prelu=bool(rows["prelu"][i]),
        relu=not rows["relu_bypassed"][i],
    )
    return int(output_stages.run_x(int(rows["x"][i]), stage))


def stage_y(rows: Columns) -> np.ndarray:
    return np.array([_y(rows, i) != rows["out"][i] for i in range(len(rows["x"]))])


def _y(rows: Columns, i: int) -> int:
    stage = StageY(
        operation=None if rows["adder_bypassed"][i] else OPERATIONS[rows["operation"][i]],
        operand=int(rows["operand"][i]),
        multiplier=None if rows["multiplier_bypassed"][i] else int(rows["multiplier"][i]),
        shift=int(rows["shift"][i]),
        prelu=bool(rows["prelu"][i]),
    )
    return int(output_stages.run_y(int(rows["x"][i]), stage))


def average(rows: Columns) -> np.ndarray:
    recip_w = np.array([pooling.reciprocal(int(k)) for k in rows["width"]])
    recip_h = np.array([pooling.reciprocal(int(k)) for k in rows["height"]])
    out = pooling.average_of(rows["sum"], recip_w, recip_h)
    along_width = rounding.shift_right(rows["sum"] * recip_w, 16)
    return (
        (recip_w != rows["recip_w"])
        | (recip_h != rows["recip_h"])
        | (along_width != rows["after_width"])
        | (out != rows["out"])
    )


def lookup_index(rows: Columns) -> np.ndarray:
    return np.array([_misplaced(rows, i) for i in range(len(rows["x"]))])


def _misplaced(rows: Columns, i: int) -> bool:
    row = {name: int(column[i]) for name, column in rows.items()}
    le = Addressing(row["le_start"], row["le_select"], not row["le_linear"], row["le_offset"])
    lo = Addressing(row["lo_start"], row["lo_select"])
    sides = ("underflow_lo", "overflow_lo", "hybrid_lo")
    found = lookup.find(row["x"], le, lo, Priority(*(TABLES[row[side]] for side in sides)))
    return any(
        int(getattr(found, name)) != row[name]
        for name in ("in_lo", "entry", "fraction", "underflow", "overflow")
    )


def lookup_value(rows: Columns) -> np.ndarray:
    inside = lookup.interpolate(rows["fraction"], rows["y0"], rows["y1"])
    edge = rows["edge"] + rows["bias"]
    outside = lookup.extend(rows["x"], edge, rows["y0"], rows["slope"], rows["slope_shift"])
    return np.where(rows["outside"], outside, inside) != rows["out"]


# Group of the vectors -> where the emulation gives another answer.
CHECKS: Mapping[str, Callable[[Columns], np.ndarray]] = {
    "input_converter": input_converter,
    "accumulator": accumulate,
    "stage_x": stage_x,
    "operand_converter": operand_converter,
    "stage_y": stage_y,
    "lookup_index": lookup_index,
    "lookup_value": lookup_value,
    "output_converter": output_converter,
    "average": average,
}
