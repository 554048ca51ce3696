"""Arrays of other CUDA libraries -> DeviceArray, with every misuse named.

An array comes by DLPack where it has that, because it then orders the streams by itself; else by
the CUDA Array Interface (pycuda). Neither copies.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from device.engine.manifest import ITEM_BYTES
from device.errors import SessionError
from device.runtime.cuda import driver
from device.runtime.cuda.context import Context
from device.runtime.cuda.device_array import DeviceArray
from device.runtime.cuda.dlpack import CUDA, CUDA_MANAGED, DEVICES, read_capsule
from device.runtime.cuda.sharing import LEGACY, PER_THREAD, current_context, follow

_VERSION = (1, 1)  # of DLPack: the first with a flag for read-only memory is 1.0
_PRIMARY = (
    "use the primary context, which CUDA's runtime, PyTorch and CuPy share: with pycuda, import "
    "pycuda.autoprimaryctx instead of pycuda.autoinit"
)


@dataclass(frozen=True, slots=True)
class Operand:
    """An array of the caller's; `raw`: of an address, whose memory may be too small."""

    array: DeviceArray
    read_only: bool = False
    raw: bool = False


def check_current(context: Context) -> None:
    """Raise SessionError if another context than the primary one is current in this thread."""
    current = current_context()
    if current not in (0, context.handle):
        raise SessionError(
            f"the current CUDA context 0x{current:x} is not the primary one of GPU 0, "
            f"0x{context.handle:x}, in which sessions run; {_PRIMARY}"
        )


def check_stream(context: Context, stream: int) -> None:
    """Raise SessionError if a stream belongs to another context; default streams belong to all."""
    if stream <= PER_THREAD:
        return
    owner = ctypes.c_void_p()
    context.call("cuStreamGetCtx", ctypes.c_void_p(stream), ctypes.byref(owner))
    if owner.value != context.handle:
        raise SessionError(
            f"the stream 0x{stream:x} belongs to the CUDA context 0x{owner.value or 0:x}, not to "
            f"the primary one of GPU 0, 0x{context.handle:x}; {_PRIMARY}"
        )


def read_operand(where: str, value: object, stream: int) -> Operand:
    """Return an array of the caller's, ready for what is enqueued in `stream` from now on.

    `where` names the tensor. Raises SessionError: no array of a GPU, not in C order, of a type
    that engines do not have.
    """
    if isinstance(value, DeviceArray):
        if value.stream is not None:
            follow(value.stream, stream)
        return Operand(value, raw=True)
    if isinstance(value, np.ndarray):
        raise SessionError(
            f"{where} is a numpy array, which is in the CPU's memory; give an array on the GPU, or "
            "use `Session.infer`"
        )
    if hasattr(value, "__dlpack__"):
        return _by_dlpack(where, value, stream)
    interface = getattr(value, "__cuda_array_interface__", None)
    if isinstance(interface, Mapping):
        return _by_interface(where, value, interface, stream)
    hint = ""
    if isinstance(value, int) or hasattr(value, "__int__"):
        hint = "; wrap an address: tandem.DeviceArray(address, shape, dtype)"
    raise SessionError(
        f"{where} is a {type(value).__name__}, which has neither __dlpack__ nor "
        f"__cuda_array_interface__{hint or '; give an array of pycuda, CuPy or PyTorch'}"
    )


def _by_dlpack(where: str, value: Any, stream: int) -> Operand:  # noqa: ANN401
    kind, index = value.__dlpack_device__()
    if kind not in (CUDA, CUDA_MANAGED) or index != 0:
        place = f"GPU {index}" if kind == CUDA else DEVICES.get(kind, f"a device of kind {kind}")
        raise SessionError(f"{where} is on {place}; sessions run on GPU 0: copy it there first")
    capsule = _capsule(where, value, stream or LEGACY)
    tensor = read_capsule(capsule)
    if tensor is None:
        raise SessionError(f"{where} gave a DLPack capsule that cannot be read: {capsule!r}")
    _check_type(where, tensor.dtype)
    _check_order(where, tensor.shape, tensor.strides)
    array = DeviceArray.within((capsule, value), tensor.address, tensor.shape, tensor.dtype)
    return Operand(array, tensor.read_only)


