"""Makes the inputs of a run: from files, from a data set, or random within the declared types."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.errors import InferError
from toolkit.evaluate.infer.runner import Array, Arrays, Input
from toolkit.evaluate.infer.saved import load_array, load_samples
from toolkit.graph.max_memory import max_memory_bytes, size_text

# `--random` draws without a range, as what the numbers of an input mean is not declared: floats of
# mean 0 and deviation 1, 8 bits with every value alike, bools, and of wider integers 0 or 1, which
# are indices of any axis.


@dataclass(frozen=True, slots=True)
class InputRequest:
    """What to run on: `files` (name of the input or "", file), a data set, or else random numbers.

    `samples`: how many random ones to make, or to take at most. `shapes` of inputs that have
    dynamic dimensions; `ranges` (low, high) of random numbers by input. `seed` None: 0.
    """

    files: tuple[tuple[str, Path], ...] = ()
    data: Path | None = None
    preprocess: Path | None = None
    seed: int | None = None
    samples: int | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def stated(self) -> bool:
        """Whether the user says what to run on; if not, it is random numbers of seed 0."""
        return bool(self.files) or self.data is not None or self.seed is not None


def make_samples(request: InputRequest, inputs: Sequence[Input], title: str) -> list[Arrays]:
    """Return the samples to run on, each a feed by input name. `title`: whose inputs they are.

    Raises TandemError: a file cannot be read, or names, shapes or ranges do not fit the inputs.
    """
    _check_names(request, inputs)
    if request.files:
        samples = _of_files(request, inputs)
        return samples[: request.samples]
    if request.data is not None:
        return _of_data(request, request.data, inputs)
    count = request.samples or 1
    sizes = [_bytes(tensor, request.shapes.get(tensor.name)) for tensor in inputs]
    if count * sum(sizes) > max_memory_bytes():
        largest = inputs[sizes.index(max(sizes))]
        raise InferError(
            f"{title}: {count} random samples of {size_text(sum(sizes))} each, of which "
            f"{largest.text} is the largest part, are above the limit of "
            f"{size_text(max_memory_bytes())}; give smaller sizes with --shape, fewer --samples, "
            "or raise the limit with `tandem infer --max-memory`"
        )
    return [_random_sample(request, inputs, number) for number in range(count)]


def describe(request: InputRequest, count: int) -> str:
    """Say what the samples are."""
    samples = f"{count} sample{'' if count == 1 else 's'}"
    if request.files:
        return f"{samples} of {', '.join(str(path) for _, path in request.files)}"
    if request.data is not None:
        return f"{samples} of {request.data}"
    return f"{samples} at random, seed {request.seed or 0}"


def _check_names(request: InputRequest, inputs: Sequence[Input]) -> None:
    names = [tensor.name for tensor in inputs]
    for option, by_name in (("--shape", request.shapes), ("--range", request.ranges)):
        for name in by_name:
            if name not in names:
                raise InferError(
                    f"{option} {name}: there is no such input; there are {', '.join(names)}"
                )


def _of_files(request: InputRequest, inputs: Sequence[Input]) -> list[Arrays]:
    single: Arrays = {}
    numbered: list[Arrays] | None = None
    for name, path in request.files:
        if name or path.suffix.lower() == ".npy":
            tensor = _input_for(name, path, inputs)
            single[tensor.name] = _read(path, tensor, request.shapes.get(tensor.name))
            continue
        samples = load_samples(path)
        if numbered is not None and len(samples) != len(numbered):
            raise InferError(
                f"{path} holds {len(samples)} samples, the file before it {len(numbered)}; give "
                "files of as many samples"
            )
        numbered = [{**a, **b} for a, b in zip(numbered or samples, samples, strict=True)]
    return [{**sample, **single} for sample in numbered or [{}]]


def _input_for(name: str, path: Path, inputs: Sequence[Input]) -> Input:
    if not name and len(inputs) == 1:
        return inputs[0]
    known = {tensor.name: tensor for tensor in inputs}
    if name in known:
        return known[name]
    what = f"there is no input {name!r}" if name else f"{path} does not say which input it is"
    raise InferError(f"{what}; give one of {', '.join(f'{n}={path}' for n in known)}")


def _read(path: Path, tensor: Input, shape: tuple[int, ...] | None) -> Array:
    """Read one input: .npy, .npz, or else the bytes of its numbers, as trtexec --loadInputs."""
    if path.suffix.lower() in (".npy", ".npz"):
        return load_array(path, tensor.name)
    dims, expected = _sizes(tensor, shape), _bytes(tensor, shape)
    try:
        size = path.stat().st_size
        if size == expected <= max_memory_bytes() and path.is_file():
            return np.frombuffer(path.read_bytes(), tensor.dtype).reshape(dims)
    except (OSError, ValueError) as error:  # ValueError: it has become shorter
        why = getattr(error, "strerror", None) or error
        raise InferError(f"cannot read {path}: {why}; check the path") from error
    if size == expected:
        raise InferError(
            f"{path} has {size_text(size)}, above the limit of {size_text(max_memory_bytes())}, "
            "or is no file; raise the limit with `tandem infer --max-memory`"
        )
    raise InferError(
        f"{path} has {size} bytes, but {tensor.text} at {'x'.join(map(str, dims))} takes "
        f"{expected}; give another file, or the size with --shape"
    )


def _bytes(tensor: Input, shape: tuple[int, ...] | None) -> int:
    return math.prod(_sizes(tensor, shape)) * np.dtype(tensor.dtype).itemsize


def _of_data(request: InputRequest, data: Path, inputs: Sequence[Input]) -> list[Arrays]:
    from calibration.dataset import InputSpec
    from pipelines.config import load_model
    from toolkit.quantize.ranges.data import open_data

    specs = [
        InputSpec(
            name=tensor.name,
            shape=_sizes(tensor, request.shapes[tensor.name])
            if tensor.name in request.shapes
            else tuple(dim if isinstance(dim, int) else None for dim in tensor.shape),
            dtype=tensor.dtype,
        )
        for tensor in inputs
    ]
    settings = load_model(request.preprocess) if request.preprocess else None
    preparation = settings.preprocess if settings else None
    return [dict(sample) for sample in open_data(data, specs, preparation, request.samples)]


def _random_sample(request: InputRequest, inputs: Sequence[Input], number: int) -> Arrays:
    generator = np.random.default_rng((request.seed or 0, number))
    return {
        tensor.name: _random(
            generator,
            _sizes(tensor, request.shapes.get(tensor.name)),
            np.dtype(tensor.dtype),
            request.ranges.get(tensor.name),
        )
        for tensor in inputs
    }


def _sizes(tensor: Input, requested: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return a shape of numbers: the requested one, or dynamic dimensions at their usual sizes."""
    if requested is None:
        return tuple(d if isinstance(d, int) else tensor.usual.get(d, 1) for d in tensor.shape)
    fits = len(requested) == len(tensor.shape) and all(
        not isinstance(dim, int) or dim == size
        for dim, size in zip(tensor.shape, requested, strict=True)
    )
    if not fits:
        raise InferError(
            f"--shape {tensor.name}={'x'.join(map(str, requested))} does not fit the input "
            f"{tensor.text}"
        )
    return requested


def _random(
    generator: np.random.Generator,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    limits: tuple[float, float] | None,
) -> Array:
    if dtype.kind == "f":
        if limits is None:
            return generator.standard_normal(shape, np.float32).astype(dtype)
        return generator.uniform(*limits, shape).astype(dtype)
    if limits is not None:
        return generator.integers(int(limits[0]), int(limits[1]), shape, endpoint=True).astype(
            dtype
        )
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(dtype)
    if dtype.itemsize == 1:
        info = np.iinfo(dtype)
        return generator.integers(info.min, info.max, shape, endpoint=True).astype(dtype)
    return generator.integers(0, 2, shape).astype(dtype)
