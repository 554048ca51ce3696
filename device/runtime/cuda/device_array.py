"""An array in the GPU's memory, for callers of `Session.infer_on_device` and other libraries."""

import math
from ctypes import c_void_p
from typing import Any, SupportsIndex, SupportsInt

import numpy as np
import numpy.typing as npt

from device.errors import SessionError
from device.runtime.cuda.context import Context, Stream
from device.runtime.cuda.dlpack import CUDA, make_capsule
from device.runtime.cuda.sharing import LEGACY, CallersContext, follow


class DeviceArray:
    """Memory of GPU 0 as an array in C order.

    Results of a session are such arrays, and own their memory. Made of an address, it is how a
    caller gives raw memory to `Session.infer_on_device`. Both protocols that it has,
    `__cuda_array_interface__` (version 3) and DLPack, share the memory and keep it alive.
    """

    __slots__ = ("__weakref__", "_owner", "address", "dtype", "shape", "stream")

    def __init__(
        self,
        address: SupportsInt,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        *,
        stream: int | None = None,
    ) -> None:
        """Take memory at an address: an int, or an object such as `pycuda.driver.DeviceAllocation`.

        The object is kept, and with it the memory. `stream` is the driver's handle of the stream
        that writes the memory, None if it is written already.
        """
        self._owner: object = address
        self.address = int(address)
        self.shape = tuple(int(size) for size in shape)
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.stream = stream

    @classmethod
    def within(
        cls,
        owner: object,
        address: int,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        stream: int | None = None,
    ) -> "DeviceArray":
        """Return an array in memory that lives as long as `owner`."""
        array = cls(address, shape, dtype, stream=stream)
        array._owner = owner
        return array

    def written_by(self, stream: int | None, owner: object = None) -> "DeviceArray":
        """Return the same memory, as written by a stream that lives as long as `owner`."""
        return self.within((self._owner, owner), self.address, self.shape, self.dtype, stream)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __int__(self) -> int:
        """Return the address."""
        return self.address

    def numpy(self) -> npt.NDArray[Any]:
        """Return a copy in the CPU's memory, once the stream has written the array.

        Raises SessionError if the driver fails.
        """
        values = np.empty(self.shape, self.dtype)
        with CallersContext():
            context = Context()
            try:
                context.activate()
                stream = Stream(context, c_void_p(self.stream or 0))
                if values.nbytes:
                    stream.download(values.reshape(-1).view(np.uint8), self.address)
                stream.wait()
            finally:
                context.close()
        return values

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array by version 3 of the CUDA Array Interface (Numba's documentation)."""
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address if self.nbytes else 0, False),
            "strides": None,
            "stream": None if self.stream is None else self.stream or LEGACY,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the kind of device and its number: CUDA, 0."""
        return CUDA, 0

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Return a capsule; the consumer's `stream` then follows the one that writes the array.

        Raises BufferError for another device or a copy, as the protocol wants it.
        """
        if dl_device not in (None, self.__dlpack_device__()) or copy:
            raise BufferError("a DeviceArray is shared where it is: on GPU 0, without a copy")
        if self.stream is not None and stream != -1:
            follow(self.stream, stream or LEGACY)
        return make_capsule(self.address, self.dtype, self.shape, 0, self)

    def __repr__(self) -> str:
        """Say address, shape and type."""
        return f"DeviceArray(0x{self.address:x}, {self.shape}, {self.dtype.name!r})"


# The attribute with the handle in each library's streams: pycuda, PyTorch, CuPy.
_HANDLES = ("handle", "cuda_stream", "ptr")


def stream_handle(stream: object) -> int:
    """Return the driver's handle of a stream: an int, or a stream of pycuda, PyTorch or CuPy.

    Raises SessionError for anything else.
    """
    if isinstance(stream, SupportsIndex) and not isinstance(stream, bool):
        return int(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if callable(protocol):
        _, handle = protocol()
        return int(handle)
    for name in _HANDLES:
        value = getattr(stream, name, None)
        if isinstance(value, int):
            return value
    raise SessionError(
        f"the stream is a {type(stream).__name__}; give a stream of pycuda, PyTorch or CuPy, or "
        "the driver's handle as an int"
    )
