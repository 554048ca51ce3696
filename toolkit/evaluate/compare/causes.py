"""Why a number of the DLA differs from that of the Q/DQ graph on the same INT8 inputs.

Each differing element is put down to the first cause that a variant of the same layer shows:

    twice     an average that differs from one rounding of the exact mean, half away from zero
    table     sigmoid or tanh: the layer with the function and its scale in floating point differs
    bias      any other layer: with its bias of 32 bits it is the result of exact scales
    multiplier  any other layer: the same with exact scales and biases differs
    tie       the exact result lies half way between two steps: away from zero against to even
    fp16      the DLA has no INT8 result here
    other     none of these

`shared_scale_cost_db` is another kind of cost: both sides carry it, and the engine's tables made
it. It is measured on FP32 operands, rounded with the scale that they share and with their own; and
on the averages of a pooling, which has the scale of its input. So is `clipping_cost_db`, of a range
that is too narrow: what leaves a DLA is INT8, where a GPU hands it on in floating point.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.error_figures import sqnr_db

Array = NDArray[Any]

TWICE, TABLE, BIAS, MULTIPLIER = "twice", "table", "bias", "multiplier"
TIE, FP16, OTHER = "tie", "fp16", "other"
CAUSES: Mapping[str, str] = {
    TWICE: "an average rounds twice, along the width and along the height",
    TABLE: "sigmoid and tanh go by a table and 16-bit numbers",
    BIAS: "a bias is 16 bits and one shift for all channels",
    MULTIPLIER: "a multiplier is 16 bits and one shift for all channels",
    TIE: "a half is rounded away from zero, not to even",
    FP16: "the result has no INT8 scale, and FP16 rounds it",
    OTHER: "no variant of the layer shows the cause",
}
SHARED_SCALE = "a layer shares one scale among its operands"
CLIPPED = "its range clips what the layer gives"
CLIPPED_LEAVING = (
    "its range clips what leaves the DLA; a GPU hands the last layers on in floating point"
)
POOL_SCALE = "a pooling rounds its averages at the scale of its input, too coarse for them"
TABLES = frozenset({"Sigmoid", "Tanh"})
AVERAGES = frozenset({"AveragePool", "GlobalAveragePool"})
# Float32 sums of the Q/DQ graph are off by some 1e-5 steps; a half within this is taken for one.
TIE_STEPS = 1e-3


@dataclass(frozen=True, slots=True)
class Variants:
    """INT8 of the DLA on the same inputs with exact biases, and with exact scales and biases."""

    exact_bias: Array
    ideal: Array


def quantized(real: Array, scale: float) -> NDArray[np.int8]:
    """Return what QuantizeLinear makes of numbers: INT8, halves to even, in float32 as it does."""
    steps = np.rint(np.asarray(real, np.float32) / np.float32(scale))
    stored: NDArray[np.int8] = np.clip(steps, -128, 127).astype(np.int8)
    return stored


def causes_of(
    dla: Array, gpu: Array, variants: Variants, exact_steps: Array, ops: frozenset[str]
) -> dict[str, int]:
    """Count the differing elements by cause.

    INT8 of the DLA, of the Q/DQ graph and of the DLA's variants, and the exact result in steps, all
    of one shape; `ops` are the operators of the layer.
    """
    inexact = dla != variants.ideal
    by_bias = inexact & (variants.exact_bias == variants.ideal)
    remaining = dla != gpu
    steps = np.asarray(exact_steps, np.float64)
    away = np.clip(np.copysign(np.floor(np.abs(steps) + 0.5), steps), -128, 127)
    from_half = np.abs(np.abs(steps) % 1.0 - 0.5)
    tie = from_half < TIE_STEPS
    where_of = {
        TWICE: (dla != away) & ~(tie & (np.abs(dla - steps) < 0.5 + TIE_STEPS))
        if ops & AVERAGES
        else np.zeros_like(remaining),
        TABLE: inexact if ops & TABLES else np.zeros_like(remaining),
        BIAS: by_bias,
        MULTIPLIER: inexact,
        TIE: tie,
        OTHER: np.ones_like(remaining),
    }
    counts = {}
    for cause, where in where_of.items():
        count = int(np.count_nonzero(remaining & where))
        if count:
            counts[cause] = count
        remaining = remaining & ~where
    return counts


def clipping_cost_db(exact: Array, scale: float) -> float:
    """Return by how many dB a range that clips nothing is better; 0 where it would be worse."""
    widest = float(np.max(np.abs(exact), initial=0.0)) / 127
    if widest <= scale:
        return 0.0
    clipped, whole = _noise(exact, scale), _noise(exact, widest)
    if clipped <= whole:
        return 0.0
    return sqnr_db(clipped, whole)


def shared_scale_cost_db(exact: Array, shared: float) -> float:
    """Return by how many dB a scale of the operand's own, its largest / 127, is better.

    0 where the shared scale is no coarser.
    """
    step = float(np.max(np.abs(exact), initial=0.0)) / 127
    if step == 0.0 or step >= shared:
        return 0.0
    apart, together = _noise(exact, step), _noise(exact, shared)
    if together <= apart:
        return 0.0
    return sqnr_db(together, apart)


def _noise(exact: Array, scale: float) -> float:
    """Return the energy of what INT8 of a scale makes of real numbers, less themselves."""
    real = np.asarray(exact, np.float64)
    rounded = np.clip(np.rint(real / scale), -128, 127) * scale
    return float(np.sum((rounded - real) ** 2))
