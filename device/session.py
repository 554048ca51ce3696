"""Sessions as a library: `open_session` opens an engine file and runs it.

`SessionPool` runs several frames of it at the same time.

The session is in `device.runtime.session`, arrays in the GPU's memory in `device.runtime.cuda`.
"""

from device.runtime.cuda.device_array import DeviceArray
from device.runtime.pool import SessionPool
from device.runtime.session import Session, open_session

__all__ = ["DeviceArray", "Session", "SessionPool", "open_session"]
