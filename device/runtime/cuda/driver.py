"""The table of libcuda functions that Tandem calls; a failed call raises CudaError.

Names, arguments and constants: CUDA Driver API reference. All but one are there since CUDA 11.4,
which every JetPack from 5 on has.
"""

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from typing import Any

from device.errors import SessionError

_LIBRARY = "libcuda.so.1"
_HANDLE = c_void_p
_ADDRESS = ctypes.c_uint64


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: a union of 64 bytes, of which Tandem sets the first integer."""

    _fields_ = (
        ("id", c_uint),
        ("pad", c_uint),
        ("value", c_int),
        ("rest", ctypes.c_char * 60),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: blocks of the grid, threads of a block, bytes, stream, attributes."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", _HANDLE),
        ("attributes", POINTER(LaunchAttribute)),
        ("attribute_count", c_uint),
    )


class IpcMemoryHandle(ctypes.Structure):
    """CUipcMemHandle: names memory of one process to others of the machine."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(_HANDLE), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxGetCurrent": (POINTER(_HANDLE),),
    "cuCtxSetCurrent": (_HANDLE,),
    "cuModuleLoadData": (POINTER(_HANDLE), c_void_p),
    "cuModuleGetFunction": (POINTER(_HANDLE), _HANDLE, c_char_p),
    "cuModuleUnload": (_HANDLE,),
    "cuFuncSetAttribute": (_HANDLE, c_int, c_int),
    "cuMemAlloc_v2": (POINTER(_ADDRESS), c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemHostAlloc": (POINTER(_HANDLE), c_size_t, c_uint),
    "cuMemHostGetDevicePointer_v2": (POINTER(_ADDRESS), c_void_p, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuIpcOpenMemHandle_v2": (POINTER(_ADDRESS), IpcMemoryHandle, c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuMemsetD8_v2": (_ADDRESS, ctypes.c_ubyte, c_size_t),
    "cuMemcpyHtoD_v2": (_ADDRESS, c_void_p, c_size_t),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, c_void_p, c_size_t, _HANDLE),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _ADDRESS, c_size_t, _HANDLE),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, c_size_t, _HANDLE),
    "cuPointerGetAttribute": (c_void_p, c_int, _ADDRESS),
    "cuStreamGetCtx": (_HANDLE, POINTER(_HANDLE)),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, c_uint),
    "cuStreamCreate": (POINTER(_HANDLE), c_uint),
    "cuStreamDestroy_v2": (_HANDLE,),
    "cuStreamSynchronize": (_HANDLE,),
    "cuStreamBeginCapture_v2": (_HANDLE, c_int),
    "cuStreamEndCapture": (_HANDLE, POINTER(_HANDLE)),
    "cuGraphInstantiateWithFlags": (POINTER(_HANDLE), _HANDLE, ctypes.c_ulonglong),
    "cuGraphLaunch": (_HANDLE, _HANDLE),
    "cuGraphExecDestroy": (_HANDLE,),
    "cuGraphDestroy": (_HANDLE,),
    "cuLaunchKernel": (_HANDLE, *(c_uint,) * 7, _HANDLE, POINTER(c_void_p), POINTER(c_void_p)),
    "cuEventCreate": (POINTER(_HANDLE), c_uint),
    "cuEventDestroy_v2": (_HANDLE,),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventSynchronize": (_HANDLE,),
    "cuEventElapsedTime": (POINTER(c_float), _HANDLE, _HANDLE),
}

# CUDA graphs have kernels that start early since CUDA 12.3 (CUDA Programming Guide, "CUDA Graphs",
# edge data). cuLaunchKernelEx, which requests them, exists since 11.8.
_EARLY_VERSION = 12030
_EARLY_CALLS: dict[str, tuple[Any, ...]] = {
    "cuLaunchKernelEx": (
        POINTER(LaunchConfig), _HANDLE, POINTER(c_void_p), POINTER(c_void_p),
    ),
}  # fmt: skip

# CUdevice_attribute, CUfunction_attribute, CU_MEMHOSTALLOC, CUstream_flags, CUstreamCaptureMode,
# CUlaunchAttributeID, CUevent_flags, CUpointer_attribute, CUmemorytype.
CLOCK_KHZ = 13
SM_COUNT = 16
INTEGRATED = 18  # the GPU shares its memory with the CPU
MEMORY_CLOCK_KHZ = 36
L2_BYTES = 38
COMPUTE_MAJOR = 75
COMPUTE_MINOR = 76
MAX_DYNAMIC_SHARED_BYTES = 8
HOST_ALLOC_MAPPED = 2
STREAM_NON_BLOCKING = 1
CAPTURE_RELAXED = 2
PROGRAMMATIC_STREAM_SERIALIZATION = 6
EVENT_DISABLE_TIMING = 2
IPC_LAZY_PEER_ACCESS = 1
POINTER_CONTEXT = 1
POINTER_MEMORY_TYPE = 2
POINTER_DEVICE = 9
POINTER_RANGE_START = 11
POINTER_RANGE_BYTES = 12
MEMORY_DEVICE = 2


class CudaError(SessionError):
    """A call of the driver failed."""


class Driver:
    """The loaded library.

    `starts_early`: it can start a kernel before its predecessor has ended, also in graphs.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Declare the arguments of every function; raises CudaError where one is missing."""
        self._library = library
        self.functions = self._declared(_CALLS)
        version = c_int()
        self.call("cuDriverGetVersion", byref(version))
        self.starts_early = version.value >= _EARLY_VERSION
        if self.starts_early:
            self.functions |= self._declared(_EARLY_CALLS)

    def _declared(self, calls: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        functions: dict[str, Any] = {}
        try:
            for name, types in calls.items():
                functions[name] = function = getattr(self._library, name)
                function.argtypes = types
                function.restype = c_int
        except AttributeError as error:
            raise CudaError(f"{_LIBRARY} lacks {name}; update the NVIDIA driver") from error
        return functions

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the table; raises CudaError with the driver's error text."""
        status = self.functions[name](*arguments)
        if status != 0:
            raise self.error(name, status)

    def error(self, name: str, status: int) -> CudaError:
        """Return the error of a status."""
        text = c_char_p()
        self._library.cuGetErrorString(c_int(status), byref(text))
        words = (text.value or b"unknown error").decode()
        return CudaError(f"{name} failed: {words} (CUDA error {status})")


@cache
def load_driver() -> Driver:
    """Load and start the driver, once for the process; raises CudaError where there is none."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise CudaError(f"there is no NVIDIA driver here ({_LIBRARY} cannot be loaded)") from error
    driver = Driver(library)
    driver.call("cuInit", 0)
    return driver


def device_attribute(number: int, index: int = 0) -> int:
    """Return an attribute of a GPU; raises CudaError: no driver, or no such GPU."""
    driver = load_driver()
    count, value = c_int(), c_int()
    driver.call("cuDeviceGetCount", byref(count))
    if index >= count.value:
        raise CudaError(f"there are {count.value} NVIDIA GPUs here, none has the index {index}")
    driver.call("cuDeviceGetAttribute", byref(value), number, index)
    return value.value


def device_sm(index: int = 0) -> int:
    """Return the architecture of a GPU: 87 is compute capability 8.7.

    Raises CudaError: no driver, or no such GPU.
    """
    major = device_attribute(COMPUTE_MAJOR, index)
    return major * 10 + device_attribute(COMPUTE_MINOR, index)
