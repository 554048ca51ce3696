"""`python .../device/start MODULE ARGUMENT...`: run a module of Tandem as a program."""

import runpy
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def main() -> None:
    """Run the module; its arguments follow it."""
    sys.path.pop(0)  # this folder: Python searches it first when it runs it
    spec = spec_from_file_location("tandem_packages", Path(__file__).with_name("packages.py"))
    assert spec is not None
    assert spec.loader is not None
    packages = module_from_spec(spec)
    spec.loader.exec_module(packages)
    packages.claim()
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
