"""Files that appear whole or not at all, also after a power cut."""

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a new file beside `path` that takes its place, on the disk, when the block is done.

    `mode`: its permissions, less the umask. If the block fails, `path` stays as it was and nothing
    is left beside it. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_synced(path: Path, parts: Iterable[bytes]) -> None:
    """Write a new file and bring it onto the disk; its name is there for sure only after
    `sync_folder`. Raises OSError.
    """
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def make_folder(folder: Path) -> None:
    """Make a folder with its missing parents and bring each name onto the disk. Raises OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    # The name of a folder that was there as well: the run that made it may have ended before this.
    for path in missing or [folder]:
        with contextlib.suppress(PermissionError):  # a parent that may be passed but not read
            sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder onto the disk: a rename survives a power cut only then."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
