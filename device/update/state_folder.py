"""The state folder is put right before anything in it is opened.

What a power cut, a failing disk or a person leaves there may have any kind: a named pipe in the
place of a file holds up who opens it, a folder cannot be replaced by one. Whatever has another kind
than it must have is kept aside, under its name with the time, and counts as lost: each reader knows
how to go on without its file. All of it is for the agent's user alone. Names that are none of the
agent's are left alone.
"""

import logging
import os
import stat
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from device.files import KINDS, remove, sync_folder
from device.update.admission import SPARE_BYTES
from device.update.members import PAYLOAD

LOG = logging.getLogger("tandem.agent")
ASIDE = ".unreadable-"  # and the time
MAX_ASIDE = 8  # in one folder
FOLDER_MODE, FILE_MODE = 0o700, 0o600
LOCK = "agent.lock"
DATA = "data"  # what releases write is theirs: nothing of the agent reads it

# What a name in the state folder must be: the first row that fits says it. None: what reads it
# judges it. Below the folders that are named here any other name may be a file or a folder.
_FILE, _FOLDER, _SOCKET = stat.S_IFREG, stat.S_IFDIR, stat.S_IFSOCK
RULES: tuple[tuple[str, int | None], ...] = (
    (LOCK, _FILE),
    ("slots.?", None),
    (f"*{ASIDE}*", None),
    (".*.tmp", None),
    ("lost+found", None),  # where the folder is a file system of its own
    ("reserve", _FILE),
    ("commands.json", _FILE),
    ("report_counter", _FILE),
    ("outbox.*", _FILE),
    ("control.sock", _SOCKET),
    ("shadow.sock", _SOCKET),
    (DATA, _FOLDER),
    ("agent", None),  # environments of other versions: links to Python, files that are run
    ("slots", _FOLDER),
    ("slots/a", _FOLDER),
    ("slots/b", _FOLDER),
    ("slots/.[ab].tmp", _FOLDER),
    (f"slots/*/{PAYLOAD}", _FOLDER),
    ("slots/*/*", _FILE),
    ("download", _FOLDER),
    ("download/*", _FILE),
    ("agent-download", _FOLDER),
    ("agent-download/*", _FILE),
    ("inbox", _FOLDER),
    ("inbox/part", _FOLDER),
    ("inbox/*.bundle", _FILE),
    ("trust", _FOLDER),
    ("trust/metadata", _FOLDER),
    ("trust/metadata/root_history", _FOLDER),
    ("trust/*.json", _FILE),
    ("plans", _FOLDER),
    ("smp", _FOLDER),
    ("smp/inbox", _FOLDER),
    ("smp/repository", _FOLDER),
    ("smp/chunks", _FOLDER),
    ("smp/*.*", _FILE),
)


def put_right(root: Path) -> tuple[str, ...]:
    """Put aside what has the wrong kind, and take rights from other users.

    Returns a sentence for each thing that is lost by that, or stays in the way.
    """
    problems: list[str] = []
    opened = 0
    for path, status in _entries(root):
        name = str(path.relative_to(root))
        problem = _kind_problem(root, path, name, status.st_mode)
        if problem is not None:
            problems.append(f"{name} {problem}")
            LOG.error("%s of state_dir %s %s", name, root, problem)
        else:
            opened += _own(path, status)
    if opened:
        LOG.warning("%d names of state_dir %s were open to other users: no more", opened, root)
    return tuple(problems)


def put_lock_right(root: Path) -> None:
    """Put the lock file aside if it is none: it is opened before all else."""
    path = root / LOCK
    try:
        status = path.lstat()
    except OSError:
        return
    problem = _kind_problem(root, path, LOCK, status.st_mode)
    if problem is not None:
        LOG.error("%s of state_dir %s %s", LOCK, root, problem)
    else:
        _own(path, status)


