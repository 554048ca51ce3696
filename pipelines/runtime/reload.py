"""pipeline.toml is read again while the pipeline runs: it takes what it can, or says why not.

A thread looks at the file and reads it; the loop takes the text while no batch is in flight, so no
frame is lost and none is half old, half new.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from device.errors import TandemError
from device.protocol.messages import Reload
from pipelines.changes import changes
from pipelines.config import PipelineConfig, parse_pipeline
from pipelines.sources.uri import redact

POLL_S = 0.25
TERMINAL = "/dev/tty"  # that of this process, whatever its output goes to

Signature = tuple[int, int, int] | None  # time of change, size, inode

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReloadFile:
    """A pipeline.toml that is read again when it changes, or when `now` is set.

    `adapt`: what the command line changes of it.
    """

    path: Path
    adapt: Callable[[PipelineConfig], PipelineConfig] = lambda config: config
    now: threading.Event = field(default_factory=threading.Event)


class Changeable(Protocol):
    """What takes the changes of a configuration."""

    def change(self, config: PipelineConfig) -> None:
        """Take them; raises TandemError, and goes on as before, if it cannot."""


class FileWatch:
    """Reads a file once at first, as it may have changed while engines were loaded, and then when
    it has changed; always once it has stayed as it is for one look."""

    def __init__(self, file: ReloadFile) -> None:
        self._file = file
        self._text: str | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="reload", daemon=True)
        self._signature: Signature = None  # of what was read last

    def __enter__(self) -> "FileWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop to look."""
        self._closing.set()
        self._file.now.set()
        self._thread.join()

    @property
    def has_text(self) -> bool:
        """Whether `take` has something."""
        return self._text is not None

    def take(self) -> str | None:
        """Return the text that is new since the last call, or None."""
        if self._text is None:  # without a lock: most calls end here
            return None
        with self._lock:
            text, self._text = self._text, None
        return text

    def _watch(self) -> None:
        before: Signature = None
        while not self._closing.is_set():
            at_once = self._file.now.wait(POLL_S)
            self._file.now.clear()
            signature = _signature(self._file.path)
            is_stable, before = signature == before, signature
            if not at_once and (signature == self._signature or not is_stable):
                continue  # an editor may still write it
            text = self._read()
            if text is not None:
                self._signature = signature
                with self._lock:
                    self._text = text

    def _read(self) -> str | None:
        try:
            return self._file.path.read_text(encoding="utf-8", errors="replace")
        except OSError:  # between an editor's unlink and its rename
            return None


class Reloader:
    """Lets a pipeline take the changes of its file; `apply` is called by the loop."""

    def __init__(
        self,
        watch: FileWatch,
        file: ReloadFile,
        config: PipelineConfig,
        target: Changeable,
        tell: Callable[[Reload], None],
    ) -> None:
        """`config`: what runs. `tell` hears of every change and refusal."""
        self._watch = watch
        self._file = file
        self._config = config
        self._target = target
        self._tell = tell

    @property
    def is_due(self) -> bool:
        """Whether the file has a new text."""
        return self._watch.has_text

    def apply(self) -> None:
        """Take the file's text, if there is a new one."""
        text = self._watch.take()
        if text is None:
            return
        try:
            config = self._file.adapt(parse_pipeline(text, self._file.path))
            changed = changes(self._config, config)
            if changed:
                self._target.change(config)
        except TandemError as error:
            refused = redact(str(error))
            _log.error(
                "%s is not taken, the pipeline goes on as before: %s", self._file.path, refused
            )
            self._tell(Reload(refused=refused))
            return
        self._config = config
        if changed:
            _log.info("%s is taken: %s", self._file.path, "; ".join(changed))
            self._tell(Reload(changes=changed))


@contextmanager
def hangups(now: threading.Event, stop: threading.Event) -> Iterator[None]:
    """Let SIGHUP set `now`, or `stop` if it says that the terminal has gone. In the main thread."""
    had_terminal = _has_terminal()

    def on_signal(number: int, frame: FrameType | None) -> None:
        (stop if had_terminal and not _has_terminal() else now).set()

    before = signal.signal(signal.SIGHUP, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _has_terminal() -> bool:
    try:
        os.close(os.open(TERMINAL, os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _signature(path: Path) -> Signature:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
