"""Sessions as a library: `open_session` opens an engine file and runs it.

The session is in `device.runtime.session`, arrays in the GPU's memory in `device.runtime.cuda`.
"""

from device.runtime.cuda.device_array import DeviceArray
from device.runtime.session import Session, open_session

__all__ = ["DeviceArray", "Session", "open_session"]