def disk_problem(root: Path) -> str:
    """Return why the disk takes nothing in this folder, or soon will not; "" if it does."""
    try:
        disk = os.statvfs(root)
        writable = os.access(root, os.W_OK)
    except OSError as error:
        return f"the disk of state_dir {root} does not answer: {error.strerror}; look at it"
    if disk.f_flag & os.ST_RDONLY or not writable:
        return (
            f"state_dir {root} is read-only: no release can be installed or rolled back for good; "
            "look at the disk (dmesg) and mount it for writing"
        )
    if disk.f_bavail * disk.f_frsize < SPARE_BYTES:
        return (
            f"the disk of state_dir {root} is full, with less than {SPARE_BYTES >> 20} MiB free: "
            "no release can be installed; make room"
        )
    if disk.f_files and not disk.f_favail:
        return f"the disk of state_dir {root} takes no more files (inodes): remove some"
    return ""


def set_aside(path: Path) -> str | None:
    """Give what cannot be used a name with the time; return it, None if it stays."""
    folder = path.parent
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    name, number = f"{path.name}{ASIDE}{stamp}", 1
    while os.path.lexists(folder / name):
        number += 1
        name = f"{path.name}{ASIDE}{stamp}-{number}"
    try:
        path.rename(folder / name)
        sync_folder(folder)
    except OSError as error:
        LOG.error("cannot keep %s aside: %s", path, error.strerror)
        return None
    copies = sorted(folder.glob(f"*{ASIDE}*"), key=lambda one: one.lstat().st_mtime)
    for oldest in copies[:-MAX_ASIDE]:
        try:
            remove(oldest)
        except OSError as error:
            LOG.warning("cannot remove %s: %s", oldest, error.strerror)
    return name


def _entries(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield what is the agent's, each folder before what it holds; links are not followed.

    The state folder itself is the agent's if it holds nothing else.
    """
    names = sorted(root.iterdir())
    waiting = [path for path in names if _rule(path.name)]
    if len(waiting) == len(names):
        yield root, root.stat()
    else:
        LOG.warning("state_dir %s holds other files, too: give the agent one of its own", root)
    while waiting:
        path = waiting.pop()
        try:
            yield path, path.lstat()
            status = path.lstat()  # it may be aside by now
            walked = path != root / DATA and ASIDE not in path.name
            if stat.S_ISDIR(status.st_mode) and walked and _rule(path.name) != (None,):
                waiting += sorted(path.iterdir())
        except OSError as error:
            if os.path.lexists(path):
                LOG.error("%s cannot be looked at: %s", path, error.strerror)


def _rule(name: str) -> tuple[int | None] | None:
    """Return the kind that the table has for a name, None if it has no row for it."""
    for pattern, kind in RULES:
        if name.count("/") == pattern.count("/") and fnmatch(name, pattern):
            return (kind,)
    return None


def _kind_problem(root: Path, path: Path, name: str, mode: int) -> str | None:
    """Put aside what has another kind than its name must have; return what to say of it."""
    kind = stat.S_IFMT(mode)
    if path == root or ASIDE in path.name or _fits(root, path, name, kind):
        return None
    what = f"is {KINDS.get(kind, 'odd')}, which has no place there"
    aside = set_aside(path)
    return f"{what}, and is kept as {aside}" if aside else f"{what}, and cannot be moved away"


def _fits(root: Path, path: Path, name: str, kind: int) -> bool:
    rule = _rule(name)
    is_link = kind == stat.S_IFLNK
    if rule is None:
        return kind in (_FILE, _FOLDER) or (is_link and _leads_inside(root, path))
    # Somebody may have put a folder on another disk.
    return rule[0] in (None, kind) or (rule[0] == _FOLDER and is_link and path.is_dir())


def _leads_inside(root: Path, path: Path) -> bool:
    """Whether a link leads to a file of the state folder, as that of the newest root key does."""
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: it leads to itself
        return False
    return root.resolve() in target.parents and target.is_file()


def _own(path: Path, status: os.stat_result) -> bool:
    """Give a file or folder the rights that it must have; return whether others had any."""
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return False
    required = FOLDER_MODE if stat.S_ISDIR(status.st_mode) else FILE_MODE
    if PAYLOAD in path.parts:  # its programs stay programs
        required |= status.st_mode & stat.S_IXUSR
    mode = stat.S_IMODE(status.st_mode)
    if mode == required:
        return False
    try:
        os.chmod(path, required)
    except OSError as error:
        LOG.error("the rights of %s cannot be set to %o: %s", path, required, error.strerror)
        return False
    return bool(mode & 0o077)
