"""Limits of a rate: the frames of a camera, or the results that a sink takes."""

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import UNSET

from pipelines.config import SourceConfig
from pipelines.frame import Frame


class RateLimit:
    """A rate limit of `max_hz` on average; a burst of two passes, so that jitter drops nothing."""

    def __init__(self, max_hz: float) -> None:
        self._hz = max_hz
        self._tokens = 2.0
        self._at: float | None = None

    def allows(self, now: float) -> bool:
        """Return whether one more may pass at `now`, in seconds."""
        if self._at is not None:
            self._tokens = min(2.0, self._tokens + (now - self._at) * self._hz)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class FrameRate:
    """Which frames are within the rate of their camera, `max_hz` of its source."""

    def __init__(self, cameras: Sequence[SourceConfig]) -> None:
        self._limits: dict[str, tuple[float, RateLimit]] = {}
        self._dropped: Counter[str] = Counter()
        self.change(cameras)

    @property
    def dropped(self) -> Mapping[str, int]:
        """rate: frames over `max_hz` of their source."""
        return dict(self._dropped)

    def admits(self, frame: Frame) -> bool:
        """Return whether a frame is to be run, and count it if not."""
        limit = self._limits.get(frame.camera)
        if limit is None or limit[1].allows(frame.t_recv.mono_ns / 1e9):
            return True
        self._dropped["rate"] += 1
        return False

    def change(self, cameras: Sequence[SourceConfig]) -> None:
        """Hold these rates from now on; one that is as before goes on."""
        before = self._limits
        self._limits = {}
        for camera in cameras:
            if camera.max_hz is UNSET:
                continue
            known = before.get(camera.id)
            same = known is not None and known[0] == camera.max_hz
            self._limits[camera.id] = (
                known if known and same else (camera.max_hz, RateLimit(camera.max_hz))
            )
