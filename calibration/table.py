"""The calibration table: amax per tensor, with what it was measured on, as a JSON file.

Format 1 holds ranges of a model as it is; format 2 also says how its weights were adjusted before
(`Adjustments`), so that ranges and weights always go together.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from calibration.errors import CalibrationError
from device.files import replacing

QMAX = 127.0
"""Symmetric INT8 uses -127 to 127."""
IMPORTED = "imported"
"""The method of ranges that others measured: how, and on how many samples, is not known."""
LARGEST_AMAX = 3.4028234663852886e38
"""The largest float32: scales are float32 on every device."""
LEAST_AMAX = QMAX * 2.0**-126
"""Below this the scale amax / 127 would not be a normal float32."""

FORMATS = (1, 2)
# A list of numbers that spreads over lines; strings hold no line feed, so it lies in none.
_NUMBERS = re.compile(rb"\[\n[-+.0-9eE,\s]*\]")

Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Name = Annotated[str, Meta(min_length=1)]


class _Head(msgspec.Struct, frozen=True):
    """What every version of the file has; read first, so that a newer file is named as such."""

    format: int


class Adjustments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the model was changed before its ranges were measured; names as in the model.

    `equalised`: tensor -> factors, one for each of its channels (axis 1). The tensor is divided by
    them: the weight and bias of the layer that makes it are divided, the weight of the layer that
    reads it is multiplied. `biases`: node -> what is added to its bias, for each output channel.
    The numbers are rounded for short files before anything is measured with them, so they are
    exact. Equalisation comes first.
    """

    equalised: dict[Name, tuple[float, ...]] = {}
    biases: dict[Name, tuple[float, ...]] = {}

    def __post_init__(self) -> None:
        if not self.equalised and not self.biases:
            raise CalibrationError(
                "the calibration table's adjustments name no tensor and no node: leave them out, "
                "or calibrate again"
            )
        for name, factors in self.equalised.items():
            _check_row(f"factor of tensor '{name}'", factors, 0.0)
        for name, changes in self.biases.items():
            _check_row(f"bias change of node '{name}'", changes, -math.inf)


class CalibrationTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`tensors`: name -> amax, the largest magnitude that INT8 represents, in the tensor's unit.

    `method`: the row of METHODS that chose them; `methods`: tensor -> the row that chose it, where
    that is another. `samples`: how many were run; 0 only in a dummy and where `method` is IMPORTED.
    `data_sha256`, `model_sha256`: of the data set, or the file imported, and of the model file, 64
    lowercase hexadecimal digits. `keep_float`: nodes that
    stay in floating point. `dummy`: the ranges were not measured; good for timing only.
    `adjusted`: how the model's weights have to be changed for these ranges, only in format 2.
    """

    format: Literal[1, 2] = 1
    method: Name
    samples: Annotated[int, Meta(ge=0)]
    data_sha256: Sha256
    model_sha256: Sha256
    tensors: dict[str, float]
    methods: dict[str, Name] = {}
    keep_float: tuple[Name, ...] = ()
    dummy: bool = False
    adjusted: Adjustments | UnsetType = UNSET

    def __post_init__(self) -> None:
        if (self.format == 2) != bool(self.adjusted):
            having = "has" if self.adjusted else "has no"
            raise CalibrationError(
                f"the calibration table is of format {self.format}, but {having} adjustments of "
                "weights, which format 2 alone holds: calibrate again"
            )
        if self.samples == 0 and not self.dummy and self.method != IMPORTED:
            raise CalibrationError(
                "the calibration table was measured on 0 samples, but is not marked as a dummy: "
                "calibrate again"
            )
        for name in self.methods.keys() - self.tensors.keys():
            raise CalibrationError(
                f"the calibration table names a method for tensor '{name}', which is not among its "
                f"{len(self.tensors)} tensors: calibrate again"
            )
        if len(set(self.keep_float)) != len(self.keep_float):
            raise CalibrationError(
                f"the calibration table keeps {len(self.keep_float)} nodes in floating point, but "
                f"only {len(set(self.keep_float))} different ones: name each node once"
            )
        for name, amax in self.tensors.items():
            if not LEAST_AMAX <= amax <= LARGEST_AMAX:  # false for NaN, too
                raise CalibrationError(
                    f"amax of tensor '{name}' is {amax}, but must lie between {LEAST_AMAX:.3g} and "
                    f"{LARGEST_AMAX:.3g}: calibrate again"
                )

    def amax(self, tensor: str) -> float:
        """The amax of `tensor`, or an error if the table lacks it."""
        found = self.tensors.get(tensor)
        if found is None:
            raise CalibrationError(
                f"the calibration table has no tensor '{tensor}' among its {len(self.tensors)}: "
                "calibrate this model again"
            )
        return found

    def method_of(self, tensor: str) -> str:
        """The row of METHODS that chose the amax of `tensor`."""
        return self.methods.get(tensor, self.method)

    def scale(self, tensor: str) -> float:
        """The scale of `tensor`: x is about q * scale, q in [-127, 127]."""
        return scale_of(self.amax(tensor))


def rounded(values: Iterable[float], digits: int) -> tuple[float, ...]:
    """The numbers with so many significant decimal digits, as `Adjustments` hold them."""
    return tuple(float(f"{value:.{digits}g}") for value in values)


def scale_of(amax: float) -> float:
    """amax / 127, the step of symmetric INT8."""
    return amax / QMAX


def encode_table(table: CalibrationTable) -> bytes:
    """The file's bytes: equal tables give equal bytes, and floats keep their last bit."""
    canonical = msgspec.json.encode(table, order="deterministic")
    lines = msgspec.json.format(canonical, indent=2) + b"\n"
    return _NUMBERS.sub(lambda found: b" ".join(found[0].split()), lines)


def decode_table(data: bytes, where: str) -> CalibrationTable:
    """Read what `encode_table` wrote; anything else is a CalibrationError that begins with `where`.

    Every length, type, name and range is checked before a value is made.
    """
    try:
        found = msgspec.json.decode(data, type=_Head).format
        if found not in FORMATS:
            raise CalibrationError(
                f"the calibration table has format {found}, but this version reads formats 1 and "
                "2: calibrate again with this version"
            )
        return msgspec.json.decode(data, type=CalibrationTable)
    except CalibrationError as error:
        raise CalibrationError(f"{where}: {error}") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CalibrationError(
            f"{where}: not a calibration table ({error}): calibrate again or restore the file"
        ) from error


def _check_row(what: str, numbers: tuple[float, ...], above: float) -> None:
    if not numbers:
        raise CalibrationError(
            f"the calibration table has no {what}: one for each channel is needed; calibrate again"
        )
    for channel, number in enumerate(numbers):
        if not (above < number < math.inf):  # false for NaN, too
            raise CalibrationError(
                f"{what} in channel {channel} is {number}, but must be finite"
                f"{' and positive' if above == 0.0 else ''}: calibrate again"
            )


def read_table(path: Path) -> CalibrationTable:
    """Read a table from a file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CalibrationError(
            f"{path}: cannot read the calibration table ({error.strerror}): check the path"
        ) from error
    return decode_table(data, str(path))


def write_table(path: Path, table: CalibrationTable) -> None:
    """Write the table so that `path` holds either the old or the new file, whatever happens."""
    try:
        with replacing(path) as file:
            file.write(encode_table(table))
    except OSError as error:
        raise CalibrationError(
            f"{path}: cannot write the calibration table ({error.strerror}): check that the folder "
            "exists, is writable and has space left"
        ) from error
