"""The output stages behind the accumulator (SDP): X1, X2, then Y; all on 32 bits.

Stage X (twice: X1 and X2), in this order:

    operand = sat32(op16 2^left)
    y33 = x + operand, max(x, operand) or min(x, operand)    the sum keeps 33 bits
    y32 = sat32(rha(y33 mul16, shift))                        mul16 = 1 if bypassed: still shifts
    out = max(0, y32) with the rectifier on

As a PReLU stage X multiplies and shifts y33 only where it is negative; the specification wants its
adder bypassed then.
Source: nvdla/hw cmod/hls/sdp/sdp_x.cpp, vmod/nvdla/sdp/NV_NVDLA_SDP_HLS_X_int_*.v.

Stage Y has the opposite order and operands of 32 bits (from converters: `convert`):

    m   = sat32(rha(x mul32, shift))      bypassed: x, unshifted
    out = sat32(m + op), max, min, or [m != op]

Source: cmod/hls/sdp/sdp_y_core.cpp. Either may take its operands per tensor, per channel or per
element. int64 is exact: 33 + 15 bits in X, 31 + 31 in Y.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from device.dla_emulator.arithmetic import checks, rounding
from device.dla_emulator.arithmetic.rounding import IntLike, Ints

XOperation = Literal["max", "min", "sum"]
YOperation = Literal["max", "min", "sum", "eql"]
_WIDEST_SHIFT = 32  # any operand but 0 has left 32 bits by then


@dataclass(frozen=True, slots=True)
class StageX:
    """The registers of X1 or X2; None bypasses adder or multiplier, `shift` (0..63) acts always.

    `operand` and `multiplier` have 16 bits each, in a shape that broadcasts to the data.
    """

    operation: XOperation | None = None
    operand: IntLike = 0
    operand_shift: IntLike = 0
    multiplier: IntLike | None = None
    shift: IntLike = 0
    prelu: bool = False
    relu: bool = False

    def __post_init__(self) -> None:
        """Raise DlaError for what the registers cannot hold."""
        checks.one_of("the operation of a stage X", self.operation, (None, "max", "min", "sum"))
        checks.signed("the operand of a stage X", self.operand, 16)
        checks.within("the shift of a stage X's operand", self.operand_shift, 0, 63)
        checks.within("the shift of a stage X", self.shift, 0, 255)
        if self.multiplier is not None:
            checks.signed("the multiplier of a stage X", self.multiplier, 16)


@dataclass(frozen=True, slots=True)
class StageY:
    """The registers of Y; None bypasses adder or multiplier. Operands have 32 bits."""

    operation: YOperation | None = None
    operand: IntLike = 0
    multiplier: IntLike | None = None
    shift: IntLike = 0
    prelu: bool = False

    def __post_init__(self) -> None:
        """Raise DlaError for what the registers cannot hold."""
        known = (None, "max", "min", "sum", "eql")
        checks.one_of("the operation of a stage Y", self.operation, known)
        checks.signed("the operand of a stage Y", self.operand, 32)
        checks.within("the shift of a stage Y", self.shift, 0, 1023)
        if self.multiplier is not None:
            checks.signed("the multiplier of a stage Y", self.multiplier, 32)


def run_x(x: IntLike, stage: StageX) -> Ints:
    """Return 32 bits after stage X of 32 bits before it. Raises DlaError: they are more."""
    number = checks.signed("the input of a stage X", x, 32)
    added = _combined(number, stage)
    factor = 1 if stage.multiplier is None else stage.multiplier
    scaled = rounding.saturate(rounding.shift_right(added * factor, stage.shift), 32)
    if stage.prelu and stage.multiplier is not None:
        scaled = np.where(added > 0, rounding.saturate(added, 32), scaled)
    return rectified(scaled) if stage.relu else scaled


def run_y(x: IntLike, stage: StageY) -> Ints:
    """Return 32 bits after stage Y's arithmetic (not its tables) of 32 bits before it.

    Raises DlaError: they are more.
    """
    number = checks.signed("the input of a stage Y", x, 32)
    scaled = number
    if stage.multiplier is not None:
        product = rounding.shift_right(number * stage.multiplier, stage.shift)
        scaled = rounding.saturate(product, 32)
        if stage.prelu:
            scaled = np.where(number > 0, number, scaled)
    if stage.operation is None:
        return scaled
    if stage.operation == "sum":
        return rounding.saturate(scaled + stage.operand, 32)
    if stage.operation == "eql":
        return np.asarray(scaled != stage.operand, np.int64)
    pick = np.maximum if stage.operation == "max" else np.minimum
    return np.asarray(pick(scaled, stage.operand), np.int64)


def rectified(x: Ints) -> Ints:
    """Return max(0, x)."""
    result: Ints = np.maximum(x, 0)
    return result


def operand_of(operand: IntLike, operand_shift: IntLike) -> Ints:
    """Return stage X's operand as its adder sees it: sat32(operand 2^operand_shift)."""
    places = np.minimum(operand_shift, _WIDEST_SHIFT)
    return rounding.saturate(np.asarray(operand, np.int64) << places, 32)


def _combined(x: Ints, stage: StageX) -> Ints:
    if stage.operation is None:
        return x
    operand = operand_of(stage.operand, stage.operand_shift)
    if stage.operation == "sum":
        return x + operand
    pick = np.maximum if stage.operation == "max" else np.minimum
    return np.asarray(pick(x, operand), np.int64)
