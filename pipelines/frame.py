"""An image with its number and its times."""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]  # [H, W, 3], BGR


@dataclass(frozen=True, slots=True)
class Stamp:
    """One moment on two clocks, in nanoseconds: `mono` for differences, `wall` for people."""

    mono_ns: int
    wall_ns: int

    @staticmethod
    def now() -> "Stamp":
        """Read both clocks."""
        return Stamp(time.monotonic_ns(), time.time_ns())

    def earlier(self, by_ns: int) -> "Stamp":
        """Return the moment `by_ns` before this one."""
        return Stamp(self.mono_ns - by_ns, self.wall_ns - by_ns)


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """An image as it came from a source.

    `image`: uint8 [H, W, 3], BGR. `seq`: the source's own count, so that gaps show drops.
    `t_capture`: the best estimate of when the camera took it; `t_recv`: when the whole image
    was in our memory. `source`: the address, without credentials; `camera`: the id that the
    pipeline gives it.
    """

    image: Image
    seq: int
    t_capture: Stamp
    t_recv: Stamp
    source: str
    camera: str = ""


@dataclass(frozen=True, slots=True)
class Away:
    """A camera that gives no frames: why, and since when in seconds of `time.monotonic()`."""

    reason: str
    since_s: float
