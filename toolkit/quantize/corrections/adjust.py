"""Apply the weight adjustments of a calibration table to a model.

Equalisation and bias correction change weights before ranges are measured. The table holds these
changes with the ranges, so that a build from it makes the same model to the last bit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.table import Adjustments, CalibrationTable, rounded
from toolkit.errors import BuildError
from toolkit.quantize.corrections.bias import change_biases
from toolkit.quantize.corrections.equalise import scale_channels
from toolkit.quantize.corrections.rounding import apply_steps

# Significant decimal digits. Factors: 0.5 % of a range is 0.04 dB of its noise. Bias changes:
# 1/2000 of the correction.
FACTOR_DIGITS = 3
CHANGE_DIGITS = 4


def short_factors(factors: Mapping[str, NDArray[Any]]) -> dict[str, tuple[float, ...]]:
    """Equalisation factors rounded for a table, without tensors that stay unchanged."""
    factors_of = {name: rounded(scale, FACTOR_DIGITS) for name, scale in factors.items()}
    return {name: row for name, row in factors_of.items() if any(factor != 1.0 for factor in row)}


def short_changes(changes: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """Bias changes rounded for a table, without nodes that stay unchanged."""
    changes_of = {name: rounded(row, CHANGE_DIGITS) for name, row in changes.items()}
    return {name: row for name, row in changes_of.items() if any(row)}


def adjust(model: ir.Model, adjustments: Adjustments) -> ir.Model:
    """Return a copy of a model (after the graph passes) with changed weights and biases.

    Raises BuildError: a tensor or node is none of this model, or its channels differ.
    """
    factors = {name: np.array(row) for name, row in adjustments.equalised.items()}
    rounded = apply_steps(scale_channels(model, factors), adjustments.rounded or {})
    return change_biases(rounded, adjustments.biases)


def adjusted_for(model: ir.Model, table: CalibrationTable, model_sha256: str) -> ir.Model:
    """Return the model that the ranges of `table` belong to: a copy, or the model itself.

    Raises BuildError: the table adjusts the weights of another model file, or names what this
    model lacks.
    """
    if not table.adjusted:
        return model
    if table.model_sha256 != model_sha256:
        raise BuildError(
            f"The calibration table adjusts {len(table.adjusted.equalised)} tensors, "
            f"{len(table.adjusted.rounded or ())} weights and "
            f"{len(table.adjusted.biases)} biases of the model with SHA-256 "
            f"{table.model_sha256[:12]}, but this file has {model_sha256[:12]}; build from that "
            "file, or calibrate this one."
        )
    return adjust(model, table.adjusted)


def adjusts_only(model: ir.Model, table: CalibrationTable) -> bool:
    """Whether the model has every tensor and node that the table adjusts."""
    if not table.adjusted:
        return True
    nodes = {str(node.name) for node in model.graph}
    tensors = {str(out.name) for node in model.graph for out in node.outputs}
    changed = table.adjusted.biases.keys() | (table.adjusted.rounded or {}).keys()
    return table.adjusted.equalised.keys() <= tensors and changed <= nodes
