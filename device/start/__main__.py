"""`python -I .../device/start MODULE ARGUMENT...`: run a module of Tandem as a program."""

import runpy
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def main() -> None:
    """Run the module; its arguments follow it."""
    sys.path.pop(0)  # this folder: Python searches it first when it runs it
    _load("isolation").restore_path()
    _load("packages").claim()
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _load(name: str) -> ModuleType:
    """Load a file of this folder by its path: `device` is not to be searched for yet."""
    spec = spec_from_file_location(f"tandem_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
