"""The import path of a process of ours: no file of its working directory is on it.

Children run with `-I`, which keeps the working directory, PYTHONPATH and the user's site-packages
away from the start of the interpreter, on Python 3.10 too (`-P` is new in 3.11). What belongs on
the path is added here afterwards: absolute entries of PYTHONPATH, and packages that were installed
with `pip install --user`.

This file is loaded by its path, before `device` is imported, and imports nothing of Tandem.
"""

import os
import site
import sys
from pathlib import Path


def restore_path() -> None:
    """Add to the path of an interpreter that runs with `-I` what it may import."""
    start = [entry for entry in _python_path() if os.path.isabs(entry)]
    before = list(sys.path)
    if _has_user_site():
        site.addsitedir(site.getusersitepackages())
    user = sys.path[len(before) :]
    system = site.getsitepackages()
    first = next((i for i, entry in enumerate(before) if entry in system), len(before))
    sys.path[:] = [*start, *before[:first], *user, *before[first:]]


def drop_working_directory() -> None:
    """Take from the path what `-m` and relative entries of PYTHONPATH put there."""
    if sys.path and sys.path[0] in ("", os.getcwd()):
        sys.path.pop(0)
    entries = _python_path()
    absolute = {os.path.abspath(entry) for entry in entries if os.path.isabs(entry)}
    relative = {os.path.abspath(entry) for entry in entries if not os.path.isabs(entry)}
    unwanted = {"", *(relative - absolute)}
    sys.path[:] = [entry for entry in sys.path if entry not in unwanted]


def _python_path() -> list[str]:
    """Return the entries of PYTHONPATH; an empty one means the working directory."""
    text = os.environ.get("PYTHONPATH", "")
    return text.split(os.pathsep) if text else []


def _has_user_site() -> bool:
    """Whether this interpreter, without `-I`, would use the user's site-packages."""
    if os.environ.get("PYTHONNOUSERSITE"):
        return False
    if os.getuid() != os.geteuid() or os.getgid() != os.getegid():
        return False
    if sys.prefix == sys.base_prefix:
        return True
    try:
        text = Path(sys.prefix, "pyvenv.cfg").read_text(encoding="utf-8")
    except OSError:
        return False
    settings = (line.lower().replace(" ", "") for line in text.splitlines())
    return "include-system-site-packages=true" in settings
