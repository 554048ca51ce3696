"""TensorRT calibration caches, which TensorRT <= 10 reads instead of Q/DQ; required for its DLA.

    TRT-100300-EntropyCalibration2       TRT-<version>-<algorithm>
    images: 3c010204                     <tensor>: <bits of the float32 s, big-endian, hexadecimal>

    s = float32(amax / 127)

The product 127 s is exact in float64, so cache -> amax -> cache keeps every byte. In the other
direction, amax -> cache -> amax keeps the scale float32(amax / 127) exactly; amax itself may
change, because float32 has fewer values for s than for amax just above a power of two.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from calibration.errors import CalibrationError
from calibration.table import QMAX, scale_of, write_whole

Algorithm = Literal[
    "EntropyCalibration2", "MinMaxCalibration", "EntropyCalibration", "LegacyCalibration"
]
"""TensorRT's names of its calibrators.

trtexec and the DLA require the name EntropyCalibration2; the scales may come from any method.
"""

DEFAULT_TENSORRT = "10.3.0"
"""The TensorRT of JetPack 6.1 and 6.2, the newest that reads caches on a board with a DLA."""

_WRITTEN: tuple[Algorithm, ...] = ("EntropyCalibration2", "MinMaxCalibration")
# Tools that know only the major version write 8XXX.
_VERSION = re.compile(r"[0-9][0-9X]{3}(?:[0-9]{2})?")
_HEADER = re.compile(rf"TRT-({_VERSION.pattern})-(\w+)")
_SCALE = re.compile(r"[0-9a-fA-F]{1,8}")
_RELEASE = re.compile(r"(\d{1,2})\.(\d{1,2})(?:\.(\d{1,2})(?:\.\d+)?)?", re.ASCII)
# TensorRT counts the version as major * 1000 + ... before this release, and * 10000 from it on.
_SIX_DIGITS_FROM = 10
_NO_CALIBRATORS_FROM = 11


@dataclass(frozen=True)
class TensorRTCache:
    """`version`: of TensorRT as the header has it, 4 digits before TensorRT 10 and then 6.

    `scales`: tensor -> s in the tensor's unit, x is about q s; every s is a positive float32.
    """

    version: str
    algorithm: Algorithm
    scales: Mapping[str, float]

    def __post_init__(self) -> None:
        if not _VERSION.fullmatch(self.version):
            raise CalibrationError(
                f"a TensorRT cache cannot have version '{self.version}': give 4 to 6 digits as "
                "`cache_version` makes them"
            )
        if self.algorithm not in get_args(Algorithm):
            raise CalibrationError(
                f"a TensorRT cache cannot have the algorithm '{self.algorithm}': "
                f"give one of {', '.join(get_args(Algorithm))}"
            )
        for name, scale in self.scales.items():
            _check_name(name)
            if not 0.0 < scale < float("inf") or _float32(scale) != scale:
                raise CalibrationError(
                    f"the scale of tensor '{name}' is {scale}, but a TensorRT cache holds positive "
                    "float32 numbers: calibrate again"
                )


def cache_version(tensorrt: str) -> str:
    """The header's version for a release of TensorRT: 8.5.2.2 -> 8502, 10.3.0 -> 100300."""
    release = _RELEASE.fullmatch(tensorrt)
    if release is None:
        raise CalibrationError(
            f"'{tensorrt}' is not a version of TensorRT: give it as 10.3.0 or 8.5.2.2"
        )
    major, minor, patch = (int(part or 0) for part in release.groups())
    unit = 10_000 if major >= _SIX_DIGITS_FROM else 1_000
    return f"{major * unit + minor * 100 + patch:04}"


def cache_warning(tensorrt: str) -> str | None:
    """Why a release of TensorRT cannot use a cache; None if it can."""
    cache_version(tensorrt)  # raises if it is not a version
    if int(tensorrt.partition(".")[0]) < _NO_CALIBRATORS_FROM:
        return None
    return (
        f"TensorRT {tensorrt} has no calibrators and reads no calibration cache, as all from "
        f"{_NO_CALIBRATORS_FROM}.0 on: export a Q/DQ model for it"
    )


