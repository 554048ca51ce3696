"""The folders of single GPU generations, which the compiler works without.

A generation's kernels and rewrites depend on its tensor cores and are worth their code only there.
Folders are looked up by name, not imported: a static import would make them obligatory. Parts:

    generation      GENERATION: rewrites, emitters and schedules     read by `toolkit.gpu.lower`
    kernels         KERNELS: name -> module of the folder's kernels  read by the kernel compiler
    overlap         with_overlap: changes PTX                        read by the compiler's worker
"""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

GENERATIONS = ("toolkit.gpu.sm90",)


def parts(name: str) -> Iterator[ModuleType]:
    """Yield the part `name` of each generation that is installed."""
    for generation in GENERATIONS:
        if find_spec(generation) is not None:
            yield import_module(f"{generation}.{name}")


def kernel_modules() -> dict[str, str]:
    """Return the module of each kernel that a generation adds."""
    return {
        kernel: f"{part.__name__}.{module}"
        for part in parts("kernels")
        for kernel, module in part.KERNELS.items()
    }


def source_files() -> list[Path]:
    """Return the files that kernels of all generations are compiled from and with."""
    files: list[Path] = []
    for part in parts("kernels"):
        folder = Path(str(part.__file__)).parent
        files += sorted([*folder.glob("*.py"), *folder.parent.glob("overlap.py")])
    return files
