"""The state of an observation, as a value and as a file: histograms, model and data.

The file: 8 bytes `MAGIC`, the SHA-256 of the rest, the rest as MessagePack (`_File`). Counts are
the bins from the first to the last that are not zero, in little endian order, each in the fewest
bytes of 1, 2, 4 and 8 that hold the largest.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from calibration.errors import CalibrationError
from calibration.observer import ALL_BINS, MIN_EXPONENT, Histogram, exponent_of
from calibration.table import Sha256, read_whole, write_whole

MAGIC = b"TNDMOBS\n"
MAX_ELEMENTS = 1 << 62
"""Two states of this size merge without overflow."""

_HASH_SIZE = hashlib.sha256().digest_size
_DTYPES = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """The samples of one observation: their number, and the hash of the model inputs."""

    sha256: Sha256
    samples: Annotated[int, Meta(ge=1)]


@dataclass(frozen=True, eq=False)
class State:
    """`histograms`: by tensor. `parts`: one for each observation, ascending."""

    model_sha256: str
    parts: tuple[Part, ...]
    histograms: Mapping[str, Histogram]

    @property
    def samples(self) -> int:
        """Number of samples run."""
        return sum(part.samples for part in self.parts)

    @property
    def data_sha256(self) -> str:
        """The hash of the data: of the only part, or of the hashes of all parts."""
        if len(self.parts) == 1:
            return self.parts[0].sha256
        return hashlib.sha256("".join(part.sha256 for part in self.parts).encode()).hexdigest()


def check_same(where: str, state: State, model_sha256: str, tensors: Mapping[str, object]) -> None:
    """Raise CalibrationError if a state is of another model or of other tensors."""
    if state.model_sha256 != model_sha256:
        raise CalibrationError(
            f"{where} is of the model {state.model_sha256[:12]}, not of {model_sha256[:12]}: "
            "observe this model anew"
        )
    missing, unexpected = (
        tensors.keys() - state.histograms.keys(),
        state.histograms.keys() - tensors.keys(),
    )
    if missing or unexpected:
        difference = " and ".join(
            f"{verb} {len(names)} ('{min(names)}' for one)"
            for verb, names in (("lacks", missing), ("has besides", unexpected))
            if names
        )
        raise CalibrationError(
            f"{where} is of other tensors: of the {len(tensors)} asked for it {difference}: "
            "observe these tensors anew"
        )


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A histogram; `first`: the bin of the first count, `size`: bytes of a count."""

    name: str
    exponent: Annotated[int, Meta(ge=MIN_EXPONENT, le=1024)]
    minimum: float
    maximum: float
    first: Annotated[int, Meta(ge=0, lt=ALL_BINS)]
    size: Literal[1, 2, 4, 8]
    counts: Annotated[bytes, Meta(max_length=8 * ALL_BINS)]


class _Head(msgspec.Struct, frozen=True):
    """Common to every version of the file; read first to detect newer files."""

    format: int


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal[1]
    model_sha256: Sha256
    parts: Annotated[list[Part], Meta(min_length=1)]
    tensors: Annotated[list[_Tensor], Meta(min_length=1)]


def encode_state(state: State) -> bytes:
    """The bytes of the file; equal states give equal bytes, in any order of tensors."""
    tensors = [_packed(name, state.histograms[name]) for name in sorted(state.histograms)]
    body = msgspec.msgpack.encode(_File(1, state.model_sha256, list(state.parts), tensors))
    return MAGIC + hashlib.sha256(body).digest() + body


