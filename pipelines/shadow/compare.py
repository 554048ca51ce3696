"""The new release's side of shadow mode: its network on the frames of the one that runs."""

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from device.choices import list_choices
from device.errors import PipelineError
from device.protocol.control import socket_address
from device.protocol.messages import Shadow
from pipelines.config import PipelineConfig
from pipelines.results import Decoded
from pipelines.runtime.lanes import Model, Network
from pipelines.shadow.agreement import Agreement
from pipelines.shadow.wire import ASK, Hello, Sample, read_hello, read_sample, task_of
from pipelines.stages.scene import Scene

RETRY_S = 0.2  # between two tries to reach the running pipeline
TOLD_S = 2.0  # between two messages on how far it is
BUSY_SHARE = 0.5  # of its time at most that the shadow works: the rest is the running release's
MAX_LISTED = 3  # classes that a message names

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """How long and how often a shadow looks.

    It ends `seconds` after its first frame, with `frames` at least; without those `timeout_s`
    later. It looks at `max_hz` frames a second at most.
    """

    seconds: float
    frames: int
    timeout_s: float
    max_hz: float


class Candidate:
    """The network of the new release, and what it needs of each camera."""

    def __init__(self, config: PipelineConfig, model: Model) -> None:
        self.config = config
        self.labels = model.labels
        self._network = Network(config.first, model, 1)
        self._scenes = {camera.id: Scene(config, model.labels) for camera in config.cameras}

    def warm_up(self) -> None:
        """Infer once: the first inference takes long."""
        self._network.warm_up()

    def close(self) -> None:
        """Free what the inputs took."""
        self._network.close()

    def knows(self, camera: str) -> bool:
        """Whether the new pipeline has this camera."""
        return camera in self._scenes

    def decoded(self, sample: Sample) -> Decoded:
        """Return what the new release sees in a frame, in its pixels."""
        frame = sample.frame
        scene = self._scenes[frame.camera]
        picture, x, y = scene.picture(frame)
        (seen,) = self._network.see([picture])
        return scene.placed(seen.decoded(), frame, x, y)


def check_comparable(hello: Hello, candidate: Candidate) -> None:
    """Raise PipelineError unless both releases have the same labels, and a camera in common."""
    old, new = hello.labels, candidate.labels
    if old != new:
        raise PipelineError(
            f"the running release has {_classes(old)}, the new one {_classes(new)}: live frames "
            "can only compare releases with the same labels.txt; roll it out without shadow_s"
        )
    if not any(candidate.knows(camera) for camera in hello.cameras):
        names = list_choices("", [camera.id for camera in candidate.config.cameras])
        raise PipelineError(
            f"the running release has the cameras {', '.join(hello.cameras)}, the new one "
            f"{names}: none is in both, so that live frames compare nothing"
        )


def check_task(old: Decoded, new: Decoded) -> None:
    """Raise PipelineError unless both results are of the same task."""
    if type(old) is not type(new):
        raise PipelineError(
            f"the running release gives {task_of(old)}, the new one {task_of(new)}: live frames "
            "can only compare releases of the same task; roll it out without shadow_s"
        )


class Connection:
    """The way to the tap of the running pipeline, which may be away for a while."""

    def __init__(self, path: Path, check: Callable[[Hello], None]) -> None:
        """`check` takes what the running release says of itself, each time it is reached."""
        self._path = path
        self._check = check
        self._socket: socket.socket | None = None
        self._stream: BinaryIO | None = None

    def sample(self, until_s: float) -> Sample | None:
        """Return the next sample, None if there is none by then (`time.monotonic()`)."""
        while time.monotonic() < until_s:
            try:
                return self._ask(until_s)
            except (OSError, EOFError) as error:
                _log.debug("no sample: %s", error)
                self.close()
                time.sleep(min(RETRY_S, max(0.0, until_s - time.monotonic())))
        return None

    def close(self) -> None:
        """Leave the running pipeline."""
        for part in (self._stream, self._socket):
            if part is not None:
                part.close()
        self._socket = self._stream = None

    def _ask(self, until_s: float) -> Sample:
        if self._socket is None or self._stream is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.settimeout(max(0.01, until_s - time.monotonic()))
            with socket_address(self._path.parent, self._path.name) as address:
                self._socket.connect(address)
            self._stream = self._socket.makefile("rb")
            self._check(read_hello(self._stream))
        self._socket.settimeout(max(0.01, until_s - time.monotonic()))
        self._socket.sendall(ASK)
        return read_sample(self._stream)


def compare_live(
    candidate: Candidate, tap: Path, limits: Limits, emit: Callable[[Shadow], None]
) -> Agreement:
    """Compare both releases on live frames; return the result. `emit` hears of progress.

    Raises PipelineError: they cannot be compared.
    """
    agreement = Agreement()
    skipped: set[str] = set()
    told_s = time.monotonic()
    until_s = told_s + limits.seconds + limits.timeout_s
    first_s: float | None = None  # when the first frame was compared
    connection = Connection(tap, lambda hello: check_comparable(hello, candidate))
    try:
        while (sample := connection.sample(until_s)) is not None:
            begin_s = time.monotonic()
            if candidate.knows(sample.frame.camera):
                new = candidate.decoded(sample)
                check_task(sample.decoded, new)
                agreement = agreement.compared(sample.decoded, new)
            elif sample.frame.camera not in skipped:
                skipped.add(sample.frame.camera)
                _log.warning("the new release has no camera %r", sample.frame.camera)
            now_s = time.monotonic()
            if agreement.frames and first_s is None:
                first_s, until_s = now_s, now_s + limits.seconds + limits.timeout_s
            if first_s is not None and agreement.frames >= limits.frames:
                until_s = min(until_s, max(first_s + limits.seconds, now_s))
            if now_s - told_s >= TOLD_S:
                told_s = now_s
                emit(message_of(agreement))
            busy_s = now_s - begin_s
            time.sleep(max(1.0 / limits.max_hz - busy_s, busy_s * (1.0 / BUSY_SHARE - 1.0), 0.0))
    finally:
        connection.close()
    return agreement


def message_of(agreement: Agreement, *, done: bool = False) -> Shadow:
    """Return the message on how far a comparison is."""
    return Shadow(
        frames=agreement.frames,
        agreement=round(agreement.share, 6),
        counted=round(agreement.counted),
        done=done,
    )


def _classes(labels: tuple[str, ...]) -> str:
    more = ", ..." if len(labels) > MAX_LISTED else ""
    return f"{len(labels)} classes ({', '.join(labels[:MAX_LISTED])}{more})"
