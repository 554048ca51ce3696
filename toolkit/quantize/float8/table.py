"""Calibration tables that give FP8 its ranges, and those that FP8 measures."""

import msgspec
from msgspec import UNSET

from calibration.table import MIN_AMAX, Adjustments, CalibrationTable, format_of
from toolkit.quantize.float8.model import Float8Model


def for_float8(table: CalibrationTable) -> CalibrationTable:
    """Return a table without what makes up for errors of INT8: rounded weights and biases.

    Equalised weights stay, as ranges are of them.
    """
    equalised = table.adjusted.equalised if table.adjusted else {}
    adjusted = Adjustments(equalised=equalised) if equalised else UNSET
    number = format_of(adjusted, table.preprocessing, table.refused)
    return msgspec.structs.replace(table, adjusted=adjusted, format=number)


def table_of_float8(model: Float8Model, data_sha256: str, model_sha256: str) -> CalibrationTable:
    """Return the ranges that FP8 measured; products that stay in floating point are kept so."""
    return CalibrationTable(
        method="minmax",
        samples=model.samples,
        data_sha256=data_sha256,
        model_sha256=model_sha256,
        tensors={name: max(amax, MIN_AMAX) for name, amax in model.amax.items()},
        keep_float=tuple(sorted(model.floats)),
    )
