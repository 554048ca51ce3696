"""The import names of Tandem, found by place: a `device.py` of the user's does not replace ours.

Python looks a name up along `sys.path`, which begins with the folder of the user's script or the
working directory. `claim` puts a finder before that search which knows Tandem's names alone.

This file is loaded by its path, before `device` is imported, and imports nothing of Tandem.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_PACKAGES = Path(__file__).resolve().parents[2]
_INSTALLED = (_PACKAGES / "__init__.py").exists()  # below one name, as setup.py moves them
ROOT = _PACKAGES.parent if _INSTALLED else _PACKAGES
NAMES = ("tandem",) if _INSTALLED else ("calibration", "configs", "device", "pipelines", "toolkit")


class OwnPackages:
    """A finder of `sys.meta_path`: Tandem's packages from ROOT, everything else from the others."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of NAMES, None for any other module."""
        return PathFinder.find_spec(name, [str(ROOT)]) if name in NAMES else None


def claim() -> tuple[str, ...]:
    """Let NAMES mean Tandem's packages from now on in this process.

    Returns the files of the user's that can no longer be imported by name. Raises ImportError if
    one was imported already: other code has it, and a name cannot mean two modules.
    """
    if OwnPackages in sys.meta_path:
        return ()
    for name in NAMES:
        path = _foreign(sys.modules.get(name))
        if path is not None:
            raise ImportError(
                f"{path} was imported as {name!r}, which is also the name of a package of Tandem; "
                f"a process can have one module of a name. Rename {Path(path).name}, or run Tandem "
                "in another process."
            )
    specs = (PathFinder.find_spec(name) for name in NAMES if name not in sys.modules)
    origins = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    sys.meta_path.insert(0, OwnPackages)
    return tuple(origin for origin in origins if not _is_ours(origin))


def _foreign(module: ModuleType | None) -> str | None:
    """Return the file of a module that is not Tandem's."""
    if module is None:
        return None
    origin = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    return None if origin and _is_ours(origin) else origin or repr(module)


def _is_ours(path: str) -> bool:
    return ROOT in Path(path).resolve().parents
