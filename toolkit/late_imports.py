"""What libraries import for rare cases is imported by a process at its first use, not with them.

onnx_ir imports sympy for arithmetic with symbolic sizes, onnxscript the reference implementation of
ONNX's operators for constants of few of them. Most models never ask for either. sympy takes longer
than all other imports of a command together but numpy, onnx and onnxscript.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import MappingProxyType, ModuleType

LATE: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "onnx_ir": ("sympy", "onnx_ir._symbolic_shapes"),  # it fills a table with sympy's functions
        "onnxscript": ("onnx.reference", "onnx.reference.ops"),
    }
)
"""Package -> the modules that are not loaded with it."""


class _LateModule(ModuleType):
    """Stands for a module; the first attribute that is asked for imports it."""

    def __getattr__(self, name: str) -> object:
        self.leave()
        return getattr(importlib.import_module(self.__name__), name)

    def enter(self) -> None:
        """Let the name mean this, as an attribute of its package, too."""
        sys.modules[self.__name__] = self
        package, _, name = self.__name__.rpartition(".")
        if package in sys.modules:
            setattr(sys.modules[package], name, self)

    def leave(self) -> None:
        """Let the name mean the module again, for everybody who imports it from now on."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


class _LateFinder:
    """A finder of `sys.meta_path`: while a package loads, stand-ins take the place of LATE's."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a package of LATE, None for any other module."""
        late_modules = LATE.get(name, ())
        spec = PathFinder.find_spec(name, path) if late_modules else None
        if spec is None or spec.loader is None or not sys.modules.keys().isdisjoint(late_modules):
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            stand_ins = [_LateModule(late) for late in late_modules]
            for late in stand_ins:
                late.enter()
            try:
                execute(module)
            finally:
                for late in stand_ins:
                    late.leave()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def import_late() -> None:
    """Let this process import LATE's modules when they are used, unless the package is loaded."""
    if _LateFinder not in sys.meta_path:
        sys.meta_path.insert(0, _LateFinder)
