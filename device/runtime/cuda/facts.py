"""The properties of a GPU that decide how fast kernels run, read from driver and system."""

import ctypes
import re
from ctypes import byref, c_int
from pathlib import Path

import msgspec

from device.board_files import read_text
from device.runtime.cuda import driver as cuda_driver
from device.runtime.cuda.driver import device_attribute, device_sm, load_driver

# The kernel module's version: the first on computers, the second (L4T) on a Jetson.
_DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/etc/nv_tegra_release"))
_DRIVER_VERSION = re.compile(r"Kernel Module.*?(\d+\.\d+[\d.]*)|R(\d+).*?REVISION: ([\d.]+)", re.S)
# Written by nvpmodel whenever the mode changes: "pmode:0002 fmode:fanNull".
_POWER_MODE_FILE = Path("/var/lib/nvpmodel/status")
_POWER_MODE = re.compile(r"pmode:(\d+)")


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU and its state; times measured in one state are not valid in another.

    Clocks are the highest that it may take, in MHz. `cuda`: the newest CUDA that the driver takes;
    `driver`: the kernel module's version, and `power_mode` nvpmodel's number, "" where there is
    none.
    """

    name: str
    sm: int
    sm_count: int
    sm_mhz: int
    memory_mhz: int
    l2_bytes: int
    cuda: str
    driver: str
    power_mode: str


def read_gpu(index: int = 0) -> GpuFacts:
    """Read driver and system; raises CudaError: no driver, or no such GPU."""
    sm = device_sm(index)
    text = ctypes.create_string_buffer(256)
    load_driver().call("cuDeviceGetName", text, len(text), index)
    cuda = c_int()
    load_driver().call("cuDriverGetVersion", byref(cuda))
    return GpuFacts(
        name=text.value.decode(),
        sm=sm,
        sm_count=device_attribute(cuda_driver.SM_COUNT, index),
        sm_mhz=device_attribute(cuda_driver.CLOCK_KHZ, index) // 1000,
        memory_mhz=device_attribute(cuda_driver.MEMORY_CLOCK_KHZ, index) // 1000,
        l2_bytes=device_attribute(cuda_driver.L2_BYTES, index),
        cuda=f"{cuda.value // 1000}.{cuda.value % 1000 // 10}",
        driver=driver_version("\n".join(map(read_text, _DRIVER_FILES))),
        power_mode=power_mode(read_text(_POWER_MODE_FILE)),
    )


def driver_version(text: str) -> str:
    """Return the version in the text of the kernel module or of L4T, "" if there is none."""
    match = _DRIVER_VERSION.search(text)
    if match is None:
        return ""
    return match[1] or f"{match[2]}.{match[3]}"


def power_mode(text: str) -> str:
    """Return the number of the mode in nvpmodel's status, "" if there is none."""
    match = _POWER_MODE.search(text)
    return str(int(match[1])) if match else ""