def decode_state(data: bytes, where: str) -> State:
    """Read the bytes of `encode_state`; raises CalibrationError that starts with `where`.

    Every length, type, name, range and count is checked.
    """
    head, body = data[: len(MAGIC) + _HASH_SIZE], data[len(MAGIC) + _HASH_SIZE :]
    if not head.startswith(MAGIC):
        raise CalibrationError(f"{where} is no calibration state: check the path")
    if head != MAGIC + hashlib.sha256(body).digest():
        raise CalibrationError(
            f"{where} is damaged (its hash does not fit its {len(data)} bytes): remove it and "
            "observe again"
        )
    try:
        version = msgspec.msgpack.decode(body, type=_Head).format
        if version != 1:
            raise CalibrationError(
                f"{where} has format {version}, but this version reads format 1: observe again "
                "with "
                "this version"
            )
        return _checked(msgspec.msgpack.decode(body, type=_File))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CalibrationError(
            f"{where} is not a calibration state ({error}): remove it and observe again"
        ) from error


def read_state(path: Path) -> State:
    """Read a state from a file. Raises CalibrationError: it cannot be read, or is no state."""
    return decode_state(read_whole(path, "calibration state"), str(path))


def write_state(path: Path, state: State) -> None:
    """Write a state as `write_whole` does."""
    write_whole(path, "calibration state", encode_state(state))


def _packed(name: str, histogram: Histogram) -> _Tensor:
    filled = np.flatnonzero(histogram.bins)
    first, last = (int(filled[0]), int(filled[-1]) + 1) if filled.size else (0, 0)
    bins = histogram.bins[first:last]
    largest = int(bins.max(initial=0))
    size = next(size for size, dtype in _DTYPES.items() if largest <= np.iinfo(dtype).max)
    return _Tensor(
        name=name,
        exponent=histogram.exponent,
        minimum=histogram.minimum,
        maximum=histogram.maximum,
        first=first,
        size=size,  # type: ignore[arg-type]
        counts=bins.astype(_DTYPES[size]).tobytes(),
    )


def _checked(file: _File) -> State:
    parts, names = file.parts, [tensor.name for tensor in file.tensors]
    if any(low.sha256 >= high.sha256 for low, high in pairwise(parts)):
        raise ValueError("its data are not in order or not different")
    if any(low >= high for low, high in pairwise(names)):
        raise ValueError("its tensors are not in order or not different")
    histograms = {tensor.name: _unpacked(tensor) for tensor in file.tensors}
    return State(file.model_sha256, tuple(parts), histograms)


def _unpacked(tensor: _Tensor) -> Histogram:
    """The histogram; ValueError if it is impossible."""
    counts = np.frombuffer(tensor.counts, _DTYPES[tensor.size])  # ValueError: not a whole number
    if tensor.first + counts.size > ALL_BINS:
        raise ValueError(f"tensor '{tensor.name}' has too many bins")
    if sum(counts.tolist()) > MAX_ELEMENTS:
        raise ValueError(f"tensor '{tensor.name}' has more than 2^62 elements")
    bins = np.zeros(ALL_BINS, np.int64)
    bins[tensor.first : tensor.first + counts.size] = counts
    histogram = Histogram(bins, tensor.exponent, tensor.minimum, tensor.maximum)
    _check_ends(tensor.name, histogram)
    return histogram


def _check_ends(name: str, histogram: Histogram) -> None:
    """Check that the extremes are in the range and its last filled bin, or that it is empty."""
    minimum, maximum = histogram.minimum, histogram.maximum
    if histogram.elements == 0:
        if (minimum, maximum, histogram.exponent) != (math.inf, -math.inf, MIN_EXPONENT):
            raise ValueError(f"tensor '{name}' has a range but no element")
        return
    if not (-math.inf < minimum <= maximum < math.inf):  # false for NaN, too
        raise ValueError(f"tensor '{name}' ranges from {minimum} to {maximum}")
    if histogram.exponent != exponent_of(histogram.amax):
        raise ValueError(
            f"tensor '{name}' has exponent {histogram.exponent} for {minimum}..{maximum}"
        )
    filled: NDArray[np.intp] = np.flatnonzero(histogram.bins)
    top = int(filled[-1])
    if not histogram.edges[top] <= histogram.amax < histogram.edges[top + 1]:
        raise ValueError(f"tensor '{name}' has its last count beside its largest number {maximum}")
