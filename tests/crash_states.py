"""Every state in which a power cut can leave a disk, from one recorded run of real code.

`record` runs code and notes each operation on files below a folder. A power cut may come after any
of them, and then any operation that was not synced may be lost, alone or with others, and the last
write may be torn:

    prefixes of the operations  x  subsets of the unsynced ones  x  torn last writes

An operation on the content of a file is durable after fsync of the file, one on a name after fsync
of the folder that has the name. Nothing else is assumed of the file system.
"""

import errno
import io
import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

Tree = dict[str, bytes | None]  # path below the root -> content, None for a folder
ROOT = 0


@dataclass(frozen=True)
class Link:
    """A new file or folder gets its name."""

    folder: int
    name: str
    node: int


@dataclass(frozen=True)
class Unlink:
    """A name is removed; `node` had it."""

    folder: int
    name: str
    node: int


@dataclass(frozen=True)
class Move:
    """A name moves, in one step, perhaps in place of another."""

    folder: int
    name: str
    new_folder: int
    new_name: str
    node: int


@dataclass(frozen=True)
class Write:
    """Bytes at an offset."""

    node: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Resize:
    """A file is cut off, or filled with zeros."""

    node: int
    size: int


@dataclass(frozen=True)
class Sync:
    """fsync of a file or folder."""

    node: int


@dataclass(frozen=True)
class Mark:
    """What the code has promised from here on."""

    claim: Any


Operation = Link | Unlink | Move | Write | Resize | Sync | Mark


@dataclass
class Recording:
    """The operations, in order, and the disk before the first: nodes with content or names."""

    files: dict[int, bytes]
    folders: dict[int, dict[str, int]]
    operations: list[Operation] = field(default_factory=list)

    def mark(self, claim: Any) -> None:
        """Note what must hold in every state from here on."""
        self.operations.append(Mark(claim))


@dataclass(frozen=True)
class CrashState:
    """The disk after a power cut, and the last claim before it."""

    tree: Tree
    claim: Any
    cut: int
    lost: tuple[int, ...]
    torn: int | None

    @property
    def key(self) -> frozenset[tuple[str, bytes | None]]:
        """Equal for equal disks."""
        return frozenset(self.tree.items())


# -- recording


class _RecordedFile(io.RawIOBase):
    """A file that is written without a buffer, each write an operation."""

    def __init__(self, recorder: "_Recorder", path: Path, flags: int) -> None:
        self._handle = recorder.open(path, flags, 0o666)
        self._recorder = recorder
        self._offset = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._handle

    def write(self, data: Any) -> int:
        self._recorder.pwrite(self._handle, bytes(data), self._offset)
        self._offset += len(bytes(data))
        return len(bytes(data))

    def close(self) -> None:
        if not self.closed:
            os.close(self._handle)
        super().close()


