"""How a compiler sets up the output stages for one layer, and the result in INT8.

With r = Si Sw / So (one factor, or one for each output channel), the accumulator a and b32 of
`scales`, for `hardware` scales:

    one factor        X1 = a + bias, rectifier       converter: multiplier and shift of r
    one per channel   X1 = (a + bias) scale >> shift, rectifier       converter: 1, shift 0
    PReLU             X2 multiplies negative numbers by a 16-bit slope
    sigmoid, tanh     X1 gives a fixed-point number of 12 fraction bits, stage Y looks it up
    scale and offset  X1 multiplies an INT8 input, X2 adds, converter: shift alone; rounds once
    clip              bounds in units of So on the INT8 result

`ideal` scales: y = sat8(round_half_away(f((a + b32) r))) with r, f and the slope in float64, so
that what 16 bits cost can be told from what rounding costs. `exact bias` has the multiplier of 16
bits and b32 as it is, so that the two can be told apart; with a function or slopes it is hardware.

Source of the first two rows: nvdla/sw umd/core/src/compiler (LowPrecision.md, BatchNormOp, BiasOp).
Both round once. The open compiler has none of the others in INT8; their rows are inferred from what
the stages can do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from device.dla_emulator.arithmetic import (
    accumulator,
    convert,
    lookup,
    output_stages,
    rounding,
    scales,
)
from device.dla_emulator.arithmetic.rounding import Floats, Ints

Int8s = NDArray[np.int8]
Arithmetic = Literal["hardware", "exact bias", "ideal"]
Function = Literal["sigmoid", "tanh"]

TABLE_FRACTION_BITS = 12
_TABLE_REACH = 8  # beyond +-8 sigmoid and tanh are within 1/2900 of their ends
_ENTRY_FRACTION_BITS = 15
_HALF_SHIFT = 8  # of 2^-shift, by which fast numbers of up to 129 are off at most by a half
_IDEAL_SHIFT = 32


@dataclass(frozen=True, slots=True)
class Activation:
    """What follows the sum, at most one of each: PReLU slopes, a function, bounds in real units.

    A rectifier is the bound low = 0. `slopes` broadcast to (channels, rows, columns).
    """

    slopes: Floats | None = None
    function: Function | None = None
    low: float = -np.inf
    high: float = np.inf


@dataclass(frozen=True, slots=True)
class Sums:
    """What a layer's accumulators mean: real = factor * step_out * (a + bias).

    `factor` (Si Sw / So) and `bias` (b32) are numbers, or one for each channel in a shape that
    broadcasts to the accumulators of one image.
    """

    factor: Floats
    bias: Ints | None = None


@dataclass(frozen=True, slots=True)
class OutputPath:
    """The set-up of the output stages of one layer."""

    x1: output_stages.StageX
    x2: output_stages.StageX | None
    tables: lookup.Tables | None
    converter: convert.Converter
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class IdealPath:
    """The same layer with exact factors: y = f(a factor + offset), one rounding, no 16 bits."""

    factor: Floats
    offset: Floats
    activation: Activation
    step_out: float
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class FastPath:
    """A path that is one factor and one rounding, in float64: y = floor(a factor + offset).

    Both are larger by a little, so that a half goes away from zero, and `offset` by 1/2.
    """

    factor: NDArray[Any]
    offset: NDArray[Any]
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class IntegerPath:
    """An OutputPath that is one multiplication and one rounding, in int64.

    y = rha(a multiplier + offset, shift): the stages' own numbers where nothing saturates.
    """

    factor: Ints
    offset: Ints
    shift: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class TablePath:
    """An OutputPath with tables; `results` has the INT8 result of each number behind X1.

    The first is that of the least number that `x1` gives, and less; the last that of the largest.
    """

    x1: IntegerPath
    results: Int8s


Path = OutputPath | IdealPath | FastPath | IntegerPath | TablePath


def make_path(
    sums: Sums, activation: Activation, step_out: float, arithmetic: Arithmetic
) -> OutputPath | IdealPath:
    """Return the set-up of a layer whose result has the scale `step_out`.

    Raises ScaleError where a factor does not fit a multiplier.
    """
    low, high = bounds_of(activation, step_out)
    if arithmetic == "ideal":
        bias = 0.0 if sums.bias is None else sums.bias
        return IdealPath(sums.factor, sums.factor * bias, activation, step_out, low, high)
    if arithmetic == "exact bias" and activation.function is None and activation.slopes is None:
        real_factor = _held(sums.factor)
        bias = 0.0 if sums.bias is None else sums.bias
        return IdealPath(real_factor, real_factor * bias, activation, step_out, low, high)
    relu = activation.low == 0.0 and activation.function is None
    if activation.function is not None:
        entry = 2.0**-_ENTRY_FRACTION_BITS / step_out
        fixed = sums.factor * step_out * 2.0**TABLE_FRACTION_BITS
        x1 = _first_stage(sums.bias, scales.multiplier_of(fixed), relu=False)
        tables = tables_of(activation.function)
        return OutputPath(x1, None, tables, _converter(scales.multiplier_of(entry)), low, high)
    factor = scales.multiplier_of(sums.factor)
    x2 = None
    if activation.slopes is not None:
        slope = scales.multiplier_of(activation.slopes)
        x2 = output_stages.StageX(multiplier=slope.scale, shift=slope.shift, prelu=True)
    if sums.factor.size == 1:
        x1 = _first_stage(sums.bias, None, relu=relu)
        scalar = scales.Multiplier(factor.scale.reshape(()), factor.shift)
        return OutputPath(x1, x2, None, _converter(scalar), low, high)
    x1 = _first_stage(sums.bias, factor, relu=relu)
    return OutputPath(x1, x2, None, convert.Converter(0, 1, 0), low, high)


def make_affine_path(
    sums: Sums, offset: Floats, bounds: Activation, step_out: float, arithmetic: Arithmetic
) -> OutputPath | IdealPath:
    """Return the set-up of y = x factor + offset / step_out for INT8 x, with bounds alone behind.

    `sums.factor` and `offset` (real) broadcast to the input. Raises ScaleError as `make_path`.
    """
    low, high = bounds_of(bounds, step_out)
    if arithmetic == "ideal":
        return IdealPath(sums.factor, offset / step_out, bounds, step_out, low, high)
    if arithmetic == "exact bias":
        return IdealPath(_held(sums.factor), offset / step_out, bounds, step_out, low, high)
    factor = scales.multiplier_of(sums.factor)
    added = scales.bias_integers(offset / step_out, 2.0**-factor.shift)
    bias = scales.bias_operand(added)
    x1 = output_stages.StageX(multiplier=factor.scale)
    x2 = output_stages.StageX(
        operation="sum", operand=bias.operand, operand_shift=bias.shift, relu=bounds.low == 0.0
    )
    return OutputPath(x1, x2, None, convert.Converter(0, 1, factor.shift), low, high)


def fast_path(path: OutputPath | IdealPath, largest_sum: int) -> FastPath | None:
    """Return the path as one factor in float64 if that gives the same, else None.

    See `integer_path`, whose results y are multiples of u = 2^-shift. Up to |y| = 129, beyond which
    all is clamped, a factor of 1 + u / 2^8 moves halves by u / 2^9 or more, away from zero, and
    others by half of u or so, which takes none over a half. Roundings in float64 err by less than
    u / 2^9 in all, or None.
    """
    whole = integer_path(path, largest_sum)
    if whole is None:
        return None
    factor, offset = (
        np.asarray(np.ldexp(numbers.astype(np.float64), -whole.shift), np.float64)
        for numbers in (whole.factor, whole.offset)
    )
    reach = largest_sum * np.max(np.abs(factor)) + np.max(np.abs(offset)) + 1.0
    if reach * 2.0**-51 >= 2.0 ** -(whole.shift + _HALF_SHIFT + 1):
        return None
    return _floored(factor, offset, whole.shift + _HALF_SHIFT, whole.low, whole.high)


def _floored(factor: Floats, offset: Floats, shift: int, low: int, high: int) -> FastPath:
    more = 1.0 + 2.0**-shift
    return FastPath(factor * more, offset * more + 0.5, low, high)


def integer_path(path: OutputPath | IdealPath, largest_sum: int) -> IntegerPath | None:
    """Return the path as one multiplication and one rounding if that is exact, else None.

    `largest_sum` bounds |a|. Needed: a stays in 34 bits and a + bias in 32, so that nothing
    saturates before the last conversion; no PReLU, no table. Then the one rounding is the
    hardware's, and a rectifier and the clamps behind it are one clamp.
    """
    if isinstance(path, IdealPath) or path.x2 is not None or path.tables is not None:
        return None
    stage = path.x1
    bias = output_stages.operand_of(stage.operand, stage.operand_shift)
    if largest_sum + int(np.max(np.abs(bias), initial=0)) >= 1 << 31:
        return None
    if stage.multiplier is None:
        scale, shift = path.converter.scale, int(path.converter.shift)
    else:
        scale, shift = stage.multiplier, int(stage.shift)
    factor, offset = np.broadcast_arrays(
        np.asarray(scale, np.int64), np.asarray(bias * scale, np.int64)
    )
    return IntegerPath(factor, offset, shift, path.low, path.high)


def ideal_in_one_step(path: IdealPath) -> FastPath | None:
    """Return an ideal path as one factor and one rounding; None with slopes or a function.

    What lies within 2^-32 of a half, in parts of itself, may round as the half does.
    """
    if path.activation.slopes is not None or path.activation.function is not None:
        return None
    return _floored(path.factor, np.asarray(path.offset), _IDEAL_SHIFT, path.low, path.high)


def input_path(step: float) -> FastPath:
    """Return the path of real numbers in float32 to INT8 with this scale.

    A quotient of two float32 is a half, or differs from it by 2^-34 of itself or more.
    """
    one = np.ones(())
    return _floored(one / step, 0 * one, _IDEAL_SHIFT + 4, -128, 127)


def in_float32(path: Path) -> FastPath | None:
    """Return a fast path in float32; it may round wrongly, so that its results are to be tried."""
    if not isinstance(path, FastPath):
        return None
    return replace(path, factor=np.float32(path.factor), offset=np.float32(path.offset))


def table_path(path: OutputPath | IdealPath, largest_sum: int) -> TablePath | None:
    """Return a path with tables as one table of its results, each looked up once; else None.

    Beyond the reach of `tables_of` both tables are flat.
    """
    if isinstance(path, IdealPath) or path.tables is None or path.x2 is not None:
        return None
    reach = _TABLE_REACH << TABLE_FRACTION_BITS
    x1 = integer_path(replace(path, tables=None, low=-reach, high=reach), largest_sum)
    results = _converted(lookup.run_lookup(np.arange(-reach, reach + 1), path.tables), path)
    return None if x1 is None else TablePath(x1, results)


def by_position(path: Path) -> bool:
    """Return whether the path differs between positions of one channel: slopes may."""
    if isinstance(path, IdealPath):
        slopes = path.activation.slopes
    else:
        x2 = path.x2 if isinstance(path, OutputPath) else None
        slopes = None if x2 is None or x2.multiplier is None else np.asarray(x2.multiplier)
    return slopes is not None and slopes.shape[-2:] not in {(), (1, 1)}


def finish(sums: NDArray[np.generic], path: Path) -> Int8s:
    """Return the INT8 result of accumulators (whole numbers of any type)."""
    return finished(sums, path).astype(np.int8, copy=False)


def finished(sums: NDArray[np.generic], path: Path) -> NDArray[Any]:
    """Return numbers of which what stands before the point is the result of `finish`."""
    if isinstance(path, FastPath):
        return _finish_in_floats(sums, path)
    if isinstance(path, IntegerPath):
        return _finish_in_integers(sums, path)
    if isinstance(path, TablePath):
        return np.take(path.results, _finish_in_integers(sums, path.x1) - path.x1.low)
    if isinstance(path, IdealPath):
        return _finish_ideal(sums, path)
    value = output_stages.run_x(accumulator.deliver(sums.astype(np.int64)), path.x1)
    if path.x2 is not None:
        value = output_stages.run_x(value, path.x2)
    if path.tables is not None:
        value = lookup.run_lookup(value, path.tables)
    return _converted(value, path)


def _converted(value: Ints, path: OutputPath) -> Int8s:
    result = convert.convert_output(value, path.converter)
    return np.clip(result, path.low, path.high).astype(np.int8)


def tables_of(function: Function) -> lookup.Tables:
    """Return both tables of a function over -8..8 (linear, the finer one answers), flat beyond.

    Entries are rounded to 15 fraction bits. The finer table errs by at most h^2 / 8 max|f''| with
    h = 1/16: 5e-5 for the sigmoid, 4e-4 for tanh, less than a tenth of an INT8 step of 1/127.
    """
    return lookup.Tables(
        _table(function, lookup.LE_ENTRIES),
        _table(function, lookup.LO_ENTRIES),
        lookup.Priority(underflow="lo", overflow="lo", hybrid="lo"),
    )


def real_function(function: Function, x: Floats) -> Floats:
    """Return the function in float64."""
    result: Floats = FUNCTIONS[function](x)
    return result


def _sigmoid(x: Floats) -> Floats:
    result: Floats = 0.5 * (1.0 + np.tanh(0.5 * x))
    return result


FUNCTIONS: Mapping[Function, Callable[[Floats], Floats]] = {"sigmoid": _sigmoid, "tanh": np.tanh}


def _table(function: Function, entries: int) -> lookup.Table:
    points = np.linspace(-_TABLE_REACH, _TABLE_REACH, entries)
    real = real_function(function, points) * 2.0**_ENTRY_FRACTION_BITS
    stored = rounding.saturate(rounding.half_away(real).astype(np.int64), 16)
    reach = _TABLE_REACH << TABLE_FRACTION_BITS
    select = (2 * reach // (entries - 1)).bit_length() - 1
    return lookup.Table(stored, lookup.Addressing(-reach, select), reach)


def bounds_of(activation: Activation, step_out: float) -> tuple[int, int]:
    """Return the INT8 numbers of real bounds at a scale, within -128..127."""
    real = np.array([activation.low, activation.high]) / step_out
    low, high = rounding.half_away(np.clip(real, -128, 127))
    return int(low), int(high)


def _first_stage(
    bias: Ints | None, factor: scales.Multiplier | None, *, relu: bool
) -> output_stages.StageX:
    operand = scales.bias_operand(np.zeros((), np.int64) if bias is None else bias)
    return output_stages.StageX(
        operation="sum",
        operand=operand.operand,
        operand_shift=operand.shift,
        multiplier=None if factor is None else factor.scale,
        shift=0 if factor is None else factor.shift,
        relu=relu,
    )


def _held(factor: Floats) -> Floats:
    """Return factors as multipliers of 16 bits hold them."""
    multiplier = scales.multiplier_of(factor)
    result: Floats = np.ldexp(multiplier.scale.astype(np.float64), -multiplier.shift)
    return result


def _converter(factor: scales.Multiplier) -> convert.Converter:
    return convert.Converter(0, factor.scale, factor.shift)


def _finish_in_floats(sums: NDArray[np.generic], path: FastPath) -> NDArray[Any]:
    value: NDArray[Any] = np.multiply(sums, path.factor, dtype=path.factor.dtype)
    value += path.offset
    if path.low < 0:
        np.floor(value, out=value)
    return np.clip(value, path.low, path.high, out=value)


def _finish_in_integers(sums: NDArray[np.generic], path: IntegerPath) -> Ints:
    value: Ints = sums.astype(np.int64)
    value *= path.factor
    value += path.offset
    if path.shift > 0:  # as rounding.shift_right; below a bound of 0 halves do not matter
        if path.low < 0:
            value += value >> 63
        value += 1 << (path.shift - 1)
        value >>= path.shift
    return np.clip(value, path.low, path.high, out=value)


def _finish_ideal(sums: NDArray[np.generic], path: IdealPath) -> Int8s:
    value: Floats = sums.astype(np.float64) * path.factor + path.offset
    if path.activation.slopes is not None:
        value = np.where(value < 0, value * path.activation.slopes, value)
    if path.activation.function is not None:
        real = real_function(path.activation.function, value * path.step_out)
        value = real / path.step_out
    return np.clip(rounding.half_away(value), path.low, path.high).astype(np.int8)