def cache_of(
    amax: Mapping[str, float], version: str, algorithm: Algorithm = "EntropyCalibration2"
) -> TensorRTCache:
    """Ranges -> cache: s = float32(amax / 127), in the order given.

    `version` is what `cache_version` makes.
    """
    return TensorRTCache(
        version, algorithm, {name: _float32(scale_of(value)) for name, value in amax.items()}
    )


def amax_of(cache: TensorRTCache) -> dict[str, float]:
    """Cache -> ranges: amax = 127 s, without rounding."""
    return {name: QMAX * scale for name, scale in cache.scales.items()}


def encode_cache(cache: TensorRTCache) -> str:
    """The text of the file, as TensorRT writes it."""
    if cache.algorithm not in _WRITTEN:
        raise CalibrationError(
            f"caches are written for {' and '.join(_WRITTEN)}, not for {cache.algorithm}, whose "
            "scales TensorRT applies after fusion: choose one of the two"
        )
    lines = [f"TRT-{cache.version}-{cache.algorithm}"]
    lines += [f"{name}: {struct.pack('>f', scale).hex()}" for name, scale in cache.scales.items()]
    return "\n".join(lines) + "\n"


def decode_cache(text: str, where: str) -> TensorRTCache:
    """Read a cache from its text; an error begins with `where` and the number of the line.

    Accepted, as TensorRT and other tools write them: no leading zeros, capitals, CRLF, trailing
    blanks, empty lines, names with colons (the last one ends the name).
    """
    header, *lines = text.split("\n")
    version, algorithm = _header(header, where)
    scales: dict[str, float] = {}
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        place = f"{where}, line {number}"
        name, scale = _entry(line, place)
        if name in scales:
            raise CalibrationError(
                f"{place}: tensor '{name}' has a scale on line {line_of[name]} already: remove one"
            )
        scales[name], line_of[name] = scale, number
    return TensorRTCache(version, algorithm, scales)


def write_cache(path: Path, cache: TensorRTCache) -> None:
    """Write a cache as `calibration.table.write_whole` does."""
    write_whole(path, "TensorRT cache", encode_cache(cache).encode())


def _header(line: str, where: str) -> tuple[str, Algorithm]:
    match = _HEADER.fullmatch(line.rstrip())
    algorithm = next((a for a in get_args(Algorithm) if match and match[2] == a), None)
    if match is None or algorithm is None:
        raise CalibrationError(
            f"{where}, line 1: found '{line.rstrip()[:80]}' where a TensorRT cache has "
            f"TRT-<version>-<algorithm> with one of {', '.join(get_args(Algorithm))}: "
            "give a calibration cache"
        )
    return match[1], algorithm


def _entry(line: str, where: str) -> tuple[str, float]:
    name, colon, digits = line.rpartition(":")
    digits = digits.strip()
    if not colon or not _SCALE.fullmatch(digits):
        raise CalibrationError(
            f"{where}: found '{line.strip()[:80]}' where a tensor's name, a colon and 1 to 8 "
            "hexadecimal digits belong: restore the file"
        )
    scale: float = struct.unpack(">f", bytes.fromhex(digits.zfill(8)))[0]
    if not 0.0 < scale < float("inf"):  # false for NaN, too
        raise CalibrationError(
            f"{where}: the scale of tensor '{name}' is {scale} (bits {digits}), but must be "
            "positive "
            "and finite: calibrate again"
        )
    try:
        _check_name(name)
    except CalibrationError as error:
        raise CalibrationError(f"{where}: {error}") from error
    return name, scale


def _check_name(name: str) -> None:
    """Refuse names that do not fit on one line of the file."""
    if not name or "\n" in name or "\r" in name or not _is_unicode(name):
        raise CalibrationError(
            f"a TensorRT cache cannot hold a tensor named {name!r}: give it a name of one line"
        )


def _is_unicode(name: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _float32(number: float) -> float:
    """The nearest float32; infinity beyond the largest one."""
    try:
        nearest: float = struct.unpack(">f", struct.pack(">f", number))[0]
    except OverflowError:
        return float("inf")
    return nearest
