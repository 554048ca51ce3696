"""Arrays in files: .npz and .npy, of one sample or several.

    NAME        the only sample's tensor NAME
    0:NAME      tensor NAME of sample 0, 1:NAME of sample 1, and so on

A file is read as several samples only if each of its names begins so and every sample has the same
tensors; names of models may hold colons. numpy.load and numpy.savez read and write these files.
"""

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from device.array_files import read_arrays
from device.errors import ArrayFileError
from device.files import replacing
from toolkit.errors import InferError
from toolkit.evaluate.infer.runner import Array, Arrays
from toolkit.graph.max_memory import max_memory_bytes

_NUMBERED = re.compile(r"(\d+):(.+)", re.DOTALL)


def load_samples(path: Path) -> list[Arrays]:
    """Return the samples of an .npz file. Raises InferError naming what is wrong with it."""
    arrays = load_npz(path)
    split = {name: _NUMBERED.fullmatch(name) for name in arrays}
    samples: dict[int, Arrays] = {}
    for name, match in split.items():
        if match is None:
            return [arrays]
        samples.setdefault(int(match[1]), {})[match[2]] = arrays[name]
    names = [set(sample) for sample in samples.values()]
    if sorted(samples) != list(range(len(samples))) or any(one != names[0] for one in names):
        return [arrays]
    return [samples[number] for number in range(len(samples))]


def save_samples(path: Path, samples: Sequence[Mapping[str, Array]]) -> None:
    """Write samples as .npz, whole or not at all. Raises InferError: the file cannot be written."""
    single = len(samples) == 1
    # Not numpy.savez: there a tensor called "file" would be the name of the archive.
    try:
        with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
            for number, sample in enumerate(samples):
                for name, array in sample.items():
                    member = f"{name if single else f'{number}:{name}'}.npy"
                    with archive.open(member, "w", force_zip64=True) as stream:
                        np.lib.format.write_array(stream, _plain(array), allow_pickle=False)
    except OSError as error:
        raise InferError(f"cannot write {path}: {error.strerror}; check the folder") from error


def _plain(array: Array) -> Array:
    """Return an array that needs no pickle: onnxruntime gives strings as objects."""
    return array.astype(str) if array.dtype.kind == "O" else np.asarray(array)


def load_npz(path: Path) -> Arrays:
    """Return the arrays of an .npz file by name. Raises InferError."""
    loaded = _load(path)
    if isinstance(loaded, dict):
        return loaded
    raise InferError(
        f"{path} holds one array without a name; give it as NAME={path}, or save with numpy.savez"
    )


def load_array(path: Path, name: str) -> Array:
    """Return the array of an .npy file, or `name` or the only one of an .npz. Raises InferError."""
    loaded = _load(path)
    if not isinstance(loaded, dict):
        return loaded
    if name in loaded or len(loaded) == 1:
        return loaded.get(name, next(iter(loaded.values())))
    raise InferError(f"{path} has no array {name!r}; it has {', '.join(map(repr, loaded))}")


def _load(path: Path) -> Array | Arrays:
    try:
        return read_arrays(path, max_memory_bytes())
    except (OSError, ArrayFileError) as error:
        raise InferError(
            f"{path} cannot be read as arrays ({error}); write it with numpy.savez or numpy.save"
        ) from error
