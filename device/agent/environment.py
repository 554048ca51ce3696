"""Makes the environment of another version of the agent, from the wheels of its bundle alone.

Nothing of the wheels is run. The environment has its name once all of it is on the disk.
"""

import contextlib
import os
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from device.errors import BundleError
from device.files import disk_problem, make_folder, remove, sync_folder, write_synced
from device.update.bundle import extract_bundle, hash_folder

_READ_BYTES = 1 << 20
_LIBRARIES = ("purelib", "platlib")  # of NAME.data; scripts and headers are of no use to an agent


def make_environment(bundle: Path, folder: Path, name: str, sha256: str = "") -> None:
    """Make the environment `folder/name` with this Python, which sees the system's packages, too.

    One of this name is whole, and stays unless its Python is gone. `sha256`: of the bundle whose
    signature was checked, as the file may be another one by now. Raises BundleError: the bundle is
    damaged or another one, a wheel cannot be unpacked, or the disk does not take it.
    """
    if os.access(folder / name / "bin" / "python", os.X_OK):
        return
    temporary = folder / f".{name}.tmp"
    try:
        remove(folder / name)
        remove(temporary)
        make_folder(temporary, 0o700)
        info = extract_bundle(bundle, temporary / "wheels")
        if sha256 and hash_folder(temporary / "wheels")[1] != sha256:
            raise BundleError(f"{bundle} was changed while it was read: try it again")
        minor = ".".join(map(str, sys.version_info[:2]))
        packages = temporary / "lib" / f"python{minor}" / "site-packages"
        make_folder(packages, 0o700)
        for entry in info.files:
            _unpack(temporary / "wheels" / entry.name, packages)
        remove(temporary / "wheels")
        _add_interpreter(temporary)
        for place, _, _ in os.walk(temporary):
            sync_folder(Path(place))
        os.rename(temporary, folder / name)
        sync_folder(folder)
    except (OSError, BundleError) as error:
        with contextlib.suppress(OSError):
            remove(temporary)
        if isinstance(error, BundleError):
            raise
        raise BundleError(disk_problem(temporary, error)) from error


def _add_interpreter(environment: Path) -> None:
    """Make `bin/python` a virtual environment of the Python that runs this."""
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    settings = (
        f"home = {os.path.dirname(python)}\ninclude-system-site-packages = true\n"
        f"version = {'.'.join(map(str, sys.version_info[:3]))}\n"
    )
    write_synced(environment / "pyvenv.cfg", [settings.encode()], 0o600)
    make_folder(environment / "bin", 0o700)
    os.symlink(python, environment / "bin" / "python")


def _unpack(wheel: Path, packages: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                path = _place(entry.filename)
                if path is None or entry.is_dir():
                    continue
                target = packages / path
                target.parent.mkdir(0o700, parents=True, exist_ok=True)
                with archive.open(entry) as file:
                    write_synced(target, _blocks(file), 0o600)
    except (
        zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError,
    ) as error:  # fmt: skip
        raise BundleError(f"{wheel.name} cannot be unpacked: {error}") from error
    except FileExistsError as error:
        raise BundleError(f"{wheel.name} has a file that another wheel has: {error}") from error


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(_READ_BYTES):
        yield block


def _place(name: str) -> PurePosixPath | None:
    """Return where a file of a wheel goes below site-packages; None: nowhere."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"the name {name!r} leads out of it")
    if not path.parts[0].endswith(".data"):
        return path
    is_installed = len(path.parts) > 2 and path.parts[1] in _LIBRARIES
    return PurePosixPath(*path.parts[2:]) if is_installed else None
