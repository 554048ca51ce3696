"""Calibration data in files: a folder of images, .npy files or .npz files, read sample by sample.

Files are sorted by name. With a limit, samples are spread evenly over all of them: the first
hundred images of a data set sorted by class would show one class only.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from calibration.arrays import (
    InputSpec,
    Sample,
    check_finite,
    count_samples,
    cut_array,
    misfit,
    read_samples,
)
from calibration.errors import CalibrationError
from calibration.iterable import iterable_dataset
from calibration.samples import (
    Dataset,
    Divisible,
    Skipped,
    Stamp,
    batched,
    memory_dataset,
    stamp_of,
)
from device.errors import SourceError
from device.files import blocks_of, sha256_of

__all__ = [
    "Dataset",
    "Divisible",
    "InputSpec",
    "LoadPicture",
    "Sample",
    "Skipped",
    "holds_pictures",
    "iterable_dataset",
    "memory_dataset",
    "open_dataset",
]

LoadPicture = Callable[[Path], NDArray[Any]]
"""Read and preprocess one image; SourceError or OSError if it is unreadable."""

PICTURES = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
ARRAYS = frozenset({".npy", ".npz"})


def open_dataset(
    path: Path,
    load_picture: LoadPicture | None,
    inputs: Sequence[InputSpec],
    limit: int | None = None,
    prepared_by: bytes = b"",
) -> Dataset:
    """The samples of a folder or file, at most `limit` of them, spread evenly.

    Images go through `load_picture`; .npy files are a model's only input; the members of a .npz
    file are named after the inputs. An array holds one sample, or many along a leading axis; a
    missing batch axis of 1 is added. If the input has a batch, a sample is one batch: images are
    stacked, and rows that do not fill a batch are skipped and counted. Folders are searched
    recursively without hidden files.

    `prepared_by`: the settings of `load_picture`. The same images prepared otherwise are other
    data, with another hash.
    """
    if limit is not None and limit < 1:
        raise CalibrationError(f"limit is {limit} samples, but must be at least 1: raise it")
    kind, files = _find(path)
    if kind != ".npz" and len(inputs) != 1:
        raise CalibrationError(
            f"{path} holds {kind} files, which feed one input, but the model has {len(inputs)}: "
            "use .npz files with a member for each input"
        )
    if kind != "picture":
        return _choose(path, [_counted(file, inputs) for file in files], limit, inputs, None)
    if load_picture is None:
        raise CalibrationError(
            f"{path} holds pictures, but nothing says how to preprocess them: name the model's "
            "configuration or use .npy files"
        )
    batch = (inputs[0].shape[:1] or (None,))[0] or 1
    image_spec = replace(inputs[0], shape=(1, *inputs[0].shape[1:]))
    pictures = limit and limit * batch
    chosen = _choose(path, files, pictures, [image_spec], load_picture, prepared_by=prepared_by)
    return batched(chosen, batch)


def holds_pictures(path: Path) -> bool:
    """True if there are images at `path`, False for arrays; raises CalibrationError for others."""
    return _find(path)[0] == "picture"


@dataclass(frozen=True)
class _File:
    """A file with its number of samples, and of rows that do not fill a batch."""

    name: str
    path: Path
    samples: int = 1
    rest: int = 0


class _Files:
    """A data set in files; `plan`: file and the indices of its samples to read."""

    shifts = False

    def __init__(
        self,
        plan: Sequence[tuple[_File, Sequence[int]]],
        requested: int,
        read: Callable[[_File, Sequence[int]], Iterator[Sample | Skipped]],
        prepared_by: bytes,
        *,
        hashes: dict[tuple[Path, Stamp], str] | None = None,
    ) -> None:
        """`hashes`: of files, for the parts of a data set; None: all of it."""
        self.requested = requested
        self.skipped: tuple[Skipped, ...] = ()
        self.names: tuple[str, ...] = ()
        self._plan = tuple(plan)
        self._read = read
        self._prepared_by = prepared_by
        self._hashes = {} if hashes is None else hashes
        self._whole = hashes is None

    def __len__(self) -> int:
        return sum(len(numbers) for _, numbers in self._plan)

    def __iter__(self) -> Iterator[Sample]:
        self.skipped = tuple(
            Skipped(file.name, f"its last {file.rest} rows do not fill a batch")
            for file, _ in self._plan
            if file.rest
        )
        self.names = ()
        for file, numbers in self._plan:
            for number, item in zip(numbers, self._read(file, numbers), strict=True):
                if isinstance(item, Skipped):
                    self.skipped += (item,)
                else:
                    self.names += (file.name if file.samples == 1 else f"{file.name}[{number}]",)
                    yield item
        if not self.names and self._whole:
            first = self.skipped[0]
            raise CalibrationError(
                f"none of {len(self)} calibration samples could be read ({first.name}: "
                f"{first.reason}): check the files"
            )

    def part(self, start: int, stop: int) -> "_Files":
        plan, first = [], 0
        for file, numbers in self._plan:
            chosen = numbers[max(0, start - first) : max(0, stop - first)]
            if chosen:  # what does not fill a batch is counted where a file begins
                plan.append((file if first >= start else replace(file, rest=0), chosen))
            first += len(numbers)
        return _Files(plan, stop - start, self._read, self._prepared_by, hashes=self._hashes)

    def sha256(self) -> str:
        return self._sha256

    @cached_property
    def _sha256(self) -> str:
        digest = hashlib.sha256(self._prepared_by)
        for file, numbers in self._plan:
            try:
                # Lengths first, so that no two data sets have the same byte stream.
                head = repr((file.name, file.path.stat().st_size, list(numbers)))
                digest.update(head.encode("utf-8", "surrogateescape"))
                if not self._whole:  # a file of many samples is in many parts, and read once
                    digest.update(self._file_sha256(file.path).encode())
                    continue
                for block in blocks_of(file.path):
                    digest.update(block)
            except OSError as error:
                raise CalibrationError(
                    f"{file.path}: cannot read the calibration data ({error.strerror}): check that "
                    "the file is still there"
                ) from error
        return digest.hexdigest()

    def stamps(self) -> Mapping[str, Stamp]:
        return {file.name: stamp_of(file.path) for file, _ in self._plan}

    def _file_sha256(self, path: Path) -> str:
        key = path, stamp_of(path)
        if key not in self._hashes:
            self._hashes[key] = sha256_of(path)
        return self._hashes[key]


def _find(path: Path) -> tuple[str, list[_File]]:
    """The data files at `path` in the order of their names, all of one kind."""
    if path.is_file():
        data_files = [_File(path.name, path)]
    elif path.is_dir():
        data_files = sorted(_walk(path), key=lambda file: file.name)
    else:
        raise CalibrationError(f"{path}: no such calibration data: check the path")
    kinds: dict[str, list[_File]] = {}
    for file in data_files:
        suffix = file.path.suffix.lower()
        if suffix in PICTURES | ARRAYS:
            kinds.setdefault("picture" if suffix in PICTURES else suffix, []).append(file)
    if len(kinds) != 1:
        counts = ", ".join(f"{len(files)} {kind}" for kind, files in sorted(kinds.items()))
        raise CalibrationError(
            f"{path} holds {counts or 'no picture, .npy or .npz'} files of {len(data_files)}, but "
            "calibration takes one kind: name a folder with pictures, .npy or .npz files"
        )
    return next(iter(kinds.items()))


def _walk(root: Path) -> Iterator[_File]:
    def refuse(error: OSError) -> None:
        raise CalibrationError(
            f"{error.filename}: cannot list the folder ({error.strerror}): check its permissions"
        ) from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                path = Path(folder, name)
                yield _File(path.relative_to(root).as_posix(), path)


def _choose(
    path: Path,
    files: Sequence[_File],
    limit: int | None,
    inputs: Sequence[InputSpec],
    load_picture: LoadPicture | None,
    *,
    prepared_by: bytes = b"",
) -> _Files:
    """Spread `limit` samples evenly over all files."""
    total = sum(file.samples for file in files)
    if total == 0:
        raise CalibrationError(f"{path} holds no whole sample: give at least one")
    count = min(total, limit or total)
    chosen = iter([number * total // count for number in range(count)])
    plan: list[tuple[_File, list[int]]] = []
    number, start = next(chosen), 0
    for file in files:
        numbers = []
        while start <= number < start + file.samples:
            numbers.append(number - start)
            number = next(chosen, total)
        start += file.samples
        if numbers:
            plan.append((file, numbers))

    def read(file: _File, numbers: Sequence[int]) -> Iterator[Sample | Skipped]:
        if load_picture is None:
            return read_samples(file.path, numbers, inputs)
        return _read_picture(file, inputs[0], load_picture)

    return _Files(plan, limit or total, read, prepared_by)


def _read_picture(
    file: _File, spec: InputSpec, load_picture: LoadPicture
) -> Iterator[Sample | Skipped]:
    try:
        picture = load_picture(file.path)
    except (SourceError, OSError) as error:
        yield Skipped(file.name, str(error))
        return
    cut = cut_array(picture.shape, picture.dtype, spec, str(file.path))
    if cut.samples != 1:
        raise misfit(picture.shape, picture.dtype, spec, str(file.path))
    check_finite(picture, str(file.path))
    yield {spec.name: picture.reshape(cut.shape)}


def _counted(file: _File, inputs: Sequence[InputSpec]) -> _File:
    samples, rest = count_samples(file.path, inputs)
    return _File(file.name, file.path, samples, rest)
