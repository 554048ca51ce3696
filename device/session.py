"""Sessions as a library: `open_session` opens an engine file and runs it.

The session is in `device.runtime.session`.
"""

from device.runtime.session import Session, open_session

__all__ = ["Session", "open_session"]
