"""What may be changed while a pipeline runs, by camera: detection, and the least score."""

import threading
from collections import Counter
from collections.abc import Mapping

import numpy as np

from pipelines.results import Decoded, Detections


class Controls:
    """Set by sinks that listen, read by the loop; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._off: set[str] = set()
        self._least: dict[str, float] = {}
        self._dropped: Counter[str] = Counter()

    @property
    def dropped(self) -> Mapping[str, int]:
        """paused: frames that came while detection was off."""
        return dict(self._dropped)

    def is_on(self, camera: str) -> bool:
        """Return whether frames of a camera are looked at."""
        with self._lock:
            return camera not in self._off

    def admits(self, camera: str) -> bool:
        """Return whether a frame of a camera is looked at, and count it if not."""
        if self.is_on(camera):
            return True
        self._dropped["paused"] += 1
        return False

    def switch(self, camera: str, *, on: bool) -> None:
        """Begin or stop to look at frames of a camera."""
        with self._lock:
            (self._off.discard if on else self._off.add)(camera)

    def least_score(self, camera: str) -> float:
        """Return the score below which detections are dropped, beside the decoder's own limit."""
        with self._lock:
            return self._least.get(camera, 0.0)

    def set_least_score(self, camera: str, score: float) -> None:
        """Drop detections with a score below this one, 0 to 1."""
        with self._lock:
            self._least[camera] = score

    def filtered(self, decoded: Decoded, camera: str) -> Decoded:
        """Return detections without those below the least score."""
        least = self.least_score(camera)
        if not least or not isinstance(decoded, Detections):
            return decoded
        return decoded[decoded.scores >= np.float32(least)]
