"""The element `tandeminfer`: an engine in any GStreamer pipeline.

`python/tandeminfer.py` is loaded by GStreamer's Python, which need not be Tandem's, nor have its
packages; `worker.py` runs the engine in a process of Tandem's Python.
"""

import os
import shlex
import sys
from pathlib import Path


def shell_variables() -> str:
    """Return the lines for a shell that let GStreamer find the element, and it this Python."""
    folders = [str(Path(__file__).parent), os.environ.get("GST_PLUGIN_PATH", "")]
    path = os.pathsep.join(dict.fromkeys(folder for folder in folders if folder))
    return (
        f"export GST_PLUGIN_PATH={shlex.quote(path)}\n"
        f"export TANDEM_PYTHON={shlex.quote(sys.executable)}"
    )
