"""The calibration table: amax per tensor and its origin, as a JSON file.

Format 1 holds the ranges of an unchanged model; format 2 also holds the adjustments of its weights
(`Adjustments`), so that ranges and weights stay together; format 3 also holds the preprocessing of
the images, and adjustments if there are any. Format 4 is one whose calibration lost too much: no
older version reads it, and no build takes it in silence. Format 5 also holds rounded weights.
"""

import hashlib
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from calibration.errors import CalibrationError
from device.engine.manifest import IMPORTED
from device.engine.preprocessing import Preprocessing
from device.files import replace_file

QMAX = 127.0
"""Symmetric INT8 uses -127 to 127."""
MAX_AMAX = 3.4028234663852886e38
"""The largest float32: scales are float32 on every device."""
MIN_AMAX = QMAX * 2.0**-126
"""Below this the scale amax / 127 would not be a normal float32."""

FORMATS = (1, 2, 3, 4, 5)
# A list of numbers over several lines; JSON strings hold no line feed.
_NUMBERS = re.compile(rb"\[\n[-+.0-9eE,\s]*\]")

Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Name = Annotated[str, Meta(min_length=1)]


class _Head(msgspec.Struct, frozen=True):
    """Common to every version of the file; read first to detect newer files."""

    format: int


class Adjustments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the model was changed before its ranges were measured; names as in the model.

    `equalised`: tensor -> factors per channel (axis 1). The tensor is divided by them: weight and
    bias of its producer are divided, or a Mul before its consumer, a depthwise convolution, writes
    TENSOR_equalised (with a number where that name is taken); the weight of its consumer is
    multiplied. `biases`: node -> values added to its bias, per output channel. `rounded`:
    node -> how its weight in INT8 differs from the nearest integers
    (`toolkit.quantize.corrections.rounding`). The numbers are rounded before anything is measured
    with them, so they are exact. Equalisation comes first.
    """

    equalised: dict[Name, tuple[float, ...]] = {}
    biases: dict[Name, tuple[float, ...]] = {}
    rounded: dict[Name, Name] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if not self.equalised and not self.biases and not self.rounded:
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

    `method`: the row of METHODS that chose them; `methods`: tensor -> its row, if another.
    `samples`: how many were run; 0 only for a dummy and if `method` is IMPORTED. `data_sha256`,
    `model_sha256`: of the data set or imported file, and of the model file, 64 lowercase
    hexadecimal digits. `keep_float`: nodes that stay in floating point. `dummy`: the ranges were
    not measured; for timing only. `adjusted`: changes of the model's weights, from format 2 on.
    `preprocessing`: image -> input, from format 3 on; unset where it is not recorded. `refused`:
    the losses at the outputs that were beyond their limits, from format 4 on.
    """

    format: Literal[1, 2, 3, 4, 5] = 1
    method: Name
    samples: Annotated[int, Meta(ge=0)]
    data_sha256: Sha256
    model_sha256: Sha256
    tensors: dict[str, float]
    methods: dict[str, Name] = {}
    keep_float: tuple[Name, ...] = ()
    dummy: bool = False
    adjusted: Adjustments | UnsetType = UNSET
    preprocessing: Preprocessing | UnsetType = UNSET
    refused: tuple[Name, ...] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.format != format_of(self.adjusted, self.preprocessing, self.refused):
            weights = "adjustments" if self.adjusted else "no adjustments"
            images = "a preprocessing" if self.preprocessing else "no preprocessing"
            losses = "losses" if self.refused else "no losses"
            raise CalibrationError(
                f"the calibration table is of format {self.format}, but has {weights} of weights, "
                f"{images} of images and {losses} beyond their limits (format 1: none, 2: "
                "adjustments, 3: a preprocessing, 4: losses, 5: rounded weights): calibrate again"
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
            if not MIN_AMAX <= amax <= MAX_AMAX:  # false for NaN, too
                raise CalibrationError(
                    f"amax of tensor '{name}' is {amax}, but must lie between {MIN_AMAX:.3g} and "
                    f"{MAX_AMAX:.3g}: calibrate again"
                )

    def amax(self, tensor: str) -> float:
        """The amax of `tensor`; raises CalibrationError if the table lacks it."""
        limit = self.tensors.get(tensor)
        if limit is None:
            raise CalibrationError(
                f"the calibration table has no tensor '{tensor}' among its {len(self.tensors)}: "
                "calibrate this model again"
            )
        return limit

    def scale(self, tensor: str) -> float:
        """The scale of `tensor`: x is about q * scale, q in [-127, 127]."""
        return scale_of(self.amax(tensor))


def format_of(
    adjusted: Adjustments | UnsetType,
    preprocessing: Preprocessing | UnsetType,
    refused: tuple[str, ...] | UnsetType = UNSET,
) -> Literal[1, 2, 3, 4, 5]:
    """The oldest format that holds them."""
    if adjusted and adjusted.rounded:
        return 5
    if refused:
        return 4
    if preprocessing:
        return 3
    return 2 if adjusted else 1


def fingerprint(table: CalibrationTable) -> str:
    """SHA-256 of the table's file, as 64 hexadecimal digits: tables that differ at all differ."""
    return hashlib.sha256(encode_table(table)).hexdigest()


def rounded(values: Iterable[float], digits: int) -> tuple[float, ...]:
    """The numbers rounded to `digits` significant decimal digits."""
    return tuple(float(f"{value:.{digits}g}") for value in values)


def scale_of(amax: float) -> float:
    """amax / 127, the scale of symmetric INT8."""
    return amax / QMAX


def encode_table(table: CalibrationTable) -> bytes:
    """The bytes of the file: equal tables give equal bytes, and floats are exact."""
    canonical = msgspec.json.encode(table, order="deterministic")
    lines = msgspec.json.format(canonical, indent=2) + b"\n"
    return _NUMBERS.sub(lambda match: b" ".join(match[0].split()), lines)


def decode_table(data: bytes, where: str) -> CalibrationTable:
    """Read the bytes of `encode_table`; raises CalibrationError that starts with `where`.

    Every length, type, name and range is checked.
    """
    try:
        version = msgspec.json.decode(data, type=_Head).format
        if version not in FORMATS:
            raise CalibrationError(
                f"the calibration table has format {version}, but this version reads formats 1 to "
                f"{FORMATS[-1]}: calibrate again with this version"
            )
        return msgspec.json.decode(data, type=CalibrationTable)
    except CalibrationError as error:
        raise CalibrationError(f"{where}: {error}") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CalibrationError(
            f"{where}: not a calibration table ({error}): calibrate again or restore the file"
        ) from error


def _check_row(subject: str, numbers: tuple[float, ...], lower_bound: float) -> None:
    if not numbers:
        raise CalibrationError(
            f"the calibration table has no {subject}: one for each channel is needed; calibrate "
            "again"
        )
    for channel, number in enumerate(numbers):
        if not (lower_bound < number < math.inf):  # false for NaN, too
            raise CalibrationError(
                f"{subject} in channel {channel} is {number}, but must be finite"
                f"{' and positive' if lower_bound == 0.0 else ''}: calibrate again"
            )


def read_table(path: Path) -> CalibrationTable:
    """Read a table from a file. Raises CalibrationError: it cannot be read, or is no table."""
    return decode_table(read_whole(path, "calibration table"), str(path))


def write_table(path: Path, table: CalibrationTable) -> None:
    """Write a table as `write_whole` does."""
    write_whole(path, "calibration table", encode_table(table))


def read_whole(path: Path, what: str) -> bytes:
    """Return the bytes of a file; `what` names it in errors. Raises CalibrationError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CalibrationError(
            f"{path}: cannot read the {what} ({error.strerror}): check the path"
        ) from error


def write_whole(path: Path, what: str, data: bytes) -> None:
    """Write a file so that `path` holds either the old or the new file, whatever happens.

    Raises CalibrationError.
    """
    try:
        replace_file(path, data)
    except OSError as error:
        raise CalibrationError(
            f"{path}: cannot write the {what} ({error.strerror}): check that the "
            "folder exists, is writable and has space left"
        ) from error
