"""Which files sinks may write: only those that the run makes, a release only in its own folder.

A person's run writes where the person says, and replaces a file only when told to. A release has a
folder on the board, made for its content alone, and a quota; it can name nothing outside of it.
"""

import logging
import os
import shutil
import stat
import time
from pathlib import Path, PurePosixPath

from device.errors import PipelineError
from pipelines.config import PipelineConfig
from pipelines.sink_config import JsonlSink, McapSink, SerialSink, SnapshotSink, VideoSink

KEPT_RELEASES = 2  # as many as there are slots
COUNT_S = 1.0  # between two looks at how much is used
MAX_NAMES = 10_000

_log = logging.getLogger(__name__)


class OutputFiles:
    """Gives sinks their files. Without a `folder` any path will do."""

    def __init__(
        self, folder: Path | None = None, *, quota_bytes: int | None = None, overwrite: bool = False
    ) -> None:
        self._folder = folder
        self._quota_bytes = quota_bytes
        self._overwrite = overwrite
        self._used_bytes = 0
        self._counted_s = float("-inf")
        self._full_said = False
        self._lines: set[Path] = set()  # of this run

    def place(self, path: str | Path, kind: str) -> Path:
        """Return where a path of pipeline.toml lies. `kind`: the kind of sink, for errors."""
        if "\0" in str(path):
            raise PipelineError(
                f"the {kind} sink cannot write {str(path)!r}: remove the zero byte from its path."
            )
        if self._folder is None:
            return Path(path)
        check_below_folder(str(path), kind)
        place = self._folder / path
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(place, kind, error) from error
        return place

    def claim(self, path: Path, kind: str) -> bool:
        """Make an empty file that the run may write; False if it may replace one that was there.

        Raises PipelineError if it may not, or if the file cannot be written.
        """
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        except FileExistsError as error:
            return self._claim_existing(path, kind, error)
        except OSError as error:
            raise _unwritable(path, kind, error) from error
        return True

    def claim_new(self, path: Path, kind: str) -> tuple[Path, bool]:
        """Like `claim`; a release takes a free name beside a file of an earlier start."""
        if self._folder is None:
            return path, self.claim(path, kind)
        numbered = (path.with_stem(f"{path.stem}-{n}") for n in range(1, MAX_NAMES))
        for candidate in (path, *numbered):
            if not os.path.lexists(candidate):
                return candidate, self.claim(candidate, kind)
        raise PipelineError(f"the {kind} sink finds no free name for {path}: remove some of them.")

    def open_lines(self, path: Path, kind: str) -> tuple[int, bool]:
        """Open a file for lines at its end; returns its descriptor and whether the run made it.

        A release goes on with the file of its earlier starts, a run with its own.
        """
        opened_before = path in self._lines and path.is_file()
        again = opened_before or (self._folder is not None and path.exists())
        is_new = not again and self.claim(path, kind)
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW * (self._folder is not None)
        if not (is_new or again) and self._folder is None and path.is_file():
            flags |= os.O_TRUNC
        try:
            lines = os.open(path, flags | os.O_CLOEXEC)
        except OSError as error:
            raise _unwritable(path, kind, error) from error
        self._lines.add(path)
        return lines, is_new

    def has_room(self, more_bytes: int = 0) -> bool:
        """Whether so many bytes more are within the quota; says once that they are not."""
        if self._folder is None or self._quota_bytes is None:
            return True
        now_s = time.monotonic()
        if now_s - self._counted_s >= COUNT_S:
            self._used_bytes, self._counted_s = folder_bytes(self._folder), now_s
        if self._used_bytes + more_bytes <= self._quota_bytes:
            self._used_bytes += more_bytes
            return True
        if not self._full_said:
            self._full_said = True
            _log.error(
                "%s holds %d bytes and may hold %d: its sinks write nothing more; remove files"
                " there, or raise data_mb in agent.toml",
                self._folder,
                self._used_bytes,
                self._quota_bytes,
            )
        return False

    def _claim_existing(self, path: Path, kind: str, error: OSError) -> bool:
        try:
            mode = path.stat().st_mode
            if stat.S_ISREG(mode) and not self._overwrite:
                raise PipelineError(
                    f"the {kind} sink does not overwrite {path}, which this run did not make: give"
                    " another path, or `tandem run --overwrite`."
                ) from error
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # a pipe is opened once only
                os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
        except OSError as failure:
            raise _unwritable(path, kind, failure) from failure
        return False


def check_below_folder(path: str, kind: str) -> None:
    """Raise PipelineError if a path of a release's sink leaves the folder of the release."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise PipelineError(
            f"the {kind} sink of a release cannot write {path!r}: a release writes only in its own"
            " data folder on the board; give a relative path without '..', such as"
            f" {pure.name or 'seen'!r}."
        )


def check_release(config: PipelineConfig) -> None:
    """Raise PipelineError if a sink of the pipeline could not be opened on a board."""
    for sink in config.sinks:
        if isinstance(sink, JsonlSink):
            check_below_folder(sink.path, "jsonl")
        elif isinstance(sink, VideoSink):
            check_below_folder(sink.path, "video")
        elif isinstance(sink, McapSink):
            check_below_folder(sink.path, "mcap")
        elif isinstance(sink, SnapshotSink):
            check_below_folder(sink.path, "snapshot")
        elif isinstance(sink, SerialSink) and not _is_device(sink.port):
            raise PipelineError(
                f"the serial sink of a release cannot write {sink.port!r}: name a port of the board"
                " below /dev, such as '/dev/ttyTHS1'."
            )


def _is_device(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return parts[:2] == ("/", "dev") and ".." not in parts


def writes_files(config: PipelineConfig) -> bool:
    """Return whether a sink of the pipeline writes files."""
    kinds = (JsonlSink, VideoSink, SnapshotSink, McapSink)
    return any(isinstance(sink, kinds) for sink in config.sinks)


def release_folder(root: Path, release: str) -> Path:
    """Make and return the folder of a release below `root`, by a name made of its content.

    Those of all but the last releases are removed, as their slots are, and what a kill left half
    written: it would count against the quota for ever.
    """
    folder = root / release
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        for part in folder.rglob(".*.part"):  # of a video whose encoder was killed
            part.unlink(missing_ok=True)
        others = [entry for entry in root.iterdir() if entry.is_dir() and entry != folder]
        others.sort(key=lambda entry: entry.stat().st_mtime_ns, reverse=True)
    except OSError as error:
        raise PipelineError(
            f"the data folder {folder} cannot be used ({error.strerror}): check state_dir."
        ) from error
    for entry in others[KEPT_RELEASES - 1 :]:
        shutil.rmtree(entry, ignore_errors=True)
    return folder


def folder_bytes(folder: Path) -> int:
    """Return the sum of the sizes of all files below a folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue  # removed meanwhile
    return total


def _unwritable(path: Path, kind: str, error: OSError) -> PipelineError:
    return PipelineError(
        f"the {kind} sink cannot write {path} ({error.strerror}): correct its path or the"
        " permissions of the folder."
    )
