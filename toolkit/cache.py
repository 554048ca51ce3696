"""One cache of what can be made again, by kind and by the hash of everything it depends on.

A folder: $TANDEM_CACHE, else $XDG_CACHE_HOME/tandem (~/.cache/tandem). An entry is a file
KIND/KE/KEY: the SHA-256 of the content, then the content. Damaged entries are found when they are
read, removed, said, and made again.
"""

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from device.files import replacing

LOG = logging.getLogger(__name__)
HASH_BYTES = hashlib.sha256().digest_size
KINDS = {
    "kernels": "GPU kernels",
    "graphs": "graphs that workers calibrate",
    "shards": "calibration shards",
    "engines": "engines with their tables, plans, tactics and reports",
}
# Distributions whose versions may change the bytes of an engine, and those of a calibration.
BUILDING = ("highspy", "numpy", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "triton")
CALIBRATING = ("numpy", "onnx", "onnx-ir", "onnxruntime", "onnxscript")
_PACKAGES = ("toolkit", "calibration", "device", "pipelines", "configs")
_DECIDING = frozenset({".py", ".toml", ".json"})
_UNFINISHED = frozenset({".tmp", ".part"})
_UNFINISHED_S = 3600.0  # since the last byte: its writer was killed
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the cache; `used`: seconds since the epoch of its last use."""

    kind: str
    key: str
    path: Path
    bytes: int
    used: float


def cache_folder() -> Path:
    """Return the folder of the cache."""
    if folder := os.environ.get("TANDEM_CACHE"):
        return Path(folder).absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "tandem"


def key_of(*parts: str | bytes) -> str:
    """Return the key of everything that an entry depends on."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def read_entry(kind: str, key: str, folder: Path | None = None) -> bytes | None:
    """Return the content of an entry, None if there is none, or a damaged one, which is removed."""
    path = entry_path(kind, key, folder)
    try:
        data = path.read_bytes()
        with suppress(OSError):
            os.utime(path)  # the last use, for `trim`
    except OSError:
        return None
    content = data[HASH_BYTES:]
    if hashlib.sha256(content).digest() == data[:HASH_BYTES]:
        return content
    LOG.warning("%s of the cache is damaged and is made again", path)
    with suppress(OSError):
        path.unlink()
    return None


def write_entry(kind: str, key: str, content: bytes) -> bool:
    """Write an entry; False where the folder cannot be written: it will be made again."""
    path = entry_path(kind, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(hashlib.sha256(content).digest() + content)
    except OSError as error:
        LOG.info("%s of the cache cannot be written: %s", path, error)
        return False
    return True


def entries(folder: Path | None = None) -> Iterator[Entry]:
    """Yield the entries, those used longest ago first."""
    root = folder or cache_folder()
    present = []
    for kind in KINDS:
        for path in (root / kind).glob(f"??/{'[0-9a-f]' * 2 * HASH_BYTES}"):
            with suppress(OSError):  # another process trims
                state = path.stat()
                present.append(Entry(kind, path.name, path, state.st_size, state.st_mtime))
    yield from sorted(present, key=lambda entry: (entry.used, entry.key))


def trim(max_bytes: int) -> tuple[int, int]:
    """Remove what was used longest ago until the rest fits; returns (files, bytes) removed.

    What killed writers and pulls left behind goes first.
    """
    count = removed = 0
    for path in (path for kind in KINDS for path in (cache_folder() / kind).glob("??/*")):
        with suppress(OSError):
            state = path.stat()
            if path.suffix in _UNFINISHED and state.st_mtime < time.time() - _UNFINISHED_S:
                path.unlink()
                count, removed = count + 1, removed + state.st_size
    present = list(entries())
    excess = sum(entry.bytes for entry in present) - max_bytes
    for entry in present:
        if excess <= 0:
            break
        with suppress(OSError):
            entry.path.unlink()
            excess -= entry.bytes
            count, removed = count + 1, removed + entry.bytes
    return count, removed


@cache
def code_version() -> str:
    """Return the version of Tandem with a hash of its sources, profiles and costs."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        files = [path for path in (_ROOT / package).rglob("*") if path.suffix in _DECIDING]
        for path in sorted(files):
            digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{package_version('tandem-edge') or '0'}+{digest.hexdigest()[:12]}"


@cache
def package_version(name: str) -> str:
    """Return the version of an installed distribution, "" if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def entry_path(kind: str, key: str, folder: Path | None = None) -> Path:
    """Return the file of an entry."""
    return (folder or cache_folder()) / kind / key[:2] / key
