"""Memory of a session on the CPU: the arena, and arrays for callers."""

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from device.engine.manifest import TensorInfo
from device.errors import SessionError

Array = npt.NDArray[Any]


def array_for(tensor: TensorInfo, sizes: Mapping[str, int]) -> Array:
    """Return an array for a tensor at these sizes of the dynamic dimensions.

    All of its sizes are known beforehand. Raises SessionError where there is no memory.
    """
    shape = [sizes[dim] if isinstance(dim, str) else dim for dim in tensor.shape if dim is not None]
    return fresh_array(tensor.name, shape, tensor.dtype)


def fresh_array(name: str, shape: list[int], dtype: str) -> Array:
    """Return a new array; raises SessionError where there is no memory."""
    try:
        return np.empty(shape, dtype)
    except MemoryError as error:
        raise SessionError(
            f"there is no memory for output {name!r} of shape {shape} and dtype {dtype}; "
            "stop other programs or feed a smaller batch"
        ) from error


def take_arena(arena_bytes: int, where: str) -> Array:
    """Return the arena: page-aligned bytes, which take memory only once they are written."""
    available = _available_bytes()
    if available is not None and arena_bytes > available:
        raise SessionError(
            f"{where} needs {arena_bytes} bytes for its tensors, {available} are free; "
            "stop other programs or build for a smaller batch"
        )
    if arena_bytes == 0:
        return np.empty(0, np.uint8)
    try:
        return np.frombuffer(mmap.mmap(-1, arena_bytes), np.uint8)
    except (OSError, OverflowError, MemoryError) as error:
        raise SessionError(
            f"{where} needs {arena_bytes} bytes for its tensors, which the system does not give "
            f"({error}); stop other programs or build for a smaller batch"
        ) from error


def _available_bytes() -> int | None:
    """Return the available memory in bytes, None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
