"""An image with its number and its times."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

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
class Nv12:
    """A picture as cameras give it: `rows`, uint8 [H * 3 / 2, stride], luma and then chroma, of
    which `width` x `height` pixels count."""

    rows: NDArray[np.uint8]
    width: int
    height: int


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """An image as it came from a source.

    `picture`: uint8 [H, W, 3], BGR, or a function that makes it, called once somebody looks at
    `image`. `seq`: the source's own count, so that gaps show drops. `t_capture`: the best estimate
    of when the camera took it; `t_recv`: when the whole image was in our memory. `source`: the
    address, without credentials; `camera`: the id that the pipeline gives it. `nv12`: what the
    picture is made of, where the camera gives that. `fps`: the source's rate, where it says so.
    """

    picture: Image | Callable[[], Image]
    seq: int
    t_capture: Stamp
    t_recv: Stamp
    source: str
    camera: str = ""
    nv12: Nv12 | None = None
    fps: float | None = None
    _made: list[Image] = field(default_factory=list, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def image(self) -> Image:
        """The image, uint8 [H, W, 3], BGR; the same array for all threads."""
        if not callable(self.picture):
            return self.picture
        with self._lock:  # models in threads of their own look at it at the same time
            if not self._made:
                self._made.append(self.picture())
        return self._made[0]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        if self.nv12 is not None:
            return self.nv12.height, self.nv12.width
        height, width = self.image.shape[:2]
        return height, width


@dataclass(frozen=True, slots=True)
class Away:
    """A camera that gives no frames: why, and since when in seconds of `time.monotonic()`."""

    reason: str
    since_s: float
