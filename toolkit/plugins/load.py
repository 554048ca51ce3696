"""A plugin file -> its plugins."""

from pathlib import Path

from toolkit.errors import PluginError, first_line
from toolkit.gpu.cubins.kernel_files import load_module
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
    found = getattr(module, "PLUGINS", None)
    if not isinstance(found, tuple) or not found or not all(isinstance(p, Plugin) for p in found):
        raise PluginError(
            f"the plugin file {path} ends in no tuple PLUGINS of toolkit.plugins.Plugin; add one, "
            "such as PLUGINS = (MY_PLUGIN,)"
        )
    return found
