"""What can be run: the protocol that models, engines and saved outputs share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from toolkit.errors import InferError
from toolkit.importers.formats import format_of

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Kind = Literal["model", "engine", "arrays"]

SUFFIXES: Mapping[str, Kind] = {
    ".onnx": "model",
    ".engine": "engine",
    ".npz": "arrays",
    ".npy": "arrays",
}


@dataclass(frozen=True, slots=True)
class Input:
    """An input: `shape` has a number, or the name of a dynamic dimension ("" without a name).

    `usual` are the sizes at which dynamic dimensions are random, by name; others are 1.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    usual: Mapping[str, int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Name, type and shape."""
        return f"{self.name!r} {self.dtype} {'x'.join(str(dim or '?') for dim in self.shape)}"


class Runner(Protocol):
    """Something that gives outputs for inputs."""

    @property
    def title(self) -> str:
        """What it is, for reports."""

    @property
    def precision(self) -> str:
        """The lowest precision that it computes in, as `arithmetic_of` says it of engines."""

    @property
    def inputs(self) -> tuple[Input, ...]:
        """What it takes."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """What it gives."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """How it runs here, for reports."""

    def run(self, feeds: Mapping[str, Array]) -> Arrays:
        """Return the outputs. Raises TandemError: the feeds do not fit, or it fails."""

    def tensors(self, feeds: Mapping[str, Array]) -> Arrays:
        """Return every tensor that it can show, in running order. Raises TandemError."""

    def close(self) -> None:
        """Release what it holds."""


def kind_of(path: Path) -> Kind:
    """Return what a file holds, by its suffix, or else by its first bytes.

    Raises InferError: there is no such file, or it is none of them.
    """
    if format_of(path) is not None:
        return "model"
    if not path.is_file():
        raise InferError(f"there is no file {path}; check the path")
    known = SUFFIXES.get(path.suffix.lower())
    if known is not None:
        return known
    with path.open("rb") as file:
        head = file.read(9)
    if head[8:9] == b"{":  # safetensors: the length of the header, then JSON
        return "engine"
    if head.startswith((b"PK", b"\x93NUMPY")):
        return "arrays"
    if head[:1] == b"\x08":  # protobuf: field 1 of a model is a number, its IR version
        return "model"
    raise InferError(
        f"{path} is no ONNX model (.onnx), no engine (.engine) and no file of arrays (.npz, .npy)"
    )


def fitted(feeds: Mapping[str, Array], inputs: tuple[Input, ...], title: str) -> Arrays:
    """Return the feeds in the types of the inputs.

    Floats become the float type that is taken; whole numbers only where that holds all of them.
    Raises InferError naming what is missing, unknown, or of another type, rank or size.
    """
    names = [tensor.name for tensor in inputs]
    missing = [name for name in names if name not in feeds]
    unknown = [name for name in feeds if name not in names]
    if missing or unknown:
        problems = [f"lack {', '.join(map(repr, missing))}"] if missing else []
        problems += [f"hold the unknown {', '.join(map(repr, unknown))}"] if unknown else []
        raise InferError(
            f"the inputs for {title} {' and '.join(problems)}; it takes "
            f"{'; '.join(tensor.text for tensor in inputs)}"
        )
    return {tensor.name: _converted(feeds[tensor.name], tensor, title) for tensor in inputs}


def _converted(array: Array, expected: Input, title: str) -> Array:
    where = f"the input {expected.name!r} for {title}"
    dtype = np.dtype(expected.dtype)
    shape = expected.shape
    if array.ndim != len(shape) or any(
        isinstance(dim, int) and dim != size for dim, size in zip(shape, array.shape, strict=True)
    ):
        actual = "x".join(map(str, array.shape)) or "a single number"
        raise InferError(f"{where} has the shape {actual}; it takes {expected.text}")
    if array.dtype == dtype or (array.dtype.kind == dtype.kind == "f"):
        return np.ascontiguousarray(array, dtype)
    whole = array.dtype.kind in "biu" and dtype.kind in "biu"
    if whole and np.array_equal(array, array.astype(dtype)):
        return np.ascontiguousarray(array, dtype)
    raise InferError(f"{where} is {array.dtype}; it takes {expected.text}: convert it first")
