"""Read samples from .npy files and the members of .npz files.

Headers are read and checked against the length of the data first. Then one sample is in memory at a
time, never the file.
"""

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from calibration.errors import CalibrationError
from device.array_files import open_member, read_header
from device.errors import ArrayFileError

Sample = dict[str, NDArray[Any]]
"""Model inputs: name -> array."""

MAX_SAMPLE_BYTES = 1 << 31

# Exceptions of numpy and zipfile for damaged files.
_DAMAGED = (
    ValueError,
    TypeError,
    EOFError,
    OverflowError,
    MemoryError,
    OSError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True)
class InputSpec:
    """A model input; a dimension of None has any size. `dtype`: numpy name."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Cut:
    """The layout of an array: `samples` of `shape`, then `rest` rows that do not fill a batch."""

    samples: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rest: int = 0


def count_samples(path: Path, inputs: Sequence[InputSpec]) -> tuple[int, int]:
    """Read the headers of a file; return its samples and the rows that do not fill a batch."""
    with ExitStack() as stack:
        cuts = [cut for _, cut in _open_arrays(path, inputs, stack)]
    if len({cut.samples for cut in cuts}) > 1:
        counts = ", ".join(
            f"{cut.samples} of '{spec.name}'" for spec, cut in zip(inputs, cuts, strict=True)
        )
        raise CalibrationError(
            f"{path} holds {counts}: give the same number of samples for every input"
        )
    return cuts[0].samples, max(cut.rest for cut in cuts)


def read_samples(
    path: Path, numbers: Sequence[int], inputs: Sequence[InputSpec]
) -> Iterator[Sample]:
    """Read the samples at the indices `numbers` (ascending)."""
    with ExitStack() as stack:
        streams = _open_arrays(path, inputs, stack)
        position = 0
        for number in numbers:
            sample = {}
            for spec, (stream, cut) in zip(inputs, streams, strict=True):
                where = f"{path}, input '{spec.name}', sample {number}"
                sample[spec.name] = _read_sample(stream, cut, number - position, where)
            position = number + 1
            yield sample


def cut_array(shape: tuple[int, ...], dtype: np.dtype[Any], spec: InputSpec, where: str) -> Cut:
    """Return how an array of `shape` holds samples of `spec`; raises CalibrationError if not."""
    rank = len(spec.shape)
    if dtype == np.dtype(spec.dtype):
        if len(shape) == rank + 1 and _fits(shape[1:], spec.shape):
            return Cut(shape[0], shape[1:], dtype)
        if len(shape) == rank == 0:
            return Cut(1, shape, dtype)
        if len(shape) == rank and _fits(shape[1:], spec.shape[1:]):
            batch = spec.shape[0] or 1
            return Cut(shape[0] // batch, (batch, *shape[1:]), dtype, shape[0] % batch)
        if spec.shape[:1] in ((1,), (None,)) and _fits(shape, spec.shape[1:]):
            return Cut(1, (1, *shape), dtype)
    raise misfit(shape, dtype, spec, where)


def _fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(
        expected_size in (None, size) for size, expected_size in zip(shape, expected, strict=True)
    )


def misfit(
    shape: tuple[int, ...], dtype: np.dtype[Any], spec: InputSpec, where: str
) -> CalibrationError:
    """Return the error for an array that does not fit an input."""
    expected = ", ".join("any" if size is None else str(size) for size in spec.shape)
    return CalibrationError(
        f"{where} is {dtype} of shape {list(shape)}, but input '{spec.name}' takes {spec.dtype} of "
        f"shape [{expected}]: convert the data as the pipeline does"
    )


def _open_arrays(
    path: Path, inputs: Sequence[InputSpec], stack: ExitStack
) -> list[tuple[IO[bytes], Cut]]:
    """Return for each input a stream at its first sample, and how to cut it."""
    try:
        if path.suffix.lower() == ".npy":
            stream: IO[bytes] = stack.enter_context(path.open("rb"))
            return [_open_array(stream, path.stat().st_size, inputs[0], str(path))]
        archive = stack.enter_context(zipfile.ZipFile(path))
        opened = []
        for spec in inputs:
            where = f"{path}, member '{spec.name}'"
            if f"{spec.name}.npy" not in archive.namelist():
                raise CalibrationError(
                    f"{where} is missing among {archive.namelist()}: name each member as its input"
                )
            member = archive.getinfo(f"{spec.name}.npy")
            stream = stack.enter_context(open_member(archive, member))
            opened.append(_open_array(stream, member.file_size, spec, where))
        return opened
    except (*_DAMAGED, ArrayFileError) as error:
        raise _damaged(str(path), str(error)) from error


def _open_array(stream: IO[bytes], size: int, spec: InputSpec, where: str) -> tuple[IO[bytes], Cut]:
    """Read the header of the .npy format and check it against the length of the stream."""
    header = read_header(stream)
    shape, dtype = header.shape, header.dtype
    cut = cut_array(shape, dtype, spec, where)
    if header.fortran and len(shape) > 1:
        raise CalibrationError(
            f"{where} is stored column by column: save np.ascontiguousarray(array) instead"
        )
    actual, declared = size - stream.tell(), header.data_bytes
    if math.prod(cut.shape) * dtype.itemsize > MAX_SAMPLE_BYTES:
        raise CalibrationError(
            f"{where} holds samples of shape {list(cut.shape)}, which have more than "
            f"{MAX_SAMPLE_BYTES} bytes each: give smaller ones"
        )
    if actual != declared:
        raise _damaged(where, f"{actual} bytes of data, but shape {list(shape)} needs {declared}")
    return stream, cut


def _read_sample(stream: IO[bytes], cut: Cut, skip: int, where: str) -> NDArray[Any]:
    """Skip `skip` samples and read the next one."""
    size = math.prod(cut.shape) * cut.dtype.itemsize
    try:
        if skip:
            stream.seek(skip * size, os.SEEK_CUR)
        data = stream.read(size)
    except _DAMAGED as error:
        raise _damaged(where, str(error)) from error
    if len(data) != size:
        raise _damaged(where, f"{len(data)} of {size} bytes")
    array = np.frombuffer(bytearray(data), cut.dtype).reshape(cut.shape)
    check_finite(array, where)
    return array


def _damaged(where: str, why: str) -> CalibrationError:
    return CalibrationError(f"{where} is damaged ({why}): write it again with numpy.save")


def check_finite(array: NDArray[Any], where: str) -> None:
    """Raise CalibrationError if an array holds NaN or infinity."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        nans, infinities = int(np.isnan(array).sum()), int(np.isinf(array).sum())
        raise CalibrationError(
            f"{where} holds {nans} NaN and {infinities} infinite of {array.size} numbers: mend or "
            "remove it"
        )
