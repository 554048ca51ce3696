"""A real PostgreSQL of Debian in a temporary folder, run as a user that is not root."""

import glob
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mqtt_fixtures import free_port

BINARIES = "/usr/lib/postgresql/*/bin"


def _programs() -> Path:
    folders = sorted(glob.glob(BINARIES))
    if not folders:
        pytest.skip(f"PostgreSQL is not installed: {BINARIES} does not exist")
    return Path(folders[-1])


def _run(folder: Path, *command: str) -> None:
    """Run a program of PostgreSQL; initdb refuses root, which then becomes `postgres`."""
    user = ("runuser", "-u", "postgres", "--") if os.geteuid() == 0 else ()
    done = subprocess.run(
        [*user, *command], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


@contextmanager
def postgresql() -> Iterator[str]:
    """Start a server on a free port and yield the URL of its database."""
    programs, port = _programs(), free_port()
    folder = Path(tempfile.mkdtemp(prefix="tandem-pg-", dir="/tmp"))
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres")
        data = str(folder / "data")
        _run(
            folder, str(programs / "initdb"), "-D", data, "-U", "tandem", "-A", "trust",
            "--no-sync", "-E", "UTF8", "--locale=C",
        )  # fmt: skip
        options = f"-p {port} -c listen_addresses=127.0.0.1 -k {folder}"
        control = str(programs / "pg_ctl")
        log = str(folder / "log")
        _run(folder, control, "-D", data, "-w", "-l", log, "-o", options, "start")
        try:
            yield f"postgresql://tandem@127.0.0.1:{port}/postgres"
        finally:
            _run(folder, control, "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
