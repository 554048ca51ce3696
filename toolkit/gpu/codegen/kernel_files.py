"""Finds the source of kernels: `toolkit.gpu.kernels` and files of plugins."""

from importlib import import_module
from pathlib import Path
from typing import Any

from toolkit.gpu.ir.launch import KERNELS, KernelSource
from toolkit.plugins.load import load_module


def kernel_function(kernel: str, source: KernelSource | None) -> Any:  # noqa: ANN401  (Triton's)
    """Return a Triton kernel. Raises AttributeError: a plugin's file does not define it."""
    if source is None:
        return getattr(import_module(f"toolkit.gpu.kernels.{KERNELS[kernel]}"), kernel)
    return getattr(load_module(Path(source.file)), kernel)
