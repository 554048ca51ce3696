"""sympy is imported by a command at its first use, not with onnx_ir.

onnx_ir imports it for arithmetic with symbolic sizes, which most models never ask for. That takes
longer than all other imports of a command together but numpy, onnx and onnxscript.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

PACKAGE = "onnx_ir"
LATE = ("sympy", "onnx_ir._symbolic_shapes")  # the second one fills a table with functions of sympy


class _LateModule(ModuleType):
    """Stands for a module; the first attribute that is asked for imports it."""

    def __getattr__(self, name: str) -> object:
        self.leave()
        return getattr(importlib.import_module(self.__name__), name)

    def leave(self) -> None:
        """Let the name mean the module again, for everybody who imports it from now on."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


class _OnnxIrFinder:
    """A finder of `sys.meta_path`: while PACKAGE loads, stand-ins take the place of LATE."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of PACKAGE, None for any other module."""
        spec = PathFinder.find_spec(name, path) if name == PACKAGE else None
        if spec is None or spec.loader is None or any(late in sys.modules for late in LATE):
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            stand_ins = [_LateModule(late) for late in LATE]
            sys.modules.update((late.__name__, late) for late in stand_ins)
            try:
                execute(module)
            finally:
                for late in stand_ins:
                    late.leave()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def import_sympy_late() -> None:
    """Let this process import sympy when it is used, if onnx_ir is not imported yet."""
    sys.meta_path.insert(0, _OnnxIrFinder)