def _capsule(where: str, value: Any, stream: int) -> object:  # noqa: ANN401
    try:
        try:
            return value.__dlpack__(stream=stream, max_version=_VERSION)
        except TypeError:  # a library from before DLPack 1.0
            return value.__dlpack__(stream=stream)
    except (BufferError, RuntimeError) as error:
        raise SessionError(f"{where} cannot be shared by DLPack: {error}") from error


def _by_interface(where: str, value: object, interface: Mapping[str, Any], stream: int) -> Operand:
    dtype = np.dtype(interface["typestr"])
    _check_type(where, dtype.name if dtype.isnative else dtype.str)
    if interface.get("mask") is not None:
        raise SessionError(f"{where} has a mask, which engines do not; give the array without it")
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    elements = None if strides is None else tuple(step / dtype.itemsize for step in strides)
    _check_order(where, shape, elements)
    address, read_only = interface["data"]
    writer = interface.get("stream")
    if writer is not None:
        follow(int(writer), stream)
    array = DeviceArray.within(value, address or 0, shape, dtype)
    return Operand(array, bool(read_only))


def _check_type(where: str, dtype: str) -> None:
    if dtype not in ITEM_BYTES:
        raise SessionError(f"{where} is of {dtype}; engines have {', '.join(ITEM_BYTES)}")


def _check_order(
    where: str, shape: tuple[int, ...], strides: tuple[int | float, ...] | None
) -> None:
    """Refuse what is not in C order; `strides` are in elements."""
    if strides is None or 0 in shape:
        return
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            shown = tuple(int(s) if s == int(s) else s for s in strides)
            raise SessionError(
                f"{where} of shape {shape} has the strides {shown} (in elements), which is not C "
                "order; make it contiguous"
            )
        step *= size


def check_memory(where: str, array: DeviceArray, context: Context) -> None:
    """Raise SessionError unless the array lies in memory of GPU 0, in the primary context.

    What a raw address points to must be large enough, too.
    """
    if not array.nbytes:
        return
    kind = _pointer(driver.POINTER_MEMORY_TYPE, array.address)
    if kind != driver.MEMORY_DEVICE:
        raise SessionError(
            f"{where} at 0x{array.address:x} is not in the GPU's memory; give an address of "
            "cuMemAlloc (mem_alloc), or use `Session.infer` for arrays of the CPU"
        )
    index = _pointer(driver.POINTER_DEVICE, array.address) or 0
    if index != 0:
        raise SessionError(f"{where} is on GPU {index}; sessions run on GPU 0: copy it there first")
    owner = _pointer(driver.POINTER_CONTEXT, array.address)
    if owner not in (None, 0, context.handle):
        raise SessionError(
            f"{where} was allocated in the CUDA context 0x{owner:x}, not in the primary one of "
            f"GPU 0, 0x{context.handle:x}; {_PRIMARY}"
        )


def check_extent(where: str, array: DeviceArray) -> None:
    """Raise SessionError if the allocation at a raw address ends before the array does."""
    start = _pointer(driver.POINTER_RANGE_START, array.address)
    size = _pointer(driver.POINTER_RANGE_BYTES, array.address)
    if start is None or size is None or not array.nbytes:
        return
    rest = start + size - array.address
    if rest < array.nbytes:
        raise SessionError(
            f"{where} of shape {array.shape} and {array.dtype} takes {array.nbytes} bytes, the "
            f"memory at 0x{array.address:x} has {rest}; allocate more"
        )


def _pointer(attribute: int, address: int) -> int | None:
    """Return an attribute of an address, None where the driver knows nothing of it."""
    value = ctypes.c_uint64()
    status = driver.load_driver().functions["cuPointerGetAttribute"](
        ctypes.addressof(value), attribute, address
    )
    return value.value if status == 0 else None
