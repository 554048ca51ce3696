"""Modules that a command imports at their first use, not with the packages that name them.

onnx_ir imports sympy for arithmetic with symbolic sizes, which most models never ask for. That
takes longer than all other imports of a command together but numpy, onnx and onnxscript.
onnxscript imports ONNX's reference evaluator, a tenth of a start, for nodes of constants alone.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import MappingProxyType, ModuleType

# package -> what it imports; the second of onnx_ir fills a table with functions of sympy
LATE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "onnx_ir": ("sympy", "onnx_ir._symbolic_shapes"),
        "onnxscript": ("onnx.reference", "onnx.reference.ops"),
    }
)


class _LateModule(ModuleType):
    """Stands for a module; the first attribute that is asked for imports it."""

    def __getattr__(self, name: str) -> object:
        self.leave()
        module = importlib.import_module(self.__name__)
        inner = f"{self.__name__}.{name}"
        late = any(inner in names for names in LATE.values())
        return importlib.import_module(inner) if late else getattr(module, name)

    def enter(self) -> None:
        """Let the name mean this stand-in."""
        parent, _, name = self.__name__.rpartition(".")
        sys.modules[self.__name__] = self
        if parent:
            setattr(importlib.import_module(parent), name, self)

    def leave(self) -> None:
        """Let the name mean the module again, for everybody who imports it from now on."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


class _LateFinder:
    """A finder of `sys.meta_path`: while a package loads, stand-ins take the place of LATE."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a package of LATE, None for any other module."""
        spec = PathFinder.find_spec(name, path) if name in LATE else None
        if spec is None or spec.loader is None or any(late in sys.modules for late in LATE[name]):
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            stand_ins = [_LateModule(late) for late in LATE[name]]
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
    """Let this process import LATE when it is used, as far as nothing has imported it."""
    sys.meta_path.insert(0, _LateFinder)
