"""Where kernels are written: files of `toolkit.gpu.kernels`, and files of plugins."""

import hashlib
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from toolkit.gpu.call import KERNELS, KernelSource


def load_module(path: Path) -> ModuleType:
    """Run a Python file as a module of its own; raises what the file raises."""
    name = f"tandem_file_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file; its name must end in .py")
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and Triton look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def kernel_function(kernel: str, source: KernelSource | None) -> Any:  # noqa: ANN401  (Triton's)
    """Return a Triton kernel; raises AttributeError where the file of a plugin does not hold it."""
    if source is None:
        return getattr(import_module(f"toolkit.gpu.kernels.{KERNELS[kernel]}"), kernel)
    return getattr(load_module(Path(source.file)), kernel)