class _Recorder:
    """Stands between the code and the disk: it does each operation, then notes it."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._nodes: dict[int, int] = {}  # inode number -> node, while the inode exists
        self._next = itertools.count()
        self.recording = Recording({}, {})
        self._scan(self._root)
        self._real = {name: getattr(os, name) for name in PATCHED}
        self._real_open = Path.open

    def patches(self) -> Iterator[Any]:
        for name in PATCHED:
            yield mock.patch.object(os, name, getattr(self, name))
        yield mock.patch.object(Path, "open", self._path_open())

    def _scan(self, path: Path) -> int:
        node = self._new_node(path)
        if path.is_dir():
            self.recording.folders[node] = {}
            names = {one.name: self._scan(one) for one in sorted(path.iterdir())}
            self.recording.folders[node].update(names)
        else:
            self.recording.files[node] = path.read_bytes()
        return node

    def _new_node(self, path: Path) -> int:
        node = self._nodes[path.lstat().st_ino] = next(self._next)
        return node

    def _ours(self, path: Path) -> bool:
        return self._root in path.parents or path == self._root

    def _node(self, path: Path) -> int:
        return self._nodes[path.lstat().st_ino]

    def _handle_node(self, handle: int) -> int | None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        return self._nodes.get(os.fstat(handle).st_ino) if self._ours(path) else None

    def _note(self, operation: Operation) -> None:
        self.recording.operations.append(operation)

    @staticmethod
    def _absolute(path: Any, dir_fd: int | None) -> Path:
        if dir_fd is None:
            return Path(os.path.abspath(path))
        return Path(os.readlink(f"/proc/self/fd/{dir_fd}")) / path

    # -- the operations, with the names and arguments of `os`

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        where = self._absolute(path, dir_fd)
        new = self._ours(where) and not os.path.lexists(where)
        handle: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        if new:
            self._note(Link(self._node(where.parent), where.name, self._new_node(where)))
        elif self._ours(where) and flags & os.O_TRUNC:
            self._note(Resize(self._node(where), 0))
        return handle

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._real["mkdir"](path, mode, dir_fd=dir_fd)
        where = self._absolute(path, dir_fd)
        if self._ours(where):
            node = self._new_node(where)
            self.recording.folders[node] = {}
            self._note(Link(self._node(where.parent), where.name, node))

    def _remove(self, name: str, path: Any, dir_fd: int | None) -> None:
        where = self._absolute(path, dir_fd)
        ours = self._ours(where) and os.path.lexists(where)
        noted = Unlink(self._node(where.parent), where.name, self._node(where)) if ours else None
        self._real[name](path, dir_fd=dir_fd)
        if noted is not None:
            self._note(noted)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("unlink", path, dir_fd)

    def remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("remove", path, dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("rmdir", path, dir_fd)

    def _move(self, name: str, source: Any, target: Any) -> None:
        old, new = Path(os.path.abspath(source)), Path(os.path.abspath(target))
        node = self._node(old) if self._ours(old) and old.exists() else None
        self._real[name](source, target)
        if node is not None:
            folders = self._node(old.parent), self._node(new.parent)
            self._note(Move(folders[0], old.name, folders[1], new.name, node))

    def rename(self, source: Any, target: Any) -> None:
        self._move("rename", source, target)

    def replace(self, source: Any, target: Any) -> None:
        self._move("replace", source, target)

    def link(self, source: Any, target: Any) -> None:
        self._real["link"](source, target)
        where = Path(os.path.abspath(target))
        self._note(Link(self._node(where.parent), where.name, self._node(where)))

    def pwrite(self, handle: int, data: bytes, offset: int) -> int:
        written: int = self._real["pwrite"](handle, data, offset)
        node = self._handle_node(handle)
        if node is not None:
            self._note(Write(node, offset, bytes(data[:written])))
        return written

    def write(self, handle: int, data: bytes) -> int:
        offset = os.lseek(handle, 0, os.SEEK_CUR)
        written: int = self._real["write"](handle, data)
        node = self._handle_node(handle)
        if node is not None:
            self._note(Write(node, offset, bytes(data[:written])))
        return written

    def ftruncate(self, handle: int, size: int) -> None:
        self._real["ftruncate"](handle, size)
        node = self._handle_node(handle)
        if node is not None:
            self._note(Resize(node, size))

    def posix_fallocate(self, handle: int, offset: int, size: int) -> None:
        self._real["posix_fallocate"](handle, offset, size)
        node = self._handle_node(handle)
        if node is not None:
            self._note(Resize(node, os.fstat(handle).st_size))

    def fsync(self, handle: int) -> None:
        node = self._handle_node(handle)
        if node is not None:
            self._note(Sync(node))

    fdatasync = fsync

    def _path_open(self) -> Callable[..., Any]:
        recorder = self

        def path_open(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not set(mode) & set("wxa+") or not recorder._ours(Path(os.path.abspath(path))):
                return recorder._real_open(path, mode, *arguments, **options)
            if mode not in FLAGS:
                raise OSError(errno.ENOTSUP, f"files are not recorded in mode {mode}")
            return _RecordedFile(recorder, path, FLAGS[mode])

        return path_open


PATCHED = (
    *("open", "mkdir", "link", "unlink", "remove", "rmdir", "rename", "replace", "pwrite", "write"),
    *("ftruncate", "posix_fallocate", "fsync", "fdatasync"),
)
FLAGS = {
    "wb": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}


@contextmanager
def record(root: Path) -> Iterator[Recording]:
    """Note what the code in the block does to the files below `root`; nothing is synced for real.

    At the end the operations are checked: done again, they give the files that are there.
    """
    recorder = _Recorder(root)
    with ExitStack() as stack:
        for patch in recorder.patches():
            stack.enter_context(patch)
        yield recorder.recording
    replayed = replay(recorder.recording, len(recorder.recording.operations), (), None)
    assert replayed == read_tree(root), "the code does something to files that is not recorded"


# -- the states


def states(
    recording: Recording, chance: random.Random, most_subsets: int = 64, *, in_order: bool = True
) -> Iterator[CrashState]:
    """Yield the states of the disk after a power cut, some of them equal.

    Of the subsets of unsynced operations at one cut all are taken, or `most_subsets` of them: all
    lost, none, those of one, of all but one, and random ones. `in_order`: cut by cut, else the
    cuts are shuffled.
    """
    operations = recording.operations
    claims: list[Any] = [None]
    for operation in operations:
        claims.append(operation.claim if isinstance(operation, Mark) else claims[-1])
    cuts = range(len(operations) + 1)
    start = _Disk(recording.files, recording.folders)
    base, begin = start.copy(), 0  # what no cut from here on can lose
    for cut in cuts if in_order else chance.sample(cuts, len(cuts)):
        last = operations[cut - 1] if cut else None
        unsynced = _unsynced(recording, cut)
        first = unsynced[0] if unsynced else cut
        if first < begin:
            base, begin = start.copy(), 0
        for operation in operations[begin:first]:
            base.apply(operation)
        begin = first
        for lost in _subsets(unsynced, chance, most_subsets):
            torn_at = [None]
            if isinstance(last, Write) and cut - 1 not in lost:
                torn_at = [None, *_cuts(last)]
            for torn in torn_at:
                disk = base.copy()
                for number in range(begin, cut):
                    if number not in lost:
                        disk.apply(operations[number], torn if number == cut - 1 else None)
                yield CrashState(disk.tree(), claims[cut], cut, lost, torn)


ZEROS = -1  # a torn write whose length is on the disk and whose bytes are not


def _cuts(write: Write) -> list[int | None]:
    size = len(write.data)
    return [ZEROS, *sorted({0, 1, size // 2, size - 1} - {size})] if size else []


def _unsynced(recording: Recording, cut: int) -> list[int]:
    """Return the numbers of the operations before a cut that may be lost."""
    operations = recording.operations[:cut]
    synced: set[int] = set()  # nodes that are synced after the operation that is looked at
    gone: set[int] = set()  # folders and files whose removal is durable
    unsynced: list[int] = []
    for number in range(cut - 1, -1, -1):
        operation = operations[number]
        if isinstance(operation, Sync):
            synced.add(operation.node)
        elif isinstance(operation, Write | Resize):
            if operation.node not in synced | gone:
                unsynced.append(number)
        elif isinstance(operation, Link | Unlink):
            if operation.folder in synced and isinstance(operation, Unlink):
                gone.add(operation.node)
            if operation.folder not in synced | gone:
                unsynced.append(number)
        elif isinstance(operation, Move) and not {operation.folder, operation.new_folder} <= (
            synced | gone
        ):
            unsynced.append(number)
    return unsynced[::-1]


def _subsets(numbers: list[int], chance: random.Random, most: int) -> Iterator[tuple[int, ...]]:
    if 2 ** len(numbers) <= most:
        for size in range(len(numbers), -1, -1):
            yield from itertools.combinations(numbers, size)
        return
    chosen = [tuple(numbers), ()]
    for one in numbers:
        chosen += [(one,), tuple(other for other in numbers if other != one)]
    yield from chosen[:most]
    for _ in range(len(chosen), most):
        yield tuple(one for one in numbers if chance.random() < 0.5)


@dataclass
class _Disk:
    """The content of files and the names in folders, by node."""

    files: dict[int, bytes]
    folders: dict[int, dict[str, int]]

    def copy(self) -> "_Disk":
        return _Disk(dict(self.files), {n: dict(names) for n, names in self.folders.items()})

    def apply(self, operation: Operation, torn: int | None = None) -> None:
        if isinstance(operation, Link):
            self.folders[operation.folder][operation.name] = operation.node
        elif isinstance(operation, Unlink):
            if self.folders[operation.folder].get(operation.name) == operation.node:
                del self.folders[operation.folder][operation.name]
        elif isinstance(operation, Move):
            self.folders[operation.folder].pop(operation.name, None)
            self.folders[operation.new_folder][operation.new_name] = operation.node
        elif isinstance(operation, Write):
            data = operation.data
            if torn is not None:
                data = bytes(len(data)) if torn == ZEROS else data[:torn]
            before = self.files.get(operation.node, b"")
            self.files[operation.node] = _written(before, operation.offset, data)
        elif isinstance(operation, Resize):
            content = self.files.get(operation.node, b"")[: operation.size]
            self.files[operation.node] = content.ljust(operation.size, b"\0")

    def tree(self) -> Tree:
        tree: Tree = {}
        _walk(ROOT, "", self.files, self.folders, tree)
        return tree


def replay(recording: Recording, cut: int, lost: tuple[int, ...], torn: int | None) -> Tree:
    """Return the disk after the operations before `cut` but the lost ones, the last write torn."""
    disk = _Disk(recording.files, recording.folders).copy()
    for number, operation in enumerate(recording.operations[:cut]):
        if number not in lost:
            disk.apply(operation, torn if number == cut - 1 else None)
    return disk.tree()


def _written(content: bytes, offset: int, data: bytes) -> bytes:
    if offset == 0 and len(data) >= len(content):
        return data
    return content[:offset].ljust(offset, b"\0") + data + content[offset + len(data) :]


def _walk(
    node: int, path: str, files: dict[int, bytes], folders: dict[int, dict[str, int]], tree: Tree
) -> None:
    for name, child in folders[node].items():
        where = f"{path}/{name}" if path else name
        if child in folders:
            tree[where] = None
            _walk(child, where, files, folders, tree)
        else:
            tree[where] = files.get(child, b"")


# -- real folders


def read_tree(root: Path) -> Tree:
    """Return the files and folders below a folder."""
    return {
        path.relative_to(root).as_posix(): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }


def write_tree(tree: Tree, root: Path) -> None:
    """Make these files and folders below a new folder."""
    root.mkdir()
    for path in sorted(tree):
        content = tree[path]
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)
