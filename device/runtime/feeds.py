"""Checks what a caller feeds into an engine against what the engine takes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from device.engine.manifest import DimRange, TensorInfo
from device.errors import SessionError
from device.runtime.cuda.device_array import DeviceArray

Array = npt.NDArray[Any]
Kind = type[Array] | type[DeviceArray]


def check_feeds(
    feeds: Mapping[str, Array] | Mapping[str, DeviceArray],
    inputs: Sequence[TensorInfo],
    ranges: Mapping[str, DimRange],
    kind: Kind = np.ndarray,
) -> dict[str, int]:
    """Return the size of each dynamic dimension, read from the shapes of the feeds.

    `kind` is the class of the feeds. Raises SessionError, naming the tensor, the limit and what
    was given, if an input is missing or unknown, has another dtype or rank, or has a size that the
    engine does not take.
    """
    check_names(feeds, inputs)
    sizes: dict[str, int] = {}
    for tensor in inputs:
        _check_kind(tensor, feeds[tensor.name], kind)
        _read_sizes(tensor, feeds[tensor.name].shape, ranges, sizes)
    return sizes


def check_names(feeds: Mapping[str, object], inputs: Sequence[TensorInfo]) -> None:
    """Raise SessionError, naming them, if inputs are missing or unknown."""
    names = [tensor.name for tensor in inputs]
    missing = [name for name in names if name not in feeds]
    unknown = [name for name in feeds if name not in names]
    if missing or unknown:
        problems = [f"lacks {', '.join(map(repr, missing))}"] if missing else []
        problems += [f"does not take {', '.join(map(repr, unknown))}"] if unknown else []
        raise SessionError(
            f"the input {' and '.join(problems)}; give {', '.join(map(repr, names))}"
        )


def check_targets(
    targets: Mapping[str, Array] | Mapping[str, DeviceArray],
    outputs: Sequence[TensorInfo],
    sizes: Mapping[str, int],
    kind: Kind = np.ndarray,
) -> None:
    """Check the arrays of class `kind` that outputs are to be written into.

    Raises SessionError, naming the output, the limit and what was given, if one is unknown, has
    another dtype or shape, or cannot be written in C order.
    """
    check_target_names(targets, outputs)
    known = {tensor.name: tensor for tensor in outputs}
    for name, array in targets.items():
        tensor, where = known[name], f"the array for output {name!r}"
        if not isinstance(array, kind) or array.dtype != np.dtype(tensor.dtype):
            actual = array.dtype if isinstance(array, kind) else type(array).__name__
            raise SessionError(f"{where} is of {actual}; give {_KINDS[kind]} of {tensor.dtype}")
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in tensor.shape)
        if array.ndim != len(shape) or any(
            known not in (None, size) for known, size in zip(shape, array.shape, strict=True)
        ):
            raise SessionError(f"{where} has the shape {_text(array.shape)}; give {_text(shape)}")
        if isinstance(array, np.ndarray) and not (
            array.flags.c_contiguous and array.flags.aligned and array.flags.writeable
        ):
            raise SessionError(
                f"{where} is read-only or not in C order; give one of numpy.empty({_text(shape)})"
            )


def check_target_names(targets: Mapping[str, object], outputs: Sequence[TensorInfo]) -> None:
    """Raise SessionError, naming it, if an array is for an output that there is not."""
    known = [tensor.name for tensor in outputs]
    for name in targets:
        if name not in known:
            raise SessionError(
                f"there is no output {name!r} to write into an array; there are "
                f"{', '.join(map(repr, known))}"
            )


_KINDS: Mapping[Kind, str] = {np.ndarray: "a numpy array", DeviceArray: "an array on the GPU"}


def _check_kind(tensor: TensorInfo, value: object, kind: Kind) -> None:
    if not isinstance(value, kind):
        raise SessionError(
            f"input {tensor.name!r} is a {type(value).__name__}; "
            f"give {_KINDS[kind]} of {tensor.dtype}"
        )
    if value.dtype != np.dtype(tensor.dtype):
        raise SessionError(
            f"input {tensor.name!r} has dtype {value.dtype}, the engine takes {tensor.dtype}; "
            f"convert it first{_scale_hint(tensor)}"
        )
    if value.ndim != len(tensor.shape):
        raise SessionError(
            f"input {tensor.name!r} has {value.ndim} dimensions {_text(value.shape)}, the engine "
            f"takes {len(tensor.shape)} {_text(tensor.shape)}; reshape it"
        )


def _scale_hint(tensor: TensorInfo) -> str:
    return "" if tensor.scale is None else f" (stored = real / {tensor.scale})"


def _read_sizes(
    tensor: TensorInfo,
    shape: tuple[int, ...],
    ranges: Mapping[str, DimRange],
    sizes: dict[str, int],
) -> None:
    for axis, (dim, size) in enumerate(zip(tensor.shape, shape, strict=True)):
        where = f"input {tensor.name!r} has the size {size} in dimension {axis}"
        if isinstance(dim, int) and size != dim:
            raise SessionError(f"{where}, the engine takes {dim}; resize it or build for {size}")
        if not isinstance(dim, str):
            continue
        limits = ranges[dim]
        if not limits.min <= size <= limits.max:
            raise SessionError(
                f"{where} ({dim!r}), the engine takes {limits.min} to {limits.max}; "
                "split it or build for a wider range"
            )
        if size % limits.step:
            raise SessionError(
                f"{where} ({dim!r}), the engine takes multiples of {limits.step}; pad or resize it"
            )
        if sizes.setdefault(dim, size) != size:
            raise SessionError(
                f"{where} ({dim!r}), another input has {sizes[dim]} there; make them equal"
            )


def _text(shape: Sequence[object]) -> str:
    return f"({', '.join(map(str, shape))})"
