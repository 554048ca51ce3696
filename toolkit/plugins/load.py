"""A plugin file -> its plugins."""

import hashlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from toolkit.errors import PluginError, first_line
from toolkit.plugins import Plugin


def load_plugins(path: str | Path) -> tuple[Plugin, ...]:
    """Run a Python file and return its `PLUGINS`; the file is code, so trust it first.

    Raises PluginError: the file cannot be read or run, or holds no tuple of plugins.
    """
    path = Path(path)
    if not path.is_file():
        raise PluginError(f"there is no plugin file {path}; check the path given with --plugin")
    try:
        module = load_module(path)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"the plugin file {path} does not run: {type(error).__name__}: {first_line(error)}"
        ) from error
    plugins = getattr(module, "PLUGINS", None)
    if (
        not isinstance(plugins, tuple)
        or not plugins
        or not all(isinstance(p, Plugin) for p in plugins)
    ):
        raise PluginError(
            f"the plugin file {path} ends in no tuple PLUGINS of toolkit.plugins.Plugin; add one, "
            "such as PLUGINS = (MY_PLUGIN,)"
        )
    return plugins


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
