"""Files that appear whole or not at all, also after a power cut, and files that are what they are
taken for: a named pipe, a device or a folder in the place of a file neither holds up nor ends us.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

# Kind of what has a name -> what it is called.
KINDS: dict[int, str] = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFREG: "a file",
}


FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_BLOCK_BYTES = 1 << 20


def disk_problem(path: Path, error: OSError) -> str:
    """Return why a file or folder cannot be written or read, and what to do if the disk is full."""
    if error.errno in FULL_DISK:
        return f"the disk of {path.parent} is full; free some of it, and it is tried again"
    return f"{error.filename or path} cannot be used: {error.strerror or error}"


class UnfitFileError(OSError):
    """What has the name is not what is expected there: no regular file, or one that is too large.

    Reading it again changes nothing.
    """

    def __str__(self) -> str:
        """Return the reason without a number: the system did not give one."""
        return self.strerror or ""


def open_regular(path: Path | str, flags: int, mode: int = 0o600, *, follow: bool = False) -> int:
    """Open a regular file and return its descriptor; nothing else is opened, or waited for.

    `follow`: a symbolic link to one will do. Raises UnfitFileError, and OSError as `os.open`.
    """
    with contextlib.suppress(FileNotFoundError):  # a device may act when it is opened
        _require_regular(os.stat(path) if follow else os.lstat(path))
    # Without O_NONBLOCK, opening a named pipe waits for a writer that may never come.
    guards = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags | guards, mode)
    try:
        _require_regular(os.fstat(descriptor))
    except UnfitFileError:
        os.close(descriptor)
        raise
    return descriptor


def open_to_read(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open a regular file as `open_regular`, as a file object."""
    return open(open_regular(path, os.O_RDONLY, follow=follow), "rb")


def read_regular(path: Path, max_bytes: int, *, follow: bool = False) -> bytes:
    """Return a regular file of at most `max_bytes`. Raises as `open_regular`."""
    with open_to_read(path, follow=follow) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise UnfitFileError(errno.EFBIG, f"it is larger than {max_bytes} bytes")
    return data


def remove(path: Path) -> None:
    """Remove what has this name, a folder with all that is in it. Raises OSError, not for a name
    that is free."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()


def _require_regular(status: os.stat_result) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise UnfitFileError(errno.EINVAL, f"it is not a regular file but {KINDS.get(kind, 'odd')}")


def blocks_of(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, 1 MiB at a time. Raises OSError."""
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield block


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hex. Raises OSError."""
    digest = hashlib.sha256()
    for block in blocks_of(path):
        digest.update(block)
    return digest.hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which ends with the process; wait for others. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


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


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a whole file as `replacing` does. Raises OSError."""
    with replacing(path, mode) as file:
        file.write(content)


def write_file(path: Path, content: bytes, mode: int, error: type[Exception]) -> None:
    """Write a whole file, in a folder that is made where it is missing. Raises `error`."""
    try:
        make_folder(path.parent)
        replace_file(path, content, mode)
    except OSError as cause:
        raise error(f"cannot write {path}: {cause.strerror}") from cause


def write_synced(path: Path, parts: Iterable[bytes], mode: int = 0o666) -> None:
    """Write a new file and bring it onto the disk; its name is there for sure only after
    `sync_folder`. `mode`: as of `replacing`. Raises OSError.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder with its missing parents and bring each name onto the disk.

    `mode`: of the folder itself, less the umask. Raises OSError.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(mode, parents=True, exist_ok=True)
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
